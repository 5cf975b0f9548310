// SPDX-License-Identifier: Apache-2.0
/* Which rank a communicator is, where its creation did not say so: children of a split, those of ncclCommInitAll, and what
 * was made inside a group. NCCL itself is asked, once, when the first operation on it shows that it is ready. */
#define _GNU_SOURCE
#include "shim.h"
#include <dlfcn.h>
#include <errno.h>

typedef int ask_fn(uint64_t comm, int *answer);

static int ask(void *library, const char *what, uint64_t comm) {
  int answer = -1;
  ask_fn *function;
  *(void **)&function = dlsym(library, what);
  return function && function(comm, &answer) == 0 ? answer : -1;
}

/* real: an address in the NCCL that the communicator is of. */
void seg_find_rank(struct seg_comm *row, uint64_t comm, const void *real) {
  Dl_info info;
  int kept = errno;
  void *library = real && dladdr(real, &info) ? dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD) : NULL;
  if (library) {
    row->rank = ask(library, "ncclCommUserRank", comm);
    row->nranks = ask(library, "ncclCommCount", comm);
    dlclose(library);
  }
  errno = kept;
}
