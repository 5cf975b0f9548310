/* Exported only by lib/newer/libnccl.so.2: what programs built against NCCL 2.28 to 2.30 link to (PyTorch 2.14 does).
 *
 * AlltoAll, Gather and Scatter are groups of transfers, as they are there. The rest is there to be found: it refuses.
 */
#include "api.h"

#define NEWER(name, params)                                                                                            \
  ncclResult_t nccl##name params;                                                                                      \
  ncclResult_t pnccl##name params;                                                                                     \
  API nccl##name params

struct exchange {
  const char *send;
  char *recv;
  size_t count;
  ncclDataType_t type;
  ncclComm_t comm;
  cudaStream_t stream;
};

static void transfer(const struct exchange *all, enum function function, size_t block, int peer) {
  size_t at = block * all->count * sim_type_bytes(all->type);
  struct operation op = {.function = function, .count = all->count, .type = all->type, .root = peer};
  op.send = function == SEND ? all->send + at : NULL;
  op.recv = function == RECV ? all->recv + at : NULL;
  op.bytes = all->count * sim_type_bytes(all->type);
  op.comm = all->comm;
  op.stream = all->stream;
  sim_group_add(&op);
}

static ncclResult_t check(const struct exchange *all, int root) {
  ncclResult_t result = sim_comm_ready(all->comm);
  if (!result && (!sim_type_bytes(all->type) || root < 0 || root >= all->comm->nRanks))
    result = sim_fail(all->comm, ncclInvalidArgument, "type %d, rank %d", all->type, root);
  return sim_group_error(result);
}

NEWER(AlltoAll,
      (const void *send, void *recv, size_t count, ncclDataType_t type, ncclComm_t comm, cudaStream_t stream)) {
  const struct exchange all = {send, recv, count, type, comm, stream};
  ncclResult_t result = check(&all, 0);
  if (result || count == 0) return result;
  sim_group_open();
  for (int peer = 0; peer < comm->nRanks; peer++) {
    transfer(&all, SEND, (size_t)peer, peer);
    transfer(&all, RECV, (size_t)peer, peer);
  }
  return sim_group_close();
}
ALIAS(AlltoAll);

NEWER(Gather, (const void *send, void *recv, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
               cudaStream_t stream)) {
  const struct exchange all = {send, recv, count, type, comm, stream};
  ncclResult_t result = check(&all, root);
  if (result || count == 0) return result;
  sim_group_open();
  transfer(&all, SEND, 0, root);
  for (int peer = 0; peer < comm->nRanks && comm->rank == root; peer++) transfer(&all, RECV, (size_t)peer, peer);
  return sim_group_close();
}
ALIAS(Gather);

NEWER(Scatter, (const void *send, void *recv, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                cudaStream_t stream)) {
  const struct exchange all = {send, recv, count, type, comm, stream};
  ncclResult_t result = check(&all, root);
  if (result || count == 0) return result;
  sim_group_open();
  transfer(&all, RECV, 0, root);
  for (int peer = 0; peer < comm->nRanks && comm->rank == root; peer++) transfer(&all, SEND, (size_t)peer, peer);
  return sim_group_close();
}
ALIAS(Scatter);

/* Ends what runs; the communicator stays, and can only be shrunk, aborted or destroyed. */
NEWER(CommRevoke, (ncclComm_t comm, int flags)) {
  ncclResult_t result = sim_comm_check(comm);
  (void)flags;
  if (!result) sim_abort_work(comm);
  return result;
}
ALIAS(CommRevoke);

#define REFUSED(name)                                                                                                  \
  NEWER(name, (void)) {                                                                                                \
    return sim_fail(NULL, ncclInvalidUsage, "not simulated: nccl" #name);                                              \
  }                                                                                                                    \
  ALIAS(name);
REFUSED(CommGetUniqueId)
REFUSED(CommGrow)
REFUSED(CommMemStats)
REFUSED(CommQueryProperties)
REFUSED(CommResume)
REFUSED(CommSuspend)
REFUSED(DevCommCreate)
REFUSED(DevCommDestroy)
REFUSED(GetLsaDevicePointer)
REFUSED(GetLsaMultimemDevicePointer)
REFUSED(GetMultimemDevicePointer)
REFUSED(GetPeerDevicePointer)
REFUSED(PutSignal)
REFUSED(Signal)
REFUSED(WaitSignal)
REFUSED(WinGetUserPtr)
