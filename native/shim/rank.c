// SPDX-License-Identifier: Apache-2.0
/* Which rank a communicator is, where its creation did not say so: children of a split, those of ncclCommInitAll, and what
 * was made inside a group. NCCL itself is asked, when an operation on it shows that it is ready. */
#define _GNU_SOURCE
#include "gpu.h"
#include "objects.h"
#include <errno.h>

typedef int ask_fn(uint64_t comm, int *answer);

struct near {
  uintptr_t address;
  const char *soname, *name;
  void *found;
};

static int look(struct dl_phdr_info *info, size_t size, void *argument) {
  struct near *n = argument;
  struct seg_object o;
  (void)size;
  if (!seg_object_of(info, &o)) return 0;
  bool is_it = n->soname ? o.soname && seg_begins(o.soname, n->soname) : n->address >= o.from && n->address < o.to;
  if (is_it) n->found = seg_symbol(&o, n->name);
  return is_it;
}

/* Not by dlopen and dlsym: they allocate, and this may be a signal handler's call in the middle of malloc. */
void *seg_symbol_near(const void *address, const char *name) {
  struct near n = {.address = (uintptr_t)address, .name = name};
  if (address) dl_iterate_phdr(look, &n);
  return n.found;
}

void *seg_symbol_of(const char *soname, const char *name) {
  struct near n = {.soname = soname, .name = name};
  dl_iterate_phdr(look, &n);
  return n.found;
}

static int ask(const void *real, const char *what, uint64_t comm) {
  int answer = -1;
  ask_fn *function;
  *(void **)&function = seg_symbol_near(real, what);
  return function && function(comm, &answer) == 0 ? answer : -1;
}

/* real: an address in the NCCL that the communicator is of. */
void seg_find_rank(struct seg_comm *row, uint64_t comm, const void *real) {
  int kept = errno;
  row->rank = ask(real, "ncclCommUserRank", comm);
  row->nranks = ask(real, "ncclCommCount", comm);
  errno = kept;
}
