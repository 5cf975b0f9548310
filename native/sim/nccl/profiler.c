/* The profiler plugin: versions 3 to 6 of its interface, loaded the way NCCL loads it.
 *
 * Of its events there are Group, Coll, P2p, KernelCh (on several channels; times from the monotonic clock), and from
 * version 5 on GroupApi, CollApi and P2pApi. They come when NCCL launches, in its own order, and for a graph each time it
 * is launched. A Coll or P2p stops when it is enqueued; its KernelCh start and stop on the stream's worker, when the
 * kernel does. As in NCCL, an event that contains one that the plugin wants is told, too. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "comm.h"

enum {
  GROUP = 1,
  COLL = 2,
  P2P = 4,
  KERNEL = 64,
  GROUP_API = 256,
  COLL_API = 512,
  P2P_API = 1024,
  KERNEL_STOP = 22,
  OLDEST = 3,
  NEWEST = 6
};

struct coll {
  uint64_t number;
  const char *function;
  const void *send;
  void *recv;
  size_t count;
  int root;
  const char *type;
  uint8_t channels, warps;
  const char *algorithm, *protocol;
  void *group; /* from version 5 on: there the parent is the call */
};

struct p2p {
  const char *function;
  void *buffer;
  const char *type;
  size_t count;
  int peer;
  uint8_t channels;
  void *group;
};

struct call {
  const char *function;
  size_t count;
  const char *type;
  int root;
  void *stream;
  bool captured;
};

/* The type is one byte up to version 4: the low one. */
struct description {
  uint64_t type;
  void *parent;
  int rank;
  union {
    struct coll coll;
    struct p2p p2p;
    struct call call;
    struct {
      uint8_t channel;
      uint64_t timer;
    } kernel;
    struct { /* version 3 */
      const char *name;
      uint64_t hash;
      union {
        struct coll coll;
        struct p2p p2p;
      };
    } named;
  };
};
_Static_assert(offsetof(struct description, coll) == 24, "coll");

typedef void (*logger)(int level, unsigned long flags, const char *file, int line, const char *format, ...);
typedef ncclResult_t init_3(void **context, int *mask);
typedef ncclResult_t init_4(void **context, int *mask, const char *comm_name, uint64_t hash, int nodes, int ranks,
                            int rank, logger log);
typedef ncclResult_t init_5(void **context, uint64_t hash, int *mask, const char *comm_name, int nodes, int ranks,
                            int rank, logger log);

struct plugin {
  const char *name;
  void *init;
  ncclResult_t (*start_event)(void *context, void **event, struct description *description);
  ncclResult_t (*stop_event)(void *event);
  ncclResult_t (*record_state)(void *event, int state, uint64_t arguments[2]);
  ncclResult_t (*finalize)(void *context);
};

static const struct plugin *plugin;
static int version, channels;
static int event_mask; /* one for all communicators; the plugin may change it at any time */
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

static int setting(const char *name, int low, int high, int usual) {
  const char *text = getenv(name);
  int value = text ? atoi(text) : usual;
  return value < low ? low : value > high ? high : value;
}

static void load(void) {
  void *library = open_plugin();
  channels = setting("STALLSCOPE_SIM_NCCL_CHANNELS", 1, MAX_CHANNELS, 1);
  version = setting("STALLSCOPE_SIM_NCCL_PROFILER", OLDEST, NEWEST, 4);
  for (; library && version >= OLDEST; version--) {
    char symbol[32];
    snprintf(symbol, sizeof(symbol), "ncclProfiler_v%d", version);
    plugin = dlsym(library, symbol);
    if (plugin) return;
  }
}

static ncclResult_t init(struct ncclComm *comm) {
  if (version == 3) return ((init_3 *)plugin->init)(&comm->profilerContext, &event_mask);
  if (version == 4)
    return ((init_4 *)plugin->init)(&comm->profilerContext, &event_mask, comm->config.commName, comm->commHash,
                                    comm->nNodes, comm->nRanks, comm->rank, log_nothing);
  return ((init_5 *)plugin->init)(&comm->profilerContext, comm->commHash, &event_mask, comm->config.commName,
                                  comm->nNodes, comm->nRanks, comm->rank, log_nothing);
}

void sim_profiler_init(struct ncclComm *comm) {
  pthread_once(&once, load);
  if (plugin && init(comm)) event_mask = 0;
}

void sim_profiler_finalize(struct ncclComm *comm) {
  if (plugin && comm->profilerContext) plugin->finalize(comm->profilerContext);
  comm->profilerContext = NULL;
}

int sim_profiler_mask(void) {
  return __atomic_load_n(&event_mask, __ATOMIC_RELAXED);
}

