/* Types of the public CUDA ABI that the simulated stack uses, written for this project from the public manuals.
 * Only what we export is here; names match CUDA's so that a program reads the same against either header.
 */
#ifndef SIM_CUDA_TYPES_H
#define SIM_CUDA_TYPES_H

#include <stddef.h>
#include <stdint.h>

/* Enums are plain ints here: the ABI is the same and unknown values need no cast. */
typedef int CUresult;
typedef int cudaError_t;
typedef int CUdevice;
typedef uintptr_t CUdeviceptr;

typedef struct CUctx_st *CUcontext;
typedef struct CUstream_st *CUstream, *cudaStream_t;
typedef struct CUevent_st *CUevent, *cudaEvent_t;
typedef struct CUfunc_st *CUfunction, *cudaFunction_t;
typedef struct CUkern_st *CUkernel, *cudaKernel_t;
typedef struct CUmod_st *CUmodule;
typedef struct CUlib_st *CUlibrary, *cudaLibrary_t;
typedef struct CUgraph_st *CUgraph, *cudaGraph_t;
typedef struct CUgraphExec_st *CUgraphExec, *cudaGraphExec_t;
typedef struct CUgraphNode_st *CUgraphNode, *cudaGraphNode_t;
typedef struct CUmemPool_st *CUmemoryPool, *cudaMemPool_t;
typedef struct cudaArray *cudaArray_t;
typedef unsigned long long CUmemGenericAllocationHandle;
typedef struct CUuserObject_st *CUuserObject, *cudaUserObject_t;
typedef void (*CUhostFn)(void *data);
typedef CUhostFn cudaHostFn_t;
typedef void (*CUstreamCallback)(CUstream stream, CUresult status, void *data);
typedef CUstreamCallback cudaStreamCallback_t;

#define CU_STREAM_LEGACY ((CUstream)0x1)
#define CU_STREAM_PER_THREAD ((CUstream)0x2)
#define cudaStreamLegacy CU_STREAM_LEGACY
#define cudaStreamPerThread CU_STREAM_PER_THREAD

enum { /* driver and runtime share these numbers */
       CUDA_SUCCESS = 0,
       CUDA_ERROR_INVALID_VALUE = 1,
       CUDA_ERROR_OUT_OF_MEMORY = 2,
       CUDA_ERROR_NOT_INITIALIZED = 3,
       CUDA_ERROR_NO_DEVICE = 100,
       CUDA_ERROR_INVALID_DEVICE = 101,
       CUDA_ERROR_INVALID_CONTEXT = 201,
       CUDA_ERROR_INVALID_HANDLE = 400,
       CUDA_ERROR_NOT_FOUND = 500,
       CUDA_ERROR_NOT_READY = 600,
       CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED = 712,
       CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED = 713,
       CUDA_ERROR_NOT_SUPPORTED = 801,
       CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900,
       CUDA_ERROR_STREAM_CAPTURE_INVALIDATED = 901,
       CUDA_ERROR_FILE_NOT_FOUND = 301,
       CUDA_ERROR_ILLEGAL_STATE = 401,
       CUDA_ERROR_UNKNOWN = 999,
};
#define cudaSuccess CUDA_SUCCESS
#define cudaErrorInvalidValue CUDA_ERROR_INVALID_VALUE
#define cudaErrorMemoryAllocation CUDA_ERROR_OUT_OF_MEMORY
#define cudaErrorInsufficientDriver 35
#define cudaErrorInvalidDevice CUDA_ERROR_INVALID_DEVICE
#define cudaErrorNotReady CUDA_ERROR_NOT_READY
#define cudaErrorNotSupported CUDA_ERROR_NOT_SUPPORTED

enum { CU_STREAM_DEFAULT = 0, CU_STREAM_NON_BLOCKING = 1 };
#define cudaStreamNonBlocking CU_STREAM_NON_BLOCKING
enum { CU_EVENT_BLOCKING_SYNC = 1, CU_EVENT_DISABLE_TIMING = 2, CU_EVENT_INTERPROCESS = 4 };
enum { CU_CTX_SCHED_SPIN = 1, CU_CTX_SCHED_YIELD = 2, CU_CTX_SCHED_BLOCKING_SYNC = 4, CU_CTX_SCHED_MASK = 7 };
#define cudaDeviceScheduleSpin CU_CTX_SCHED_SPIN
#define cudaDeviceScheduleYield CU_CTX_SCHED_YIELD
#define cudaDeviceScheduleBlockingSync CU_CTX_SCHED_BLOCKING_SYNC
enum { CU_MEMORYTYPE_HOST = 1, CU_MEMORYTYPE_DEVICE = 2, CU_MEMORYTYPE_ARRAY = 3, CU_MEMORYTYPE_UNIFIED = 4 };
enum { cudaMemoryTypeUnregistered = 0, cudaMemoryTypeHost = 1, cudaMemoryTypeDevice = 2, cudaMemoryTypeManaged = 3 };
enum cudaMemcpyKind {
  cudaMemcpyHostToHost,
  cudaMemcpyHostToDevice,
  cudaMemcpyDeviceToHost,
  cudaMemcpyDeviceToDevice,
  cudaMemcpyDefault,
};
enum { CU_STREAM_CAPTURE_STATUS_NONE = 0, CU_STREAM_CAPTURE_STATUS_ACTIVE = 1 };

