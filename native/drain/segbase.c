// SPDX-License-Identifier: Apache-2.0
/* A reader that is not the first one counts from where the last one stopped: what was told before is subtracted. Calls
 * whose records wait in the rings, or that are under way, are still to be told. */
#define _GNU_SOURCE
#include "seg.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define TRIES 200
#ifndef LEASE_S
#define LEASE_S 5
#endif

/* What of a thread changes with each call. */
struct moment {
  uint64_t head, vital_head, depth, calls;
};

static struct moment moment_of(const struct segment *s, uint32_t block, const struct wire_count *rows) {
  struct moment m = {.head = seg_word(s, SEG_FIELD(s, block, head)),
                     .vital_head = seg_word(s, SEG_FIELD(s, block, vital_head)),
                     .depth = (uint32_t)seg_word(s, SEG_FIELD(s, block, depth))};
  for (int i = 0; i < WIRE_HOOKS; i++) m.calls += rows[i].calls;
  return m;
}

static void count_bulk(const struct segment *s, uint32_t block, struct seg_reader *r, uint64_t head,
                       uint64_t *waiting) {
  uint64_t slots = 1ull << s->header.bulk_bits;
  if (head - r->tail > slots - 1) r->tail = head - (slots - 1);
  for (uint64_t i = r->tail; i < head; i++) {
    uint64_t at = seg_block_at(s, block) + SEG_BULK_AT(s->header.vital_bits) + (i & (slots - 1)) * 32;
    uint32_t hook = seg_word(s, at + 8) >> 32 & 0xffff;
    if (hook < WIRE_HOOKS) waiting[hook]++;
  }
}

/* Records that will be events: not the second one of a call. */
static void count_vital(const struct segment *s, uint32_t block, struct seg_reader *r, uint64_t head,
                        uint64_t *waiting) {
  uint64_t slots = 1ull << s->header.vital_bits, floor = seg_word(s, SEG_FIELD(s, block, vital_floor));
  struct seg_vital v;
  if (floor > r->vital_tail) r->vital_tail = floor;
  if (head - r->vital_tail > slots) return;
  for (uint64_t i = r->vital_tail; i < head; i += v.has_uid ? 2 : 1) {
    seg_copy(s, seg_block_at(s, block) + SEG_VITAL_AT + (i & (slots - 1)) * sizeof(v), &v, sizeof(v));
    bool second = (v.kind == WIRE_DONE || v.kind == WIRE_ABANDONED) && v.flags & WIRE_ENTERED;
    if (v.hook < WIRE_HOOKS && v.kind <= WIRE_ABANDONED && !second) waiting[v.hook]++;
  }
}

void seg_count_waiting(const struct segment *s, uint32_t block, struct seg_reader *r, uint64_t head,
                       uint64_t vital_head, uint64_t *waiting) {
  count_bulk(s, block, r, head, waiting);
  count_vital(s, block, r, vital_head, waiting);
}

static void count_under_way(const struct segment *s, uint32_t block, uint64_t depth, uint64_t *waiting) {
  for (uint32_t i = 0; i < WIRE_DEPTH && i < depth; i++) {
    uint64_t what = seg_word(s, SEG_FIELD(s, block, frames) + i * sizeof(struct seg_frame) + 8);
    if ((what & 0xffff) < WIRE_HOOKS && !(what >> 16 & WIRE_ENTERED)) waiting[what & 0xffff]++;
  }
}

