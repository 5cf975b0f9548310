/* NCCL's public interface as libnccl 2.27 exports it, written for this project from the public manual. */
#ifndef SIM_NCCL_H
#define SIM_NCCL_H

#include "sim_cuda_types.h"

typedef struct ncclComm *ncclComm_t;
typedef struct ncclWindow *ncclWindow_t;
typedef int ncclResult_t, ncclDataType_t, ncclRedOp_t, ncclScalarResidence_t;

enum {
  ncclSuccess,
  ncclUnhandledCudaError,
  ncclSystemError,
  ncclInternalError,
  ncclInvalidArgument,
  ncclInvalidUsage,
  ncclRemoteError,
  ncclInProgress,
  ncclNumResults
};
enum {
  ncclInt8,
  ncclUint8,
  ncclInt32,
  ncclUint32,
  ncclInt64,
  ncclUint64,
  ncclFloat16,
  ncclFloat32,
  ncclFloat64,
  ncclBfloat16,
  ncclFloat8e4m3,
  ncclFloat8e5m2,
  ncclNumTypes
};
enum { ncclSum, ncclProd, ncclMax, ncclMin, ncclAvg, ncclNumOps };
enum { ncclScalarDevice, ncclScalarHostImmediate };

#define NCCL_CONFIG_UNDEF_INT INT32_MIN
#define NCCL_SPLIT_NOCOLOR (-1)
enum { NCCL_SHRINK_DEFAULT = 0, NCCL_SHRINK_ABORT = 1 };
enum { NCCL_UNIQUE_ID_BYTES = 128 };
#define NCCL_CONFIG_MAGIC 0xcafebeefu

/* By value in memory, as the ABI has it for 128 bytes. */
typedef struct {
  char internal[NCCL_UNIQUE_ID_BYTES];
} ncclUniqueId;

typedef struct {
  size_t size;
  unsigned magic, version;
  int blocking, cgaClusterSize, minCTAs, maxCTAs;
  const char *netName;
  int splitShare, trafficClass;
  const char *commName;
  int collnetEnable, CTAPolicy, shrinkShare, nvlsCTAs;
} ncclConfig_t;

typedef struct {
  size_t size;
  unsigned magic, version;
  float estimatedTime;
} ncclSimInfo_t;

/* NCCL(name, (parameters)) declares ncclX and pncclX, two names of one address. */
#define NCCL_RETURNING(type, name, params)                                                                             \
  type nccl##name params;                                                                                              \
  type pnccl##name params
#define NCCL(name, params) NCCL_RETURNING(ncclResult_t, name, params)

NCCL(GetVersion, (int *version));
NCCL(GetUniqueId, (ncclUniqueId * id));
NCCL_RETURNING(const char *, GetErrorString, (ncclResult_t result));
NCCL_RETURNING(const char *, GetLastError, (ncclComm_t comm));
void ncclResetDebugInit(void);

NCCL(CommInitRank, (ncclComm_t * comm, int nranks, ncclUniqueId id, int rank));
NCCL(CommInitRankConfig, (ncclComm_t * comm, int nranks, ncclUniqueId id, int rank, ncclConfig_t *config));
NCCL(CommInitRankScalable,
     (ncclComm_t * comm, int nranks, int rank, int id_count, ncclUniqueId *ids, ncclConfig_t *config));
NCCL(CommInitAll, (ncclComm_t * comms, int count, const int *devices));
NCCL(CommSplit, (ncclComm_t comm, int color, int key, ncclComm_t *child, ncclConfig_t *config));
NCCL(CommShrink,
     (ncclComm_t comm, int *excluded, int excluded_count, ncclComm_t *child, ncclConfig_t *config, int flags));
NCCL(CommFinalize, (ncclComm_t comm));
NCCL(CommDestroy, (ncclComm_t comm));
NCCL(CommAbort, (ncclComm_t comm));
NCCL(CommGetAsyncError, (ncclComm_t comm, ncclResult_t *error));
NCCL(CommCount, (ncclComm_t comm, int *count));
NCCL(CommCuDevice, (ncclComm_t comm, int *device));
NCCL(CommUserRank, (ncclComm_t comm, int *rank));
NCCL(CommRegister, (ncclComm_t comm, void *buffer, size_t size, void **handle));
NCCL(CommDeregister, (ncclComm_t comm, void *handle));
NCCL(CommWindowRegister, (ncclComm_t comm, void *buffer, size_t size, ncclWindow_t *window, int flags));
NCCL(CommWindowDeregister, (ncclComm_t comm, ncclWindow_t window));
NCCL(MemAlloc, (void **memory, size_t size));
NCCL(MemFree, (void *memory));
NCCL(RedOpCreatePreMulSum,
     (ncclRedOp_t * op, void *scalar, ncclDataType_t type, ncclScalarResidence_t residence, ncclComm_t comm));
NCCL(RedOpDestroy, (ncclRedOp_t op, ncclComm_t comm));
NCCL(GroupStart, (void));
NCCL(GroupEnd, (void));
NCCL(GroupSimulateEnd, (ncclSimInfo_t * info));

NCCL(AllReduce, (const void *send, void *recv, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm,
                 cudaStream_t stream));
NCCL(ReduceScatter, (const void *send, void *recv, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm,
                     cudaStream_t stream));
NCCL(Reduce, (const void *send, void *recv, size_t count, ncclDataType_t type, ncclRedOp_t op, int root,
              ncclComm_t comm, cudaStream_t stream));
NCCL(AllGather,
     (const void *send, void *recv, size_t count, ncclDataType_t type, ncclComm_t comm, cudaStream_t stream));
NCCL(Broadcast,
     (const void *send, void *recv, size_t count, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t stream));
NCCL(Bcast, (void *buffer, size_t count, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t stream));
NCCL(Send,
     (const void *buffer, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream));
NCCL(Recv, (void *buffer, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream));

#undef NCCL
#undef NCCL_RETURNING
#endif
