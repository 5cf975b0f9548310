/* The communicator: what a tracer may read of it, laid out as in libnccl 2.27.5, and what the simulation needs. */
#ifndef SIM_NCCL_COMM_H
#define SIM_NCCL_COMM_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "driver_table.h"
#include "shared.h"
#include "sim_nccl.h"

#define NCCL_MAGIC 0x0280028002800280u
#define EXPORT __attribute__((visibility("default")))

enum {
  VERSION = 22705,
  FUNCTIONS = 5, /* seqNumber is indexed by `enum function`, of which it has the collectives */
  MAX_USER_OPS = 64,
  SIZE = 0x107c00,
  AT_MAGIC = 0x1044a8,
  AT_OP_COUNT = 0x1045c0,
  AT_CONFIG = 0x1064d0,
  AT_SEQ_NUMBER = 0x106550,
};

enum function { BROADCAST, REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, SEND_RECV, SEND, RECV };

struct ncclComm {
  uint64_t startMagic;
  struct state *state;
  char before[AT_MAGIC - 16];
  uint64_t magic, commHash;
  int rank, nRanks, cudaDev, nvmlDev;
  char gap1[16];
  int64_t busId;
  char gap2[0x8c];
  int node, nNodes, localRank, localRanks;
  char gap3[AT_OP_COUNT - 0x10457c];
  uint64_t opCount; /* stays 0, as on a single node */
  uint32_t *abortFlag;
  ncclResult_t asyncResult;
  char gap4[AT_CONFIG - AT_OP_COUNT - 24];
  ncclConfig_t config;
  char gap5[AT_SEQ_NUMBER - AT_CONFIG - sizeof(ncclConfig_t)];
  uint64_t seqNumber[FUNCTIONS];
  void *profilerContext; /* in the communicator, as in the real one */
  char after[SIZE - AT_SEQ_NUMBER - FUNCTIONS * 8 - 16];
  uint64_t endMagic;
};
_Static_assert(offsetof(struct ncclComm, commHash) == 0x1044b0, "commHash");
_Static_assert(offsetof(struct ncclComm, rank) == 0x1044b8, "rank");
_Static_assert(offsetof(struct ncclComm, busId) == 0x1044d8, "busId");
_Static_assert(offsetof(struct ncclComm, localRank) == 0x104574, "localRank");
_Static_assert(offsetof(struct ncclComm, opCount) == AT_OP_COUNT, "opCount");
_Static_assert(offsetof(struct ncclComm, config) == AT_CONFIG, "config");
_Static_assert(offsetof(struct ncclComm, seqNumber) == AT_SEQ_NUMBER, "seqNumber");
_Static_assert(sizeof(struct ncclComm) == SIZE, "size");

/* A number of any type, as the bits that stand in memory. */
union scalar {
  uint64_t bits;
  char bytes[8];
};

struct user_op {
  bool used;
  ncclDataType_t type;
  const void *device; /* read when the operation runs; NULL: the value is here */
  union scalar value;
};

struct state {
  struct room room;    /* what the ranks share */
  uint32_t abort_flag; /* atomic; the one way out of every wait */
  _Atomic ncclResult_t error;
  bool nonblocking, finalized;
  atomic_bool entered;   /* the room is there */
  atomic_bool abandoned; /* the program has called for its abort */
  CUcontext context;
  char name[64], last_error[128];
  /* under `lock` */
  pthread_mutex_t lock;
  pthread_cond_t changed;
  uint64_t next_ticket, serving;       /* kernels of one communicator run one after the other, in the order of launch */
  unsigned in_flight, running, inside; /* operations on streams; kernels at work; threads in calls that wait */
  uint64_t operations;                 /* how many were ever enqueued: the `op` of a fault */
  unsigned children, splits, split_turn;
  struct state *forming, *next_forming; /* children that are on their way, and their list */
  struct user_op user_ops[MAX_USER_OPS];
};

/* One call of the interface. */
struct operation {
  enum function function;
  const char *send;
  char *recv;
  size_t count, bytes;
  ncclDataType_t type;
  ncclRedOp_t redop;
  int root; /* or peer */
  struct ncclComm *comm;
  CUstream stream;
  uint64_t index;
  struct user_op scale;
  void *event;  /* the profiler's, of the operation */
  int profiled; /* its mask of events at the call */
};

/* comm.c */
struct ncclComm *sim_comm_new(const ncclConfig_t *config, ncclResult_t *result);
void sim_comm_identify(struct ncclComm *comm, uint64_t magic, uint64_t hash, int rank, int nranks);
void sim_comm_retire(struct ncclComm *comm);
ncclResult_t sim_comm_check(const struct ncclComm *comm);
ncclResult_t sim_comm_ready(const struct ncclComm *comm);
ncclResult_t sim_fail(struct ncclComm *comm, ncclResult_t result, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
bool sim_aborted(const struct ncclComm *comm);
void sim_abort_work(struct ncclComm *comm);
void sim_wait_idle(struct ncclComm *comm);
void sim_enter(struct ncclComm *comm);
void sim_leave(struct ncclComm *comm);
void *sim_new(size_t bytes);

/* driver.c */
const struct driver_table *sim_driver(void);
CUresult sim_launch_visible(CUstream stream, const char *name);

/* group.c */
ncclResult_t sim_group_add(const struct operation *operation);
ncclResult_t sim_group_error(ncclResult_t result);
void sim_group_open(void);
ncclResult_t sim_group_close(void);

/* plan.c */
ncclResult_t sim_plan_launch(struct ncclComm *comm, struct operation *operations, size_t count);

/* collective.c, p2p.c: false when the communicator was aborted under way */
bool sim_collective(const struct operation *operation);
ncclResult_t sim_p2p_connect(const struct operation *operations, size_t count);
void sim_p2p(const struct operation *operations, size_t count);

/* reduce.c */
size_t sim_type_bytes(ncclDataType_t type);
bool sim_can_reduce(ncclDataType_t type);
void sim_reduce(void *out, const char *first, size_t stride, unsigned ranks, size_t count, ncclDataType_t type,
                ncclRedOp_t op);
void sim_scale(void *out, const void *in, size_t count, ncclDataType_t type, const union scalar *factor);
union scalar sim_reciprocal(ncclDataType_t type, int ranks);

/* hash.c */
uint64_t sim_hash_id(const ncclUniqueId *id);
uint64_t sim_hash_child(uint64_t parent, unsigned ordinal, int color);

/* faults.c */
bool sim_fault(const struct ncclComm *comm, const char *kind, int64_t operation, const char *value, uint64_t *out);
bool sim_hinder(const struct operation *operation);
void sim_hang_abort(const struct ncclComm *comm);

/* profiler.c */
enum { MAX_CHANNELS = 32 };
int sim_profiler_mask(void);
void sim_profiler_init(struct ncclComm *comm);
void sim_profiler_finalize(struct ncclComm *comm);
void *sim_profiler_queued(struct ncclComm *comm, struct operation *operations, size_t count);
void sim_profiler_stop(void *event);
void sim_profiler_kernel(const struct operation *operation, void *events[MAX_CHANNELS]);
void sim_profiler_kernel_end(void *events[MAX_CHANNELS]);

#endif
