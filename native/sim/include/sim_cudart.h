/* Prototypes of the simulated CUDA runtime (libcudart.so.12 and .13): the part of the public ABI it exports.
 *
 * RT(name, (parameters)); RT_TWIN also declares name##suffix, in which stream 0 is the calling thread's own.
 */
#ifndef SIM_CUDART_H
#define SIM_CUDART_H

#include "sim_cuda_types.h"

#define RT(name, params) cudaError_t name params
#define RT_TWIN(name, suffix, params)                                                                                  \
  cudaError_t name params;                                                                                             \
  cudaError_t name##suffix params
#define LAUNCH_PARAMS (const void *func, dim3 grid, dim3 block, void **args, size_t smem, cudaStream_t stream)

/* launches */
RT_TWIN(cudaLaunchKernel, _ptsz, LAUNCH_PARAMS);
RT_TWIN(__cudaLaunchKernel, _ptsz,
        (cudaKernel_t kernel, dim3 grid, dim3 block, void **args, size_t smem, cudaStream_t stream));
RT_TWIN(cudaLaunchCooperativeKernel, _ptsz, LAUNCH_PARAMS);
RT_TWIN(cudaLaunchKernelExC, _ptsz, (const cudaLaunchConfig_t *config, const void *func, void **args));
RT_TWIN(cudaLaunchHostFunc, _ptsz, (cudaStream_t stream, cudaHostFn_t func, void *data));
#undef LAUNCH_PARAMS

/* graphs */
RT_TWIN(cudaGraphLaunch, _ptsz, (cudaGraphExec_t exec, cudaStream_t stream));
RT_TWIN(cudaGraphUpload, _ptsz, (cudaGraphExec_t exec, cudaStream_t stream));
RT_TWIN(cudaStreamBeginCapture, _ptsz, (cudaStream_t stream, int mode));
RT_TWIN(cudaStreamEndCapture, _ptsz, (cudaStream_t stream, cudaGraph_t *graph));
RT_TWIN(cudaStreamIsCapturing, _ptsz, (cudaStream_t stream, int *status));
#if !defined(RUNTIME_MAJOR) || RUNTIME_MAJOR < 13
RT_TWIN(cudaStreamGetCaptureInfo, _ptsz, (cudaStream_t stream, int *status, unsigned long long *id));
RT_TWIN(cudaStreamGetCaptureInfo_v2, _ptsz,
        (cudaStream_t stream, int *status, unsigned long long *id, cudaGraph_t *graph, const cudaGraphNode_t **nodes,
         size_t *count));
RT_TWIN(cudaStreamGetCaptureInfo_v3, _ptsz,
        (cudaStream_t stream, int *status, unsigned long long *id, cudaGraph_t *graph, const cudaGraphNode_t **nodes,
         const void **edges, size_t *count));
#endif
RT(cudaThreadExchangeStreamCaptureMode, (int *mode));
RT(cudaGraphCreate, (cudaGraph_t * graph, unsigned flags));
RT(cudaGraphDestroy, (cudaGraph_t graph));
RT(cudaGraphGetNodes, (cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count));
RT(cudaGraphInstantiate, (cudaGraphExec_t * exec, cudaGraph_t graph, unsigned long long flags));
RT(cudaGraphInstantiateWithFlags, (cudaGraphExec_t * exec, cudaGraph_t graph, unsigned long long flags));
RT_TWIN(cudaGraphInstantiateWithParams, _ptsz,
        (cudaGraphExec_t * exec, cudaGraph_t graph, CUDA_GRAPH_INSTANTIATE_PARAMS *params));
RT(cudaUserObjectCreate,
   (cudaUserObject_t * out, void *data, cudaHostFn_t destroy, unsigned references, unsigned flags));
RT(cudaUserObjectRetain, (cudaUserObject_t object, unsigned count));
RT(cudaUserObjectRelease, (cudaUserObject_t object, unsigned count));
RT(cudaGraphRetainUserObject, (cudaGraph_t graph, cudaUserObject_t object, unsigned count, unsigned flags));
RT(cudaGraphReleaseUserObject, (cudaGraph_t graph, cudaUserObject_t object, unsigned count));
RT(cudaGraphExecDestroy, (cudaGraphExec_t exec));

