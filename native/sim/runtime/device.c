/* Devices, functions, libraries, driver entry points, errors in words. */
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "runtime.h"

#define DRIVER_ONLY(name, params, expression)                                                                          \
  EXPORT cudaError_t name params {                                                                                     \
    const struct driver_table *drv = rt_driver(PLAIN);                                                                 \
    return drv ? rt_finish(expression) : rt_failed();                                                                  \
  }

DRIVER_ONLY(cudaGetDeviceCount, (int *count), drv->cuDeviceGetCount(count))
DRIVER_ONLY(cudaDeviceGetAttribute, (int *value, int attribute, int device),
            drv->cuDeviceGetAttribute(value, attribute, device))
DRIVER_ONLY(cudaDeviceGetPCIBusId, (char *text, int length, int device), drv->cuDeviceGetPCIBusId(text, length, device))
DRIVER_ONLY(cudaDeviceGetByPCIBusId, (int *device, const char *text), drv->cuDeviceGetByPCIBusId(device, text))
DRIVER_ONLY(cudaDeviceCanAccessPeer, (int *can, int device, int peer), drv->cuDeviceCanAccessPeer(can, device, peer))
DRIVER_ONLY(cudaSetDeviceFlags, (unsigned flags), drv->cuDevicePrimaryCtxSetFlags_v2(rt_device(), flags))
DRIVER_ONLY(cudaInitDevice, (int device, unsigned device_flags, unsigned flags),
            ((void)device_flags, (void)flags, rt_context_of(device) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE))
RUNTIME(cudaGetDeviceFlags, (unsigned *flags), drv->cuCtxGetFlags(flags))
RUNTIME(cudaDeviceReset, (void), drv->cuDevicePrimaryCtxReset_v2(rt_device()))
RUNTIME(cudaDeviceEnablePeerAccess, (int peer, unsigned flags), drv->cuCtxEnablePeerAccess(rt_context_of(peer), flags))
RUNTIME(cudaDeviceDisablePeerAccess, (int peer), drv->cuCtxDisablePeerAccess(rt_context_of(peer)))
RUNTIME(cudaDeviceGetStreamPriorityRange, (int *least, int *greatest),
        drv->cuCtxGetStreamPriorityRange(least, greatest))
RUNTIME(cudaDeviceGetLimit, (size_t * value, int limit), drv->cuCtxGetLimit(value, limit))
RUNTIME(cudaDeviceSetLimit, (int limit, size_t value), drv->cuCtxSetLimit(limit, value))
RUNTIME(cudaProfilerStart, (void), CUDA_SUCCESS)
RUNTIME(cudaProfilerStop, (void), CUDA_SUCCESS)

EXPORT cudaError_t cudaDriverGetVersion(int *version) {
  const struct driver_table *drv = rt_driver(PLAIN);
  if (!version) return rt_finish(cudaErrorInvalidValue);
  *version = 0; /* what a machine without a driver says, with success */
  return drv ? rt_finish(drv->cuDriverGetVersion(version)) : cudaSuccess;
}

EXPORT cudaError_t cudaRuntimeGetVersion(int *version) {
  if (!version) return rt_finish(cudaErrorInvalidValue);
  *version = RUNTIME_VERSION;
  return cudaSuccess;
}

