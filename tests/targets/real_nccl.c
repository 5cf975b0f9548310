/* real_nccl LIBRARY: ncclGetUniqueId and ncclCommInitRank of a real libnccl on a machine without a GPU.
 *
 * The id is real; the communicator fails with 1 (unhandled CUDA error), as there is no device. Prints "ready" and
 * waits for a line before the first call.
 */
#include <dlfcn.h>

/* clang-format off */
#define APIS(X) \
  X(ncclGetUniqueId) X(ncclCommInitRank)
/* clang-format on */
#include "target.h"

/* By value in memory, as the ABI has it for 128 bytes. */
typedef struct {
  unsigned char bytes[128];
} unique_id;

enum { NRANKS = 2, RANK = 0 };

static void *symbol(void *library, const char *name) {
  void *address = dlsym(library, name);
  if (!address) {
    fprintf(stderr, "real_nccl: no %s\n", name);
    exit(1);
  }
  return address;
}

int main(int argc, char **argv) {
  int (*get_unique_id)(unique_id *);
  int (*comm_init_rank)(void **, int, unique_id, int);
  struct tally tally = {0};
  unique_id id = {{0}};
  void *comm = NULL;
  /* No other interface answers in a sandbox, and ncclGetUniqueId listens on one. */
  setenv("NCCL_SOCKET_IFNAME", "lo", 1);
  void *library = argc > 1 ? dlopen(argv[1], RTLD_NOW) : NULL;
  if (!library) {
    fprintf(stderr, "real_nccl: %s\n", argc > 1 ? dlerror() : "LIBRARY is missing");
    return 2;
  }
  *(void **)&get_unique_id = symbol(library, "ncclGetUniqueId");
  *(void **)&comm_init_rank = symbol(library, "ncclCommInitRank");
  ready();
  tally.calls[API_ncclGetUniqueId]++;
  int id_result = get_unique_id(&id);
  tally.calls[API_ncclCommInitRank]++;
  int init_result = comm_init_rank(&comm, NRANKS, id, RANK);
  printf("{\"target\": \"real_nccl\", \"pid\": %d, \"nranks\": %d, \"rank\": %d, \"returned\": {\"ncclGetUniqueId\": "
         "%d, \"ncclCommInitRank\": %d}, \"unique_id\": \"",
         getpid(), NRANKS, RANK, id_result, init_result);
  for (size_t i = 0; i < sizeof(id.bytes); i++) printf("%02x", id.bytes[i]);
  printf("\", ");
  tally_print("", &tally);
  puts("}");
  fflush(stdout);
  /* A failed start leaves threads of the library behind, which need not survive its destructors. */
  _exit(0);
}