/* waits */
RT(cudaDeviceSynchronize, (void));
RT(cudaThreadSynchronize, (void));
RT_TWIN(cudaStreamSynchronize, _ptsz, (cudaStream_t stream));
RT(cudaEventSynchronize, (cudaEvent_t event));

/* streams and events */
RT(cudaStreamCreate, (cudaStream_t * stream));
RT(cudaStreamCreateWithFlags, (cudaStream_t * stream, unsigned flags));
RT(cudaStreamCreateWithPriority, (cudaStream_t * stream, unsigned flags, int priority));
RT(cudaStreamDestroy, (cudaStream_t stream));
RT_TWIN(cudaStreamQuery, _ptsz, (cudaStream_t stream));
RT_TWIN(cudaStreamGetFlags, _ptsz, (cudaStream_t stream, unsigned *flags));
RT_TWIN(cudaStreamGetPriority, _ptsz, (cudaStream_t stream, int *priority));
RT_TWIN(cudaStreamGetId, _ptsz, (cudaStream_t stream, unsigned long long *id));
RT_TWIN(cudaStreamAddCallback, _ptsz, (cudaStream_t stream, cudaStreamCallback_t callback, void *data, unsigned flags));
RT(cudaEventCreate, (cudaEvent_t * event));
RT(cudaEventCreateWithFlags, (cudaEvent_t * event, unsigned flags));
RT(cudaEventDestroy, (cudaEvent_t event));
RT(cudaEventQuery, (cudaEvent_t event));
RT(cudaEventElapsedTime, (float *ms, cudaEvent_t start, cudaEvent_t end));
RT(cudaEventElapsedTime_v2, (float *ms, cudaEvent_t start, cudaEvent_t end));
RT_TWIN(cudaEventRecord, _ptsz, (cudaEvent_t event, cudaStream_t stream));
RT_TWIN(cudaEventRecordWithFlags, _ptsz, (cudaEvent_t event, cudaStream_t stream, unsigned flags));
RT_TWIN(cudaStreamWaitEvent, _ptsz, (cudaStream_t stream, cudaEvent_t event, unsigned flags));

/* copies */
RT_TWIN(cudaMemcpy, _ptds, (void *dst, const void *src, size_t bytes, int kind));
RT_TWIN(cudaMemcpyAsync, _ptsz, (void *dst, const void *src, size_t bytes, int kind, cudaStream_t stream));
RT_TWIN(cudaMemcpy2D, _ptds,
        (void *dst, size_t dpitch, const void *src, size_t spitch, size_t width, size_t height, int kind));
RT_TWIN(cudaMemcpy2DAsync, _ptsz,
        (void *dst, size_t dpitch, const void *src, size_t spitch, size_t width, size_t height, int kind,
         cudaStream_t stream));
RT_TWIN(cudaMemcpy3D, _ptds, (const struct cudaMemcpy3DParms *params));
RT_TWIN(cudaMemcpy3DAsync, _ptsz, (const struct cudaMemcpy3DParms *params, cudaStream_t stream));
RT(cudaMemcpyPeer, (void *dst, int dst_device, const void *src, int src_device, size_t bytes));
RT(cudaMemcpyPeerAsync,
   (void *dst, int dst_device, const void *src, int src_device, size_t bytes, cudaStream_t stream));
RT_TWIN(cudaMemcpyToSymbol, _ptds, (const void *symbol, const void *src, size_t bytes, size_t offset, int kind));
RT_TWIN(cudaMemcpyToSymbolAsync, _ptsz,
        (const void *symbol, const void *src, size_t bytes, size_t offset, int kind, cudaStream_t stream));
