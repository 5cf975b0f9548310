// SPDX-License-Identifier: Apache-2.0
/* A thread's block: taken at its first hooked call, given back at its end. */
#define _GNU_SOURCE
#include "system.h"
#include "hot.h"
#include <pthread.h>
#include <string.h>

#if defined(__x86_64__)
#define OLDEST "GLIBC_2.2.5"
#else
#define OLDEST "GLIBC_2.17"
#endif
__asm__(".symver pthread_key_create,pthread_key_create@" OLDEST);
__asm__(".symver pthread_setspecific,pthread_setspecific@" OLDEST);

#define PATIENCE 2000 /* yields while another thread makes the segment: it takes well below a millisecond */

__thread struct seg_thread *seg_self;
__thread uint32_t seg_attaching;
static pthread_key_t key;
static bool has_key;

uint32_t seg_tid(void) {
  return (uint32_t)syscall(SYS_gettid);
}

/* A thread that ends inside calls (pthread_exit, cancellation): they become records, not open questions. */
static void abandon(struct seg_thread *t) {
  uint32_t depth = t->depth < WIRE_DEPTH ? t->depth : WIRE_DEPTH;
  uint64_t now = seg_ticks();
  for (uint32_t i = 0; i < depth; i++) {
    const struct seg_frame *f = &t->block->frames[i];
    if (!f->t0) continue;
    uint8_t flags = (uint8_t)(f->what >> 16);
    struct seg_vital v = {.ts = f->t0,
                          .dur = now - f->t0,
                          .hook = (uint16_t)f->what,
                          .kind = WIRE_ABANDONED,
                          .flags = flags,
                          .depth = (uint8_t)i,
                          .n = (uint32_t)(f->what >> 32),
                          .tid = t->tid};
    if (seg_put(t, &v, NULL) && !(flags & WIRE_ENTERED)) seg_bump(&t->counts[v.hook % WIRE_HOOKS].lost);
  }
  __atomic_store_n(&t->block->depth, 0, __ATOMIC_RELEASE);
  t->depth = t->active = 0;
}

static void leave(void *argument) {
  struct seg_thread *t = argument;
  seg_self = NULL;
  if (!t->slots) return;
  abandon(t);
  t->slots = NULL;
  __atomic_store_n(&t->block->state, SEG_EXITED, __ATOMIC_RELEASE);
}

void seg_thread_key(void) {
  has_key = !pthread_key_create(&key, leave);
}

void seg_leave_behind(void) {
  seg_self = NULL;
  if (has_key) pthread_setspecific(key, NULL);
}

static struct seg_block *block_at(const struct seg_process *p, uint32_t index) {
  return (struct seg_block *)(void *)(p->blocks + index * p->header->block_bytes);
}

/* One that a dead thread left, else one that nobody ever had; -1: none. */
static int take_block(struct seg_process *p) {
  uint32_t used = __atomic_load_n(&p->header->used, __ATOMIC_ACQUIRE), most = p->header->n_blocks;
  for (uint32_t i = 0; i < used && i < most; i++) {
    uint32_t left = SEG_EXITED;
    if (!__atomic_load_n(&p->has_room[i], __ATOMIC_ACQUIRE)) continue; /* a look at its memory may be a SIGBUS */
    uint32_t *state = &block_at(p, i)->state;
    if (__atomic_load_n(state, __ATOMIC_RELAXED) == SEG_EXITED &&
        __atomic_compare_exchange_n(state, &left, SEG_ACTIVE, false, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED))
      return (int)i;
  }
  if (used >= most) return -1;
  uint32_t fresh = __atomic_fetch_add(&p->header->used, 1, __ATOMIC_ACQ_REL);
  if (fresh >= most || !seg_reserve(p, (uint8_t *)block_at(p, fresh))) return -1;
  __atomic_store_n(&block_at(p, fresh)->state, SEG_ACTIVE, __ATOMIC_RELEASE);
  __atomic_store_n(&p->has_room[fresh], 1, __ATOMIC_RELEASE);
  return (int)fresh;
}

/* Everything but slots, which says that the rest is there. head and vital_head go on where the last owner stopped. */
static uint64_t *fit(struct seg_process *p, struct seg_thread *t, struct seg_block *b) {
  uint8_t *base = (uint8_t *)b;
  t->block = b;
  t->header = p->header;
  t->counts = (struct wire_count *)(void *)(base + SEG_COUNTS_AT);
  t->times = (struct wire_time *)(void *)(base + SEG_TIMES_AT);
  t->vital = (struct seg_vital *)(void *)(base + SEG_VITAL_AT);
  t->vital_mask = (1ull << p->header->vital_bits) - 1;
  t->mask = (1ull << p->header->bulk_bits) - 1;
  t->depth = t->active = t->busy = 0;
  t->tid = seg_tid();
  return (uint64_t *)(void *)(base + SEG_BULK_AT(p->header->vital_bits));
}

