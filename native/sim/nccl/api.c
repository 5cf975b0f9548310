/* Exported: operations. Each is checked as far as the real library checks it, and added to the group. */
#include "api.h"

static ncclResult_t check_op(struct operation *op) {
  const struct ncclComm *comm = op->comm;
  int user = op->redop - ncclNumOps;
  if (op->redop < 0 || user >= MAX_USER_OPS || !sim_can_reduce(op->type))
    return sim_fail(op->comm, ncclInvalidArgument, "operation %d of type %d", op->redop, op->type);
  if (user < 0) return ncclSuccess;
  op->scale = comm->state->user_ops[user];
  op->redop = ncclSum;
  return op->scale.used && op->scale.type == op->type
             ? ncclSuccess
             : sim_fail(op->comm, ncclInvalidArgument, "no such operation of type %d", op->type);
}

static ncclResult_t check(struct operation *op, bool reduces) {
  ncclResult_t result = sim_comm_ready(op->comm);
  if (result) return result;
  if (sim_aborted(op->comm)) return sim_fail(op->comm, ncclInternalError, "the communicator was aborted");
  if (!sim_type_bytes(op->type)) return sim_fail(op->comm, ncclInvalidArgument, "type %d", op->type);
  if (op->root < 0 || op->root >= op->comm->nRanks)
    return sim_fail(op->comm, ncclInvalidArgument, "rank %d of %d", op->root, op->comm->nRanks);
  op->bytes = op->count * sim_type_bytes(op->type);
  return reduces ? check_op(op) : ncclSuccess;
}

/* Collectives of nothing are dropped; empty messages are not. */
static ncclResult_t add(struct operation op, bool reduces) {
  ncclResult_t result = check(&op, reduces);
  if (result) return sim_group_error(result);
  return op.count == 0 && op.function < SEND ? ncclSuccess : sim_group_add(&op);
}

API ncclAllReduce(const void *send, void *recv, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm,
                  cudaStream_t stream) {
  struct operation operation = {ALL_REDUCE, send, recv, count, .type = type, .redop = op, .comm = comm};
  operation.stream = stream;
  return add(operation, true);
}
ALIAS(AllReduce);

API ncclReduceScatter(const void *send, void *recv, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm,
                      cudaStream_t stream) {
  struct operation operation = {REDUCE_SCATTER, send, recv, count, .type = type, .redop = op, .comm = comm};
  operation.stream = stream;
  return add(operation, true);
}
ALIAS(ReduceScatter);

API ncclReduce(const void *send, void *recv, size_t count, ncclDataType_t type, ncclRedOp_t op, int root,
               ncclComm_t comm, cudaStream_t stream) {
  struct operation operation = {REDUCE, send, recv, count, .type = type, .redop = op, .root = root, .comm = comm};
  operation.stream = stream;
  return add(operation, true);
}
ALIAS(Reduce);

API ncclAllGather(const void *send, void *recv, size_t count, ncclDataType_t type, ncclComm_t comm,
                  cudaStream_t stream) {
  struct operation operation = {ALL_GATHER, send, recv, count, .type = type, .comm = comm, .stream = stream};
  return add(operation, false);
}
ALIAS(AllGather);

API ncclBroadcast(const void *send, void *recv, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                  cudaStream_t stream) {
  struct operation operation = {BROADCAST, send, recv, count, .type = type, .root = root, .comm = comm};
  operation.stream = stream;
  return add(operation, false);
}
ALIAS(Broadcast);

/* Through the PLT, as in the real library: a tracer sees both. */
API ncclBcast(void *buffer, size_t count, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t stream) {
  return ncclBroadcast(buffer, buffer, count, type, root, comm, stream);
}
ALIAS(Bcast);

API ncclSend(const void *buffer, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
  struct operation operation = {SEND, buffer, NULL, count, .type = type, .root = peer, .comm = comm};
  operation.stream = stream;
  return add(operation, false);
}
ALIAS(Send);

API ncclRecv(void *buffer, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
  struct operation operation = {RECV, NULL, buffer, count, .type = type, .root = peer, .comm = comm};
  operation.stream = stream;
  return add(operation, false);
}
ALIAS(Recv);
