// SPDX-License-Identifier: Apache-2.0
#include "hot.h"

void *seg_timed_enter(struct seg_call *c, const struct seg_fixed *f, uint32_t instance, void *back, uint64_t a,
                      uint64_t b) {
  return seg_in(c, f, instance, back, a, b);
}

uint64_t seg_timed_leave(struct seg_call *c, const struct seg_fixed *f, int32_t status, uint64_t a, uint64_t b) {
  return seg_out_timed(c, f, status, a, b);
}
