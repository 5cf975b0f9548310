/* What the program's start-up code registers: host address -> kernel or variable. Read without a lock. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime.h"

enum { BUCKETS = 1 << 15, CALL_DEPTH = 16 };

struct entry {
  const void *host;
  char *name;
  size_t bytes;         /* of a variable */
  _Atomic(void *) made; /* CUfunction, or the variable's memory */
  struct entry *next;
};

static _Atomic(struct entry *) functions[BUCKETS], variables[BUCKETS];
static pthread_mutex_t make_lock = PTHREAD_MUTEX_INITIALIZER;

void rt_registry_lock(void) {
  pthread_mutex_lock(&make_lock);
}

void rt_registry_unlock(void) {
  pthread_mutex_unlock(&make_lock);
}

static size_t bucket(const void *host) {
  return (size_t)(((uintptr_t)host >> 2) * 0x9e3779b97f4a7c15u >> 49);
}

static struct entry *find(_Atomic(struct entry *) *table, const void *host) {
  struct entry *entry = atomic_load_explicit(&table[bucket(host)], memory_order_acquire);
  while (entry && entry->host != host) entry = entry->next;
  return entry;
}

static struct entry *add(_Atomic(struct entry *) *table, const void *host, const char *name, size_t bytes) {
  struct entry *entry = calloc(1, sizeof(*entry));
  if (!entry || !(entry->name = strdup(name))) abort();
  entry->host = host;
  entry->bytes = bytes;
  _Atomic(struct entry *) *head = &table[bucket(host)];
  entry->next = atomic_load(head);
  while (!atomic_compare_exchange_weak(head, &entry->next, entry))
    ;
  return entry;
}

/* Programs built without nvcc launch whatever address they like: it gets the name of the symbol that stands there. */
static struct entry *add_unregistered(const void *func) {
  Dl_info info;
  char name[32];
  if (dladdr(func, &info) && info.dli_sname && info.dli_saddr == func) return add(functions, func, info.dli_sname, 0);
  snprintf(name, sizeof(name), "%p", func);
  return add(functions, func, name, 0);
}

static CUfunction make_function(const struct driver_table *drv, const void *func) {
  pthread_mutex_lock(&make_lock);
  struct entry *entry = find(functions, func);
  if (!entry) entry = add_unregistered(func);
  CUfunction made = atomic_load(&entry->made);
  if (!made && drv->stallscope_sim_function(&made, entry->name) == CUDA_SUCCESS)
    atomic_store_explicit(&entry->made, made, memory_order_release);
  pthread_mutex_unlock(&make_lock);
  return made;
}

CUfunction rt_function(const struct driver_table *drv, const void *func) {
  if (!func) return NULL;
  struct entry *entry = find(functions, func);
  CUfunction made = entry ? atomic_load_explicit(&entry->made, memory_order_acquire) : NULL;
  return made ? made : make_function(drv, func);
}

/* A kernel handle is its own host address, so that a launch takes either. */
void rt_function_handle(const void *handle) {
  pthread_mutex_lock(&make_lock);
  if (!find(functions, handle)) {
    struct entry *entry = add(functions, handle, "", 0);
    atomic_store(&entry->made, (void *)(uintptr_t)handle);
  }
  pthread_mutex_unlock(&make_lock);
}

void *rt_symbol(const struct driver_table *drv, const void *symbol, size_t *bytes) {
  struct entry *entry = find(variables, symbol);
  if (!entry) return NULL;
  pthread_mutex_lock(&make_lock);
  CUdeviceptr memory = (CUdeviceptr)atomic_load(&entry->made);
  if (!memory && drv->stallscope_sim_alloc(&memory, entry->bytes) == CUDA_SUCCESS)
    atomic_store(&entry->made, (void *)memory);
  pthread_mutex_unlock(&make_lock);
  *bytes = entry->bytes;
  return (void *)memory;
}

EXPORT void **__cudaRegisterFatBinary(void *image) {
  void **handle = calloc(1, sizeof(*handle));
  if (handle) *handle = image;
  return handle;
}

EXPORT void __cudaRegisterFatBinaryEnd(void **handle) {
  (void)handle;
}

EXPORT void __cudaUnregisterFatBinary(void **handle) {
  free(handle);
}

EXPORT char __cudaInitModule(void **handle) {
  (void)handle;
  return 1;
}

EXPORT void __cudaRegisterFunction(void **handle, const char *host, char *device, const char *name, int limit,
                                   void *tid, void *bid, dim3 *block, dim3 *grid, int *warp) {
  (void)handle, (void)device, (void)limit, (void)tid, (void)bid, (void)block, (void)grid, (void)warp;
  add(functions, host, name ? name : "", 0);
}

EXPORT void __cudaRegisterVar(void **handle, char *host, char *device, const char *name, int external, size_t bytes,
                              int constant, int global) {
  (void)handle, (void)device, (void)external, (void)constant, (void)global;
  add(variables, host, name ? name : "", bytes);
}

EXPORT void __cudaRegisterManagedVar(void **handle, void **host, char *device, const char *name, int external,
                                     size_t bytes, int constant, int global) {
  __cudaRegisterVar(handle, (char *)host, device, name, external, bytes, constant, global);
}

EXPORT cudaError_t stallscope_sim_name_function(const void *func, const char *name) {
  if (!func || !name) return cudaErrorInvalidValue;
  add(functions, func, name, 0);
  return cudaSuccess;
}

/* What `kernel<<<grid, block, smem, stream>>>` leaves for the launch stub that follows. */
static _Thread_local struct {
  dim3 grid, block;
  size_t smem;
  cudaStream_t stream;
} pushed[CALL_DEPTH];
static _Thread_local unsigned pushed_count;

EXPORT unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t smem, cudaStream_t stream) {
  if (pushed_count == CALL_DEPTH) return 1;
  pushed[pushed_count].grid = grid;
  pushed[pushed_count].block = block;
  pushed[pushed_count].smem = smem;
  pushed[pushed_count++].stream = stream;
  return 0;
}

EXPORT cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *smem, void *stream) {
  if (!pushed_count) return rt_finish(52); /* cudaErrorMissingConfiguration */
  pushed_count--;
  *grid = pushed[pushed_count].grid;
  *block = pushed[pushed_count].block;
  *smem = pushed[pushed_count].smem;
  *(cudaStream_t *)stream = pushed[pushed_count].stream;
  return cudaSuccess;
}
