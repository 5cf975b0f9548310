/* Communicators as objects: birth, identity, waiting for them to fall idle, abort, death. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "api.h"

enum { GRAVES = 64, MESSAGE = 256 };

static char last_error[MESSAGE];
static pthread_mutex_t shared_lock = PTHREAD_MUTEX_INITIALIZER; /* last_error and the graves */

void *sim_new(size_t bytes) {
  void *memory = calloc(1, bytes ? bytes : 1);
  if (!memory) {
    fputs("stallscope sim: out of host memory\n", stderr);
    abort();
  }
  return memory;
}

static bool warns(void) {
  const char *level = getenv("NCCL_DEBUG");
  return level && (strcmp(level, "WARN") == 0 || strcmp(level, "INFO") == 0 || strcmp(level, "TRACE") == 0);
}

ncclResult_t sim_fail(struct ncclComm *comm, ncclResult_t result, const char *format, ...) {
  char text[MESSAGE];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof(text), format, arguments);
  va_end(arguments);
  pthread_mutex_lock(&shared_lock);
  memcpy(last_error, text, sizeof(last_error));
  pthread_mutex_unlock(&shared_lock);
  if (warns()) printf("%d [%d] NCCL WARN %s\n", (int)getpid(), comm ? comm->cudaDev : -1, text);
  return result;
}

API_RETURNING(const char *) ncclGetLastError(ncclComm_t comm) {
  static _Thread_local char copy[MESSAGE];
  (void)comm;
  pthread_mutex_lock(&shared_lock);
  memcpy(copy, last_error, sizeof(copy));
  pthread_mutex_unlock(&shared_lock);
  return copy;
}
ALIAS(GetLastError);

static void greet(void) {
  const char *level = getenv("NCCL_DEBUG");
  if (level && (warns() || strcmp(level, "VERSION") == 0)) puts("NCCL version 2.27.5+stallscope-simulated");
}

static int64_t bus_of(int device) {
  char text[32] = "";
  int64_t bus = 0;
  sim_driver()->cuDeviceGetPCIBusId(text, sizeof(text), device);
  for (const char *at = text; *at; at++)
    if (*at != ':' && *at != '.') bus = bus * 16 + (int64_t)strtol((char[]){*at, 0}, NULL, 16);
  return bus;
}

/* The calling thread's device, else the first one. */
static CUresult take_device(struct ncclComm *comm) {
  const struct driver_table *drv = sim_driver();
  if (!drv) return CUDA_ERROR_NO_DEVICE;
  if (drv->cuCtxGetDevice(&comm->cudaDev)) comm->cudaDev = 0;
  comm->nvmlDev = comm->cudaDev;
  comm->busId = bus_of(comm->cudaDev);
  return drv->cuDevicePrimaryCtxRetain(&comm->state->context, comm->cudaDev);
}

/* Fields of newer headers are left out, of older ones undefined. */
static ncclResult_t take_config(struct ncclComm *comm, const ncclConfig_t *config) {
  ncclConfig_t *own = &comm->config;
  *own = (ncclConfig_t){.size = sizeof(*own), .magic = NCCL_CONFIG_MAGIC, .version = VERSION, .blocking = 1};
  own->cgaClusterSize = own->minCTAs = own->maxCTAs = own->splitShare = own->trafficClass = NCCL_CONFIG_UNDEF_INT;
  own->collnetEnable = own->CTAPolicy = own->shrinkShare = own->nvlsCTAs = NCCL_CONFIG_UNDEF_INT;
  if (!config) return ncclSuccess;
  if (config->magic != NCCL_CONFIG_MAGIC || config->size < offsetof(ncclConfig_t, blocking))
    return sim_fail(comm, ncclInvalidArgument, "ncclConfig_t is not initialised");
  memcpy(own, config, config->size < sizeof(*own) ? config->size : sizeof(*own));
  own->size = sizeof(*own);
  if (own->blocking == NCCL_CONFIG_UNDEF_INT) own->blocking = 1;
  if (own->blocking != 0 && own->blocking != 1)
    return sim_fail(comm, ncclInvalidArgument, "config.blocking is %d", own->blocking);
  return ncclSuccess;
}

static void name_comm(struct ncclComm *comm) {
  struct state *state = comm->state;
  if (comm->config.commName) snprintf(state->name, sizeof(state->name), "%s", comm->config.commName);
  comm->config.commName = comm->config.commName ? state->name : NULL;
  comm->config.netName = NULL;
  state->nonblocking = comm->config.blocking == 0;
}

static void comm_free(struct ncclComm *comm) {
  pthread_cond_destroy(&comm->state->changed);
  pthread_mutex_destroy(&comm->state->lock);
  free(comm->state);
  free(comm);
}

