// SPDX-License-Identifier: Apache-2.0
/* What a wrapper does at most once a thread, once a function, or after something odd. */
#define _GNU_SOURCE
#include "system.h"
#include "hot.h"

/* No library in this process has the function: only a program that links to none and calls all the same comes here. */
static uint64_t missing_cuda(void) {
  return 500; /* cudaErrorSymbolNotFound, CUDA_ERROR_NOT_FOUND */
}
static uint64_t missing_nccl(void) {
  return 2; /* ncclSystemError */
}

struct seg_way seg_cold(uint32_t hook, uint32_t slot, uint32_t instance, void *back) {
  int saved = errno;
  struct seg_way way = {seg_real_of(slot, instance, back), seg_self};
  if (!way.real) {
    way.t = NULL;
    way.real = seg_library_of[slot] == SEG_NCCL ? (void *)missing_nccl : (void *)missing_cuda;
  } else {
    if (!way.t || !way.t->slots) way.t = seg_attach();
    if (!way.t) seg_homeless(hook);
  }
  errno = saved;
  return way;
}

/* Calls at or below this stack pointer never returned in sight: longjmp or an exception passed them. */
uint32_t seg_settle(struct seg_thread *t, uint64_t sp) {
  uint32_t top = t->depth < WIRE_DEPTH ? t->depth : WIRE_DEPTH, depth = t->depth;
  while (top && t->outer[top - 1].sp <= sp) {
    depth = --top;
    if (!t->outer[top].untold) continue;
    seg_bump(&t->counts[t->outer[top].hook].lost);
    seg_bump(&t->block->stale);
  }
  t->depth = depth;
  if (t->light_sp <= sp) t->active = top ? t->outer[top - 1].active : 0; /* else a call that is only counted is alive */
  return t->active;
}

/* It did return, from a stack of its own (a signal's, a coroutine's) whose pointers say nothing of order. */
void seg_not_stale(struct seg_thread *t, uint32_t depth, uint32_t hook) {
  if (t->depth > depth || depth >= WIRE_DEPTH || !t->outer[depth].untold) return;
  __atomic_fetch_sub(&t->counts[hook].lost, 1, __ATOMIC_RELAXED);
  __atomic_fetch_sub(&t->block->stale, 1, __ATOMIC_RELAXED);
}
