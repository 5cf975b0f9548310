// SPDX-License-Identifier: Apache-2.0
/* Reading a segment: counters, calls under way, communicators, settings. */
#define _GNU_SOURCE
#include "seg.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define TRIES 100

void seg_add(struct wire_count *sum, const struct wire_count *row) {
  sum->calls += row->calls;
  sum->nested += row->nested;
  sum->errors += row->errors;
  sum->lost += row->lost;
  sum->sampled_out += row->sampled_out;
  sum->filtered += row->filtered;
}

/* One thread's counters, calls under way and positions. */
struct shot {
  struct wire_count rows[WIRE_HOOKS];
  struct seg_frame frames[WIRE_DEPTH];
  uint32_t n_frames;
  uint64_t head, vital_head;
};

/* All of one moment, unless the thread writes in each of TRIES looks: false then. */
static bool shoot(const struct segment *s, uint32_t block, struct shot *x) {
  static const size_t bytes = sizeof(x->rows);
  struct wire_count again[WIRE_HOOKS];
  for (int i = 0; i < TRIES; i++) {
    x->head = seg_word(s, SEG_FIELD(s, block, head));
    x->vital_head = seg_word(s, SEG_FIELD(s, block, vital_head));
    seg_copy(s, seg_block_at(s, block) + SEG_COUNTS_AT, x->rows, bytes);
    x->n_frames = seg_frames(s, block, x->frames);
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    seg_copy(s, seg_block_at(s, block) + SEG_COUNTS_AT, again, bytes);
    bool same = x->head == seg_word(s, SEG_FIELD(s, block, head));
    if (same && x->vital_head == seg_word(s, SEG_FIELD(s, block, vital_head)) && !memcmp(x->rows, again, bytes))
      return true;
  }
  return false;
}

static uint64_t under_way(const struct shot *x, uint32_t hook) {
  uint64_t n = 0;
  for (uint32_t i = 0; i < x->n_frames; i++)
    n += (x->frames[i].what & 0xffff) == hook && !(x->frames[i].what >> 16 & WIRE_ENTERED);
  return n;
}

/* Calls without an account when a reader has just come: their records were overwritten before it did, or wait. False: a
 * ring was overwritten meanwhile. */
static bool date(struct segment *s, uint32_t block, struct seg_reader *r, const struct shot *x) {
  uint64_t waiting[WIRE_HOOKS] = {0}, slots = 1ull << s->header.bulk_bits;
  seg_count_waiting(s, block, r, x->head, x->vital_head, waiting);
  if (seg_word(s, SEG_FIELD(s, block, head)) - r->tail >= slots) return false;
  if (seg_word(s, SEG_FIELD(s, block, vital_floor)) > r->vital_tail) return false;
  for (uint32_t i = 0; i < WIRE_HOOKS; i++) {
    const struct wire_count *row = &x->rows[i];
    uint64_t told = row->lost + row->sampled_out + row->filtered + r->events[i] + under_way(x, i) + waiting[i];
    r->history[i] = row->calls > told ? row->calls - told : 0;
  }
  return true;
}

/* Calls without an account: their records wait in the rings, or are gone. The first are held back, as if they had not
 * been made yet: a reader who takes no more records would not find them again. So is one that the thread is about to show
 * or to record: whoever reads may have taken the processor from it there. The others are lost, or, when they were
 * overwritten before anybody looked, history; which hooks' they were is certain when nothing waits. is_over: the process
 * has ended, and nothing comes any more. */
static void settle(struct segment *s, uint32_t block, struct shot *x, bool whole, bool is_over) {
  struct seg_reader *r = s->readers[block];
  if (r->dates && date(s, block, r, x) && whole) r->dates = r->behind = false;
  uint64_t waiting = x->head - r->tail + (x->vital_head - r->vital_tail), gone_now = 0;
  uint64_t between = !is_over && !r->behind;
  for (uint32_t i = 0; i < WIRE_HOOKS; i++) {
    struct wire_count *row = &x->rows[i];
    uint64_t told = row->lost + row->sampled_out + row->filtered + r->events[i] + r->missed[i] + under_way(x, i);
    /* One that was about to be recorded then was taken for history. */
    if (whole && told <= row->calls && r->history[i] > row->calls - told) r->history[i] = row->calls - told;
    told += r->history[i];
    uint64_t open = row->calls > told ? row->calls - told : 0, held = open < waiting ? open : waiting;
    if (open > held && between) {
      between = 0;
      held++;
    }
    uint64_t gone = (r->behind && !r->dates) || is_over ? open - held : 0;
    row->calls -= held;
    if (row->nested > row->calls) row->nested = row->calls;
    if (whole && !waiting) r->missed[i] += gone;
    else row->lost += gone;
    gone_now += r->missed[i];
    row->lost += r->missed[i];
    row->filtered += r->history[i];
  }
  if (!whole || waiting || r->dates || !(r->behind || is_over)) return;
  r->behind = false;
  r->overwritten = gone_now;
}

