// SPDX-License-Identifier: Apache-2.0
#define _GNU_SOURCE
#include "window.h"
#include <errno.h>
#include <sys/mman.h>
#include <unistd.h>

static uint64_t round_up(uint64_t n, uint64_t page) {
  return (n + page - 1) / page * page;
}

int window__init(struct window *w, int fd, int prot, uint64_t limit, size_t room) {
  size_t page = (size_t)sysconf(_SC_PAGESIZE);
  room = round_up(room, page) + page; /* a range that does not begin at a page */
  uint8_t *area = mmap(NULL, room + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (area == MAP_FAILED) return -errno;
  *w =
      (struct window){.area = area, .page = page, .room = room, .limit = round_up(limit, page), .fd = fd, .prot = prot};
  return 0;
}

void window__deinit(struct window *w) {
  if (w->area) munmap(w->area, w->room + 2 * w->page);
  w->area = NULL;
  w->from = w->upto = 0;
}

uint8_t *window__move(struct window *w, uint64_t offset, size_t need) {
  uint64_t from = offset / w->page * w->page;
  if (need > w->room - w->page || offset > w->limit || need > w->limit - offset) {
    errno = EINVAL;
    return NULL;
  }
  uint64_t length = w->limit - from < w->room ? w->limit - from : w->room;
  w->from = w->upto = 0;
  if (mmap(w->area + w->page, length, w->prot, MAP_SHARED | MAP_FIXED, w->fd, (off_t)from) == MAP_FAILED) return NULL;
  w->from = from;
  w->upto = from + length;
  return w->area + w->page + (offset - from);
}
