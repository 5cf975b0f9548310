// SPDX-License-Identifier: Apache-2.0
/* A BPF ring buffer as the kernel maps it (kernel/bpf/ringbuf.c):
 *
 *   0            page           2 page              2 page + size        2 page + 2 size
 *   +------------+--------------+-------------------+--------------------+
 *   | consumer   | producer     | data              | the same data      |   positions only grow; & (size - 1) is the place
 *   +------------+--------------+-------------------+--------------------+
 *   a record: u32 length | BUSY | DISCARD, u32 unused, length bytes, padding to 8
 *
 * The second copy lets a record that wraps be read in one piece. Only a window of it all is mapped: mapped whole and
 * twice, as usual, a ring of 16 MiB adds 32 MiB to the resident size. */
#define _GNU_SOURCE
#include "drain.h"
#include "window.h"
#include <errno.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define BUSY (1u << 31)
#define DISCARD (1u << 30)
#define HEAD 8
#define WINDOW_BYTES (1u << 20)

struct ring {
  uint64_t *consumer;
  const uint64_t *producer;
  struct window data;
  uint64_t size, skipped, corrupt;
};

static int map_page(int fd, int prot, uint64_t index, void *out) {
  size_t page = (size_t)sysconf(_SC_PAGESIZE);
  void *p = mmap(NULL, page, prot, MAP_SHARED, fd, (off_t)(index * page));
  if (p == MAP_FAILED) return -errno;
  memcpy(out, &p, sizeof(p));
  return 0;
}

static int map_ring(struct ring *r, int fd) {
  uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
  int ret = map_page(fd, PROT_READ | PROT_WRITE, 0, &r->consumer);
  if (!ret) ret = map_page(fd, PROT_READ, 1, &r->producer);
  if (!ret)
    ret =
        window__init(&r->data, fd, PROT_READ, 2 * page + 2 * r->size, r->size < WINDOW_BYTES ? r->size : WINDOW_BYTES);
  return ret;
}

int ring__open(int fd, uint64_t size, struct ring **out) {
  uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
  *out = NULL;
  if (size < page || (size & (size - 1)) || size > (1ull << 40)) return -EINVAL;
  struct ring *r = calloc(1, sizeof(*r));
  if (!r) return -ENOMEM;
  r->size = size;
  int ret = map_ring(r, fd);
  if (ret) ring__close(r);
  else *out = r;
  return ret;
}

void ring__close(struct ring *r) {
  if (!r) return;
  size_t page = (size_t)sysconf(_SC_PAGESIZE);
  window__deinit(&r->data);
  if (r->producer) munmap((void *)r->producer, page);
  if (r->consumer) munmap(r->consumer, page);
  free(r);
}

/* false: no room for it in the batch. `length` was read once and checked; the record's own bytes are only copied. */
static bool take(struct ring *r, struct ring_batch *b, const uint8_t *body, uint32_t length) {
  if (length == sizeof(struct wire_rec)) {
    if (b->n_recs == b->max_recs) return false;
    memcpy(b->recs + (size_t)b->n_recs++ * sizeof(struct wire_rec), body, sizeof(struct wire_rec));
  } else if (length == sizeof(struct wire_uid_rec)) {
    if (b->n_uids == b->max_uids) return false;
    memcpy(b->uids + (size_t)b->n_uids++ * sizeof(struct wire_uid_rec), body, sizeof(struct wire_uid_rec));
  } else r->skipped++;
  return true;
}

/* Records in [*at, upto). 1: all taken, 0: stopped at a busy record or a full batch, < 0: errno. */
static int take_range(struct ring *r, struct ring_batch *b, uint64_t *at, uint64_t upto) {
  while (*at < upto) {
    uint64_t place = 2 * r->data.page + (*at & (r->size - 1));
    const uint8_t *p = window__at(&r->data, place, HEAD + sizeof(struct wire_uid_rec));
    if (!p) return -errno;
    uint32_t head = __atomic_load_n((const uint32_t *)p, __ATOMIC_ACQUIRE), length = head & ~(BUSY | DISCARD);
    if (head & BUSY) return 0; /* reserved, not submitted: waiting keeps the order */
    uint64_t step = ((uint64_t)length + HEAD + 7) & ~7ull;
    if (step > upto - *at) {
      r->corrupt++;
      *at = upto;
      return 1;
    }
    if (!(head & DISCARD) && !take(r, b, p + HEAD, length)) return 0;
    *at += step;
  }
  return 1;
}

int ring__drain(struct ring *r, struct ring_batch *b) {
  uint64_t at = __atomic_load_n(r->consumer, __ATOMIC_RELAXED), upto;
  int more = 1;
  b->n_recs = b->n_uids = 0;
  while (more > 0 && at != (upto = __atomic_load_n(r->producer, __ATOMIC_ACQUIRE))) {
    if (upto - at > r->size || (at & 7)) {
      r->corrupt++;
      at = upto;
    } else more = take_range(r, b, &at, upto);
    __atomic_store_n(r->consumer, at, __ATOMIC_RELEASE);
    if (b->n_recs == b->max_recs) break;
  }
  return more < 0 ? more : 0;
}

uint64_t ring__consumed(const struct ring *r) {
  return __atomic_load_n(r->consumer, __ATOMIC_RELAXED);
}

uint64_t ring__pending(const struct ring *r) {
  return __atomic_load_n(r->producer, __ATOMIC_ACQUIRE) - __atomic_load_n(r->consumer, __ATOMIC_RELAXED);
}

uint64_t ring__skipped(const struct ring *r) {
  return r->skipped;
}
uint64_t ring__corrupt(const struct ring *r) {
  return r->corrupt;
}
