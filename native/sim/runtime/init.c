/* How the runtime reaches the driver, and how a thread gets its device.
 *
 * STALLSCOPE_SIM_DRIVER: `exported` calls the exported symbols of libcuda.so.1, `private` calls inner addresses that
 * libcuda.so.1 hands out, `inside` uses the copy of the driver linked into the runtime and loads no libcuda.
 */
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime.h"

enum { MAX_RUNTIME_DEVICES = 16, ERROR_INSUFFICIENT_DRIVER = 35 };

static struct driver_table exported_table[2];
static const struct driver_table *tables; /* NULL: no driver */
static pthread_once_t tables_once = PTHREAD_ONCE_INIT;

/* Grows in a forked child, where every thread and device has to be bound anew. */
static atomic_uint epoch = 1;
static pthread_mutex_t bind_lock = PTHREAD_MUTEX_INITIALIZER;
static CUcontext contexts[MAX_RUNTIME_DEVICES];

static _Thread_local int device;
static _Thread_local int bound_device;
static _Thread_local unsigned bound_epoch;
static _Thread_local cudaError_t last_error;

/* The driver that lies beside this library comes first, so that a program needs no search path for it. */
static void *open_libcuda(void) {
  Dl_info self;
  char path[4096];
  void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  if (library) return library;
  const char *slash = dladdr((void *)open_libcuda, &self) && self.dli_fname ? strrchr(self.dli_fname, '/') : NULL;
  if (slash) {
    snprintf(path, sizeof(path), "%.*s/libcuda.so.1", (int)(slash - self.dli_fname), self.dli_fname);
    library = dlopen(path, RTLD_NOW | RTLD_GLOBAL);
  }
  return library ? library : dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
}

static bool fill_exported(void *library) {
  bool whole = true;
#define FIELD(index, field, symbol)                                                                                    \
  {                                                                                                                    \
    void *address = dlsym(library, symbol);                                                                            \
    memcpy(&exported_table[index].field, &address, sizeof(address));                                                   \
    whole &= address != NULL;                                                                                          \
  }
#define DRV(name, params, args) FIELD(0, name, #name) FIELD(1, name, #name)
#define DRV_TWIN(name, suffix, params, args) FIELD(0, name, #name) FIELD(1, name, #name #suffix)
#include "sim_cuda_driver.def"
#undef DRV
#undef DRV_TWIN
  return whole;
}

static void before_fork(void) {
  pthread_mutex_lock(&bind_lock);
  rt_registry_lock();
}

static void after_fork_parent(void) {
  rt_registry_unlock();
  pthread_mutex_unlock(&bind_lock);
}

static void after_fork_child(void) {
  atomic_fetch_add(&epoch, 1);
  memset(contexts, 0, sizeof(contexts));
  after_fork_parent();
}

static const struct driver_table *reach_driver(void) {
  const char *way = getenv("STALLSCOPE_SIM_DRIVER");
  if (way && strcmp(way, "inside") == 0) return sim_inner_table;
  /* A driver without our own symbol is a real one: this runtime has no business with it. */
  void *library = open_libcuda();
  const struct driver_table *(*private_table)(void) = NULL;
  void *address = library ? dlsym(library, "stallscope_sim_private_table") : NULL;
  memcpy(&private_table, &address, sizeof(address));
  if (!private_table) return NULL;
  if (way && strcmp(way, "private") == 0) return private_table();
  return fill_exported(library) ? exported_table : NULL;
}

/* For libraries above the runtime that must use the same driver: the copy that is inside, when that is the way. */
EXPORT const struct driver_table *stallscope_sim_inside_table(void) {
  return sim_inner_table;
}

/* The driver registers its fork handlers first, so that ours, which run in reverse, lock before its do. */
static void find_driver(void) {
  tables = reach_driver();
  if (tables) tables->cuInit(0);
  pthread_atfork(before_fork, after_fork_parent, after_fork_child);
}

const struct driver_table *rt_driver(int twin) {
  pthread_once(&tables_once, find_driver);
  return tables && tables->cuInit(0) == CUDA_SUCCESS ? &tables[twin] : NULL;
}

CUcontext rt_context_of(int ordinal) {
  const struct driver_table *drv = rt_driver(PLAIN);
  if (!drv || ordinal < 0 || ordinal >= MAX_RUNTIME_DEVICES) return NULL;
  pthread_mutex_lock(&bind_lock);
  if (!contexts[ordinal] && drv->cuDevicePrimaryCtxRetain(&contexts[ordinal], ordinal)) contexts[ordinal] = NULL;
  CUcontext context = contexts[ordinal];
  pthread_mutex_unlock(&bind_lock);
  return context;
}

static const struct driver_table *bind_thread(int twin) {
  const struct driver_table *drv = rt_driver(twin);
  CUcontext context = drv ? rt_context_of(device) : NULL;
  if (!context || drv->cuCtxSetCurrent(context)) return NULL;
  bound_device = device;
  bound_epoch = atomic_load(&epoch);
  return drv;
}

const struct driver_table *rt_enter(int twin) {
  if (bound_epoch == atomic_load_explicit(&epoch, memory_order_relaxed) && bound_device == device) return &tables[twin];
  return bind_thread(twin);
}

cudaError_t rt_finish(cudaError_t result) {
  if (result && result != cudaErrorNotReady) last_error = result;
  return result;
}

cudaError_t rt_failed(void) {
  return rt_finish(tables ? CUDA_ERROR_NO_DEVICE : ERROR_INSUFFICIENT_DRIVER);
}

int rt_device(void) {
  return device;
}

EXPORT cudaError_t cudaGetDevice(int *out) {
  if (!out) return rt_finish(cudaErrorInvalidValue);
  *out = device;
  return cudaSuccess;
}

EXPORT cudaError_t cudaSetDevice(int ordinal) {
  int count = 0;
  cudaError_t error = cudaGetDeviceCount(&count);
  if (error) return error;
  if (ordinal < 0 || ordinal >= count) return rt_finish(cudaErrorInvalidDevice);
  device = ordinal;
  return rt_enter(PLAIN) ? cudaSuccess : rt_failed();
}

EXPORT cudaError_t cudaGetLastError(void) {
  cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}

EXPORT cudaError_t cudaPeekAtLastError(void) {
  return last_error;
}