static int sum_counts(struct segment *s, bool is_over, struct wire_count *sums) {
  struct shot x;
  seg_copy(s, SEG_HOMELESS_AT, sums, WIRE_HOOKS * sizeof(*sums));
  for (uint32_t block = 0; block < seg_used(s); block++) {
    struct seg_reader *r = seg_reader_of(s, block);
    if (!r) return -ENOMEM;
    bool whole = shoot(s, block, &x);
    settle(s, block, &x, whole, is_over);
    memcpy(r->frames, x.frames, sizeof(r->frames));
    r->n_frames = x.n_frames;
    for (uint32_t i = 0; i < WIRE_HOOKS; i++) seg_add(&sums[i], &x.rows[i]);
  }
  for (uint32_t i = 0; i < WIRE_HOOKS; i++) {
    seg_subtract(&sums[i], &s->base[i]);
    sums[i].reserved[0] = sums[i].reserved[1] = 0;
    /* What was under way, and so counted, may wait in a ring by now. */
    if (sums[i].calls < s->last[i].calls) sums[i].calls = s->last[i].calls;
  }
  return 0;
}

void seg_sum_time(const struct segment *s, uint32_t time_id, struct wire_time *sum) {
  struct wire_time row;
  memset(sum, 0, sizeof(*sum));
  for (uint32_t block = 0; block < seg_used(s); block++) {
    seg_copy(s, seg_block_at(s, block) + SEG_TIMES_AT + time_id * sizeof(row), &row, sizeof(row));
    sum->n += row.n;
    sum->sum_ns += row.sum_ns;
    if (row.max_ns > sum->max_ns) sum->max_ns = row.max_ns;
    for (int i = 0; i < WIRE_BUCKETS; i++) sum->hist[i] += row.hist[i];
  }
}

static void tell_time(struct segment *s, uint32_t time_id, struct counters_delta *out) {
  struct wire_time *t = &out->times[out->n_times];
  uint64_t in_hist = 0;
  if (time_id >= WIRE_TIMES) return;
  seg_sum_time(s, time_id, t);
  if (s->base_times) seg_subtract_time(t, &s->base_times[time_id]);
  for (int i = 0; i < WIRE_BUCKETS; i++) in_hist += t->hist[i];
  if (t->n == s->marks[time_id].n && t->sum_ns == s->marks[time_id].sum_ns && in_hist == s->marks[time_id].in_hist &&
      t->max_ns == s->marks[time_id].max_ns)
    return;
  s->marks[time_id].n = t->n;
  s->marks[time_id].sum_ns = t->sum_ns;
  s->marks[time_id].max_ns = t->max_ns;
  s->marks[time_id].in_hist = in_hist;
  out->timed[out->n_times++] = (uint16_t)time_id;
}

int segment__counts(struct segment *s, uint32_t is_over, struct counters_delta *out) {
  struct wire_count sums[WIRE_HOOKS];
  out->n_counts = out->n_times = 0;
  int ret = sum_counts(s, is_over, sums);
  if (ret) return ret;
  for (uint16_t i = 0; i < WIRE_HOOKS; i++) {
    if (!sums[i].calls) continue;
    if (memcmp(&sums[i], &s->last[i], sizeof(sums[i]))) {
      s->last[i] = sums[i];
      out->hooks[out->n_counts] = i;
      out->counts[out->n_counts++] = sums[i];
    }
    if (s->header.words[i].is_call) continue;
    for (uint32_t nested = 0; nested < 2 && out->n_times < WIRE_TIMES; nested++)
      tell_time(s, s->header.words[i].time_id + nested, out);
  }
  return 0;
}

/* Frame by frame. Its thread writes t0 first and shows it by depth: with the same t0 before and after, it is whole. */
static bool copy_frame(const struct segment *s, uint32_t block, uint32_t index, struct seg_frame *out) {
  uint64_t at = SEG_FIELD(s, block, frames) + index * sizeof(*out);
  for (int i = 0; i < TRIES; i++) {
    uint64_t t0 = seg_word(s, at);
    uint32_t depth = (uint32_t)seg_word(s, SEG_FIELD(s, block, depth));
    if (!t0 || depth <= index) return false;
    seg_copy(s, at, out, sizeof(*out));
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    if (out->t0 == t0 && seg_word(s, at) == t0) return true;
  }
  return false;
}

static void show_frame(const struct segment *s, const struct seg_clock *c, const struct seg_frame *f,
                       struct wire_frame *out) {
  uint32_t hook = f->what & 0xffff;
  *out = (struct wire_frame){.ts_ns = segment__to_ns(s, c, f->t0),
                             .cookie = hook,
                             .n = (uint32_t)(f->what >> 32),
                             .flags = (uint8_t)(f->what >> 16),
                             .pick = 1};
  if (f->what >> 24 & 1) {
    memcpy(out->a, f->a, sizeof(out->a));
    return;
  }
  const struct seg_words *w = &s->header.words[hook];
  if (w->r < 8) out->a[w->r] = f->a[1] >> 48;
  if (w->q < 8) out->a[w->q] = f->a[1] & 0xffffffffffffull;
  if (w->p < 8) out->a[w->p] = f->a[0];
}