static void base_block(struct segment *s, uint32_t block, struct seg_reader *r) {
  struct wire_count rows[WIRE_HOOKS];
  uint64_t bulk[WIRE_HOOKS], other[WIRE_HOOKS], tail = r->tail;
  for (int try = 0; try < TRIES; try++) {
    memset(bulk, 0, sizeof(bulk));
    memset(other, 0, sizeof(other));
    r->tail = tail;
    seg_copy(s, seg_block_at(s, block) + SEG_COUNTS_AT, rows, sizeof(rows));
    struct moment before = moment_of(s, block, rows);
    count_bulk(s, block, r, before.head, bulk);
    count_vital(s, block, r, before.vital_head, other);
    count_under_way(s, block, before.depth, other);
    seg_copy(s, seg_block_at(s, block) + SEG_COUNTS_AT, rows, sizeof(rows));
    struct moment after = moment_of(s, block, rows);
    if (!memcmp(&before, &after, sizeof(after))) break;
  }
  for (int i = 0; i < WIRE_HOOKS; i++) {
    uint64_t open = rows[i].lost + rows[i].sampled_out + rows[i].filtered + bulk[i] + other[i];
    r->events[i] = rows[i].calls > open ? rows[i].calls - open : 0;
    seg_add(&s->base[i], &rows[i]);
    s->base[i].calls -= bulk[i] + other[i];
  }
}

int seg_start_from_here(struct segment *s) {
  struct wire_count homeless[WIRE_HOOKS];
  struct wire_time *times = calloc(WIRE_TIMES, sizeof(*times));
  if (!times) return -ENOMEM;
  seg_copy(s, SEG_HOMELESS_AT, homeless, sizeof(homeless));
  for (int i = 0; i < WIRE_HOOKS; i++) seg_add(&s->base[i], &homeless[i]);
  for (uint32_t block = 0; block < seg_used(s); block++) {
    struct seg_reader *r = seg_reader_of(s, block);
    if (r) base_block(s, block, r);
  }
  for (uint32_t i = 0; i < WIRE_TIMES; i++) seg_sum_time(s, i, &times[i]);
  s->base_times = times;
  return 0;
}

void seg_subtract(struct wire_count *sum, const struct wire_count *base) {
  sum->calls -= base->calls;
  sum->nested -= base->nested;
  sum->errors -= base->errors;
  sum->lost -= base->lost;
  sum->sampled_out -= base->sampled_out;
  sum->filtered -= base->filtered;
}

/* The longest one of before is not the longest one since. */
void seg_subtract_time(struct wire_time *sum, const struct wire_time *base) {
  sum->n -= base->n;
  sum->sum_ns -= base->sum_ns;
  if (sum->max_ns == base->max_ns) sum->max_ns = 0;
  for (int i = 0; i < WIRE_BUCKETS; i++) sum->hist[i] -= base->hist[i];
  for (int i = WIRE_BUCKETS - 1; !sum->max_ns && i >= 0; i--)
    if (sum->hist[i]) sum->max_ns = i ? (4ull + (i & 3)) << (i / 4 + WIRE_BUCKET_SHIFT - 2) : 1;
}

void seg_gone(struct seg_reader *r, uint64_t records) {
  r->dates = r->is_old;
  if (!r->is_old) r->overwritten += records;
  r->behind = true;
}

/* A reader that dies does not say so, and a program must not ask: what it said last holds for some seconds. */
void segment__hold(struct segment *s) {
  uint64_t span = s->header.ticks_per_s * LEASE_S, now = seg_ticks_now();
  uint64_t there = seg_word(s, offsetof(struct seg_header, lease)); /* ours, or that of one who reads along */
  if (!s->has_arrived || (there > now && there - now > span / 2)) return;
  s->lease = now + span;
  seg_store(s, offsetof(struct seg_header, lease), s->lease);
}

/* Unless another reader has come since. */
void seg_let_go(struct segment *s) {
  if (s->lease && seg_word(s, offsetof(struct seg_header, lease)) == s->lease)
    seg_store(s, offsetof(struct seg_header, lease), 0);
}

uint64_t segment__whole_since(struct segment *s, const struct seg_clock *c) {
  uint64_t since = 0;
  for (uint32_t block = 0; block < seg_used(s); block++) {
    const struct seg_reader *r = s->readers[block];
    if (r && r->since > since) since = r->since;
  }
  return since ? segment__to_ns(s, c, since) : 0;
}