RT_TWIN(cudaMemcpyFromSymbol, _ptds, (void *dst, const void *symbol, size_t bytes, size_t offset, int kind));
RT_TWIN(cudaMemcpyFromSymbolAsync, _ptsz,
        (void *dst, const void *symbol, size_t bytes, size_t offset, int kind, cudaStream_t stream));
RT_TWIN(cudaMemset, _ptds, (void *dst, int value, size_t bytes));
RT_TWIN(cudaMemsetAsync, _ptsz, (void *dst, int value, size_t bytes, cudaStream_t stream));
RT_TWIN(cudaMemset2D, _ptds, (void *dst, size_t pitch, int value, size_t width, size_t height));
RT_TWIN(cudaMemset2DAsync, _ptsz,
        (void *dst, size_t pitch, int value, size_t width, size_t height, cudaStream_t stream));

/* memory */
RT(cudaMalloc, (void **out, size_t bytes));
RT(cudaMallocManaged, (void **out, size_t bytes, unsigned flags));
RT(cudaMallocPitch, (void **out, size_t *pitch, size_t width, size_t height));
RT(cudaMallocHost, (void **out, size_t bytes));
RT(cudaHostAlloc, (void **out, size_t bytes, unsigned flags));
RT(cudaHostRegister, (void *host, size_t bytes, unsigned flags));
RT(cudaHostUnregister, (void *host));
RT(cudaHostGetDevicePointer, (void **out, void *host, unsigned flags));
RT(cudaFree, (void *device));
RT(cudaFreeHost, (void *host));
RT(cudaMemGetInfo, (size_t * free_bytes, size_t *total_bytes));
RT(cudaPointerGetAttributes, (struct cudaPointerAttributes * attributes, const void *pointer));
RT_TWIN(cudaMallocAsync, _ptsz, (void **out, size_t bytes, cudaStream_t stream));
RT_TWIN(cudaMallocFromPoolAsync, _ptsz, (void **out, size_t bytes, cudaMemPool_t pool, cudaStream_t stream));
RT_TWIN(cudaFreeAsync, _ptsz, (void *device, cudaStream_t stream));
RT(cudaDeviceGetDefaultMemPool, (cudaMemPool_t * pool, int device));
RT(cudaDeviceGetMemPool, (cudaMemPool_t * pool, int device));
RT(cudaMemPoolCreate, (cudaMemPool_t * pool, const void *properties));
RT(cudaMemPoolDestroy, (cudaMemPool_t pool));
RT(cudaMemPoolTrimTo, (cudaMemPool_t pool, size_t bytes));
RT(cudaMemPoolSetAttribute, (cudaMemPool_t pool, int attribute, void *value));
RT(cudaMemPoolGetAttribute, (cudaMemPool_t pool, int attribute, void *value));
RT(cudaMemPoolSetAccess, (cudaMemPool_t pool, const void *descriptors, size_t count));
RT(cudaIpcGetMemHandle, (void *handle, void *device));
RT(cudaIpcOpenMemHandle, (void **out, struct ipc_handle handle, unsigned flags));
RT(cudaIpcCloseMemHandle, (void *device));
RT(cudaIpcGetEventHandle, (void *handle, cudaEvent_t event));
RT(cudaIpcOpenEventHandle, (cudaEvent_t * event, struct ipc_handle handle));

