// SPDX-License-Identifier: Apache-2.0
/* Which real function a wrapper stands for. */
#define _GNU_SOURCE
#include "objects.h"
#include "system.h"
#include <string.h>

#define MOST 8 /* libraries that have one function */
#define CALLERS 8

struct seg_real seg_reals[SEG_INSTANCES][WIRE_HOOKS];
extern void *const *const seg_wrappers_0, *const *const seg_wrappers_1, *const *const seg_wrappers_2,
                                                                            *const *const seg_wrappers_3;

/* Where more than one library has a function: whose calls go where. Rows are only added, until all are dropped. */
struct caller {
  uintptr_t from, to;
  void *real;
};
static struct {
  struct caller rows[CALLERS];
  uint32_t n;
} callers[WIRE_HOOKS];

static const char *const families[SEG_LIBRARIES] = {"libcudart.so", "libcuda.so", "libnccl.so"};
static uint32_t generation; /* of callers */
static uintptr_t own_from, own_to;
static struct { uintptr_t from, to; } before_us[MOST]; /* the program and libraries preloaded before us */
static size_t n_at_start, n_before;                    /* n_before: up to us, and us */

bool seg_is_family(const char *soname) {
  for (int i = 0; i < SEG_LIBRARIES; i++)
    if (seg_begins(soname, families[i])) return true;
  return false;
}

bool seg_is_ours(const void *address) {
  return (uintptr_t)address >= own_from && (uintptr_t)address < own_to;
}

static int count_object(struct dl_phdr_info *info, size_t size, void *argument) {
  struct seg_object o;
  (void)size, (void)argument;
  size_t index = n_at_start++;
  if (!seg_object_of(info, &o)) return 0;
  if (!own_to && index < MOST) before_us[index].from = o.from, before_us[index].to = o.to;
  if ((uintptr_t)seg_start >= o.from && (uintptr_t)seg_start < o.to)
    own_from = o.from, own_to = o.to, n_before = index + 1;
  return 0;
}

bool seg_is_before_us(uintptr_t address) {
  for (size_t i = 0; i < MOST && i + 1 < n_before; i++)
    if (address >= before_us[i].from && address < before_us[i].to) return true;
  return false;
}

bool seg_was_at_start(size_t index) {
  return index < n_at_start;
}

void seg_objects_at_start(void) {
  dl_iterate_phdr(count_object, NULL);
}

void seg_forget_start(void) {
  n_at_start = n_before = 0;
}

struct found {
  void *real;
  uintptr_t from, to;
  char soname[64];
  bool is_family, at_start;
};

struct search {
  const char *name, *family;
  uintptr_t back;
  size_t index;
  struct found found[MOST];
  int n, needed; /* needed: which of them the caller names; -1 = none */
  uintptr_t caller_from, caller_to;
};

static int collect(struct dl_phdr_info *info, size_t size, void *argument) {
  struct search *s = argument;
  struct seg_object o;
  (void)size;
  size_t index = s->index++;
  /* Whoever stands before us has called us. */
  if (index < n_before || !seg_object_of(info, &o)) return 0;
  void *real = s->n < MOST ? seg_symbol(&o, s->name) : NULL;
  if (!real) return 0;
  struct found *f = &s->found[s->n++];
  *f = (struct found){.real = real, .from = o.from, .to = o.to, .at_start = index < n_at_start};
  f->is_family = seg_begins(o.soname, s->family);
  strncpy(f->soname, o.soname, sizeof(f->soname) - 1);
  return 0;
}

static int look_at_caller(struct dl_phdr_info *info, size_t size, void *argument) {
  struct search *s = argument;
  struct seg_object o;
  (void)size;
  if (!seg_object_of(info, &o) || s->back < o.from || s->back >= o.to) return 0;
  s->caller_from = o.from;
  s->caller_to = o.to;
  for (int i = 0; i < s->n && s->needed < 0; i++)
    if (s->found[i].is_family && seg_needs(&o, s->found[i].soname)) s->needed = i;
  return 1;
}

/* As the loader would have bound the caller without us: a library that stood in the way from the start (another
 * preloaded one, a stub) comes first; then the version that the caller names; then the first there is. */
static void *choose(const struct search *s) {
  int first = -1, family = -1;
  for (int i = s->n - 1; i >= 0; i--) {
    if (s->found[i].at_start && !s->found[i].is_family) first = i;
    if (s->found[i].is_family) family = i;
  }
  int chosen = first >= 0 ? first : s->needed >= 0 ? s->needed : family >= 0 ? family : 0;
  return s->n ? s->found[chosen].real : NULL;
}

