// SPDX-License-Identifier: Apache-2.0
/* Exact counters of one process slot at a time, against what was reported of it before. One slot of both maps is mapped
 * at any moment: 240 KiB instead of 30 MiB. */
#define _GNU_SOURCE
#include "drain.h"
#include "window.h"
#include <errno.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define COUNT_BYTES (WIRE_HOOKS * sizeof(struct wire_count))
#define TIME_BYTES (WIRE_TIMES * sizeof(struct wire_time))

/* What identifies the state of a wire_time without keeping a copy: each of these only grows. */
struct time_mark {
  uint64_t n, sum_ns, max_ns, in_hist;
};

struct shadow {
  struct wire_count counts[WIRE_HOOKS];
  struct time_mark times[WIRE_TIMES];
};

struct counters {
  struct window counts, times;
  struct shadow *shadow[WIRE_PROCS];
};

int counters__open(int counts_fd, int times_fd, struct counters **out) {
  *out = NULL;
  struct counters *c = calloc(1, sizeof(*c));
  if (!c) return -ENOMEM;
  int prot = PROT_READ | PROT_WRITE,
      ret = window__init(&c->counts, counts_fd, prot, WIRE_PROCS * COUNT_BYTES, COUNT_BYTES);
  if (!ret) ret = window__init(&c->times, times_fd, prot, WIRE_PROCS * TIME_BYTES, TIME_BYTES);
  if (!ret && (!window__at(&c->counts, 0, COUNT_BYTES) || !window__at(&c->times, 0, TIME_BYTES))) ret = -errno;
  if (ret) counters__close(c);
  else *out = c;
  return ret;
}

void counters__close(struct counters *c) {
  if (!c) return;
  for (int i = 0; i < WIRE_PROCS; i++) free(c->shadow[i]);
  window__deinit(&c->counts);
  window__deinit(&c->times);
  free(c);
}

static int map_slot(struct counters *c, uint32_t slot, struct wire_count **counts, struct wire_time **times) {
  if (slot >= WIRE_PROCS) return -EINVAL;
  *counts = (struct wire_count *)(void *)window__at(&c->counts, slot * COUNT_BYTES, COUNT_BYTES);
  if (!*counts) return -errno;
  *times = (struct wire_time *)(void *)window__at(&c->times, slot * TIME_BYTES, TIME_BYTES);
  return *times ? 0 : -errno;
}

static void changed_counts(const struct wire_count *now, struct shadow *s, struct counters_delta *out) {
  for (uint16_t i = 0; i < WIRE_HOOKS; i++) {
    if (!memcmp(&now[i], &s->counts[i], sizeof(*now))) continue;
    s->counts[i] = now[i];
    out->hooks[out->n_counts] = i;
    out->counts[out->n_counts++] = s->counts[i];
  }
}

static struct time_mark mark_of(const struct wire_time *t) {
  struct time_mark m = {.n = t->n, .sum_ns = t->sum_ns, .max_ns = t->max_ns};
  for (int i = 0; i < WIRE_BUCKETS; i++) m.in_hist += t->hist[i];
  return m;
}

/* A program adds to n first and to hist last: once both agree, an unchanged head means an unchanged histogram. */
static bool settled(const struct wire_time *t, const struct time_mark *m) {
  return t->n == m->n && t->sum_ns == m->sum_ns && t->max_ns == m->max_ns && m->in_hist == m->n;
}

static void changed_times(const struct wire_time *now, struct shadow *s, struct counters_delta *out) {
  for (uint16_t i = 0; i < WIRE_TIMES; i++) {
    if (settled(&now[i], &s->times[i])) continue;
    struct wire_time *copy = &out->times[out->n_times];
    memcpy(copy, &now[i], sizeof(*copy));
    struct time_mark m = mark_of(copy);
    if (!memcmp(&m, &s->times[i], sizeof(m))) continue;
    s->times[i] = m;
    out->timed[out->n_times++] = i;
  }
}

/* Whether the process of a slot has made no call since the slot was zeroed: then its times are zero, too. Most processes
 * of a job never call, and mapping 240 KiB for one costs more than all else that is done for it. 1, 0 or -errno. */
static int is_unused(struct counters *c, uint32_t slot) {
  if (slot >= WIRE_PROCS) return -EINVAL;
  if (c->shadow[slot]) return 0;
  const uint64_t *words = window__at(&c->counts, slot * COUNT_BYTES, COUNT_BYTES);
  if (!words) return -errno;
  for (size_t i = 0; i < COUNT_BYTES / sizeof(*words); i++)
    if (words[i]) return 0;
  return 1;
}

int counters__changed(struct counters *c, uint32_t slot, struct counters_delta *out) {
  struct wire_count *counts;
  struct wire_time *times;
  out->n_counts = out->n_times = 0;
  int ret = is_unused(c, slot);
  if (ret) return ret < 0 ? ret : 0;
  ret = map_slot(c, slot, &counts, &times);
  if (ret) return ret;
  if (!c->shadow[slot] && !(c->shadow[slot] = calloc(1, sizeof(struct shadow)))) return -ENOMEM;
  changed_counts(counts, c->shadow[slot], out);
  changed_times(times, c->shadow[slot], out);
  return 0;
}

int counters__zero(struct counters *c, uint32_t slot) {
  struct wire_count *counts;
  struct wire_time *times;
  int ret = is_unused(c, slot);
  if (ret) return ret < 0 ? ret : 0;
  ret = map_slot(c, slot, &counts, &times);
  if (ret) return ret;
  memset(counts, 0, COUNT_BYTES);
  memset(times, 0, TIME_BYTES);
  free(c->shadow[slot]);
  c->shadow[slot] = NULL;
  return 0;
}
