/* Pairs of events alone: stands in for the driver, for NCCL's getters and for the rest of the shim. With KIT_MAIN a stress
 * for sanitizers. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gpu.h"
#include "pairs.h"
#include "shim.h"

#define SHOW __attribute__((visibility("default")))

enum { EVENTS = 1 << 18, ROOM = 1 << 16, CONTEXT = 0xc0, NO_TIMES = 2, RELAXED = 2 };

/* What a test sets, and sees. */
struct kit {
  int depth, capturing, capture_status, record_status, query_status, create_status, device, comm_device, ranks;
  int reaches_at_once; /* every event, when it is recorded */
  int has_no_driver;
  uint64_t current; /* context of the calling thread */
  uint64_t created, destroyed, wrong, records, watchers;
  uint64_t figures[SEG_GPU_FIGURES];
};
SHOW struct kit kit;
static struct seg_header header;
static struct seg_process process = {.header = &header};
struct seg_process *seg_proc = &process;

struct record {
  uint64_t event, stream;
};
static struct record records[ROOM];
struct told {
  uint32_t kind, hook, n, flags;
  uint64_t comm;
};
static struct told told[ROOM];
static uint64_t n_told;
static _Atomic int reached[EVENTS];
static _Atomic uint64_t queries;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static __thread int mode;
static __thread uint64_t context;

/* The driver. An event is its number + 1. */

static int record(void *event, void *stream) {
  if (kit.record_status) return kit.record_status;
  atomic_store(&reached[(uintptr_t)event], kit.reaches_at_once);
  pthread_mutex_lock(&lock);
  records[kit.records++ % ROOM] = (struct record){(uintptr_t)event, (uintptr_t)stream};
  pthread_mutex_unlock(&lock);
  return 0;
}

static int query(void *event) {
  atomic_fetch_add(&queries, 1);
  if (mode != RELAXED || context != CONTEXT || reached[(uintptr_t)event] < 0) __atomic_fetch_add(&kit.wrong, 1, 5);
  if (kit.query_status) return kit.query_status;
  return atomic_load(&reached[(uintptr_t)event]) ? 0 : PAIR_NOT_READY;
}

static int create(void **event, unsigned flags) {
  if (kit.create_status || flags != NO_TIMES) return 1;
  *event = (void *)(uintptr_t)(__atomic_add_fetch(&kit.created, 1, 5));
  return 0;
}

static int destroy(void *event) {
  atomic_store(&reached[(uintptr_t)event], -1);
  __atomic_fetch_add(&kit.destroyed, 1, 5);
  return 0;
}

static int is_capturing(void *stream, int *status) {
  (void)stream;
  *status = kit.capturing;
  return kit.capture_status;
}

static int context_of(void *stream, void **found) {
  (void)stream;
  *found = (void *)CONTEXT;
  return 0;
}

static int current(void **found) {
  *found = (void *)(uintptr_t)kit.current;
  return 0;
}

static int set_current(void *wanted) {
  context = (uintptr_t)wanted;
  return 0;
}

static int pop(void **popped) {
  *popped = NULL;
  return 0;
}

static int device(int *found) {
  *found = kit.device;
  return 0;
}

static int capture_mode(int *wanted) {
  int old = mode;
  mode = *wanted;
  *wanted = old;
  return 0;
}

void *seg_symbol_of(const char *soname, const char *name) {
  static const struct {
    const char *name;
    void *function;
  } names[] = {{"cuEventRecord", (void *)record},
               {"cuEventQuery", (void *)query},
               {"cuEventCreate", (void *)create},
               {"cuEventDestroy_v2", (void *)destroy},
               {"cuStreamIsCapturing", (void *)is_capturing},
               {"cuStreamGetCtx", (void *)context_of},
               {"cuCtxGetCurrent", (void *)current},
               {"cuCtxSetCurrent", (void *)set_current},
               {"cuCtxPushCurrent_v2", (void *)set_current},
               {"cuCtxPopCurrent_v2", (void *)pop},
               {"cuCtxGetDevice", (void *)device},
               {"cuThreadExchangeStreamCaptureMode", (void *)capture_mode}};
  for (size_t i = 0; i < sizeof(names) / sizeof(*names); i++)
    if (!kit.has_no_driver && !strcmp(soname, "libcuda.so.1") && !strcmp(names[i].name, name)) return names[i].function;
  return NULL;
}

/* NCCL and the shim. */

