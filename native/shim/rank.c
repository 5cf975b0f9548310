// SPDX-License-Identifier: Apache-2.0
/* Which rank a communicator is, where its creation did not say so: children of a split, those of ncclCommInitAll, and what
 * was made inside a group. NCCL itself is asked, once, when the first operation on it shows that it is ready. */
#define _GNU_SOURCE
#include "shim.h"
#include "loader.h"
#include <errno.h>

typedef int ask_fn(uint64_t comm, int *answer);

static int ask(void *library, const char *what, uint64_t comm) {
  int answer = -1;
  ask_fn *function;
  *(void **)&function = loader_symbol(library, what);
  return function && function(comm, &answer) == 0 ? answer : -1;
}

/* real: an address in the NCCL that the communicator is of. */
void seg_find_rank(struct seg_comm *row, uint64_t comm, const void *real) {
  const char *file = loader_file_of(real);
  int kept = errno;
  void *library = file ? loader_open(file, RTLD_LAZY | RTLD_NOLOAD) : NULL;
  if (library) {
    row->rank = ask(library, "ncclCommUserRank", comm);
    row->nranks = ask(library, "ncclCommCount", comm);
    loader_close(library);
  }
  errno = kept;
}
