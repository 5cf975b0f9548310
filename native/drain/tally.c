// SPDX-License-Identifier: Apache-2.0
/* Call events by process slot and hook: how many of a process's calls a reader has been told of. */
#include "drain.h"
#include <string.h>

void tally__add(const uint8_t *recs, uint32_t n, uint32_t stride, uint64_t *table) {
  for (uint32_t i = 0; i < n; i++) {
    struct wire_rec r;
    memcpy(&r, recs + (size_t)i * stride, sizeof(r));
    /* a return whose entry was told is the second record of one call */
    int again = (r.kind == WIRE_DONE || r.kind == WIRE_ABANDONED) && r.flags & WIRE_ENTERED;
    if (r.kind <= WIRE_ABANDONED && !again && r.slot < WIRE_PROCS && r.hook < WIRE_HOOKS)
      table[r.slot * WIRE_HOOKS + r.hook]++;
  }
}