/* From this record on the ring is another thread's. */
static void mark(struct seg_thread *t) {
  uint64_t *p = t->slots + SEG_WORDS * (t->head & t->mask);
  p[0] = seg_ticks();
  p[1] = (uint64_t)SEG_MARK << 32;
  p[2] = t->tid;
  p[3] = 0;
  t->block->since = t->head;
  __atomic_store_n(&t->block->tid, t->tid, __ATOMIC_RELEASE);
  __atomic_store_n(&t->block->generation, t->block->generation + 1, __ATOMIC_RELEASE);
  __atomic_store_n(&t->block->head, ++t->head, __ATOMIC_RELEASE);
}

static struct seg_thread *join(struct seg_process *p) {
  int index = take_block(p);
  if (index < 0) return NULL;
  struct seg_thread *t = &p->threads[index];
  t->slots = fit(p, t, block_at(p, (uint32_t)index));
  mark(t);
  if (has_key) pthread_setspecific(key, t);
  seg_self = t;
  return t;
}

/* The segment of this process, made by the first thread that comes; NULL: there is none. */
static struct seg_process *ready(void) {
  struct seg_process *p = __atomic_load_n(&seg_proc, __ATOMIC_ACQUIRE);
  uint32_t none = SEG_NONE;
  if (!p) return NULL;
  if (__atomic_compare_exchange_n(&p->state, &none, SEG_MAKING, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
    bool made = seg_make(p);
    __atomic_store_n(&p->state, made ? SEG_READY : SEG_FAILED, __ATOMIC_SEQ_CST);
    if (made) seg_move_early(p);
  }
  for (int i = 0; i < PATIENCE && __atomic_load_n(&p->state, __ATOMIC_ACQUIRE) == SEG_MAKING; i++)
    syscall(SYS_sched_yield);
  return __atomic_load_n(&p->state, __ATOMIC_ACQUIRE) == SEG_READY ? p : NULL;
}

bool seg_make_now(void) {
  seg_start();
  return ready() != NULL;
}

/* A thread that found no block asks again after so many calls only. In the child of a fork all is open again. */
#define CALLS_WITHOUT 1000
static __thread uint32_t calls_without;

static bool is_hopeless(const struct seg_process *p) {
  uint32_t state = p ? __atomic_load_n(&p->state, __ATOMIC_ACQUIRE) : SEG_NONE;
  return calls_without && (state == SEG_READY || state == SEG_FAILED) && calls_without--;
}

/* seg_attaching: a signal handler's call in the middle of this must not take a second block. */
struct seg_thread *seg_attach(void) {
  if (seg_attaching || is_hopeless(__atomic_load_n(&seg_proc, __ATOMIC_ACQUIRE))) return NULL;
  seg_attaching = 1;
  seg_start();
  struct seg_process *p = ready();
  struct seg_thread *t = p ? join(p) : NULL;
  if (!t && !(p && __atomic_load_n(&p->state, __ATOMIC_RELAXED) == SEG_MAKING)) calls_without = CALLS_WITHOUT;
  seg_attaching = 0;
  return t;
}

static void count_homeless(struct seg_process *p, uint32_t hook, uint64_t calls) {
  struct wire_count *row = (struct wire_count *)(void *)((uint8_t *)p->header + SEG_HOMELESS_AT) + hook;
  if (!calls) return;
  __atomic_fetch_add(&row->lost, calls, __ATOMIC_RELAXED);
  __atomic_fetch_add(&row->calls, calls, __ATOMIC_RELAXED);
  __atomic_fetch_add(&p->header->losses[SEG_NO_RING], calls, __ATOMIC_RELAXED);
}

/* Calls made while the segment was being made wait in `early`. Whoever sees it ready moves them, each of them once. */
static void move_early(struct seg_process *p, uint32_t hook) {
  if (__atomic_load_n(&p->state, __ATOMIC_SEQ_CST) != SEG_READY) return;
  count_homeless(p, hook, __atomic_exchange_n(&p->early[hook], 0, __ATOMIC_SEQ_CST));
}

void seg_move_early(struct seg_process *p) {
  for (uint32_t hook = 0; hook < WIRE_HOOKS; hook++) move_early(p, hook);
}

void seg_homeless(uint32_t hook) {
  struct seg_process *p = __atomic_load_n(&seg_proc, __ATOMIC_ACQUIRE);
  if (!p) return;
  __atomic_fetch_add(&p->early[hook], 1, __ATOMIC_SEQ_CST);
  move_early(p, hook);
}
