// SPDX-License-Identifier: Apache-2.0
/* Feeds the drain rings that no kernel would write, with sanitizers: `ring_fuzz SECONDS SEED`. One line at the end, abort on
 * a broken promise. While the drain reads, a second thread keeps changing the ring, so that checks made on one reading
 * of a length can't hold for another. */
#define _GNU_SOURCE
#include "drain.h"
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define SIZE 16384u
#define ROOM 64

static uint8_t *memory;
static uint64_t page, state, rounds, taken;
static atomic_int stop;

#define MUST(x)                                                                                                        \
  if (!(x)) {                                                                                                          \
    fprintf(stderr, "broken: %s (round %llu)\n", #x, (unsigned long long)rounds);                                      \
    abort();                                                                                                           \
  }

static uint64_t next(uint64_t *s) {
  *s ^= *s << 13;
  *s ^= *s >> 7;
  *s ^= *s << 17;
  return *s;
}

static uint64_t *position(int index) {
  return (uint64_t *)(void *)(memory + (uint64_t)index * page);
}

/* A length that is likely to be believed, or an edge, or anything. */
static uint32_t some_length(uint64_t r) {
  static const uint32_t edges[] = {0,   1,        7,    8,          103,        104,        105,      231,     232,
                                   233, SIZE - 8, SIZE, 0x3fffffff, 0x3ffffff9, 0xffffffff, 1u << 30, 1u << 31};
  switch (r & 7) {
  case 0:
    return (uint32_t)(r >> 8);
  case 1:
    return edges[(r >> 8) % (sizeof(edges) / sizeof(*edges))];
  case 2:
    return 232;
  case 3:
    return 104 | ((r >> 40 & 7) ? 0 : 1u << 30);
  default:
    return 104;
  }
}

/* A chain of records from `at` on; the rest is noise. */
static void scribble(uint64_t at) {
  for (uint64_t i = 0; i < 2 * SIZE; i += 8) {
    uint64_t r = next(&state);
    memcpy(memory + 2 * page + i, &r, 8);
  }
  for (uint64_t end = at + SIZE; at < end;) {
    uint32_t head = some_length(next(&state));
    memcpy(memory + 2 * page + (at & (SIZE - 1) & ~7ull), &head, 4);
    at += ((uint64_t)(head & 0x3fffffff) + 15) & ~7ull;
  }
}

static void *mutate(void *unused) {
  uint64_t s = 88172645463325252ull;
  while (!atomic_load(&stop)) {
    uint64_t r = next(&s);
    uint32_t head = some_length(r >> 3);
    __atomic_store_n((uint32_t *)(void *)(memory + 2 * page + (r >> 20) % (2 * SIZE / 8) * 8), head, __ATOMIC_RELAXED);
    if (!(r >> 50 & 63)) __atomic_store_n(position(1), next(&s), __ATOMIC_RELAXED);
  }
  return unused;
}

/* Buffers of exactly the size that was promised, so that the sanitizer sees the first byte too many. */
static void one_round(struct ring *r) {
  uint64_t kind = next(&state), start = kind & 1 ? next(&state) : next(&state) & ~7ull;
  *position(0) = start;
  *position(1) = kind & 2 ? start + (next(&state) % (SIZE + 16) & ~7ull) : next(&state);
  scribble(start);
  struct ring_batch b = {.max_recs = next(&state) % ROOM, .max_uids = next(&state) % ROOM};
  b.recs = malloc(b.max_recs * sizeof(struct wire_rec));
  b.uids = malloc(b.max_uids * sizeof(struct wire_uid_rec));
  MUST(ring__drain(r, &b) == 0);
  MUST(b.n_recs <= b.max_recs && b.n_uids <= b.max_uids);
  taken += b.n_recs + b.n_uids;
  free(b.recs);
  free(b.uids);
  rounds++;
}

static void run(struct ring *r, double seconds) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  double end = (double)t.tv_sec + (double)t.tv_nsec * 1e-9 + seconds, now = 0;
  while (now < end) {
    for (int i = 0; i < 100; i++) one_round(r);
    clock_gettime(CLOCK_MONOTONIC, &t);
    now = (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
  }
}

int main(int argc, char **argv) {
  if (argc != 3) return 2;
  page = (uint64_t)sysconf(_SC_PAGESIZE);
  state = strtoull(argv[2], NULL, 10) * 2654435761u + 1;
  int fd = memfd_create("ring", MFD_CLOEXEC);
  size_t bytes = 2 * page + 2 * SIZE;
  MUST(fd >= 0 && !ftruncate(fd, (off_t)bytes));
  memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  struct ring *r;
  MUST(memory != MAP_FAILED && !ring__open(fd, SIZE, &r));
  run(r, atof(argv[1]) / 2);
  pthread_t thread;
  MUST(!pthread_create(&thread, NULL, mutate, NULL));
  run(r, atof(argv[1]) / 2);
  atomic_store(&stop, 1);
  pthread_join(thread, NULL);
  printf("rounds %llu taken %llu skipped %llu corrupt %llu\n", (unsigned long long)rounds, (unsigned long long)taken,
         (unsigned long long)ring__skipped(r), (unsigned long long)ring__corrupt(r));
  ring__close(r);
  munmap(memory, bytes);
  close(fd);
  return 0;
}
