/* nccl_stress [ROUNDS]: ranks as threads of one process, for the sanitizers; prints "done" at the end.
 *
 * They add up, send in a ring, split, leave, start without waiting, and abort what one of them never joins.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "sim_cudart.h"
#include "sim_nccl.h"

enum { RANKS = 4, COUNT = 3000 };

static int rounds;
static ncclUniqueId *ids; /* two a round, and two for the aborts */

#define OK(call)                                                                                                       \
  do {                                                                                                                 \
    int result = (call);                                                                                               \
    if (result) {                                                                                                      \
      fprintf(stderr, "%s: %d\n", #call, result);                                                                      \
      abort();                                                                                                         \
    }                                                                                                                  \
  } while (0)

struct rank {
  int rank;
  cudaStream_t stream;
  int *data, *other, *third;
};

static void sum(const struct rank *own, ncclComm_t comm, int ranks) {
  for (int i = 0; i < COUNT; i++) own->data[i] = i;
  OK(ncclAllReduce(own->data, own->other, COUNT, ncclInt32, ncclSum, comm, own->stream));
  OK(cudaStreamSynchronize(own->stream));
  if (own->other[COUNT - 1] != (COUNT - 1) * ranks) abort();
}

static void pass_round(const struct rank *own, ncclComm_t comm) {
  own->data[0] = own->third[0] = own->rank;
  OK(ncclGroupStart());
  OK(ncclSend(own->data, COUNT, ncclInt32, (own->rank + 1) % RANKS, comm, own->stream));
  OK(ncclRecv(own->other, COUNT, ncclInt32, (own->rank + RANKS - 1) % RANKS, comm, own->stream));
  OK(ncclAllReduce(own->third, own->third, COUNT, ncclInt32, ncclMax, comm, own->stream));
  OK(ncclGroupEnd());
  OK(cudaStreamSynchronize(own->stream));
  if (own->other[0] != (own->rank + RANKS - 1) % RANKS || own->third[0] != RANKS - 1) abort();
}

static void split(const struct rank *own, ncclComm_t comm) {
  ncclComm_t child;
  OK(ncclCommSplit(comm, own->rank ? own->rank % 2 : NCCL_SPLIT_NOCOLOR, -own->rank, &child, NULL));
  if (!child != !own->rank) abort();
  if (!child) return;
  int ranks;
  OK(ncclCommCount(child, &ranks));
  sum(own, child, ranks);
  OK(ncclCommFinalize(child));
  OK(ncclCommDestroy(child));
}

/* Without blocking on the host. */
static void in_the_back(const struct rank *own, ncclUniqueId id) {
  ncclConfig_t config = {.size = sizeof(config), .magic = NCCL_CONFIG_MAGIC, .version = 22705, .blocking = 0};
  ncclComm_t comm;
  ncclResult_t state = ncclCommInitRankConfig(&comm, RANKS, id, own->rank, &config);
  while (state == ncclInProgress) {
    usleep(200);
    OK(ncclCommGetAsyncError(comm, &state));
  }
  OK(state);
  sum(own, comm, RANKS);
  OK(ncclCommDestroy(comm));
}

/* The last rank never comes to the second sum. */
static void abort_blocked(const struct rank *own) {
  ncclComm_t comm;
  OK(ncclCommInitRank(&comm, RANKS, ids[2 * rounds], own->rank));
  sum(own, comm, RANKS);
  if (own->rank < RANKS - 1)
    for (int i = 0; i < 3; i++) OK(ncclAllReduce(own->data, own->other, COUNT, ncclInt32, ncclSum, comm, own->stream));
  usleep(20000);
  if (own->rank < RANKS - 1 && cudaStreamQuery(own->stream) != cudaErrorNotReady) abort();
  OK(ncclCommAbort(comm));
  OK(cudaStreamSynchronize(own->stream));
}

static void *abort_later(void *comm) {
  usleep(20000);
  OK(ncclCommAbort(comm));
  return NULL;
}

/* The first rank waits on the host for a peer that never receives, until another thread aborts. */
static void abort_from_beside(const struct rank *own) {
  ncclComm_t comm;
  pthread_t beside;
  OK(ncclCommInitRank(&comm, RANKS, ids[2 * rounds + 1], own->rank));
  if (own->rank) {
    OK(ncclCommAbort(comm));
    return;
  }
  pthread_create(&beside, NULL, abort_later, comm);
  if (ncclSend(own->data, COUNT, ncclInt32, 1, comm, own->stream) != ncclInternalError) abort();
  pthread_join(beside, NULL);
}

static void *work(void *argument) {
  struct rank *own = argument;
  OK(cudaSetDevice(own->rank % 2));
  OK(cudaStreamCreateWithFlags(&own->stream, cudaStreamNonBlocking));
  OK(cudaMalloc((void **)&own->data, COUNT * sizeof(int)));
  OK(cudaMalloc((void **)&own->other, COUNT * sizeof(int)));
  OK(cudaMalloc((void **)&own->third, COUNT * sizeof(int)));
  OK(cudaMemset(own->third, 0, COUNT * sizeof(int)));
  for (int i = 0; i < rounds; i++) {
    ncclComm_t comm;
    OK(ncclCommInitRank(&comm, RANKS, ids[2 * i], own->rank));
    sum(own, comm, RANKS);
    pass_round(own, comm);
    split(own, comm);
    OK(ncclCommDestroy(comm));
    in_the_back(own, ids[2 * i + 1]);
  }
  abort_blocked(own);
  abort_from_beside(own);
  OK(cudaFree(own->data));
  OK(cudaFree(own->other));
  OK(cudaFree(own->third));
  OK(cudaStreamDestroy(own->stream));
  return NULL;
}

int main(int argc, char **argv) {
  pthread_t threads[RANKS];
  struct rank ranks[RANKS] = {0};
  rounds = argc > 1 ? atoi(argv[1]) : 20;
  ids = calloc((size_t)(2 * rounds + 2), sizeof(*ids));
  for (int i = 0; i < 2 * rounds + 2; i++) OK(ncclGetUniqueId(&ids[i]));
  for (int i = 0; i < RANKS; i++) {
    ranks[i].rank = i;
    pthread_create(&threads[i], NULL, work, &ranks[i]);
  }
  for (int i = 0; i < RANKS; i++) pthread_join(threads[i], NULL);
  free(ids);
  puts("done");
  return 0;
}