typedef struct {
  char bytes[16];
} CUuuid;
typedef struct dim3 {
  unsigned x, y, z;
} dim3;
struct cudaExtent {
  size_t width, height, depth;
};
struct cudaPos {
  size_t x, y, z;
};
struct cudaPitchedPtr {
  void *ptr;
  size_t pitch, xsize, ysize;
};

typedef struct cudaLaunchConfig_st {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  void *attrs;
  unsigned numAttrs;
} cudaLaunchConfig_t;

typedef struct CUlaunchConfig_st {
  unsigned gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ, sharedMemBytes;
  CUstream hStream;
  void *attrs;
  unsigned numAttrs;
} CUlaunchConfig;

struct cudaMemcpy3DParms {
  cudaArray_t srcArray;
  struct cudaPos srcPos;
  struct cudaPitchedPtr srcPtr;
  cudaArray_t dstArray;
  struct cudaPos dstPos;
  struct cudaPitchedPtr dstPtr;
  struct cudaExtent extent;
  enum cudaMemcpyKind kind;
};

typedef struct CUDA_MEMCPY2D_st {
  size_t srcXInBytes, srcY;
  int srcMemoryType;
  const void *srcHost;
  CUdeviceptr srcDevice;
  void *srcArray;
  size_t srcPitch;
  size_t dstXInBytes, dstY;
  int dstMemoryType;
  void *dstHost;
  CUdeviceptr dstDevice;
  void *dstArray;
  size_t dstPitch;
  size_t WidthInBytes, Height;
} CUDA_MEMCPY2D;

typedef struct CUDA_MEMCPY3D_st {
  size_t srcXInBytes, srcY, srcZ, srcLOD;
  int srcMemoryType;
  const void *srcHost;
  CUdeviceptr srcDevice;
  void *srcArray, *reserved0;
  size_t srcPitch, srcHeight;
  size_t dstXInBytes, dstY, dstZ, dstLOD;
  int dstMemoryType;
  void *dstHost;
  CUdeviceptr dstDevice;
  void *dstArray, *reserved1;
  size_t dstPitch, dstHeight;
  size_t WidthInBytes, Height, Depth;
} CUDA_MEMCPY3D;

struct cudaPointerAttributes {
  int type, device;
  void *devicePointer, *hostPointer;
  long reserved[8]; /* CUDA 13 has it; writers of the CUDA 12 layout stop before it */
};

struct cudaFuncAttributes {
  size_t sharedSizeBytes, constSizeBytes, localSizeBytes;
  int maxThreadsPerBlock, numRegs, ptxVersion, binaryVersion, cacheModeCA, maxDynamicSharedSizeBytes;
  int rest[23];
};

typedef struct {
  unsigned long long flags;
  CUstream uploadStream;
  CUgraphNode errNode;
  int result;
} CUDA_GRAPH_INSTANTIATE_PARAMS;

typedef struct {
  int type, handle_types;
  struct {
    int type, id;
  } location;
  void *win32;
  unsigned char compression, rdma;
  unsigned short usage;
  unsigned char reserved[4];
} CUmemAllocationProp;

typedef struct {
  int id;
  union {
    uint64_t bytes[8];
    struct {
      CUevent event;
      int flags;
    } event;
  };
} CUlaunchAttribute;

/* Sixty-four bytes that a program sends to another by its own ways. The other opens the descriptor through /proc, so
 * both belong to one user, and the first has to live until the second has opened it, as with the real handles. */
struct ipc_handle {
  uint32_t magic;
  int32_t pid, fd, device;
  uint64_t bytes, inode;
  uint64_t unused[4];
};

_Static_assert(sizeof(struct ipc_handle) == 64, "public ABI");
_Static_assert(sizeof(CUmemAllocationProp) == 32, "public ABI");
_Static_assert(sizeof(CUlaunchAttribute) == 72, "public ABI");
_Static_assert(sizeof(cudaLaunchConfig_t) == 56, "public ABI");
_Static_assert(sizeof(CUlaunchConfig) == 56, "public ABI");
_Static_assert(offsetof(CUlaunchConfig, hStream) == 32, "public ABI");
_Static_assert(sizeof(CUDA_MEMCPY2D) == 128, "public ABI");
_Static_assert(sizeof(CUDA_MEMCPY3D) == 200, "public ABI");
_Static_assert(sizeof(struct cudaMemcpy3DParms) == 160, "public ABI");

#endif
