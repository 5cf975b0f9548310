/* The profiler plugin: version 4 of its interface, loaded the way NCCL loads it.
 *
 * Of its events there are Group, Coll, P2p and KernelCh (one channel; times from the monotonic clock). A Coll or P2p
 * stops when it is enqueued; its KernelCh starts and stops on the stream's worker, when the kernel does.
 */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "comm.h"

enum { EVENT_GROUP = 1, EVENT_COLL = 2, EVENT_P2P = 4, EVENT_KERNEL = 64, STATE_KERNEL_STOP = 22 };

struct event_v4 {
  uint8_t type;
  void *parent;
  int rank;
  union {
    struct {
      uint64_t number;
      const char *function;
      const void *send;
      void *recv;
      size_t count;
      int root;
      const char *type;
      uint8_t channels, warps;
      const char *algorithm, *protocol;
    } coll;
    struct {
      const char *function;
      void *buffer;
      const char *type;
      size_t count;
      int peer;
      uint8_t channels;
    } p2p;
    struct {
      uint8_t channel;
      uint64_t timer;
    } kernel;
  };
};

union state_v4 {
  uint64_t timer;
  char room[16];
};

typedef void (*logger)(int level, unsigned long flags, const char *file, int line, const char *format, ...);

struct profiler_v4 {
  const char *name;
  ncclResult_t (*init)(void **context, int *mask, const char *comm_name, uint64_t hash, int nodes, int ranks, int rank,
                       logger log);
  ncclResult_t (*start_event)(void *context, void **event, struct event_v4 *description);
  ncclResult_t (*stop_event)(void *event);
  ncclResult_t (*record_state)(void *event, int state, union state_v4 *arguments);
  ncclResult_t (*finalize)(void *context);
};

static const struct profiler_v4 *plugin;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static const char *const functions[] = {"Broadcast", "Reduce",   "AllGather", "ReduceScatter",
                                        "AllReduce", "SendRecv", "Send",      "Recv"};
static const char *const types[] = {"ncclInt8",    "ncclUint8",    "ncclInt32",      "ncclUint32",
                                    "ncclInt64",   "ncclUint64",   "ncclFloat16",    "ncclFloat32",
                                    "ncclFloat64", "ncclBfloat16", "ncclFloat8e4m3", "ncclFloat8e5m2"};

static void log_nothing(int level, unsigned long flags, const char *file, int line, const char *format, ...) {
  (void)level, (void)flags, (void)file, (void)line, (void)format;
}

/* A path, else libnccl-profiler-NAME.so, else libnccl-profiler.so. */
static void *open_plugin(void) {
  const char *name = getenv("NCCL_PROFILER_PLUGIN");
  char file[512];
  if (!name || !*name) return dlopen("libnccl-profiler.so", RTLD_NOW | RTLD_LOCAL);
  if (strcmp(name, "none") == 0) return NULL;
  void *library = dlopen(strcmp(name, "STATIC_PLUGIN") == 0 ? NULL : name, RTLD_NOW | RTLD_LOCAL);
  snprintf(file, sizeof(file), "libnccl-profiler-%s.so", name);
  return library ? library : dlopen(file, RTLD_NOW | RTLD_LOCAL);
}

static void load(void) {
  void *library = open_plugin();
  if (library) plugin = dlsym(library, "ncclProfiler_v4");
}

void sim_profiler_init(struct ncclComm *comm) {
  struct state *state = comm->state;
  pthread_once(&once, load);
  if (!plugin) return;
  if (plugin->init(&state->profiler, &state->profiler_mask, comm->config.commName, comm->commHash, comm->nNodes,
                   comm->nRanks, comm->rank, log_nothing))
    state->profiler_mask = 0;
}

void sim_profiler_finalize(struct ncclComm *comm) {
  if (plugin && comm->state->profiler) plugin->finalize(comm->state->profiler);
  comm->state->profiler = NULL;
  comm->state->profiler_mask = 0;
}

static void *start(struct ncclComm *comm, struct event_v4 *description) {
  void *event = NULL;
  if (!plugin || !(comm->state->profiler_mask & description->type)) return NULL;
  description->rank = comm->rank;
  return plugin->start_event(comm->state->profiler, &event, description) ? NULL : event;
}

void sim_profiler_stop(struct ncclComm *comm, void *event) {
  (void)comm;
  if (event) plugin->stop_event(event);
}

void *sim_profiler_group(struct ncclComm *comm) {
  struct event_v4 event = {.type = EVENT_GROUP};
  return start(comm, &event);
}

static void *start_coll(const struct operation *op, void *group) {
  struct event_v4 event = {.type = EVENT_COLL, .parent = group};
  event.coll.number = op->comm->seqNumber[op->function];
  event.coll.function = functions[op->function];
  event.coll.send = op->send;
  event.coll.recv = op->recv;
  event.coll.count = op->count;
  event.coll.root = op->root;
  event.coll.type = types[op->type];
  event.coll.channels = 1;
  event.coll.warps = 16;
  event.coll.algorithm = "RING";
  event.coll.protocol = "LL";
  return start(op->comm, &event);
}

static void *start_p2p(const struct operation *op, void *group) {
  struct event_v4 event = {.type = EVENT_P2P, .parent = group};
  event.p2p.function = functions[op->function];
  event.p2p.buffer = op->function == SEND ? (void *)(uintptr_t)op->send : op->recv;
  event.p2p.type = types[op->type];
  event.p2p.count = op->count;
  event.p2p.peer = op->root;
  event.p2p.channels = 1;
  return start(op->comm, &event);
}

void sim_profiler_enqueued(struct operation *op, void *group) {
  op->event = op->function >= SEND ? start_p2p(op, group) : start_coll(op, group);
  sim_profiler_stop(op->comm, op->event);
}

static uint64_t timer(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

void *sim_profiler_kernel(const struct operation *op) {
  struct event_v4 event = {.type = EVENT_KERNEL, .parent = op->event};
  if (!op->event) return NULL;
  event.kernel.timer = timer();
  return start(op->comm, &event);
}

void sim_profiler_kernel_end(const struct operation *op, void *event) {
  (void)op;
  if (!event) return;
  union state_v4 state = {.timer = timer()};
  plugin->record_state(event, STATE_KERNEL_STOP, &state);
  plugin->stop_event(event);
}
