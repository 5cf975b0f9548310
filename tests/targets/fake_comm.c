/* fake_comm LIBRARY SIZE RANK_AT MAGIC_AT ABORT_AT END_AT: real calls of a real libnccl on a communicator made by hand.
 *
 * The memory has what NCCL looks at before it touches a device; every call has one argument that it refuses with 4
 * (ncclInvalidArgument). END_AT: where the second magic stands, 0 for versions without. commHash lies 8 bytes before the
 * rank. Prints "ready", waits for a line, calls, prints "made", waits for a line, prints what it passed.
 */
#include <dlfcn.h>
#include <stdbool.h>

#define APIS(X) X(ncclAllReduce)
#include "target.h"

enum { RANK = 5, NRANKS = 8, DEVICE = 3, BAD_TYPE = 99, BAD_RANK = 77, FLOAT = 7, ARGUMENTS = 8, MAX_CALLS = 64 };
#define MAGIC 0x0280028002800280u
#define HASH 0x1122334455667788u
#define ID 0xa1b2c3d4e5f60718u

typedef int (*function)(uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t);

/* What stands for what in `order`: s, r buffers, n count, t dtype, o reduction, R root or peer (in range), c communicator,
 * S stream; T and P are the type and the rank that are refused. */
static const struct {
  const char *name, *order;
} calls[] = {
    {"ncclAllReduce", "srnTocS"}, {"ncclReduceScatter", "srnTocS"}, {"ncclReduce", "srnToRcS"},
    {"ncclReduce", "srntoPcS"},   {"ncclBroadcast", "srntPcS"},     {"ncclBcast", "sntPcS"},
    {"ncclAllGather", "srnTcS"},  {"ncclSend", "sntPcS"},           {"ncclRecv", "rntPcS"},
    {"ncclAlltoAll", "srnTcS"},   {"ncclGather", "srntPcS"},        {"ncclScatter", "srntPcS"},
};

static struct {
  unsigned char *at;
  size_t size, rank_at, magic_at, abort_at, end_at;
} comm;
static uint32_t abort_flag[16];

static void put(size_t at, const void *value, size_t bytes) {
  memcpy(comm.at + at, value, bytes);
}

/* Anew for each call: a refused one leaves its error behind. */
static void make(void) {
  const int identity[] = {RANK, NRANKS, DEVICE};
  const uint64_t magic = MAGIC, hash = HASH, id = ID;
  const uint32_t *flag = abort_flag;
  memset(comm.at, 0, comm.size);
  if (comm.end_at) {
    put(0, &magic, 8);
    put(comm.end_at, &magic, 8);
  }
  put(comm.rank_at - 8, &hash, 8);
  put(comm.magic_at, &id, 8);
  put(comm.rank_at, identity, sizeof(identity));
  put(comm.abort_at, &flag, sizeof(flag));
}

static uint64_t value_of(char kind, uint64_t number) {
  switch (kind) {
  case 's':
    return 0x7f0000001000 + number * 0x100;
  case 'r':
    return 0x7e0000002000 + number * 0x100;
  case 'n':
    return 0x100000000 + number;
  case 't':
    return FLOAT;
  case 'T':
    return BAD_TYPE;
  case 'P':
    return BAD_RANK;
  case 'o':
    return number % 4;
  case 'R':
    return number % NRANKS;
  case 'c':
    return (uint64_t)(uintptr_t)comm.at;
  default:
    return 0xabcd000000 + number;
  }
}

static uint64_t passed[MAX_CALLS][ARGUMENTS];
static int returned[MAX_CALLS];

static void call(void *library, size_t i) {
  function f;
  *(void **)&f = dlsym(library, calls[i].name);
  returned[i] = -1;
  if (!f) return;
  uint64_t *a = passed[i];
  for (size_t k = 0; calls[i].order[k]; k++) a[k] = value_of(calls[i].order[k], i);
  make();
  returned[i] = f(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7]);
}

static void getters(void *library, int out[3]) {
  static const char *const names[] = {"ncclCommUserRank", "ncclCommCount", "ncclCommCuDevice"};
  for (int i = 0; i < 3; i++) {
    int (*get)(void *, int *);
    *(void **)&get = dlsym(library, names[i]);
    make();
    if (get(comm.at, &out[i])) out[i] = -1;
  }
}

static void tell(const int got[3]) {
  printf("{\"target\": \"fake_comm\", \"pid\": %d, \"pointer\": %llu, \"got\": [%d, %d, %d], \"calls\": [", getpid(),
         (unsigned long long)(uintptr_t)comm.at, got[0], got[1], got[2]);
  for (size_t i = 0, first = 1; i < sizeof(calls) / sizeof(*calls); i++) {
    if (returned[i] == -1) continue;
    printf("%s[\"%s\", %d, [", first ? "" : ", ", calls[i].name, returned[i]);
    for (size_t k = 0; calls[i].order[k]; k++) printf("%s%llu", k ? ", " : "", (unsigned long long)passed[i][k]);
    printf("]]");
    first = 0;
  }
  puts("]}");
  fflush(stdout);
}

static void await(const char *word) {
  puts(word);
  fflush(stdout);
  while (getchar() != '\n') continue;
}

int main(int argc, char **argv) {
  int got[3];
  if (argc < 7) return 2;
  setenv("NCCL_SOCKET_IFNAME", "lo", 1);
  void *library = dlopen(argv[1], RTLD_NOW);
  if (!library) {
    fprintf(stderr, "fake_comm: %s\n", dlerror());
    return 2;
  }
  size_t *const places[] = {&comm.size, &comm.rank_at, &comm.magic_at, &comm.abort_at, &comm.end_at};
  for (int i = 0; i < 5; i++) *places[i] = strtoul(argv[i + 2], NULL, 10);
  comm.at = aligned_alloc(64, (comm.size + 127) / 64 * 64);
  if (!comm.at) return 2;
  await("ready");
  getters(library, got);
  for (size_t i = 0; i < sizeof(calls) / sizeof(*calls); i++) call(library, i);
  make();
  await("made");
  tell(got);
  _exit(0);
}
