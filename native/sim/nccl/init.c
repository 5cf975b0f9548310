/* The bodies of the calls that all ranks make together: initialisation, split, shrink. They block on the host. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "jobs.h"

static ncclResult_t enter(struct ncclComm *comm, uint64_t hash, int rank, int ranks) {
  if (sim_room_enter(&comm->state->room, hash, rank, ranks, &comm->state->abort_flag)) {
    atomic_store(&comm->state->entered, true);
    return ncclSuccess;
  }
  if (sim_aborted(comm)) return sim_fail(comm, ncclInternalError, "aborted during initialisation");
  return sim_fail(comm, ncclSystemError, "no shared memory: %s", strerror(errno));
}

static ncclResult_t create(struct job *job, uint64_t magic, uint64_t hash, int rank, int ranks) {
  struct ncclComm *comm = job->comm;
  sim_comm_identify(comm, magic, hash, rank, ranks);
  ncclResult_t result = enter(comm, hash, rank, ranks);
  if (!result) sim_profiler_init(comm);
  return result;
}

/* Several splits of one communicator in one group go one after the other. */
static void await_turn(const struct job *job) {
  struct state *state = job->parent->state;
  pthread_mutex_lock(&state->lock);
  while (state->split_turn != job->turn && !sim_aborted(job->parent)) pthread_cond_wait(&state->changed, &state->lock);
  pthread_mutex_unlock(&state->lock);
}

static void pass_turn(const struct job *job) {
  struct state *state = job->parent->state;
  pthread_mutex_lock(&state->lock);
  state->split_turn = job->turn + 1;
  pthread_cond_broadcast(&state->changed);
  pthread_mutex_unlock(&state->lock);
}

/* This rank's place among those of its color, by key and then by rank. */
static void place(const struct room *room, int color, int key, int *rank, int *ranks) {
  *rank = *ranks = 0;
  for (int i = 0; i < room->ranks; i++) {
    const struct member *member = &room->shared->members[i];
    if (member->color != color) continue;
    ++*ranks;
    *rank += member->key < key || (member->key == key && i < room->rank);
  }
}

/* Every rank tells its color and key; those without a color tell that. */
static bool exchange(struct job *job) {
  struct room *room = &job->parent->state->room;
  struct member *own = &room->shared->members[room->rank];
  own->color = job->color;
  own->key = job->key;
  if (!sim_gate_host(room)) return false;
  place(room, job->color, job->key, &job->rank, &job->ranks);
  return sim_gate_host(room);
}

static ncclResult_t split(struct job *job) {
  await_turn(job);
  bool told = exchange(job);
  pass_turn(job);
  if (!told) return sim_fail(job->parent, ncclInternalError, "aborted during a split");
  if (!job->comm) return ncclSuccess;
  uint64_t hash = sim_hash_child(job->parent->commHash, job->ordinal, job->color);
  return create(job, hash, hash, job->rank, job->ranks);
}

static ncclResult_t run(struct job *job) {
  switch (job->kind) {
  case JOB_INIT:
    return create(job, job->magic, job->hash, job->rank, job->ranks);
  case JOB_SPLIT:
    return split(job);
  case JOB_SHRINK:
    return create(job, job->hash, job->hash, job->rank, job->ranks);
  default:
    sim_wait_idle(job->comm);
    return ncclSuccess;
  }
}

static void leave_parent(const struct job *job) {
  struct state *parent = job->parent->state;
  pthread_mutex_lock(&parent->lock);
  struct state **link = &parent->forming;
  while (*link && !(job->comm && *link == job->comm->state)) link = &(*link)->next_forming;
  if (*link) *link = (*link)->next_forming;
  parent->inside--;
  pthread_cond_broadcast(&parent->changed);
  pthread_mutex_unlock(&parent->lock);
}

/* A communicator that did not come about goes away, unless somebody who aborts it is about to take it away. */
static bool goes_away(const struct job *job) {
  if (!job->result || job->kind == JOB_FINALIZE || !job->comm) return false;
  return !job->comm->state->nonblocking && !atomic_load(&job->comm->state->abandoned);
}

void sim_job_run(struct job *job) {
  struct ncclComm *comm = job->comm;
  job->result = run(job);
  bool failed = goes_away(job);
  if (failed) *job->out = NULL;
  if (job->parent) leave_parent(job);
  if (comm) atomic_store(&comm->state->error, job->result);
  if (comm && job->kind != JOB_FINALIZE) sim_leave(comm);
  if (failed) sim_comm_retire(comm);
}
