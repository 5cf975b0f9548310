// SPDX-License-Identifier: Apache-2.0
/* A perf_event ring: copies the bytes of all records that are there, whole and in order. */
#define _GNU_SOURCE
#include "drain.h"
#include <errno.h>
#include <linux/perf_event.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

struct perf {
  struct perf_event_mmap_page *control;
  const uint8_t *data;
  uint64_t size, mapped;
  int fd;
};

int perf__open(int fd, uint32_t pages, struct perf **out) {
  uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), mapped = (pages + 1ull) * page;
  *out = NULL;
  struct perf *p = calloc(1, sizeof(*p));
  if (!p) return -ENOMEM;
  void *at = mmap(NULL, mapped, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (at == MAP_FAILED) {
    int ret = -errno;
    free(p);
    return ret;
  }
  *p = (struct perf){.control = at, .data = (uint8_t *)at + page, .size = pages * page, .mapped = mapped, .fd = fd};
  *out = p;
  return 0;
}

void perf__close(struct perf *p) {
  if (!p) return;
  munmap(p->control, p->mapped);
  close(p->fd);
  free(p);
}

static void copy_out(const struct perf *p, uint64_t from, uint8_t *out, uint64_t length) {
  uint64_t start = from % p->size, first = p->size - start < length ? p->size - start : length;
  memcpy(out, p->data + start, first);
  memcpy(out + first, p->data, length - first);
}

/* max must be at least the size of the ring, -ENOSPC else. -EPROTO: positions made no sense, all was dropped. */
int perf__drain(struct perf *p, uint8_t *out, uint32_t max) {
  uint64_t head = __atomic_load_n(&p->control->data_head, __ATOMIC_ACQUIRE), tail = p->control->data_tail;
  uint64_t length = head - tail;
  if (!length) return 0;
  if (length <= p->size && length > max) return -ENOSPC;
  if (length <= p->size) copy_out(p, tail, out, length);
  __atomic_store_n(&p->control->data_tail, head, __ATOMIC_RELEASE);
  return length <= p->size ? (int)length : -EPROTO;
}
