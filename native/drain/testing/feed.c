// SPDX-License-Identifier: Apache-2.0
/* For tests: threads that write into ordinary memory what the kernel and BPF programs write into maps. */
#define _GNU_SOURCE
#include "wire.h"
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define BUSY (1u << 31)
#define DISCARD (1u << 30)
#define EXPORT __attribute__((visibility("default")))

struct feeder {
  pthread_t thread;
  uint8_t *at;
  uint64_t size, count, owner, rounds;
  uint32_t row;
  atomic_int stop;
};

static struct feeder *start(int fd, size_t bytes, struct feeder with, void *(*body)(void *)) {
  struct feeder *f = malloc(sizeof(*f));
  if (!f) abort();
  memcpy(f, &with, sizeof(*f));
  f->at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (f->at == MAP_FAILED || pthread_create(&f->thread, NULL, body, f)) abort();
  return f;
}

/* The same mix as in flood.bpf.c. A record that wraps runs on into the second copy, where the reader looks. */
static uint32_t compose(uint8_t *body, uint32_t n, uint32_t *flags) {
  struct wire_uid_rec record = {.rec = {.n = n, .a[7] = ~(uint64_t)n}};
  record.uid[127] = (uint8_t)n;
  memcpy(body, &record, sizeof(record));
  *flags = n % 64 == 7 ? DISCARD : 0;
  return n % 64 == 5 ? sizeof(record) : n % 64 == 6 ? 16 : sizeof(record.rec);
}

static void *feed_ring(void *argument) {
  struct feeder *f = argument;
  uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), *consumer = (uint64_t *)(void *)f->at;
  uint64_t *producer = (uint64_t *)(void *)(f->at + page), at = *producer;
  for (uint32_t n = 0; n < f->count; n++) {
    uint8_t body[sizeof(struct wire_uid_rec)], *place = f->at + 2 * page + (at & (f->size - 1));
    uint32_t flags, length = compose(body, n, &flags);
    uint64_t next = at + ((length + 8 + 7) & ~7u);
    while (next - __atomic_load_n(consumer, __ATOMIC_ACQUIRE) > f->size) sched_yield();
    __atomic_store_n((uint32_t *)(void *)place, length | BUSY, __ATOMIC_RELAXED);
    __atomic_store_n(producer, next, __ATOMIC_RELEASE);
    memcpy(place + 8, body, length);
    __atomic_store_n((uint32_t *)(void *)place, length | flags, __ATOMIC_RELEASE);
    at = next;
  }
  return NULL;
}

EXPORT void *feed__ring(int fd, uint64_t size, uint64_t count) {
  struct feeder with = {.size = size, .count = count};
  return start(fd, 2 * ((size_t)sysconf(_SC_PAGESIZE) + size), with, feed_ring);
}

static void push(struct wire_row *row, uint32_t depth, uint64_t value) {
  __atomic_store_n(&row->seq, row->seq + 1, __ATOMIC_RELAXED);
  __atomic_thread_fence(__ATOMIC_RELEASE);
  struct wire_frame *f = &row->f[depth - 1];
  f->ts_ns = f->sp = f->cookie = value;
  for (int i = 0; i < 8; i++) __atomic_store_n(&f->a[i], value, __ATOMIC_RELAXED);
  __atomic_store_n(&row->depth, depth, __ATOMIC_RELAXED);
  __atomic_store_n(&row->seq, row->seq + 1, __ATOMIC_RELEASE);
}

/* Every word of a frame is the number of the call: a torn copy would mix two. */
static void *feed_row(void *argument) {
  struct feeder *f = argument;
  struct wire_row *row = (struct wire_row *)(void *)f->at + f->row;
  row->owner = f->owner;
  while (!atomic_load(&f->stop)) {
    push(row, 1 + f->rounds % WIRE_DEPTH, f->rounds);
    f->rounds++;
    for (volatile int i = 0; i < 200; i++) {}
  }
  return NULL;
}

EXPORT void *feed__row(int fd, uint32_t row, uint64_t owner) {
  struct feeder with = {.row = row, .owner = owner};
  return start(fd, WIRE_ROWS * sizeof(struct wire_row), with, feed_row);
}

/* Ends the thread; how many rounds it made. */
EXPORT uint64_t feed__end(void *feeder) {
  struct feeder *f = feeder;
  atomic_store(&f->stop, 1);
  pthread_join(f->thread, NULL);
  uint64_t rounds = f->rounds;
  free(f);
  return rounds;
}
