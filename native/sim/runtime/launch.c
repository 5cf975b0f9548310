/* Launches, functions, graphs, waits, streams, events: one driver call each. */
#include "runtime.h"

enum { ERROR_INVALID_DEVICE_FUNCTION = 98 };

static CUresult launch(const struct driver_table *drv, const void *func, dim3 grid, dim3 block, void **args,
                       size_t smem, cudaStream_t stream) {
  CUfunction function = rt_function(drv, func);
  if (!function) return ERROR_INVALID_DEVICE_FUNCTION;
  return drv->cuLaunchKernel(function, grid.x, grid.y, grid.z, block.x, block.y, block.z, (unsigned)smem, stream, args,
                             NULL);
}

static CUresult launch_cooperative(const struct driver_table *drv, const void *func, dim3 grid, dim3 block, void **args,
                                   size_t smem, cudaStream_t stream) {
  CUfunction function = rt_function(drv, func);
  if (!function) return ERROR_INVALID_DEVICE_FUNCTION;
  return drv->cuLaunchCooperativeKernel(function, grid.x, grid.y, grid.z, block.x, block.y, block.z, (unsigned)smem,
                                        stream, args);
}

static CUresult launch_config(const struct driver_table *drv, const cudaLaunchConfig_t *config, const void *func,
                              void **args) {
  CUfunction function = rt_function(drv, func);
  if (!function || !config) return config ? ERROR_INVALID_DEVICE_FUNCTION : CUDA_ERROR_INVALID_VALUE;
  CUlaunchConfig driver_config = {
      .gridDimX = config->gridDim.x,
      .gridDimY = config->gridDim.y,
      .gridDimZ = config->gridDim.z,
      .blockDimX = config->blockDim.x,
      .blockDimY = config->blockDim.y,
      .blockDimZ = config->blockDim.z,
      .sharedMemBytes = (unsigned)config->dynamicSmemBytes,
      .hStream = config->stream,
      .attrs = config->attrs,
      .numAttrs = config->numAttrs,
  };
  return drv->cuLaunchKernelEx(&driver_config, function, args, NULL);
}

RUNTIME_TWIN(cudaLaunchKernel, _ptsz,
             (const void *func, dim3 grid, dim3 block, void **args, size_t smem, cudaStream_t stream),
             launch(drv, func, grid, block, args, smem, stream))
RUNTIME_TWIN(cudaLaunchCooperativeKernel, _ptsz,
             (const void *func, dim3 grid, dim3 block, void **args, size_t smem, cudaStream_t stream),
             launch_cooperative(drv, func, grid, block, args, smem, stream))
RUNTIME_TWIN(cudaLaunchKernelExC, _ptsz, (const cudaLaunchConfig_t *config, const void *func, void **args),
             launch_config(drv, config, func, args))
RUNTIME_TWIN(cudaLaunchHostFunc, _ptsz, (cudaStream_t stream, cudaHostFn_t func, void *data),
             drv->cuLaunchHostFunc(stream, func, data))

