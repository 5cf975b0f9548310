// SPDX-License-Identifier: Apache-2.0
/* The driver's functions, past every wrapper. Not the runtime's: those set its last error, which belongs to the program,
 * and make a context where there was none. */
#define _GNU_SOURCE
#include <stddef.h>

#include "gpu.h"
#include "pairs.h"

static struct pair_driver driver;
static _Atomic bool is_found;

static const struct {
  const char *name;
  size_t at;
} names[] = {
    {"cuEventRecord", offsetof(struct pair_driver, record)},
    {"cuEventQuery", offsetof(struct pair_driver, query)},
    {"cuEventCreate", offsetof(struct pair_driver, create)},
    {"cuEventDestroy_v2", offsetof(struct pair_driver, destroy)},
    {"cuStreamIsCapturing", offsetof(struct pair_driver, is_capturing)},
    {"cuStreamGetCtx", offsetof(struct pair_driver, context_of)},
    {"cuCtxGetCurrent", offsetof(struct pair_driver, current)},
    {"cuCtxSetCurrent", offsetof(struct pair_driver, set_current)},
    {"cuCtxPushCurrent_v2", offsetof(struct pair_driver, push)},
    {"cuCtxPopCurrent_v2", offsetof(struct pair_driver, pop)},
    {"cuCtxGetDevice", offsetof(struct pair_driver, device)},
    {"cuThreadExchangeStreamCaptureMode", offsetof(struct pair_driver, capture_mode)},
};

/* Two threads may both look: they find the same. */
const struct pair_driver *seg_pair_driver(void) {
  if (atomic_load_explicit(&is_found, memory_order_acquire)) return &driver;
  for (size_t i = 0; i < sizeof(names) / sizeof(*names); i++) {
    void *found = seg_symbol_of("libcuda.so.1", names[i].name);
    if (!found) return NULL;
    __atomic_store_n((void **)(void *)((char *)&driver + names[i].at), found, __ATOMIC_RELAXED);
  }
  atomic_store_explicit(&is_found, true, memory_order_release);
  return &driver;
}