struct ncclComm *sim_comm_new(const ncclConfig_t *config, ncclResult_t *result) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  struct ncclComm *comm = sim_new(sizeof(*comm));
  pthread_once(&once, greet);
  comm->state = sim_new(sizeof(*comm->state));
  pthread_mutex_init(&comm->state->lock, NULL);
  pthread_cond_init(&comm->state->changed, NULL);
  comm->startMagic = comm->endMagic = NCCL_MAGIC;
  comm->abortFlag = &comm->state->abort_flag;
  comm->rank = comm->nRanks = -1;
  *result = take_config(comm, config);
  if (!*result && take_device(comm)) *result = sim_fail(comm, ncclUnhandledCudaError, "no device");
  if (!*result) name_comm(comm);
  if (!*result) return comm;
  comm_free(comm);
  return NULL;
}

void sim_comm_identify(struct ncclComm *comm, uint64_t magic, uint64_t hash, int rank, int nranks) {
  comm->magic = magic;
  comm->commHash = hash;
  comm->rank = comm->localRank = rank;
  comm->nRanks = comm->localRanks = nranks;
  comm->nNodes = 1;
}

/* An aborted one may have work on a stream that is stuck elsewhere. */
static bool is_idle(struct ncclComm *comm) {
  pthread_mutex_lock(&comm->state->lock);
  bool idle = comm->state->in_flight == 0;
  pthread_mutex_unlock(&comm->state->lock);
  return idle;
}

/* Poisoned as the real one, and kept for a while: a program that uses it again gets an error. */
void sim_comm_retire(struct ncclComm *comm) {
  static struct ncclComm *graves[GRAVES];
  static unsigned next;
  sim_profiler_finalize(comm);
  sim_room_leave(&comm->state->room);
  comm->rank = comm->nRanks = comm->cudaDev = -1;
  comm->busId = -1;
  __atomic_store_n(&comm->endMagic, 0, __ATOMIC_RELEASE);
  __atomic_store_n(&comm->startMagic, 0, __ATOMIC_RELEASE);
  pthread_mutex_lock(&shared_lock);
  struct ncclComm *oldest = graves[next % GRAVES];
  graves[next++ % GRAVES] = comm;
  pthread_mutex_unlock(&shared_lock);
  if (oldest && is_idle(oldest)) comm_free(oldest);
}

ncclResult_t sim_comm_check(const struct ncclComm *comm) {
  if (!comm) return sim_fail(NULL, ncclInvalidArgument, "the communicator is NULL");
  if (__atomic_load_n(&comm->startMagic, __ATOMIC_ACQUIRE) != NCCL_MAGIC || comm->endMagic != NCCL_MAGIC)
    return sim_fail(NULL, ncclInvalidArgument, "the communicator is corrupt or destroyed");
  return ncclSuccess;
}

/* A non-blocking communicator may not be used before it has been seen to be ready. */
ncclResult_t sim_comm_ready(const struct ncclComm *comm) {
  ncclResult_t result = sim_comm_check(comm);
  if (result || !comm->state->nonblocking) return result;
  result = atomic_load(&comm->state->error);
  return result == ncclInProgress ? sim_fail(NULL, ncclInvalidArgument, "the last call has not ended") : result;
}

bool sim_aborted(const struct ncclComm *comm) {
  return __atomic_load_n(&comm->state->abort_flag, __ATOMIC_ACQUIRE) != 0;
}

static void raise_abort(struct state *state) {
  __atomic_store_n(&state->abort_flag, 1, __ATOMIC_RELEASE);
  if (atomic_load(&state->entered)) sim_room_wake(&state->room);
}

/* Ends what runs and who waits, also for children that are on their way. What has not come to its turn on a stream yet ends when it does. */
void sim_abort_work(struct ncclComm *comm) {
  struct state *state = comm->state;
  pthread_mutex_lock(&state->lock);
  raise_abort(state);
  for (struct state *child = state->forming; child; child = child->next_forming) raise_abort(child);
  pthread_cond_broadcast(&state->changed);
  while (state->running || state->inside) pthread_cond_wait(&state->changed, &state->lock);
  pthread_mutex_unlock(&state->lock);
}

/* Until nothing of it is on a stream, and no thread inside a call that waits. */
void sim_wait_idle(struct ncclComm *comm) {
  struct state *state = comm->state;
  pthread_mutex_lock(&state->lock);
  while (state->in_flight || state->inside) pthread_cond_wait(&state->changed, &state->lock);
  pthread_mutex_unlock(&state->lock);
}

void sim_enter(struct ncclComm *comm) {
  pthread_mutex_lock(&comm->state->lock);
  comm->state->inside++;
  pthread_mutex_unlock(&comm->state->lock);
}

void sim_leave(struct ncclComm *comm) {
  pthread_mutex_lock(&comm->state->lock);
  comm->state->inside--;
  pthread_cond_broadcast(&comm->state->changed);
  pthread_mutex_unlock(&comm->state->lock);
}
