// SPDX-License-Identifier: Apache-2.0
/* Segments that libstallscope.so would not write: segment_fuzz SECONDS SEED. A whole one is made, bytes of it are
 * changed, some while they are read; now and then it is cut. Prints what happened. */
#define _GNU_SOURCE
#include "seg.h"
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define BLOCKS 3
#define BULK_BITS 6
#define VITAL_BITS 4
#define MAX_RECS 256
#define MAX_UIDS 16

static uint64_t state;
static uint8_t *memory;
static size_t bytes;
static int stopping;

static uint64_t next(uint64_t *s) {
  *s ^= *s << 13;
  *s ^= *s >> 7;
  *s ^= *s << 17;
  return *s;
}

static void fill_header(struct seg_header *h) {
  *h = (struct seg_header){.version = SEG_VERSION,
                           .header_bytes = SEG_HEADER_BYTES,
                           .n_blocks = BLOCKS,
                           .block_bytes = SEG_BLOCK_BYTES(VITAL_BITS, BULK_BITS),
                           .total_bytes = bytes - SEG_SITE_BYTES,
                           .sites_at = bytes - SEG_SITE_BYTES,
                           .bulk_bits = BULK_BITS,
                           .vital_bits = VITAL_BITS,
                           .comm_bits = SEG_COMM_BITS,
                           .counter = 1000,
                           .mono_ns = 1000,
                           .ticks_per_s = 1000000000,
                           .used = BLOCKS};
  for (int i = 0; i < WIRE_HOOKS; i++)
    h->words[i] = (struct seg_words){0, 7, 8, (uint8_t)(i & 1), (uint16_t)(i / 2), 0};
  h->magic = SEG_MAGIC;
}

static struct seg_block *block_at(uint32_t i) {
  return (struct seg_block *)(void *)(memory + SEG_HEADER_BYTES + i * SEG_BLOCK_BYTES(VITAL_BITS, BULK_BITS));
}

/* Small numbers, which mean something in most places, half of the time. */
static uint64_t value(uint64_t *s) {
  uint64_t v = next(s);
  return v & 1 ? v >> (next(s) % 64) : next(s) % 70;
}

static void scribble(uint64_t *s, int times) {
  for (int i = 0; i < times; i++) {
    uint8_t *block = (uint8_t *)block_at(next(s) % BLOCKS);
    size_t place = next(s) % 4 ? next(s) % sizeof(struct seg_block) : next(s) % SEG_BLOCK_BYTES(VITAL_BITS, BULK_BITS);
    __atomic_store_n((uint64_t *)(void *)(block + place / 8 * 8), value(s), __ATOMIC_RELAXED);
    place = next(s) % 2 ? next(s) % SEG_SITE_KEYS : next(s) % SEG_SITE_BYTES;
    __atomic_store_n((uint64_t *)(void *)(memory + bytes - SEG_SITE_BYTES + place / 8 * 8), value(s), __ATOMIC_RELAXED);
  }
}

static void *writer(void *argument) {
  uint64_t s = 0x9e3779b97f4a7c15ull ^ (uint64_t)(uintptr_t)argument;
  while (!__atomic_load_n(&stopping, __ATOMIC_RELAXED)) scribble(&s, 100);
  return NULL;
}

static uint64_t rounds, taken, refused, corrupt, sites;

static void read_sites(struct segment *s, const struct seg_clock *clock) {
  const uint64_t hooks[(WIRE_HOOKS + 63) / 64] = {1};
  struct wire_python python = {.tgid = 1};
  struct segment_sites facts;
  struct wire_site site;
  uint16_t rows[64];
  segment__sites(s, &facts);
  uint32_t n = segment__site_rows(s, rows, 64);
  for (uint32_t i = 0; i < n; i++) sites += (uint64_t)segment__site(s, clock, rows[i], &site);
  if (segment__site(s, clock, 1u << SEG_SITE_BITS, &site)) abort();
  segment__walk(s, n & 1 ? &python : NULL, hooks, 1);
}

