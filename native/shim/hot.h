/* SPDX-License-Identifier: Apache-2.0
 *
 * The way of a call through a wrapper: no lock, no system call, no allocation, errno untouched. Everything here is
 * inlined into each wrapper with the hook's constants; what happens rarely is in cold.c, vital.c and nccl.c. */
#ifndef STALLSCOPE_HOT_H
#define STALLSCOPE_HOT_H
#include "shim.h"

#define SEG_IN_RUNTIME (1u << 31) /* in seg_thread.active: a driver call is part of a runtime call */

/* A hook's constants. */
struct seg_fixed {
  uint32_t hook, slot, bits, nests; /* slot: in seg_reals; bits it sets in active; bits that make it nested */
  uint32_t time_id;                 /* of timed hooks */
  bool is_call, is_tap;             /* is_call: not timed */
  uint64_t flags;                   /* as they stand in a record */
};

/* As probes/maps.h does it: not n % N, because a step that makes a multiple of N calls would always show the same. */
INLINE bool seg_sampled(uint64_t settings, uint64_t n) {
  uint32_t threshold = settings >> 32;
  if (LIKELY(threshold == UINT32_MAX)) return true;
  uint32_t x = (uint32_t)n * 2654435761u;
  x ^= x >> 15;
  x *= 2246822519u;
  x ^= x >> 13;
  return threshold && x <= threshold;
}

INLINE void seg_show(struct seg_thread *t, uint32_t depth, uint64_t t0, uint64_t what, uint64_t a, uint64_t b) {
  if (UNLIKELY(depth >= WIRE_DEPTH)) return;
  struct seg_frame *f = &t->block->frames[depth];
  __atomic_store_n(&f->t0, t0, __ATOMIC_RELAXED);
  __atomic_thread_fence(__ATOMIC_RELEASE);
  __atomic_store_n(&f->what, what, __ATOMIC_RELAXED);
  __atomic_store_n(&f->a[0], a, __ATOMIC_RELAXED);
  __atomic_store_n(&f->a[1], b, __ATOMIC_RELAXED);
}

INLINE void seg_push(struct seg_thread *t, uint32_t bits, const struct seg_call *c, uint64_t sp, bool untold) {
  if (LIKELY(c->depth < WIRE_DEPTH)) {
    t->outer[c->depth].sp = sp;
    t->outer[c->depth].active = c->active | bits;
    t->outer[c->depth].hook = (uint16_t)c->hook;
    t->outer[c->depth].untold = untold;
  }
  t->active = c->active | bits;
  t->depth = c->depth + 1;
}

INLINE uint64_t seg_settings_of(const struct seg_thread *t) {
  return __atomic_load_n(&t->header->settings, __ATOMIC_RELAXED);
}

INLINE bool seg_picks(const struct seg_thread *t, const struct seg_fixed *f, uint64_t n) {
  uint64_t settings = seg_settings_of(t);
  return seg_sampled(settings, n) || (f->is_tap && settings & SEG_TAP);
}

INLINE uint32_t seg_active(struct seg_thread *t, uint64_t sp) {
  return LIKELY(!t->active) ? 0 : seg_settle(t, sp);
}

/* A call that is only counted. Returns what was active before it. */
INLINE uint32_t seg_light(struct seg_thread *t, const struct seg_fixed *f) {
  struct wire_count *row = &t->counts[f->hook];
  uint64_t sp = seg_sp();
  uint32_t active = seg_active(t, sp);
  seg_bump(&row->calls);
  if (active & f->nests) seg_bump(&row->nested);
  seg_bump(&row->sampled_out);
  t->light_sp = sp;
  t->active = active | f->bits;
  return active;
}

/* The real function. a, b: the two words of its record. */
INLINE void *seg_in(struct seg_call *c, const struct seg_fixed *f, uint32_t instance, void *back, uint64_t a,
                    uint64_t b) {
  struct seg_thread *t = seg_self;
  void *real = __atomic_load_n(&seg_reals[instance][f->slot].address, __ATOMIC_RELAXED);
  c->t = NULL;
  if (UNLIKELY(!t || !t->slots || !real)) {
    struct seg_way way = seg_cold(f->hook, f->slot, instance, back);
    real = way.real;
    if (!(t = way.t)) return real;
  }
  uint64_t sp = seg_sp();
  c->t = t;
  c->active = seg_active(t, sp);
  c->depth = t->depth;
  struct wire_count *row = &t->counts[f->hook];
  uint64_t n = seg_bump(&row->calls);
  c->flags = c->active & f->nests ? WIRE_NESTED : 0;
  if (c->flags) seg_bump(&row->nested);
  c->pick = f->is_call || seg_picks(t, f, n);
  c->n = (uint32_t)n;
  c->hook = f->hook;
  c->t0 = seg_ticks();
  seg_push(t, f->bits, c, sp, true);
  seg_show(t, c->depth, c->t0, f->hook | (uint64_t)c->flags << 16 | n << 32, a, b);
  __atomic_store_n(&t->block->depth, c->depth + 1, __ATOMIC_RELEASE);
  return real;
}

/* Units of 1, 1024 and 2^20 ticks: 32 bits hold ten days at 5 GHz with an error of 2^-22. */
INLINE uint64_t seg_scaled(uint64_t dur) {
  uint64_t scale = 0;
  if (UNLIKELY(dur >> 32)) {
    scale = dur >> 42 ? 2 : 1;
    dur >>= 10 * scale;
    if (dur >> 32) dur = UINT32_MAX;
  }
  return dur | scale << 48;
}

INLINE uint64_t seg_status_byte(int32_t status) {
  if (LIKELY(!status)) return 0;
  if (status == 600) return SEG_STATUS_NOT_READY;
  return status > 0 && status < SEG_STATUS_NOT_READY ? (uint64_t)status : 255;
}

