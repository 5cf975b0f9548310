// SPDX-License-Identifier: Apache-2.0
/* Libraries that came since the last look. dlopen is not wrapped, because a library's search path is taken from its
 * caller; the loader counts what it loads, and after a load somebody asks dlsym for something. */
#define _GNU_SOURCE
#include "objects.h"
#include "system.h"
#include <string.h>

#define SEEN 2048 /* a power of two */

static uint64_t adds, subs;
static uint32_t looking;
static uintptr_t seen[SEEN]; /* by base address; 0 = free */

struct look {
  uint64_t adds, subs;
  size_t index;
  bool has_provider;
};

static int read_counters(struct dl_phdr_info *info, size_t size, void *argument) {
  struct look *l = argument;
  (void)size;
  l->adds = info->dlpi_adds;
  l->subs = info->dlpi_subs;
  return 1;
}

/* Its place in the table, NULL when the table is full. */
static uintptr_t *place_of(uintptr_t key) {
  size_t i = (key >> 12) * 2654435761u % SEEN;
  for (size_t j = 0; j < SEEN; j++) {
    uintptr_t *p = &seen[(i + j) % SEEN];
    if (!*p || *p == key) return p;
  }
  return NULL;
}

static int look_at(struct dl_phdr_info *info, size_t size, void *argument) {
  struct look *l = argument;
  struct seg_object o;
  (void)size;
  /* What was there at the start can't bind deep: we are before it in its scope. */
  if (seg_was_at_start(l->index++) || !seg_object_of(info, &o)) return 0;
  uintptr_t *place = place_of(o.from);
  if (place && *place) return 0;
  if (seg_is_family(o.soname)) l->has_provider = true;
  if (seg_patch(&o) && place) *place = o.from;
  return 0;
}

bool seg_look_around(void) {
  struct look now = {0, 0, 0, false};
  dl_iterate_phdr(read_counters, &now);
  if (LIKELY(now.adds == __atomic_load_n(&adds, __ATOMIC_ACQUIRE) && now.subs == subs)) return false;
  if (__atomic_exchange_n(&looking, 1, __ATOMIC_ACQUIRE)) return false;
  if (now.subs != subs) memset(seen, 0, sizeof(seen));
  bool gone = now.subs != subs;
  if (!__atomic_load_n(&seg_released, __ATOMIC_ACQUIRE)) dl_iterate_phdr(look_at, &now);
  if (gone || now.has_provider) seg_forget_reals();
  subs = now.subs;
  __atomic_store_n(&adds, now.adds, __ATOMIC_RELEASE);
  __atomic_store_n(&looking, 0, __ATOMIC_RELEASE);
  return true;
}

static void lock(void) {
  while (__atomic_exchange_n(&looking, 1, __ATOMIC_ACQUIRE)) syscall(SYS_sched_yield);
}

void seg_look_again(void) {
  lock();
  memset(seen, 0, sizeof(seen));
  __atomic_store_n(&adds, 0, __ATOMIC_RELEASE);
  __atomic_store_n(&looking, 0, __ATOMIC_RELEASE);
}

/* seg_released has been set: who comes after this sets nothing. */
void seg_unpatch(uint32_t *restored, uint32_t *foreign) {
  lock();
  seg_put_back_slots(restored, foreign);
  __atomic_store_n(&looking, 0, __ATOMIC_RELEASE);
}