static void read_all(struct segment *s) {
  static uint8_t recs[MAX_RECS * sizeof(struct wire_rec)], uids[MAX_UIDS * sizeof(struct wire_uid_rec)];
  static struct counters_delta delta;
  static struct wire_row rows[BLOCKS];
  static struct segment_comm comms[64];
  struct seg_clock clock = {.count = 1, .line = {{5000, 1000005000, 1ull << 32}}};
  struct ring_batch batch = {.recs = recs, .uids = uids, .max_recs = MAX_RECS, .max_uids = MAX_UIDS};
  struct segment_thread threads[BLOCKS];
  struct segment_facts facts;
  uint64_t losses[SEGMENT_LOSSES], figures[SEG_GPU_FIGURES];
  for (int i = 0; i < 4; i++) {
    if (segment__drain(s, &clock, 1, 2, &batch)) abort();
    taken += batch.n_recs + batch.n_uids;
    for (uint32_t j = 0; j < batch.n_recs; j++)
      if (((struct wire_rec *)(void *)recs)[j].hook >= WIRE_HOOKS) abort();
    if (segment__counts(s, i == 3, &delta) || delta.n_counts > WIRE_HOOKS || delta.n_times > WIRE_TIMES) abort();
    int n = segment__inflight(s, &clock, 1, 2, i % 2, rows, BLOCKS);
    for (int j = 0; j < n; j++)
      if (rows[j].depth > WIRE_DEPTH) abort();
    segment__threads(s, threads, BLOCKS);
    segment__comms(s, comms, 64);
    segment__losses(s, losses);
    segment__facts(s, &facts);
    segment__gpu_untold(s, figures);
    segment__gpu(s);
    read_sites(s, &clock);
    segment__set(s, UINT64_MAX, 1);
    corrupt += losses[SEGMENT_CORRUPT];
  }
}

static int make(int sealed) {
  int fd = memfd_create("fuzz", MFD_ALLOW_SEALING);
  if (fd < 0 || ftruncate(fd, (off_t)bytes)) exit(3);
  if (sealed && fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW)) exit(3);
  memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (memory == MAP_FAILED) exit(3);
  return fd;
}

static void one_round(void) {
  int sealed = next(&state) & 1, fd = make(sealed);
  struct seg_header *h = (struct seg_header *)(void *)memory;
  const char *why;
  struct segment *s;
  pthread_t id;
  fill_header(h);
  scribble(&state, 300);
  if (next(&state) % 3 == 0) ((uint64_t *)(void *)memory)[next(&state) % 7] = value(&state);
  if (next(&state) % 3 == 0) ((uint64_t *)(void *)memory)[next(&state) % (sizeof(*h) / 8)] = value(&state);
  stopping = 0;
  if (pthread_create(&id, NULL, writer, (void *)(uintptr_t)next(&state))) exit(3);
  if (segment__open(fd, &s, &why)) refused++;
  else read_all(s), segment__close(s);
  __atomic_store_n(&stopping, 1, __ATOMIC_RELAXED);
  pthread_join(id, NULL);
  if (!sealed && !segment__open(fd, &s, &why)) {
    if (ftruncate(fd, (off_t)(next(&state) % bytes))) exit(3);
    read_all(s);
    segment__close(s);
  }
  munmap(memory, bytes);
  close(fd);
  rounds++;
}

int main(int argc, char **argv) {
  if (argc < 3) return 2;
  state = strtoull(argv[2], NULL, 10) * 0x9e3779b97f4a7c15ull + 1;
  bytes = SEG_HEADER_BYTES + BLOCKS * SEG_BLOCK_BYTES(VITAL_BITS, BULK_BITS) + SEG_SITE_BYTES;
  struct timespec now, end;
  clock_gettime(CLOCK_MONOTONIC, &end);
  double until = (double)end.tv_sec + (double)end.tv_nsec * 1e-9 + atof(argv[1]);
  do {
    one_round();
    clock_gettime(CLOCK_MONOTONIC, &now);
  } while ((double)now.tv_sec + (double)now.tv_nsec * 1e-9 < until);
  printf("rounds %lu taken %lu refused %lu corrupt %lu sites %lu\n", (unsigned long)rounds, (unsigned long)taken,
         (unsigned long)refused, (unsigned long)corrupt, (unsigned long)sites);
  return 0;
}