/* A bulk record; head is published last. On aarch64 a store must not overtake the head before it: the fence. */
INLINE void seg_record(struct seg_thread *t, uint32_t hook, uint64_t w0, uint64_t w1, uint64_t a, uint64_t b) {
  struct wire_count *row = &t->counts[hook];
  if (UNLIKELY(t->busy)) {
    seg_bump(&row->lost);
    seg_bump(&t->block->busy);
    return;
  }
  t->busy = 1;
  __atomic_signal_fence(__ATOMIC_SEQ_CST);
  uint64_t head = t->head, *p = t->slots + SEG_WORDS * (head & t->mask);
  __atomic_thread_fence(__ATOMIC_RELEASE);
  __atomic_store_n(&p[0], w0, __ATOMIC_RELAXED);
  __atomic_store_n(&p[1], w1, __ATOMIC_RELAXED);
  __atomic_store_n(&p[2], a, __ATOMIC_RELAXED);
  __atomic_store_n(&p[3], b, __ATOMIC_RELAXED);
  t->head = head + 1;
  __atomic_store_n(&t->block->head, head + 1, __ATOMIC_RELEASE);
  seg_bump(&row->reserved[0]);
  __atomic_signal_fence(__ATOMIC_SEQ_CST);
  t->busy = 0;
}

INLINE void seg_pop(struct seg_thread *t, struct seg_call *c) {
  if (UNLIKELY(t->depth != c->depth + 1)) seg_not_stale(t, c->depth, c->hook);
  __atomic_store_n(&t->block->depth, c->depth, __ATOMIC_RELEASE);
  t->depth = c->depth;
  t->active = c->active;
}

INLINE uint64_t seg_bucket(uint64_t ns) {
  if (ns < 1ull << WIRE_BUCKET_SHIFT) return 0;
  uint32_t e = 63 - (uint32_t)__builtin_clzll(ns);
  uint64_t bucket = (uint64_t)(e - WIRE_BUCKET_SHIFT) << 2 | (ns >> (e - 2) & 3);
  return bucket < WIRE_BUCKETS ? bucket : WIRE_BUCKETS - 1;
}

INLINE uint64_t seg_ns(const struct seg_thread *t, uint64_t ticks) {
  uint64_t rate = __atomic_load_n(&t->header->ns_per_tick, __ATOMIC_RELAXED);
  return (uint64_t)((unsigned __int128)ticks * rate >> 32);
}

INLINE void seg_time(struct seg_thread *t, uint32_t time_id, uint64_t dur) {
  struct wire_time *row = &t->times[time_id];
  uint64_t ns = seg_ns(t, dur);
  seg_bump(&row->n);
#if defined(__x86_64__)
  __asm__ volatile("addq %1, %0" : "+m"(row->sum_ns) : "r"(ns) : "cc");
  __asm__ volatile("addl $1, %0" : "+m"(row->hist[seg_bucket(ns)]) : : "cc");
#else
  __atomic_fetch_add(&row->sum_ns, ns, __ATOMIC_RELAXED);
  __atomic_fetch_add(&row->hist[seg_bucket(ns)], 1, __ATOMIC_RELAXED);
#endif
  if (ns > row->max_ns) row->max_ns = ns;
}

/* After an entry-only hook. */
INLINE void seg_out_call(struct seg_call *c, const struct seg_fixed *f, int32_t status, uint64_t a, uint64_t b) {
  struct seg_thread *t = c->t;
  if (UNLIKELY(!t || !t->slots)) return; /* no ring; or the call forked, and this is the child */
  bool is_lite = (seg_settings_of(t) & 3) == SEG_LITE;
  uint64_t w1 = f->flags | (uint64_t)c->flags * SEG_NESTED << 48 | seg_status_byte(status) << 56;
  w1 |= is_lite ? (uint64_t)SEG_NO_DUR << 48 : seg_scaled(seg_ticks() - c->t0);
  seg_pop(t, c);
  seg_record(t, f->hook, c->t0, w1, a, b);
}

/* After a timed hook. Not 0: a record is always made of it, with all its arguments; the duration + 1. */
INLINE uint64_t seg_out_timed(struct seg_call *c, const struct seg_fixed *f, int32_t status, uint64_t a, uint64_t b) {
  struct seg_thread *t = c->t;
  if (UNLIKELY(!t || !t->slots)) return 0;
  uint64_t dur = seg_ticks() - c->t0;
  seg_pop(t, c);
  seg_time(t, f->time_id + (c->flags & WIRE_NESTED), dur);
  bool failed = status && status != 600; /* cudaErrorNotReady, CUDA_ERROR_NOT_READY */
  if (UNLIKELY(failed || dur >= __atomic_load_n(&t->header->long_ticks, __ATOMIC_RELAXED))) {
    if (failed) seg_bump(&t->counts[f->hook].errors);
    return dur + 1;
  }
  if (!c->pick) {
    seg_bump(&t->counts[f->hook].sampled_out);
    return 0;
  }
  uint64_t w1 = f->flags | (uint64_t)c->flags * SEG_NESTED << 48 | seg_status_byte(status) << 56 | seg_scaled(dur);
  seg_record(t, f->hook, c->t0, w1, a, b);
  return 0;
}
/* timed.c: the same for timed hooks, as functions. */
void *seg_timed_enter(struct seg_call *c, const struct seg_fixed *f, uint32_t instance, void *back, uint64_t a,
                      uint64_t b);
uint64_t seg_timed_leave(struct seg_call *c, const struct seg_fixed *f, int32_t status, uint64_t a, uint64_t b);
#endif