/* devices */
RT(cudaDeviceGetGraphMemAttribute, (int device, int attribute, void *value));
RT(cudaDeviceSetGraphMemAttribute, (int device, int attribute, void *value));
RT(cudaGetDeviceCount, (int *count));
RT(cudaGetDevice, (int *device));
RT(cudaSetDevice, (int device));
RT(cudaInitDevice, (int device, unsigned device_flags, unsigned flags));
RT(cudaSetDeviceFlags, (unsigned flags));
RT(cudaGetDeviceFlags, (unsigned *flags));
RT(cudaDeviceReset, (void));
RT(cudaGetDeviceProperties, (void *properties, int device));
RT(cudaGetDeviceProperties_v2, (void *properties, int device));
RT(cudaDeviceGetAttribute, (int *value, int attribute, int device));
RT(cudaDeviceGetPCIBusId, (char *text, int length, int device));
RT(cudaDeviceGetByPCIBusId, (int *device, const char *text));
RT(cudaDeviceCanAccessPeer, (int *can, int device, int peer));
RT(cudaDeviceEnablePeerAccess, (int peer, unsigned flags));
RT(cudaDeviceDisablePeerAccess, (int peer));
RT(cudaDeviceGetStreamPriorityRange, (int *least, int *greatest));
RT(cudaDeviceGetLimit, (size_t * value, int limit));
RT(cudaDeviceSetLimit, (int limit, size_t value));
RT(cudaRuntimeGetVersion, (int *version));
RT(cudaDriverGetVersion, (int *version));
RT(cudaGetLastError, (void));
RT(cudaPeekAtLastError, (void));
const char *cudaGetErrorString(cudaError_t error);
const char *cudaGetErrorName(cudaError_t error);
RT_TWIN(cudaGetDriverEntryPoint, _ptsz, (const char *symbol, void **address, unsigned long long flags, int *status));
RT_TWIN(cudaGetDriverEntryPointByVersion, _ptsz,
        (const char *symbol, void **address, unsigned version, unsigned long long flags, int *status));
RT(cudaProfilerStart, (void));
RT(cudaProfilerStop, (void));

/* functions, libraries, registration */
RT(cudaFuncGetAttributes, (struct cudaFuncAttributes * attributes, const void *func));
RT(cudaFuncSetAttribute, (const void *func, int attribute, int value));
RT(cudaFuncSetCacheConfig, (const void *func, int config));
RT(cudaKernelSetAttributeForDevice, (cudaKernel_t kernel, int attribute, int value, int device));
RT(cudaGetFuncBySymbol, (cudaFunction_t * function, const void *func));
RT(cudaGetKernel, (cudaKernel_t * kernel, const void *func));
RT(cudaFuncGetName, (const char **name, const void *func));
RT(cudaGetSymbolAddress, (void **address, const void *symbol));
RT(cudaGetSymbolSize, (size_t * bytes, const void *symbol));
RT(cudaOccupancyMaxActiveBlocksPerMultiprocessor, (int *count, const void *func, int block_size, size_t smem));
RT(cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags,
   (int *count, const void *func, int block_size, size_t smem, unsigned flags));
RT(cudaLibraryLoadData, (cudaLibrary_t * library, const void *code, int *jit, void **jit_values, unsigned jit_count,
                         int *options, void **values, unsigned count));
RT(cudaLibraryUnload, (cudaLibrary_t library));
RT(cudaLibraryGetKernel, (cudaKernel_t * kernel, cudaLibrary_t library, const char *name));
RT(__cudaGetKernel, (cudaKernel_t * kernel, const void *func));
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t smem, cudaStream_t stream);
RT(__cudaPopCallConfiguration, (dim3 * grid, dim3 *block, size_t *smem, void *stream));
void **__cudaRegisterFatBinary(void *image);
void __cudaRegisterFatBinaryEnd(void **handle);
void __cudaUnregisterFatBinary(void **handle);
char __cudaInitModule(void **handle);
void __cudaRegisterFunction(void **handle, const char *host, char *device, const char *name, int limit, void *tid,
                            void *bid, dim3 *block, dim3 *grid, int *warp);
void __cudaRegisterVar(void **handle, char *host, char *device, const char *name, int external, size_t bytes,
                       int constant, int global);
void __cudaRegisterManagedVar(void **handle, void **host, char *device, const char *name, int external, size_t bytes,
                              int constant, int global);

/* Not CUDA: the simulation's own controls, see README.md. */
RT(stallscope_sim_set_next_kernel_ns, (uint64_t duration_ns));
RT(stallscope_sim_name_function, (const void *func, const char *name));
RT(stallscope_sim_hold, (cudaStream_t stream, void **hold));
RT(stallscope_sim_release, (void *hold));

#undef RT
#undef RT_TWIN

#endif