static uint64_t calls_of(const struct segment *s, uint32_t block) {
  struct wire_count rows[WIRE_HOOKS];
  uint64_t sum = 0;
  seg_copy(s, seg_block_at(s, block) + SEG_COUNTS_AT, rows, sizeof(rows));
  for (int i = 0; i < WIRE_HOOKS; i++) sum += rows[i].calls;
  return sum;
}

uint32_t seg_frames(const struct segment *s, uint32_t block, struct seg_frame *out) {
  uint32_t n = 0;
  for (uint32_t i = 0; i < WIRE_DEPTH; i++)
    if (copy_frame(s, block, i, &out[n]) && (out[n].what & 0xffff) < WIRE_HOOKS) n++;
  return n;
}

int segment__inflight(struct segment *s, const struct seg_clock *c, uint32_t slot, uint32_t tgid, uint32_t as_counted,
                      struct wire_row *out, uint32_t max) {
  uint32_t n = 0;
  for (uint32_t block = 0; block < seg_used(s) && n < max; block++) {
    struct wire_row row = {.slot = slot};
    struct seg_frame now[WIRE_DEPTH];
    const struct seg_reader *r = as_counted ? seg_reader_of(s, block) : NULL;
    row.depth = r ? r->n_frames : seg_frames(s, block, now);
    if (!row.depth) continue;
    for (uint32_t i = 0; i < row.depth; i++) show_frame(s, c, r ? &r->frames[i] : &now[i], &row.f[i]);
    row.owner = (uint64_t)tgid << 32 | (uint32_t)seg_word(s, SEG_FIELD(s, block, tid));
    row.calls = calls_of(s, block);
    out[n++] = row;
  }
  return (int)n;
}

void segment__gpu_untold(const struct segment *s, uint64_t *out) {
  seg_copy(s, offsetof(struct seg_header, gpu_untold), out, SEG_GPU_FIGURES * sizeof(*out));
}

uint32_t segment__gpu(const struct segment *s) {
  return (uint32_t)seg_word(s, offsetof(struct seg_header, gpu));
}

void segment__losses(struct segment *s, uint64_t *out) {
  uint64_t header[SEG_LOSSES];
  memset(out, 0, SEGMENT_LOSSES * sizeof(*out));
  seg_copy(s, offsetof(struct seg_header, losses), header, sizeof(header));
  for (uint32_t block = 0; block < seg_used(s); block++) {
    const struct seg_reader *r = seg_reader_of(s, block);
    out[SEGMENT_OVERWRITTEN] += r ? r->overwritten : 0;
    for (int i = 0; r && i < WIRE_HOOKS; i++) out[SEGMENT_HISTORY] += r->history[i];
    out[SEGMENT_VITAL_FULL] += seg_word(s, SEG_FIELD(s, block, vital_lost));
    out[SEGMENT_BUSY] += seg_word(s, SEG_FIELD(s, block, busy));
    out[SEGMENT_STALE] += seg_word(s, SEG_FIELD(s, block, stale));
  }
  out[SEGMENT_NO_RING] = header[SEG_NO_RING];
  out[SEGMENT_NO_COMM] = header[SEG_NO_COMM];
  out[SEGMENT_UNWRAPPED] = header[SEG_UNWRAPPED];
  out[SEGMENT_HELLO] = header[SEG_HELLO];
  out[SEGMENT_COMMS_MADE] = header[SEG_COMMS_MADE];
  out[SEGMENT_CORRUPT] = s->corrupt;
}

int segment__set(struct segment *s, uint64_t settings, uint64_t long_ns) {
  uint64_t ticks = (uint64_t)((unsigned __int128)long_ns * s->header.ticks_per_s / 1000000000u);
  seg_store(s, offsetof(struct seg_header, long_ticks), ticks);
  seg_store(s, offsetof(struct seg_header, settings), settings);
  return 0;
}

int segment__threads(struct segment *s, struct segment_thread *out, uint32_t max) {
  uint32_t n = 0;
  for (uint32_t block = 0; block < seg_used(s) && n < max; block++) {
    uint32_t state = (uint32_t)(seg_word(s, SEG_FIELD(s, block, depth)) >> 32);
    if (state != SEG_ACTIVE && state != SEG_EXITED) continue;
    uint32_t tid = (uint32_t)seg_word(s, SEG_FIELD(s, block, tid));
    out[n++] = (struct segment_thread){.tid = tid, .state = state, .calls = calls_of(s, block)};
  }
  return (int)n;
}

int segment__comms(struct segment *s, struct segment_comm *out, uint32_t max) {
  uint32_t n = 0;
  _Static_assert(sizeof(struct segment_comm) == sizeof(struct seg_comm), "segment_comm");
  for (uint32_t row = 0; row < 1u << SEG_COMM_BITS && n < max; row++) {
    seg_copy(s, SEG_COMMS_AT + row * sizeof(struct seg_comm), &out[n], sizeof(*out));
    if (out[n].comm) n++;
  }
  return (int)n;
}
