// SPDX-License-Identifier: Apache-2.0
/* Records of full width, in a ring that keeps the newest while nobody reads, and else what has not been read yet. */
#define _GNU_SOURCE
#include "hot.h"
#include <string.h>

/* Whole records from `floor` on go, so that the ring has room up to `end`; some more, since each look at the lease is a
 * reading of the counter. A reader that copied a slot looks at vital_floor: what lies before it may be torn. */
static uint64_t overwrite(struct seg_thread *t, uint64_t floor, uint64_t end) {
  uint64_t size = t->vital_mask + 1;
  for (end += size / 256; floor + size < end;) floor += t->vital[floor & t->vital_mask].has_uid ? 2 : 1;
  __atomic_store_n(&t->block->vital_floor, floor, __ATOMIC_RELAXED);
  __atomic_thread_fence(__ATOMIC_RELEASE);
  return floor;
}

static bool has_room(struct seg_thread *t, uint64_t slots) {
  uint64_t end = t->vital_head + slots, size = t->vital_mask + 1;
  if (LIKELY(end <= t->vital_limit)) return true;
  uint64_t floor = __atomic_load_n(&t->block->vital_floor, __ATOMIC_RELAXED);
  uint64_t tail = __atomic_load_n(&t->block->vital_tail, __ATOMIC_ACQUIRE);
  if (tail > floor && tail <= t->vital_head) floor = tail;
  if (end > floor + size && seg_ticks() >= __atomic_load_n(&t->header->lease, __ATOMIC_RELAXED))
    floor = overwrite(t, floor, end);
  t->vital_limit = floor + size;
  return end <= t->vital_limit;
}

/* 0: it is in the ring. */
int seg_put(struct seg_thread *t, const struct seg_vital *v, const void *uid) {
  uint64_t slots = uid ? 2 : 1;
  if (t->busy) {
    seg_bump(&t->block->busy);
    return -1;
  }
  t->busy = 1;
  __atomic_signal_fence(__ATOMIC_SEQ_CST);
  bool room = has_room(t, slots);
  if (room) {
    memcpy(&t->vital[t->vital_head & t->vital_mask], v, sizeof(*v));
    if (uid) memcpy(&t->vital[(t->vital_head + 1) & t->vital_mask], uid, WIRE_UID_BYTES);
    t->vital_head += slots;
    __atomic_store_n(&t->block->vital_head, t->vital_head, __ATOMIC_RELEASE);
  } else seg_bump(&t->block->vital_lost);
  __atomic_signal_fence(__ATOMIC_SEQ_CST);
  t->busy = 0;
  return room ? 0 : -1;
}

/* The end of a wait that was long, or of a call that failed. */
void seg_told(struct seg_call c, uint64_t dur, int32_t status, const uint64_t *a) {
  struct seg_vital v = {.ts = c.t0,
                        .dur = dur,
                        .hook = (uint16_t)c.hook,
                        .kind = WIRE_DONE,
                        .flags = (uint8_t)(c.flags | WIRE_ALWAYS),
                        .depth = (uint8_t)c.depth,
                        .n = c.n,
                        .status = status,
                        .tid = c.t->tid};
  memcpy(v.a, a, sizeof(v.a));
  seg_waited(&c, dur);
  if (!seg_put(c.t, &v, NULL)) return;
  /* The agent has not taken the old ones yet: what is newest goes where the newest stays. */
  const struct seg_words *w = &seg_words_of[c.hook];
  uint64_t low = w->q < SEG_NO_WORD ? a[w->q] & 0xffffffffffffull : 0, high = w->r < SEG_NO_WORD ? a[w->r] << 48 : 0;
  uint64_t w1 = (uint64_t)c.hook << 32 | (uint64_t)(SEG_ALWAYS | (c.flags & WIRE_NESTED) * SEG_NESTED) << 48 |
                seg_status_byte(status) << 56 | seg_scaled(dur);
  seg_record(c.t, c.hook, c.t0, w1, w->p < SEG_NO_WORD ? a[w->p] : 0, low | high);
}

/* For the profiler plugin: a record that is no call. v->ts and v->tid 0 = now, this thread. */
void seg_emit_vital(const struct seg_vital *v) {
  struct seg_thread *t = seg_self;
  if (!t || !t->slots) t = seg_attach();
  if (!t) return;
  struct seg_vital copy = *v;
  if (!copy.ts) copy.ts = seg_ticks();
  if (!copy.tid) copy.tid = t->tid;
  (void)seg_put(t, &copy, NULL);
}
