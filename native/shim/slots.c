// SPDX-License-Identifier: Apache-2.0
/* What slots held before the injected library set them. A row is taken once and never freed; who writes holds the lock
 * of look.c. */
#define _GNU_SOURCE
#include "objects.h"

#define ROWS 8192 /* a power of two; PyTorch has some hundred slots */
#define PROBES 64

static struct row {
  void **slot; /* NULL: free */
  void *before, *now;
} rows[ROWS];
static uint32_t n_set, n_turned_away;

static struct row *row_of(void **slot) {
  size_t i = ((uintptr_t)slot >> 3) * 0x9e3779b97f4a7c15ull >> 51;
  for (size_t j = 0; j < PROBES; j++) {
    struct row *r = &rows[(i + j) % ROWS];
    if (!r->slot || r->slot == slot) return r;
  }
  return NULL;
}

bool seg_keep_slot(void **slot, void *before, void *now) {
  struct row *r = row_of(slot);
  if (!r) {
    n_turned_away++;
    return false;
  }
  if (!r->slot || !r->now) n_set++;
  *r = (struct row){slot, before, now};
  return true;
}

uint32_t seg_slots_set(uint32_t *turned_away) {
  *turned_away = n_turned_away;
  return n_set;
}

struct back {
  uint32_t restored, foreign;
};

/* Only slots of libraries that are there: under the loader's lock none is unmapped meanwhile. */
static int put_back(struct dl_phdr_info *info, size_t size, void *argument) {
  struct back *b = argument;
  struct seg_object o;
  (void)size;
  if (!seg_object_of(info, &o)) return 0;
  seg_next_object();
  for (struct row *r = rows; r < rows + ROWS; r++) {
    if (!r->now || (uintptr_t)r->slot < o.from || (uintptr_t)r->slot >= o.to) continue;
    bool is_ours = __atomic_load_n(r->slot, __ATOMIC_ACQUIRE) == r->now && seg_store(&o, r->slot, r->before);
    if (is_ours) b->restored++;
    else b->foreign++;
    r->now = NULL;
  }
  return 0;
}

void seg_put_back_slots(uint32_t *restored, uint32_t *foreign) {
  struct back b = {0, 0};
  dl_iterate_phdr(put_back, &b);
  *restored = b.restored;
  *foreign = b.foreign;
  for (struct row *r = rows; r < rows + ROWS; r++) r->now = NULL; /* of libraries that are gone */
  n_set = n_turned_away = 0;
}