/* Where cudaDeviceProp keeps what; CUDA 13 took fields out, so the two versions differ behind sharedMemPerBlock. */
enum {
  PROP_NAME = 0,
  PROP_UUID = 256,
  PROP_TOTAL_MEMORY = 288,
  PROP_SHARED_PER_BLOCK = 296,
  PROP_BYTES = RUNTIME_MAJOR >= 13 ? 1008 : 712
};
static const struct {
  int offset12, offset13, attribute, wide;
} properties[] = {
    {304, 304, 12, 0}, /* regsPerBlock */
    {308, 308, 10, 0}, /* warpSize */
    {320, 320, 1, 0},  /* maxThreadsPerBlock */
    {324, 324, 2, 0},  /* maxThreadsDim */
    {328, 328, 3, 0},  /* maxThreadsDim */
    {332, 332, 4, 0},  /* maxThreadsDim */
    {336, 336, 5, 0},  /* maxGridSize */
    {340, 340, 6, 0},  /* maxGridSize */
    {344, 344, 7, 0},  /* maxGridSize */
    {296, 296, 8, 1},  /* sharedMemPerBlock */
    {360, 360, 75, 0}, /* major */
    {364, 364, 76, 0}, /* minor */
    {388, 384, 16, 0}, /* multiProcessorCount */
    {400, 392, 19, 0}, /* canMapHostMemory */
    {576, 560, 31, 0}, /* concurrentKernels */
    {584, 568, 33, 0}, /* pciBusID */
    {600, 584, 40, 0}, /* asyncEngineCount */
    {604, 588, 41, 0}, /* unifiedAddressing */
    {616, 596, 38, 0}, /* l2CacheSize */
    {624, 604, 39, 0}, /* maxThreadsPerMultiProcessor */
    {640, 624, 81, 1}, /* sharedMemPerMultiprocessor */
    {648, 632, 82, 0}, /* regsPerMultiprocessor */
    {652, 636, 83, 0}, /* managedMemory */
    {688, 668, 95, 0}, /* cooperativeLaunch */
    {696, 672, 97, 1}, /* sharedMemPerBlockOptin */
};

static void put(char *base, int offset, const void *value, size_t bytes) {
  memcpy(base + offset, value, bytes);
}

static CUresult device_properties(const struct driver_table *drv, char *out, int device) {
  size_t total = 0;
  int count = 0;
  drv->cuDeviceGetCount(&count);
  if (!out || device < 0 || device >= count) return out ? CUDA_ERROR_INVALID_DEVICE : CUDA_ERROR_INVALID_VALUE;
  memset(out, 0, PROP_BYTES);
  drv->cuDeviceGetName(out + PROP_NAME, 256, device);
  drv->cuDeviceGetUuid((CUuuid *)(out + PROP_UUID), device);
  drv->cuDeviceTotalMem_v2(&total, device);
  put(out, PROP_TOTAL_MEMORY, &total, sizeof(total));
  for (size_t i = 0; i < sizeof(properties) / sizeof(properties[0]); i++) {
    int value = 0, offset = RUNTIME_MAJOR >= 13 ? properties[i].offset13 : properties[i].offset12;
    drv->cuDeviceGetAttribute(&value, properties[i].attribute, device);
    size_t wide = (size_t)value;
    put(out, offset, properties[i].wide ? (void *)&wide : (void *)&value,
        properties[i].wide ? sizeof(wide) : sizeof(value));
  }
  return CUDA_SUCCESS;
}
DRIVER_ONLY(cudaGetDeviceProperties, (void *properties_out, int device), device_properties(drv, properties_out, device))
#if RUNTIME_MAJOR < 13
DRIVER_ONLY(cudaGetDeviceProperties_v2, (void *properties_out, int device),
            device_properties(drv, properties_out, device))
#endif

/* functions and libraries */
enum {
  ERROR_INVALID_DEVICE_FUNCTION = 98,
  FUNC_THREADS = 0,
  FUNC_REGISTERS = 4,
  FUNC_PTX = 5,
  FUNC_BINARY = 6,
  FUNC_DYNAMIC = 8
};

static CUresult function_attributes(const struct driver_table *drv, struct cudaFuncAttributes *out, const void *func) {
  CUfunction function = rt_function(drv, func);
  if (!out || !function) return out ? ERROR_INVALID_DEVICE_FUNCTION : CUDA_ERROR_INVALID_VALUE;
  memset(out, 0, sizeof(*out));
  drv->cuFuncGetAttribute(&out->maxThreadsPerBlock, FUNC_THREADS, function);
  drv->cuFuncGetAttribute(&out->numRegs, FUNC_REGISTERS, function);
  drv->cuFuncGetAttribute(&out->ptxVersion, FUNC_PTX, function);
  drv->cuFuncGetAttribute(&out->binaryVersion, FUNC_BINARY, function);
  return drv->cuFuncGetAttribute(&out->maxDynamicSharedSizeBytes, FUNC_DYNAMIC, function);
}

