/* The GPU's witness under sanitizers: threads that call, and as many that run kernels, as NCCL's do. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gpu.h"
#include "gpu_ops.h"
#include "gpu_symbols.h"
#include "shim.h"

enum { PAIRS = 4, CALLS = 20000, ALL_REDUCE = 300, GROUP_START = 340, GROUP_END = 341, ROOM = 64, CHANNELS = 3 };

static struct seg_header header;
static struct seg_process process = {.header = &header};
struct seg_process *seg_proc = &process;
bool seg_injected; /* of the rest of the shim */

static _Atomic uint64_t told[16];

void seg_emit_vital(const struct seg_vital *v) {
  atomic_fetch_add(&told[v->kind], 1);
}

struct pair {
  char communicator[4096];
  _Atomic uint64_t names[ROOM];
  _Atomic uint64_t head, tail;
  uint32_t context;
};

static struct pair pairs[PAIRS];

static void *calls(void *argument) {
  struct pair *p = argument;
  for (uint32_t n = 0; n < CALLS; n++) {
    uint64_t words[8] = {n % 7, 9, 8, 7, 0, (uintptr_t)p, 0, 0}, none[8] = {0};
    struct seg_gpu_task task = {(void *)(uintptr_t)(n % 7), (void *)9, -1, SEG_GPU_ALL_REDUCE, CHANNELS};
    if (n % 16 == 0) seg_gpu_entered(GROUP_START, none, 0);
    seg_gpu_entered(ALL_REDUCE, words, n);
    uint64_t name = seg_gpu_queued(p->context, &task);
    seg_gpu_returned(ALL_REDUCE, words, n, n % 100 == 99 ? 5 : 0);
    if (n % 16 == 3) seg_gpu_returned(GROUP_END, none, 0, 0);
    if (!name) continue;
    while (atomic_load(&p->head) - atomic_load(&p->tail) == ROOM) sched_yield();
    atomic_store(&p->names[atomic_load(&p->head) % ROOM], name);
    atomic_fetch_add(&p->head, 1);
  }
  while (atomic_load(&p->head) - atomic_load(&p->tail) == ROOM) sched_yield();
  atomic_store(&p->names[atomic_load(&p->head) % ROOM], 0);
  atomic_fetch_add(&p->head, 1);
  return NULL;
}

static void *kernels(void *argument) {
  struct pair *p = argument;
  for (;;) {
    uint64_t tail = atomic_load(&p->tail);
    if (tail == atomic_load(&p->head)) {
      sched_yield();
      continue;
    }
    uint64_t name = atomic_load(&p->names[tail % ROOM]);
    atomic_store(&p->tail, tail + 1);
    if (!name) return NULL;
    uint64_t kernel = 0;
    for (int i = 0; i < CHANNELS; i++) kernel = seg_gpu_begun(name);
    for (int i = 0; i < CHANNELS; i++) seg_gpu_ended(kernel);
  }
}

int main(void) {
  pthread_t threads[2 * PAIRS];
  for (int i = 0; i < PAIRS; i++) pairs[i].context = seg_gpu_context_new(pairs[i].communicator + 100, 2);
  for (int i = 0; i < PAIRS; i++) {
    if (pthread_create(&threads[2 * i], NULL, calls, &pairs[i])) abort();
    if (pthread_create(&threads[2 * i + 1], NULL, kernels, &pairs[i])) abort();
  }
  for (int i = 0; i < 2 * PAIRS; i++) pthread_join(threads[i], NULL);
  for (int i = 0; i < PAIRS; i++) seg_gpu_context_free(pairs[i].context);
  uint64_t queued = told[WIRE_QUEUED], busy = header.gpu_untold[SEG_GPU_BUSY],
           untold = header.gpu_untold[SEG_GPU_UNTOLD];
  if (queued + busy + untold < PAIRS * CALLS || queued != told[WIRE_STARTED] || queued != told[WIRE_FINISHED]) {
    printf("%lu of %d queued, %lu begun, %lu ended, %lu busy, %lu untold\n", queued, PAIRS * CALLS, told[WIRE_STARTED],
           told[WIRE_FINISHED], busy, untold);
    return 1;
  }
  puts("done");
  return 0;
}