static int count_of(uint64_t comm, int *answer) {
  (void)comm;
  *answer = kit.ranks;
  return kit.ranks < 0;
}

static int device_of(uint64_t comm, int *answer) {
  (void)comm;
  *answer = kit.comm_device;
  return 0;
}

void *seg_symbol_near(const void *address, const char *name) {
  (void)address;
  if (!strcmp(name, "ncclCommCount")) return (void *)count_of;
  return strcmp(name, "ncclCommCuDevice") ? NULL : (void *)device_of;
}

void *seg_libc(const char *name) {
  kit.watchers++;
  return dlsym(RTLD_DEFAULT, name);
}

uint32_t seg_gpu_depth(void) {
  return (uint32_t)kit.depth;
}

void seg_gpu_count(enum seg_gpu_figure which) {
  __atomic_fetch_add(&kit.figures[which], 1, 5);
}

void seg_emit_vital(const struct seg_vital *v) {
  uint64_t comm = 0;
  for (int i = 0; i < 8; i++) comm |= v->a[i]; /* the only word */
  pthread_mutex_lock(&lock);
  if (n_told < ROOM) told[n_told++] = (struct told){v->kind, v->hook, v->n, v->flags, comm};
  pthread_mutex_unlock(&lock);
}

SHOW uint64_t kit_told(struct told *out) {
  pthread_mutex_lock(&lock);
  uint64_t taken = n_told;
  memcpy(out, told, taken * sizeof(*told));
  n_told = 0;
  pthread_mutex_unlock(&lock);
  return taken;
}

SHOW int kit_has_told(void) {
  pthread_mutex_lock(&lock);
  int has = n_told > 0;
  pthread_mutex_unlock(&lock);
  return has;
}

SHOW uint64_t kit_records(struct record *out) {
  pthread_mutex_lock(&lock);
  uint64_t taken = kit.records;
  memcpy(out, records, taken * sizeof(*records));
  kit.records = 0;
  pthread_mutex_unlock(&lock);
  return taken;
}

SHOW void kit_reach(uint64_t event) {
  atomic_store(&reached[event], 1);
}

SHOW uint64_t kit_queries(void) {
  return atomic_load(&queries);
}

static struct seg_nccl call_of(uint32_t hook, uint32_t comm, uint32_t count) {
  return (struct seg_nccl){.cookie = (uint64_t)comm << 40, .hook = (uint16_t)hook, .count = (uint8_t)count};
}

SHOW void kit_open(void) {
  seg_pairs_open();
}

SHOW uint32_t kit_state(void) {
  return seg_pairs_state();
}

SHOW void kit_entered(uint32_t hook, uint32_t comm, uint32_t count, const uint64_t *a, uint32_t n) {
  struct seg_nccl k = call_of(hook, comm, count);
  seg_pairs_entered(&k, a, n, NULL);
}

SHOW void kit_returned(uint32_t hook, int32_t status) {
  struct seg_nccl k = call_of(hook, 0, 0);
  seg_pairs_returned(&k, status);
}

#ifdef KIT_MAIN
enum { THREADS = 4, CALLS = 20000, ALL_REDUCE = 300, DESTROY = 359 };

static void *calls(void *argument) {
  uint64_t a[8] = {1, 2, 8, 7, 0, (uintptr_t)argument, 0x100, 0};
  for (uint32_t n = 0; n < CALLS; n++) {
    kit_entered(ALL_REDUCE, 6, 3, a, n);
    kit_returned(ALL_REDUCE, 0);
    if (n % 1000 != 999) continue;
    uint64_t gone[8] = {(uintptr_t)argument};
    kit_entered(DESTROY, 1, 0, gone, 0);
  }
  return NULL;
}

int main(void) {
  pthread_t threads[THREADS];
  static char comms[THREADS];
  kit = (struct kit){.reaches_at_once = 1, .current = CONTEXT, .ranks = 2};
  kit_open();
  for (int i = 0; i < THREADS; i++)
    if (pthread_create(&threads[i], NULL, calls, &comms[i])) abort();
  for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
  uint64_t busy = kit.figures[SEG_GPU_BUSY], untold = kit.figures[SEG_GPU_UNTOLD];
  if (kit.wrong || busy || untold || kit.records < THREADS * 1000 || !atomic_load(&queries))
    printf("%lu wrong, %lu busy, %lu untold, %lu records\n", kit.wrong, busy, untold, kit.records);
  else puts("done");
  return 0;
}
#endif