static CUresult kernel_handle(const struct driver_table *drv, CUfunction *out, const void *func) {
  CUfunction function = rt_function(drv, func);
  if (!out || !function) return out ? ERROR_INVALID_DEVICE_FUNCTION : CUDA_ERROR_INVALID_VALUE;
  rt_function_handle(function);
  *out = function;
  return CUDA_SUCCESS;
}

static CUresult library_kernel(const struct driver_table *drv, cudaKernel_t *kernel, cudaLibrary_t library,
                               const char *name) {
  CUresult error = drv->cuLibraryGetKernel(kernel, library, name);
  if (!error) rt_function_handle(*kernel);
  return error;
}

RUNTIME(cudaFuncGetAttributes, (struct cudaFuncAttributes * attributes, const void *func),
        function_attributes(drv, attributes, func))
RUNTIME(cudaFuncSetAttribute, (const void *func, int attribute, int value),
        drv->cuFuncSetAttribute(rt_function(drv, func), attribute, value))
RUNTIME(cudaFuncSetCacheConfig, (const void *func, int config),
        drv->cuFuncSetCacheConfig(rt_function(drv, func), config))
RUNTIME(cudaFuncGetName, (const char **name, const void *func), drv->cuFuncGetName(name, rt_function(drv, func)))
RUNTIME(cudaKernelSetAttributeForDevice, (cudaKernel_t kernel, int attribute, int value, int device),
        drv->cuKernelSetAttribute(attribute, value, (CUkernel)rt_function(drv, kernel), device))
RUNTIME(cudaGetFuncBySymbol, (cudaFunction_t * function, const void *func), kernel_handle(drv, function, func))
RUNTIME(cudaGetKernel, (cudaKernel_t * kernel, const void *func), kernel_handle(drv, (CUfunction *)kernel, func))
RUNTIME(__cudaGetKernel, (cudaKernel_t * kernel, const void *func), kernel_handle(drv, (CUfunction *)kernel, func))
RUNTIME(cudaOccupancyMaxActiveBlocksPerMultiprocessor, (int *count, const void *func, int block_size, size_t smem),
        drv->cuOccupancyMaxActiveBlocksPerMultiprocessor(count, rt_function(drv, func), block_size, smem))
RUNTIME(cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags,
        (int *count, const void *func, int block_size, size_t smem, unsigned flags),
        drv->cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(count, rt_function(drv, func), block_size, smem,
                                                                  flags))
RUNTIME(cudaLibraryLoadData,
        (cudaLibrary_t * library, const void *code, int *jit, void **jit_values, unsigned jit_count, int *options,
         void **values, unsigned count),
        drv->cuLibraryLoadData(library, code, jit, jit_values, jit_count, options, values, count))
RUNTIME(cudaLibraryUnload, (cudaLibrary_t library), drv->cuLibraryUnload(library))
RUNTIME(cudaLibraryGetKernel, (cudaKernel_t * kernel, cudaLibrary_t library, const char *name),
        library_kernel(drv, kernel, library, name))

/* The driver's entries as the runtime itself would reach them. Status 1 is "symbol not found". */
static CUresult entry_point(const struct driver_table *drv, const char *symbol, void **address, unsigned version,
                            unsigned long long flags, int *status) {
  int found;
  return drv->cuGetProcAddress_v2(symbol, address, (int)version, flags, status ? status : &found);
}
RUNTIME(cudaGetDriverEntryPoint, (const char *symbol, void **address, unsigned long long flags, int *status),
        entry_point(drv, symbol, address, RUNTIME_VERSION, flags, status))
RUNTIME(cudaGetDriverEntryPoint_ptsz, (const char *symbol, void **address, unsigned long long flags, int *status),
        entry_point(drv, symbol, address, RUNTIME_VERSION, flags | 2, status))
RUNTIME(cudaGetDriverEntryPointByVersion,
        (const char *symbol, void **address, unsigned version, unsigned long long flags, int *status),
        entry_point(drv, symbol, address, version, flags, status))
RUNTIME(cudaGetDriverEntryPointByVersion_ptsz,
        (const char *symbol, void **address, unsigned version, unsigned long long flags, int *status),
        entry_point(drv, symbol, address, version, flags | 2, status))

