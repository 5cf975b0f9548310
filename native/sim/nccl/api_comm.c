/* Exported: communicators. */
#include <stdlib.h>
#include <string.h>

#include "api.h"

static ncclResult_t init(ncclComm_t *out, int nranks, const ncclUniqueId *id, int rank, const ncclConfig_t *config) {
  ncclResult_t result;
  struct job job = {.kind = JOB_INIT, .rank = rank, .ranks = nranks, .out = out};
  if (!out || nranks < 1 || nranks > MAX_RANKS || rank < 0 || rank >= nranks)
    return sim_group_error(sim_fail(NULL, ncclInvalidArgument, "rank %d of %d", rank, nranks));
  *out = NULL;
  job.comm = sim_comm_new(config, &result);
  if (!job.comm) return sim_group_error(result);
  memcpy(&job.magic, id, sizeof(job.magic));
  job.hash = sim_hash_id(id);
  atomic_store(&job.comm->state->error, job.comm->state->nonblocking ? ncclInProgress : ncclSuccess);
  sim_enter(job.comm);
  *out = job.comm;
  return sim_group_job(&job);
}

API ncclCommInitRank(ncclComm_t *comm, int nranks, ncclUniqueId id, int rank) {
  return init(comm, nranks, &id, rank, NULL);
}
ALIAS(CommInitRank);

/* As the real one: of a non-blocking communicator, by the exported function. */
static ncclResult_t outcome(ncclResult_t result, const ncclComm_t *comm) {
  if (result == ncclInProgress && *comm) ncclCommGetAsyncError(*comm, &result);
  return result;
}

API ncclCommInitRankConfig(ncclComm_t *comm, int nranks, ncclUniqueId id, int rank, ncclConfig_t *config) {
  return outcome(init(comm, nranks, &id, rank, config), comm);
}
ALIAS(CommInitRankConfig);

API ncclCommInitRankScalable(ncclComm_t *comm, int nranks, int rank, int id_count, ncclUniqueId *ids,
                             ncclConfig_t *config) {
  if (id_count < 1 || !ids) return sim_group_error(sim_fail(NULL, ncclInvalidArgument, "no unique id"));
  return outcome(init(comm, nranks, &ids[0], rank, config), comm);
}
ALIAS(CommInitRankScalable);

static ncclResult_t init_on(int device, ncclComm_t *comm, int count, const ncclUniqueId *id, int rank) {
  const struct driver_table *drv = sim_driver();
  CUcontext context;
  if (!drv || drv->cuDevicePrimaryCtxRetain(&context, device))
    return sim_group_error(sim_fail(NULL, ncclUnhandledCudaError, "no device %d", device));
  drv->cuCtxPushCurrent_v2(context);
  ncclResult_t result = init(comm, count, id, rank, NULL);
  drv->cuCtxPopCurrent_v2(NULL);
  return result;
}

API ncclCommInitAll(ncclComm_t *comms, int count, const int *devices) {
  ncclUniqueId id;
  if (!comms || count < 1) return sim_fail(NULL, ncclInvalidArgument, "%d devices", count);
  ncclResult_t result = ncclGetUniqueId(&id);
  if (result) return result;
  sim_group_open();
  for (int i = 0; i < count; i++) init_on(devices ? devices[i] : i, &comms[i], count, &id, i);
  return sim_group_close();
}
ALIAS(CommInitAll);

/* The child's number: every rank of the parent counts the same calls. */
static void number(struct job *job) {
  struct state *state = job->parent->state;
  pthread_mutex_lock(&state->lock);
  state->inside++;
  if (job->comm) {
    job->comm->state->next_forming = state->forming;
    state->forming = job->comm->state;
  }
  job->ordinal = ++state->children;
  job->turn = job->kind == JOB_SPLIT ? state->splits++ : 0;
  pthread_mutex_unlock(&state->lock);
}

static ncclResult_t start_child(struct job *job, const ncclConfig_t *config) {
  ncclResult_t result = ncclSuccess;
  struct ncclComm *parent = job->parent;
  bool takes_part = job->color != NCCL_SPLIT_NOCOLOR;
  *job->out = NULL;
  sim_driver()->cuCtxPushCurrent_v2(parent->state->context);
  if (takes_part) job->comm = sim_comm_new(config ? config : &parent->config, &result);
  sim_driver()->cuCtxPopCurrent_v2(NULL);
  if (result) return sim_group_error(result);
  number(job);
  if (job->kind == JOB_SHRINK) job->hash = sim_hash_child(parent->commHash, job->ordinal, job->color);
  if (job->comm) {
    atomic_store(&job->comm->state->error, job->comm->state->nonblocking ? ncclInProgress : ncclSuccess);
    sim_enter(job->comm);
  }
  *job->out = job->comm;
  return sim_group_job(job);
}

API ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *child, ncclConfig_t *config) {
  struct job job = {.kind = JOB_SPLIT, .parent = comm, .out = child, .color = color, .key = key};
  ncclResult_t result = sim_comm_ready(comm);
  if (!result && (!child || color < NCCL_SPLIT_NOCOLOR))
    result = sim_fail(comm, ncclInvalidArgument, "color %d", color);
  return result ? sim_group_error(result) : start_child(&job, config);
}
ALIAS(CommSplit);

static bool is_excluded(int rank, const int *excluded, int count) {
  for (int i = 0; i < count; i++)
    if (excluded[i] == rank) return true;
  return false;
}

API ncclCommShrink(ncclComm_t comm, int *excluded, int excluded_count, ncclComm_t *child, ncclConfig_t *config,
                   int flags) {
  struct job job = {.kind = JOB_SHRINK, .parent = comm, .out = child};
  ncclResult_t result = sim_comm_ready(comm);
  if (!result && (!child || !excluded || excluded_count < 1 || is_excluded(comm->rank, excluded, excluded_count)))
    result = sim_fail(comm, ncclInvalidArgument, "%d ranks to exclude", excluded_count);
  if (result) return sim_group_error(result);
  for (int rank = 0; rank < comm->nRanks; rank++) {
    if (rank == comm->rank) job.rank = job.ranks;
    job.ranks += !is_excluded(rank, excluded, excluded_count);
  }
  if (flags & NCCL_SHRINK_ABORT) sim_abort_work(comm);
  return start_child(&job, config);
}
ALIAS(CommShrink);

API ncclCommFinalize(ncclComm_t comm) {
  ncclResult_t result = sim_comm_ready(comm);
  if (result) return sim_group_error(result);
  if (comm->state->finalized) return sim_fail(comm, ncclInvalidArgument, "finalized before");
  comm->state->finalized = true;
  if (comm->state->nonblocking) atomic_store(&comm->state->error, ncclInProgress);
  result = sim_group_job(&(struct job){.kind = JOB_FINALIZE, .comm = comm});
  return outcome(result, &comm);
}
ALIAS(CommFinalize);

/* Waits for everything that is under way. */
API ncclCommDestroy(ncclComm_t comm) {
  if (!comm) return ncclSuccess;
  ncclResult_t result = sim_comm_check(comm);
  if (result) return result;
  sim_wait_idle(comm);
  sim_comm_retire(comm);
  return ncclSuccess;
}
ALIAS(CommDestroy);

API ncclCommAbort(ncclComm_t comm) {
  if (!comm) return ncclSuccess;
  ncclResult_t result = sim_comm_check(comm);
  if (result) return result;
  sim_hang_abort(comm);
  atomic_store(&comm->state->abandoned, true);
  sim_abort_work(comm);
  sim_comm_retire(comm);
  return ncclSuccess;
}
ALIAS(CommAbort);

API ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error) {
  uint64_t code;
  ncclResult_t result = sim_comm_check(comm);
  if (result || !error) return result ? result : ncclInvalidArgument;
  *error = atomic_load(&comm->state->error);
  if (sim_fault(comm, "async_error", -1, "code", &code)) *error = (ncclResult_t)code;
  return ncclSuccess;
}
ALIAS(CommGetAsyncError);

/* Kept simple: tools find out where the fields lie by reading these three functions' machine code. */
#define FIELD(name, parameter, field)                                                                                  \
  API nccl##name(ncclComm_t comm, int *parameter) {                                                                    \
    ncclResult_t result = sim_comm_ready(comm);                                                                        \
    if (result || !parameter) return result ? result : ncclInvalidArgument;                                            \
    *parameter = comm->field;                                                                                          \
    return ncclSuccess;                                                                                                \
  }                                                                                                                    \
  ALIAS(name);
FIELD(CommCount, count, nRanks)
FIELD(CommCuDevice, device, cudaDev)
FIELD(CommUserRank, rank, rank)
