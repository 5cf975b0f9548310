/* SPDX-License-Identifier: Apache-2.0
 *
 * A view of a file that slides. BPF maps are mapped with all their pages present, so that each mapped page counts in the
 * resident size; a window keeps that at its own length, whatever the size of the map. The window lies between two
 * guard pages. */
#ifndef STALLSCOPE_WINDOW_H
#define STALLSCOPE_WINDOW_H
#include <stddef.h>
#include <stdint.h>

struct window {
  uint8_t *area; /* guard page, `room` bytes, guard page */
  size_t page, room;
  uint64_t from, upto; /* file range that is mapped now */
  uint64_t limit;      /* bytes of the file that may be mapped, whole pages */
  int fd, prot;
};

/* need: the longest range that window__at will be asked for; room is rounded up so that it always fits. */
int window__init(struct window *w, int fd, int prot, uint64_t limit, size_t room);
void window__deinit(struct window *w);
/* Moves the window. NULL, with errno set, when the range is outside the file or the kernel refuses. */
uint8_t *window__move(struct window *w, uint64_t offset, size_t need);

static inline uint8_t *window__at(struct window *w, uint64_t offset, size_t need) {
  if (offset >= w->from && offset + need <= w->upto) return w->area + w->page + (offset - w->from);
  return window__move(w, offset, need);
}
#endif
