/* Groups: what is called in one is put together and starts at the outermost end. A call outside is a group of one. */
#include <stdlib.h>
#include <string.h>

#include "api.h"

static _Thread_local struct group {
  int depth;
  ncclResult_t error;
  struct operation *operations;
  size_t count, capacity;
  struct job *first, **last;
} group;

static void clear(void) {
  while (group.first) {
    struct job *job = group.first;
    group.first = job->next;
    free(job);
  }
  free(group.operations);
  group = (struct group){0};
}

static void *job_thread(void *argument) {
  pthread_setname_np(pthread_self(), "sim-nccl-init");
  sim_job_run(argument);
  return NULL;
}

static void *detached_job(void *argument) {
  job_thread(argument);
  free(argument);
  return NULL;
}

static bool is_nonblocking(const struct job *job) {
  const struct ncclComm *comm = job->comm ? job->comm : job->parent;
  return comm->state->nonblocking;
}

/* The list is taken apart: those who run behind the caller's back free themselves. */
static ncclResult_t start_detached(struct job *job) {
  pthread_t thread;
  if (pthread_create(&thread, NULL, detached_job, job)) {
    sim_job_run(job);
    ncclResult_t result = job->result;
    free(job);
    return result;
  }
  pthread_detach(thread);
  return ncclInProgress;
}

static ncclResult_t join_all(struct job *jobs) {
  ncclResult_t result = ncclSuccess;
  while (jobs) {
    struct job *job = jobs;
    jobs = job->next;
    if (job->thread) pthread_join(job->thread, NULL);
    if (job->result) result = job->result;
    free(job);
  }
  return result;
}

/* One alone runs on the calling thread, several run side by side. */
static ncclResult_t run_jobs(struct job *jobs) {
  struct job *waited = NULL;
  bool alone = jobs && !jobs->next;
  ncclResult_t result = ncclSuccess;
  while (jobs) {
    struct job *job = jobs;
    jobs = job->next;
    if (is_nonblocking(job)) {
      result = start_detached(job);
      continue;
    }
    job->next = waited;
    waited = job;
    if (alone || pthread_create(&job->thread, NULL, job_thread, job)) {
      job->thread = 0;
      sim_job_run(job);
    }
  }
  ncclResult_t joined = join_all(waited);
  return joined ? joined : result;
}

/* All operations of one communicator, in order, moved to the front of what is left. */
static size_t gather(struct operation *left, size_t count) {
  struct ncclComm *comm = left[0].comm;
  size_t own = 0;
  for (size_t i = 0; i < count; i++) {
    if (left[i].comm != comm) continue;
    struct operation operation = left[i];
    memmove(left + own + 1, left + own, (i - own) * sizeof(*left));
    left[own++] = operation;
  }
  return own;
}

static void for_each_comm(const struct operation *operations, size_t count, void (*visit)(struct ncclComm *comm)) {
  for (size_t i = 0; i < count; i++) visit(operations[i].comm);
}

/* Behind sim_enter: an abort that comes later waits for this thread. */
static ncclResult_t check_all(const struct operation *operations, size_t count) {
  for (size_t i = 0; i < count; i++)
    if (sim_aborted(operations[i].comm)) return sim_fail(NULL, ncclInternalError, "the communicator was aborted");
  return ncclSuccess;
}

static ncclResult_t launch_all(struct operation *operations, size_t count) {
  for_each_comm(operations, count, sim_enter);
  ncclResult_t result = check_all(operations, count);
  if (!result) result = sim_p2p_connect(operations, count);
  for (size_t at = 0, own; at < count && !result; at += own) {
    own = gather(operations + at, count - at);
    result = sim_plan_launch(operations[at].comm, operations + at, own);
  }
  for_each_comm(operations, count, sim_leave);
  return result;
}

static ncclResult_t end(void) {
  struct group own = group;
  group = (struct group){0};
  ncclResult_t result = own.error;
  if (result) {
    group = own;
    clear();
    return result;
  }
  result = run_jobs(own.first);
  if ((result == ncclSuccess || result == ncclInProgress) && own.count) {
    ncclResult_t launched = launch_all(own.operations, own.count);
    if (launched) result = launched;
  }
  free(own.operations);
  return result;
}

void sim_group_open(void) {
  group.depth++;
}

ncclResult_t sim_group_close(void) {
  if (group.depth == 0) return sim_fail(NULL, ncclInvalidUsage, "ncclGroupEnd without ncclGroupStart");
  return --group.depth ? ncclSuccess : end();
}

/* An error inside a group fails the whole group at its end. */
ncclResult_t sim_group_error(ncclResult_t result) {
  if (group.depth && !group.error) group.error = result;
  return result;
}

ncclResult_t sim_group_add(const struct operation *operation) {
  struct state *state = operation->comm->state;
  sim_group_open();
  if (group.count == group.capacity) {
    group.capacity = group.capacity ? 2 * group.capacity : 16;
    struct operation *grown = realloc(group.operations, group.capacity * sizeof(*grown));
    if (!grown) abort();
    group.operations = grown;
  }
  group.operations[group.count] = *operation;
  group.operations[group.count].profiled = sim_profiler_mask();
  pthread_mutex_lock(&state->lock);
  group.operations[group.count++].index = state->operations++;
  pthread_mutex_unlock(&state->lock);
  return sim_group_close();
}

ncclResult_t sim_group_job(const struct job *job) {
  struct job *copy = sim_new(sizeof(*copy));
  *copy = *job;
  sim_group_open();
  if (!group.first) group.last = &group.first;
  *group.last = copy;
  group.last = &copy->next;
  return sim_group_close();
}

API ncclGroupStart(void) {
  sim_group_open();
  return ncclSuccess;
}
ALIAS(GroupStart);

API ncclGroupEnd(void) {
  return sim_group_close();
}
ALIAS(GroupEnd);

/* What it would take: the group is dropped. */
API ncclGroupSimulateEnd(ncclSimInfo_t *info) {
  if (group.depth == 0) return sim_fail(NULL, ncclInvalidUsage, "ncclGroupSimulateEnd without ncclGroupStart");
  if (--group.depth == 0) clear();
  if (info) info->estimatedTime = 1;
  return ncclSuccess;
}
ALIAS(GroupSimulateEnd);