/* As in NVIDIA's runtime: a jump past the PLT, so that a probe at cudaLaunchKernel sees the calls of both names. */
#define TAIL_JUMP(name, target)                                                                                        \
  extern __typeof__(target) rt_local_##target __attribute__((alias(#target), visibility("hidden")));                   \
  __asm__(".pushsection .text\n.globl " #name "\n.type " #name ", @function\n" #name ":\n\tjmp rt_local_" #target      \
          "\n.size " #name ", .-" #name "\n.popsection");
TAIL_JUMP(__cudaLaunchKernel, cudaLaunchKernel)
TAIL_JUMP(__cudaLaunchKernel_ptsz, cudaLaunchKernel_ptsz)

/* graphs */
RUNTIME_TWIN(cudaGraphLaunch, _ptsz, (cudaGraphExec_t exec, cudaStream_t stream), drv->cuGraphLaunch(exec, stream))
RUNTIME_TWIN(cudaGraphUpload, _ptsz, (cudaGraphExec_t exec, cudaStream_t stream), drv->cuGraphUpload(exec, stream))
RUNTIME_TWIN(cudaStreamBeginCapture, _ptsz, (cudaStream_t stream, int mode), drv->cuStreamBeginCapture_v2(stream, mode))
RUNTIME_TWIN(cudaStreamEndCapture, _ptsz, (cudaStream_t stream, cudaGraph_t *graph),
             drv->cuStreamEndCapture(stream, graph))
RUNTIME_TWIN(cudaStreamIsCapturing, _ptsz, (cudaStream_t stream, int *status), drv->cuStreamIsCapturing(stream, status))
RUNTIME(cudaThreadExchangeStreamCaptureMode, (int *mode), drv->cuThreadExchangeStreamCaptureMode(mode))
RUNTIME(cudaGraphCreate, (cudaGraph_t * graph, unsigned flags), drv->cuGraphCreate(graph, flags))
RUNTIME(cudaGraphDestroy, (cudaGraph_t graph), drv->cuGraphDestroy(graph))
RUNTIME(cudaGraphGetNodes, (cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count),
        drv->cuGraphGetNodes(graph, nodes, count))
RUNTIME(cudaGraphInstantiate, (cudaGraphExec_t * exec, cudaGraph_t graph, unsigned long long flags),
        drv->cuGraphInstantiateWithFlags(exec, graph, flags))
RUNTIME(cudaGraphInstantiateWithFlags, (cudaGraphExec_t * exec, cudaGraph_t graph, unsigned long long flags),
        drv->cuGraphInstantiateWithFlags(exec, graph, flags))
RUNTIME_TWIN(cudaGraphInstantiateWithParams, _ptsz,
             (cudaGraphExec_t * exec, cudaGraph_t graph, CUDA_GRAPH_INSTANTIATE_PARAMS *params),
             drv->cuGraphInstantiateWithParams(exec, graph, params))
RUNTIME(cudaUserObjectCreate,
        (cudaUserObject_t * out, void *data, cudaHostFn_t destroy, unsigned references, unsigned flags),
        drv->cuUserObjectCreate(out, data, destroy, references, flags))
RUNTIME(cudaUserObjectRetain, (cudaUserObject_t object, unsigned count), drv->cuUserObjectRetain(object, count))
RUNTIME(cudaUserObjectRelease, (cudaUserObject_t object, unsigned count), drv->cuUserObjectRelease(object, count))
RUNTIME(cudaGraphRetainUserObject, (cudaGraph_t graph, cudaUserObject_t object, unsigned count, unsigned flags),
        drv->cuGraphRetainUserObject(graph, object, count, flags))
RUNTIME(cudaGraphReleaseUserObject, (cudaGraph_t graph, cudaUserObject_t object, unsigned count),
        drv->cuGraphReleaseUserObject(graph, object, count))
RUNTIME(cudaGraphExecDestroy, (cudaGraphExec_t exec), drv->cuGraphExecDestroy(exec))

/* Version 13 gave the plain name the arguments of _v3. */
#define CAPTURE_INFO_V3                                                                                                \
  (cudaStream_t stream, int *status, unsigned long long *id, cudaGraph_t *graph, const cudaGraphNode_t **nodes,        \
   const void **edges, size_t *count)
#define CALL_CAPTURE_INFO_V3                                                                                           \
  drv->cuStreamGetCaptureInfo_v3(stream, status, (uint64_t *)id, graph, (const CUgraphNode **)nodes, edges, count)
#if RUNTIME_MAJOR >= 13
cudaError_t cudaStreamGetCaptureInfo CAPTURE_INFO_V3;
cudaError_t cudaStreamGetCaptureInfo_ptsz CAPTURE_INFO_V3;
RUNTIME_TWIN(cudaStreamGetCaptureInfo, _ptsz, CAPTURE_INFO_V3, CALL_CAPTURE_INFO_V3)
#else
RUNTIME_TWIN(cudaStreamGetCaptureInfo, _ptsz, (cudaStream_t stream, int *status, unsigned long long *id),
             drv->cuStreamGetCaptureInfo_v2(stream, status, (uint64_t *)id, NULL, NULL, NULL))
RUNTIME_TWIN(cudaStreamGetCaptureInfo_v2, _ptsz,
             (cudaStream_t stream, int *status, unsigned long long *id, cudaGraph_t *graph,
              const cudaGraphNode_t **nodes, size_t *count),
             drv->cuStreamGetCaptureInfo_v2(stream, status, (uint64_t *)id, graph, (const CUgraphNode **)nodes, count))
RUNTIME_TWIN(cudaStreamGetCaptureInfo_v3, _ptsz, CAPTURE_INFO_V3, CALL_CAPTURE_INFO_V3)
#endif

/* waits */
RUNTIME(cudaDeviceSynchronize, (void), drv->cuCtxSynchronize())
#if RUNTIME_MAJOR < 13
RUNTIME(cudaThreadSynchronize, (void), drv->cuCtxSynchronize())
#endif
RUNTIME_TWIN(cudaStreamSynchronize, _ptsz, (cudaStream_t stream), drv->cuStreamSynchronize(stream))
RUNTIME(cudaEventSynchronize, (cudaEvent_t event), drv->cuEventSynchronize(event))

/* streams */
RUNTIME(cudaStreamCreate, (cudaStream_t * stream), drv->cuStreamCreate(stream, CU_STREAM_DEFAULT))
RUNTIME(cudaStreamCreateWithFlags, (cudaStream_t * stream, unsigned flags), drv->cuStreamCreate(stream, flags))
RUNTIME(cudaStreamCreateWithPriority, (cudaStream_t * stream, unsigned flags, int priority),
        drv->cuStreamCreateWithPriority(stream, flags, priority))
RUNTIME(cudaStreamDestroy, (cudaStream_t stream), drv->cuStreamDestroy_v2(stream))
RUNTIME_TWIN(cudaStreamQuery, _ptsz, (cudaStream_t stream), drv->cuStreamQuery(stream))
RUNTIME_TWIN(cudaStreamGetFlags, _ptsz, (cudaStream_t stream, unsigned *flags), drv->cuStreamGetFlags(stream, flags))
RUNTIME_TWIN(cudaStreamGetPriority, _ptsz, (cudaStream_t stream, int *priority),
             drv->cuStreamGetPriority(stream, priority))
RUNTIME_TWIN(cudaStreamGetId, _ptsz, (cudaStream_t stream, unsigned long long *id), drv->cuStreamGetId(stream, id))
RUNTIME_TWIN(cudaStreamAddCallback, _ptsz,
             (cudaStream_t stream, cudaStreamCallback_t callback, void *data, unsigned flags),
             drv->cuStreamAddCallback(stream, callback, data, flags))

/* events */
RUNTIME(cudaEventCreate, (cudaEvent_t * event), drv->cuEventCreate(event, 0))
RUNTIME(cudaEventCreateWithFlags, (cudaEvent_t * event, unsigned flags), drv->cuEventCreate(event, flags))
RUNTIME(cudaEventDestroy, (cudaEvent_t event), drv->cuEventDestroy_v2(event))
RUNTIME(cudaEventQuery, (cudaEvent_t event), drv->cuEventQuery(event))
RUNTIME(cudaEventElapsedTime, (float *ms, cudaEvent_t start, cudaEvent_t end), drv->cuEventElapsedTime(ms, start, end))
#if RUNTIME_MAJOR < 13
RUNTIME(cudaEventElapsedTime_v2, (float *ms, cudaEvent_t start, cudaEvent_t end),
        drv->cuEventElapsedTime_v2(ms, start, end))
#endif
RUNTIME_TWIN(cudaEventRecord, _ptsz, (cudaEvent_t event, cudaStream_t stream), drv->cuEventRecord(event, stream))
RUNTIME_TWIN(cudaEventRecordWithFlags, _ptsz, (cudaEvent_t event, cudaStream_t stream, unsigned flags),
             drv->cuEventRecordWithFlags(event, stream, flags))
RUNTIME_TWIN(cudaStreamWaitEvent, _ptsz, (cudaStream_t stream, cudaEvent_t event, unsigned flags),
             drv->cuStreamWaitEvent(stream, event, flags))

/* controls of the simulation */
RUNTIME(stallscope_sim_hold, (cudaStream_t stream, void **hold), drv->stallscope_sim_hold(stream, hold))
RUNTIME(stallscope_sim_release, (void *hold), drv->stallscope_sim_release(hold))
RUNTIME(stallscope_sim_set_next_kernel_ns, (uint64_t duration_ns), drv->stallscope_sim_set_next_kernel_ns(duration_ns))