static void remember(uint32_t slot, const struct search *s, void *real) {
  int n_family = 0;
  for (int i = 0; i < s->n; i++) n_family += s->found[i].is_family;
  if (n_family < 2) {
    __atomic_store_n(&seg_reals[0][slot].address, real, __ATOMIC_RELEASE);
    return;
  }
  uint32_t n = __atomic_load_n(&callers[slot].n, __ATOMIC_ACQUIRE);
  if (!s->caller_to || n >= CALLERS) return;
  /* Two threads may both write this row: of the same caller, most likely; else one of them asks again. */
  callers[slot].rows[n] = (struct caller){s->caller_from, s->caller_to, real};
  __atomic_store_n(&callers[slot].n, n + 1, __ATOMIC_RELEASE);
}

void *seg_resolve(uint32_t slot, uint32_t instance, void *back) {
  struct search s = {
      .name = seg_name_of[slot], .family = families[seg_library_of[slot]], .back = (uintptr_t)back, .needed = -1};
  if (instance) return NULL;
  dl_iterate_phdr(collect, &s);
  if (s.n > 1) dl_iterate_phdr(look_at_caller, &s);
  void *real = choose(&s);
  if (real) remember(slot, &s, real);
  return real;
}

static void *real_for(uint32_t slot, uintptr_t back) {
  uint32_t before = __atomic_load_n(&generation, __ATOMIC_ACQUIRE),
           n = __atomic_load_n(&callers[slot].n, __ATOMIC_ACQUIRE);
  void *real = NULL;
  for (uint32_t i = 0; !real && i < n; i++) {
    const struct caller *c = &callers[slot].rows[i];
    if (back >= c->from && back < c->to) real = c->real;
  }
  __atomic_thread_fence(__ATOMIC_ACQUIRE);
  return __atomic_load_n(&generation, __ATOMIC_RELAXED) == before ? real : NULL;
}

void *seg_real_of(uint32_t slot, uint32_t instance, void *back) {
  void *real = __atomic_load_n(&seg_reals[instance][slot].address, __ATOMIC_ACQUIRE);
  if (!real && !instance) real = real_for(slot, (uintptr_t)back);
  if (real) return real;
  seg_look_around();
  return seg_resolve(slot, instance, back);
}

/* Libraries came or went: who stood for what is found out again, call by call. */
void seg_forget_reals(void) {
  __atomic_fetch_add(&generation, 1, __ATOMIC_ACQ_REL);
  for (uint32_t slot = 0; slot < WIRE_HOOKS; slot++) {
    __atomic_store_n(&callers[slot].n, 0, __ATOMIC_RELEASE);
    __atomic_store_n(&seg_reals[0][slot].address, NULL, __ATOMIC_RELEASE);
  }
}

void *seg_exported(const struct seg_entry *e) {
  return seg_wrappers_0[e - seg_entries];
}

const struct seg_entry *seg_entry_of(const char *name) {
  uint32_t low = 0, high = seg_n_entries;
  while (low < high) {
    uint32_t middle = (low + high) / 2;
    int order = seg_order(name, seg_entries[middle].name);
    if (!order) return &seg_entries[middle];
    if (order < 0) high = middle;
    else low = middle + 1;
  }
  return NULL;
}

/* A wrapper that stands for this one address, whatever the caller. */
void *seg_wrapper_for(const struct seg_entry *e, void *real) {
  void *const *const wrappers[SEG_INSTANCES] = {seg_wrappers_0, seg_wrappers_1, seg_wrappers_2, seg_wrappers_3};
  if (seg_is_ours(real) || __atomic_load_n(&seg_released, __ATOMIC_ACQUIRE)) return real;
  for (uint32_t i = 1; i < SEG_INSTANCES; i++) {
    void *none = NULL;
    void **address = &seg_reals[i][e->hook].address;
    if (__atomic_load_n(address, __ATOMIC_ACQUIRE) == real ||
        __atomic_compare_exchange_n(address, &none, real, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE) || none == real)
      return wrappers[i][e - seg_entries];
  }
  struct seg_process *p = seg_proc;
  if (p && p->header) __atomic_fetch_add(&p->header->losses[SEG_UNWRAPPED], 1, __ATOMIC_RELAXED);
  return real;
}