/* What contains each kind of event, up to version 4 and from version 5 on. */
static int with_inner(int type) {
  switch (type) {
  case GROUP:
    return GROUP | COLL | P2P | KERNEL;
  case COLL:
    return COLL | KERNEL;
  case P2P:
    return P2P | KERNEL;
  case GROUP_API:
    return GROUP_API | COLL_API | P2P_API | GROUP | COLL | P2P | KERNEL;
  case COLL_API:
    return COLL_API | COLL | KERNEL;
  case P2P_API:
    return P2P_API | P2P | KERNEL;
  default:
    return type;
  }
}

static void *start(struct ncclComm *comm, int mask, struct description *description) {
  void *event = NULL;
  if (!plugin || !comm->profilerContext || !(mask & with_inner((int)description->type))) return NULL;
  description->rank = comm->rank;
  return plugin->start_event(comm->profilerContext, &event, description) ? NULL : event;
}

void sim_profiler_stop(void *event) {
  if (event) plugin->stop_event(event);
}

/* In bytes where NCCL makes it so. */
static void size_of(const struct operation *op, size_t *count, const char **type) {
  bool in_bytes = op->function == ALL_GATHER || op->function == BROADCAST;
  *count = in_bytes ? op->count * sim_type_bytes(op->type) : op->count;
  *type = types[in_bytes ? ncclInt8 : op->type];
}

static struct coll coll_of(const struct operation *op, void *group, uint64_t number) {
  struct coll coll = {.number = number, .function = functions[op->function]};
  coll.send = op->send;
  coll.recv = op->recv;
  size_of(op, &coll.count, &coll.type);
  coll.root = op->root;
  coll.channels = (uint8_t)(version == 3 ? MAX_CHANNELS : channels);
  coll.warps = 16;
  coll.algorithm = "RING";
  coll.protocol = "LL";
  coll.group = group;
  return coll;
}

static struct p2p p2p_of(const struct operation *op, void *group) {
  struct p2p p2p = {.function = functions[op->function], .type = types[op->type], .count = op->count};
  p2p.buffer = op->function == SEND ? (void *)(uintptr_t)op->send : op->recv;
  p2p.peer = op->root;
  p2p.channels = (uint8_t)channels;
  p2p.group = group;
  return p2p;
}

/* The call of the interface; NULL up to version 4. */
static void *call_of(const struct operation *op, void *parent) {
  struct description event = {.type = op->function < SEND ? COLL_API : P2P_API, .parent = parent};
  if (version < 5) return NULL;
  event.call = (struct call){functions[op->function], op->count, types[op->type], op->root, op->stream, false};
  return start(op->comm, op->profiled, &event);
}

static void *task_of(const struct operation *op, void *call, void *group, uint64_t number) {
  struct description event = {.type = op->function < SEND ? COLL : P2P, .parent = version < 5 ? group : call};
  if (version == 3) {
    event.named.hash = op->comm->commHash;
    if (op->function < SEND) event.named.coll = coll_of(op, NULL, number);
    else event.named.p2p = p2p_of(op, NULL);
  } else if (op->function < SEND) {
    event.coll = coll_of(op, group, number);
  } else {
    event.p2p = p2p_of(op, group);
  }
  return start(op->comm, op->profiled, &event);
}

/* All of a plan, in its order; the event of the group, which is to be stopped. */
void *sim_profiler_queued(struct ncclComm *comm, struct operation *operations, size_t count) {
  struct description whole = {.type = GROUP}, api = {.type = GROUP_API};
  if (!plugin) return NULL;
  uint64_t earlier[FUNCTIONS] = {0};
  int mask = 0;
  for (size_t i = 0; i < count; i++) mask |= operations[i].profiled;
  void *outer = version < 5 ? NULL : start(comm, mask, &api);
  void *group = start(comm, mask, &whole);
  for (size_t i = 0; i < count; i++) {
    void *call = call_of(&operations[i], outer);
    int f = (int)operations[i].function;
    uint64_t number = f < FUNCTIONS ? comm->seqNumber[f] + earlier[f]++ : 0;
    operations[i].event = task_of(&operations[i], call, group, number);
    sim_profiler_stop(operations[i].event);
    sim_profiler_stop(call);
  }
  sim_profiler_stop(outer);
  return group;
}

static uint64_t timer(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* NCCL does so without asking what became of the operation's own event. */
void sim_profiler_kernel(const struct operation *op, void *events[MAX_CHANNELS]) {
  for (int i = 0; plugin && i < channels; i++) {
    struct description event = {.type = KERNEL, .parent = op->event, .kernel = {(uint8_t)i, timer()}};
    events[i] = start(op->comm, op->profiled, &event);
  }
}

void sim_profiler_kernel_end(void *events[MAX_CHANNELS]) {
  for (int i = 0; i < channels; i++) {
    uint64_t state[2] = {timer(), 0};
    if (!events[i]) continue;
    if (version > 3) plugin->record_state(events[i], KERNEL_STOP, state);
    plugin->stop_event(events[i]);
  }
}
