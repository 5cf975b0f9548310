// SPDX-License-Identifier: Apache-2.0
/* The thread table, read beside its writers. A row's seq is odd while its thread writes; a copy counts only if seq was
 * even before and is the same after. */
#define _GNU_SOURCE
#include "drain.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define TRIES 100

struct rows {
  struct wire_row *at;
  uint64_t torn;
};

int rows__open(int fd, struct rows **out) {
  *out = NULL;
  struct wire_row *at = mmap(NULL, WIRE_ROWS * sizeof(*at), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (at == MAP_FAILED) return -errno;
  struct rows *r = calloc(1, sizeof(*r));
  if (!r) {
    munmap(at, WIRE_ROWS * sizeof(*at));
    return -ENOMEM;
  }
  r->at = at;
  *out = r;
  return 0;
}

void rows__close(struct rows *r) {
  if (!r) return;
  munmap(r->at, WIRE_ROWS * sizeof(*r->at));
  free(r);
}

static uint64_t owner_of(const struct wire_row *row) {
  return __atomic_load_n(&row->owner, __ATOMIC_ACQUIRE);
}
static uint32_t depth_of(const struct wire_row *row) {
  return __atomic_load_n(&row->depth, __ATOMIC_RELAXED);
}

/* 0: copied. -EAGAIN: its thread wrote each time. */
static int copy_row(const struct wire_row *row, struct wire_row *out) {
  for (int i = 0; i < TRIES; i++) {
    uint32_t before = __atomic_load_n(&row->seq, __ATOMIC_ACQUIRE);
    memcpy(out, row, sizeof(*out));
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    if (!(before & 1) && __atomic_load_n(&row->seq, __ATOMIC_RELAXED) == before) return 0;
  }
  return -EAGAIN;
}

int rows__inflight(struct rows *r, struct wire_row *out, uint32_t max) {
  uint32_t n = 0;
  for (uint32_t i = 0; i < WIRE_ROWS && n < max; i++) {
    const struct wire_row *row = &r->at[i];
    if (!owner_of(row) || !depth_of(row)) continue;
    if (copy_row(row, &out[n])) r->torn++;
    else if (out[n].owner && out[n].depth) n++;
  }
  return (int)n;
}

int rows__of_tgid(struct rows *r, uint32_t tgid, struct rows_thread *out, uint32_t max) {
  uint32_t n = 0;
  for (uint32_t i = 0; i < WIRE_ROWS && n < max; i++) {
    uint64_t owner = owner_of(&r->at[i]);
    if (!owner || owner >> 32 != tgid) continue;
    uint64_t calls = __atomic_load_n(&r->at[i].calls, __ATOMIC_RELAXED);
    out[n++] = (struct rows_thread){.tid = (uint32_t)owner, .slot = r->at[i].slot, .calls = calls};
  }
  return (int)n;
}

/* last: the process has ended, and its number may be another's soon: of its threads nothing is known any more. */
int rows__deeds(struct rows *r, uint32_t tgid, int last, struct rows_deeds *out, uint32_t max) {
  uint32_t n = 0;
  for (uint32_t i = 0; i < WIRE_ROWS && n < max; i++) {
    struct wire_row *row = &r->at[i];
    uint64_t was = __atomic_load_n(&row->was, __ATOMIC_ACQUIRE);
    if (!was || was >> 32 != tgid) continue;
    out[n] = (struct rows_deeds){.tid = (uint32_t)was, .lives = owner_of(row) == was, .wait_ns = row->wait_ns};
    for (int j = 0; j < WIRE_DEEDS; j++) out[n].deeds[j] = __atomic_load_n(&row->deeds[j], __ATOMIC_RELAXED);
    /* Else another thread has taken the row meanwhile. */
    if (last) n += __atomic_compare_exchange_n(&row->was, &was, 0, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
    else n += __atomic_load_n(&row->was, __ATOMIC_ACQUIRE) == was;
  }
  return (int)n;
}

/* The place is that of row_of in probes/maps.h. */
int rows__calls(struct rows *r, uint32_t tgid, uint32_t tid, uint64_t *calls) {
  uint32_t first = (tid * 2654435761u) >> (32 - WIRE_ROW_BITS);
  uint64_t id = (uint64_t)tgid << 32 | tid;
  for (uint32_t i = 0; i < WIRE_ROW_PROBES; i++) {
    const struct wire_row *row = &r->at[(first + i) & (WIRE_ROWS - 1)];
    if (owner_of(row) != id) continue;
    *calls = __atomic_load_n(&row->calls, __ATOMIC_RELAXED);
    return 1;
  }
  return 0;
}

/* Frees rows that no exit will free, because the filter forgot their process first. No program may run in it any more. */
int rows__release(struct rows *r, uint32_t tgid) {
  int n = 0;
  for (uint32_t i = 0; i < WIRE_ROWS; i++) {
    struct wire_row *row = &r->at[i];
    uint64_t owner = owner_of(row);
    if (!owner || owner >> 32 != tgid) continue;
    __atomic_store_n(&row->depth, 0, __ATOMIC_RELAXED);
    n += __atomic_compare_exchange_n(&row->owner, &owner, 0, 0, __ATOMIC_RELEASE, __ATOMIC_RELAXED);
  }
  return n;
}

uint64_t rows__torn(const struct rows *r) {
  return r->torn;
}