static const struct {
  cudaError_t error;
  const char *name, *text;
} errors[] = {
    {0, "cudaSuccess", "no error"},
    {1, "cudaErrorInvalidValue", "invalid argument"},
    {2, "cudaErrorMemoryAllocation", "out of memory"},
    {3, "cudaErrorInitializationError", "initialization error"},
    {13, "cudaErrorInvalidSymbol", "invalid device symbol"},
    {21, "cudaErrorInvalidMemcpyDirection", "invalid copy direction for memcpy"},
    {35, "cudaErrorInsufficientDriver", "CUDA driver version is insufficient for CUDA runtime version"},
    {52, "cudaErrorMissingConfiguration", "__global__ function call is not configured"},
    {98, "cudaErrorInvalidDeviceFunction", "invalid device function"},
    {100, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {101, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {201, "cudaErrorDeviceUninitialized", "invalid device context"},
    {400, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {401, "cudaErrorIllegalState", "the operation cannot be performed in the present state"},
    {500, "cudaErrorSymbolNotFound", "named symbol not found"},
    {600, "cudaErrorNotReady", "device not ready"},
    {712, "cudaErrorHostMemoryAlreadyRegistered", "part or all of the requested memory range is already mapped"},
    {713, "cudaErrorHostMemoryNotRegistered", "pointer does not correspond to a registered memory region"},
    {801, "cudaErrorNotSupported", "operation not supported"},
    {900, "cudaErrorStreamCaptureUnsupported", "operation not permitted when stream is capturing"},
};

EXPORT const char *cudaGetErrorString(cudaError_t error) {
  for (size_t i = 0; i < sizeof(errors) / sizeof(errors[0]); i++)
    if (errors[i].error == error) return errors[i].text;
  return "unrecognized error code";
}

EXPORT const char *cudaGetErrorName(cudaError_t error) {
  for (size_t i = 0; i < sizeof(errors) / sizeof(errors[0]); i++)
    if (errors[i].error == error) return errors[i].name;
  return "unrecognized error code";
}

/* Graphs hold no memory of their own here: all figures are 0. */
static CUresult graph_memory(int device, uint64_t *value) {
  if (!value || !rt_context_of(device)) return value ? CUDA_ERROR_INVALID_DEVICE : CUDA_ERROR_INVALID_VALUE;
  *value = 0;
  return CUDA_SUCCESS;
}
RUNTIME(cudaDeviceGetGraphMemAttribute, (int device, int attribute, void *value),
        ((void)attribute, graph_memory(device, value)))
RUNTIME(cudaDeviceSetGraphMemAttribute, (int device, int attribute, void *value),
        ((void)attribute, value &&rt_context_of(device) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE))

/* Between two devices: 1 performance rank, 2 access, 3 native atomics, 4 arrays. */
static CUresult peer_attribute(int *value, int attribute, int source, int target) {
  if (!value || attribute < 1 || attribute > 4 || source == target) return CUDA_ERROR_INVALID_VALUE;
  if (!rt_context_of(source) || !rt_context_of(target)) return CUDA_ERROR_INVALID_DEVICE;
  *value = attribute == 2;
  return CUDA_SUCCESS;
}
cudaError_t cudaDeviceGetP2PAttribute(int *value, int attribute, int source, int target);
RUNTIME(cudaDeviceGetP2PAttribute, (int *value, int attribute, int source, int target),
        peer_attribute(value, attribute, source, target))

/* Present so that programs load; what they would do needs more than a time line. */
#define NOT_SUPPORTED(name)                                                                                            \
  cudaError_t name(void);                                                                                              \
  EXPORT cudaError_t name(void) {                                                                                      \
    return rt_finish(cudaErrorNotSupported);                                                                           \
  }
NOT_SUPPORTED(cudaGraphAddNode)
NOT_SUPPORTED(cudaGraphConditionalHandleCreate)
NOT_SUPPORTED(cudaGraphNodeGetDependencies)
NOT_SUPPORTED(cudaStreamBeginCaptureToGraph)
NOT_SUPPORTED(cudaStreamUpdateCaptureDependencies)
