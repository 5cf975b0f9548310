/* Copies, memsets and memory: one driver call each, chosen by the kind of copy. */
#include <stdbool.h>
#include <string.h>

#include "runtime.h"

enum { ERROR_INVALID_SYMBOL = 13, ERROR_INVALID_COPY_DIRECTION = 21 };

static CUresult copy(const struct driver_table *drv, void *dst, const void *src, size_t bytes, int kind) {
  switch (kind) {
  case cudaMemcpyHostToDevice:
    return drv->cuMemcpyHtoD_v2(DEVPTR(dst), src, bytes);
  case cudaMemcpyDeviceToHost:
    return drv->cuMemcpyDtoH_v2(dst, DEVPTR(src), bytes);
  case cudaMemcpyDeviceToDevice:
    return drv->cuMemcpyDtoD_v2(DEVPTR(dst), DEVPTR(src), bytes);
  case cudaMemcpyHostToHost:
  case cudaMemcpyDefault:
    return drv->cuMemcpy(DEVPTR(dst), DEVPTR(src), bytes);
  default:
    return ERROR_INVALID_COPY_DIRECTION;
  }
}

static CUresult copy_async(const struct driver_table *drv, void *dst, const void *src, size_t bytes, int kind,
                           cudaStream_t stream) {
  switch (kind) {
  case cudaMemcpyHostToDevice:
    return drv->cuMemcpyHtoDAsync_v2(DEVPTR(dst), src, bytes, stream);
  case cudaMemcpyDeviceToHost:
    return drv->cuMemcpyDtoHAsync_v2(dst, DEVPTR(src), bytes, stream);
  case cudaMemcpyDeviceToDevice:
    return drv->cuMemcpyDtoDAsync_v2(DEVPTR(dst), DEVPTR(src), bytes, stream);
  case cudaMemcpyHostToHost:
  case cudaMemcpyDefault:
    return drv->cuMemcpyAsync(DEVPTR(dst), DEVPTR(src), bytes, stream);
  default:
    return ERROR_INVALID_COPY_DIRECTION;
  }
}

static int dst_type(int kind) {
  if (kind == cudaMemcpyDefault) return CU_MEMORYTYPE_UNIFIED;
  return kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
}

static int src_type(int kind) {
  if (kind == cudaMemcpyDefault) return CU_MEMORYTYPE_UNIFIED;
  return kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
}

static CUDA_MEMCPY2D shape_2d(void *dst, size_t dpitch, const void *src, size_t spitch, size_t width, size_t height,
                              int kind) {
  return (CUDA_MEMCPY2D){
      .srcMemoryType = src_type(kind),
      .srcHost = src,
      .srcDevice = DEVPTR(src),
      .srcPitch = spitch,
      .dstMemoryType = dst_type(kind),
      .dstHost = dst,
      .dstDevice = DEVPTR(dst),
      .dstPitch = dpitch,
      .WidthInBytes = width,
      .Height = height,
  };
}

static CUDA_MEMCPY3D shape_3d(const struct cudaMemcpy3DParms *p) {
  return (CUDA_MEMCPY3D){
      .srcXInBytes = p->srcPos.x,
      .srcY = p->srcPos.y,
      .srcZ = p->srcPos.z,
      .srcMemoryType = p->srcArray ? CU_MEMORYTYPE_ARRAY : src_type(p->kind),
      .srcHost = p->srcPtr.ptr,
      .srcDevice = DEVPTR(p->srcPtr.ptr),
      .srcArray = p->srcArray,
      .srcPitch = p->srcPtr.pitch,
      .srcHeight = p->srcPtr.ysize,
      .dstXInBytes = p->dstPos.x,
      .dstY = p->dstPos.y,
      .dstZ = p->dstPos.z,
      .dstMemoryType = p->dstArray ? CU_MEMORYTYPE_ARRAY : dst_type(p->kind),
      .dstHost = p->dstPtr.ptr,
      .dstDevice = DEVPTR(p->dstPtr.ptr),
      .dstArray = p->dstArray,
      .dstPitch = p->dstPtr.pitch,
      .dstHeight = p->dstPtr.ysize,
      .WidthInBytes = p->extent.width,
      .Height = p->extent.height,
      .Depth = p->extent.depth,
  };
}

static CUresult copy_3d(const struct driver_table *drv, const struct cudaMemcpy3DParms *params, bool async,
                        cudaStream_t stream) {
  if (!params) return CUDA_ERROR_INVALID_VALUE;
  CUDA_MEMCPY3D shape = shape_3d(params);
  return async ? drv->cuMemcpy3DAsync_v2(&shape, stream) : drv->cuMemcpy3D_v2(&shape);
}

/* Address inside a registered variable; the copy may not reach over its end. */
static CUresult symbol_at(const struct driver_table *drv, const void *symbol, size_t bytes, size_t offset, char **at) {
  size_t size = 0;
  char *base = rt_symbol(drv, symbol, &size);
  if (!base) return ERROR_INVALID_SYMBOL;
  if (offset > size || bytes > size - offset) return CUDA_ERROR_INVALID_VALUE;
  *at = base + offset;
  return CUDA_SUCCESS;
}

static CUresult to_symbol(const struct driver_table *drv, const void *symbol, const void *src, size_t bytes,
                          size_t offset, int kind, bool async, cudaStream_t stream) {
  char *at;
  CUresult error = symbol_at(drv, symbol, bytes, offset, &at);
  if (error) return error;
  return async ? copy_async(drv, at, src, bytes, kind, stream) : copy(drv, at, src, bytes, kind);
}

static CUresult from_symbol(const struct driver_table *drv, void *dst, const void *symbol, size_t bytes, size_t offset,
                            int kind, bool async, cudaStream_t stream) {
  char *at;
  CUresult error = symbol_at(drv, symbol, bytes, offset, &at);
  if (error) return error;
  return async ? copy_async(drv, dst, at, bytes, kind, stream) : copy(drv, dst, at, bytes, kind);
}

RUNTIME_TWIN(cudaMemcpy, _ptds, (void *dst, const void *src, size_t bytes, int kind), copy(drv, dst, src, bytes, kind))
RUNTIME_TWIN(cudaMemcpyAsync, _ptsz, (void *dst, const void *src, size_t bytes, int kind, cudaStream_t stream),
             copy_async(drv, dst, src, bytes, kind, stream))
RUNTIME_TWIN(cudaMemcpy2D, _ptds,
             (void *dst, size_t dpitch, const void *src, size_t spitch, size_t width, size_t height, int kind),
             drv->cuMemcpy2D_v2((CUDA_MEMCPY2D[]){shape_2d(dst, dpitch, src, spitch, width, height, kind)}))
RUNTIME_TWIN(cudaMemcpy2DAsync, _ptsz,
             (void *dst, size_t dpitch, const void *src, size_t spitch, size_t width, size_t height, int kind,
              cudaStream_t stream),
             drv->cuMemcpy2DAsync_v2((CUDA_MEMCPY2D[]){shape_2d(dst, dpitch, src, spitch, width, height, kind)},
                                     stream))
RUNTIME_TWIN(cudaMemcpy3D, _ptds, (const struct cudaMemcpy3DParms *params), copy_3d(drv, params, false, NULL))
RUNTIME_TWIN(cudaMemcpy3DAsync, _ptsz, (const struct cudaMemcpy3DParms *params, cudaStream_t stream),
             copy_3d(drv, params, true, stream))
RUNTIME(cudaMemcpyPeer, (void *dst, int dst_device, const void *src, int src_device, size_t bytes),
        drv->cuMemcpyPeer(DEVPTR(dst), rt_context_of(dst_device), DEVPTR(src), rt_context_of(src_device), bytes))
RUNTIME(cudaMemcpyPeerAsync,
        (void *dst, int dst_device, const void *src, int src_device, size_t bytes, cudaStream_t stream),
        drv->cuMemcpyPeerAsync(DEVPTR(dst), rt_context_of(dst_device), DEVPTR(src), rt_context_of(src_device), bytes,
                               stream))
RUNTIME_TWIN(cudaMemcpyToSymbol, _ptds, (const void *symbol, const void *src, size_t bytes, size_t offset, int kind),
             to_symbol(drv, symbol, src, bytes, offset, kind, false, NULL))
RUNTIME_TWIN(cudaMemcpyToSymbolAsync, _ptsz,
             (const void *symbol, const void *src, size_t bytes, size_t offset, int kind, cudaStream_t stream),
             to_symbol(drv, symbol, src, bytes, offset, kind, true, stream))
RUNTIME_TWIN(cudaMemcpyFromSymbol, _ptds, (void *dst, const void *symbol, size_t bytes, size_t offset, int kind),
             from_symbol(drv, dst, symbol, bytes, offset, kind, false, NULL))
RUNTIME_TWIN(cudaMemcpyFromSymbolAsync, _ptsz,
             (void *dst, const void *symbol, size_t bytes, size_t offset, int kind, cudaStream_t stream),
             from_symbol(drv, dst, symbol, bytes, offset, kind, true, stream))

RUNTIME_TWIN(cudaMemset, _ptds, (void *dst, int value, size_t bytes),
             drv->cuMemsetD8_v2(DEVPTR(dst), (unsigned char)value, bytes))
RUNTIME_TWIN(cudaMemsetAsync, _ptsz, (void *dst, int value, size_t bytes, cudaStream_t stream),
             drv->cuMemsetD8Async(DEVPTR(dst), (unsigned char)value, bytes, stream))
RUNTIME_TWIN(cudaMemset2D, _ptds, (void *dst, size_t pitch, int value, size_t width, size_t height),
             drv->cuMemsetD2D8_v2(DEVPTR(dst), pitch, (unsigned char)value, width, height))
RUNTIME_TWIN(cudaMemset2DAsync, _ptsz,
             (void *dst, size_t pitch, int value, size_t width, size_t height, cudaStream_t stream),
             drv->cuMemsetD2D8Async(DEVPTR(dst), pitch, (unsigned char)value, width, height, stream))

/* memory */
enum { PITCH_ELEMENT_BYTES = 4 };
RUNTIME(cudaMalloc, (void **out, size_t bytes), drv->cuMemAlloc_v2((CUdeviceptr *)out, bytes))
RUNTIME(cudaMallocManaged, (void **out, size_t bytes, unsigned flags),
        drv->cuMemAllocManaged((CUdeviceptr *)out, bytes, flags))
RUNTIME(cudaMallocPitch, (void **out, size_t *pitch, size_t width, size_t height),
        drv->cuMemAllocPitch_v2((CUdeviceptr *)out, pitch, width, height, PITCH_ELEMENT_BYTES))
RUNTIME(cudaMallocHost, (void **out, size_t bytes), drv->cuMemAllocHost_v2(out, bytes))
RUNTIME(cudaHostAlloc, (void **out, size_t bytes, unsigned flags), drv->cuMemHostAlloc(out, bytes, flags))
RUNTIME(cudaHostRegister, (void *host, size_t bytes, unsigned flags), drv->cuMemHostRegister_v2(host, bytes, flags))
RUNTIME(cudaHostUnregister, (void *host), drv->cuMemHostUnregister(host))
RUNTIME(cudaHostGetDevicePointer, (void **out, void *host, unsigned flags),
        drv->cuMemHostGetDevicePointer_v2((CUdeviceptr *)out, host, flags))
RUNTIME(cudaFree, (void *device), drv->cuMemFree_v2(DEVPTR(device)))
RUNTIME(cudaFreeHost, (void *host), drv->cuMemFreeHost(host))
RUNTIME(cudaMemGetInfo, (size_t * free_bytes, size_t *total_bytes), drv->cuMemGetInfo_v2(free_bytes, total_bytes))
RUNTIME_TWIN(cudaMallocAsync, _ptsz, (void **out, size_t bytes, cudaStream_t stream),
             drv->cuMemAllocAsync((CUdeviceptr *)out, bytes, stream))
RUNTIME_TWIN(cudaMallocFromPoolAsync, _ptsz, (void **out, size_t bytes, cudaMemPool_t pool, cudaStream_t stream),
             drv->cuMemAllocFromPoolAsync((CUdeviceptr *)out, bytes, pool, stream))
RUNTIME_TWIN(cudaFreeAsync, _ptsz, (void *device, cudaStream_t stream), drv->cuMemFreeAsync(DEVPTR(device), stream))
RUNTIME(cudaDeviceGetDefaultMemPool, (cudaMemPool_t * pool, int device), drv->cuDeviceGetDefaultMemPool(pool, device))
RUNTIME(cudaDeviceGetMemPool, (cudaMemPool_t * pool, int device), drv->cuDeviceGetMemPool(pool, device))
RUNTIME(cudaMemPoolCreate, (cudaMemPool_t * pool, const void *properties), drv->cuMemPoolCreate(pool, properties))
RUNTIME(cudaMemPoolDestroy, (cudaMemPool_t pool), drv->cuMemPoolDestroy(pool))
RUNTIME(cudaMemPoolTrimTo, (cudaMemPool_t pool, size_t bytes), drv->cuMemPoolTrimTo(pool, bytes))
RUNTIME(cudaMemPoolSetAttribute, (cudaMemPool_t pool, int attribute, void *value),
        drv->cuMemPoolSetAttribute(pool, attribute, value))
RUNTIME(cudaMemPoolGetAttribute, (cudaMemPool_t pool, int attribute, void *value),
        drv->cuMemPoolGetAttribute(pool, attribute, value))
RUNTIME(cudaMemPoolSetAccess, (cudaMemPool_t pool, const void *descriptors, size_t count),
        drv->cuMemPoolSetAccess(pool, descriptors, count))

RUNTIME(cudaIpcGetMemHandle, (void *handle, void *device), drv->cuIpcGetMemHandle(handle, DEVPTR(device)))
RUNTIME(cudaIpcOpenMemHandle, (void **out, struct ipc_handle handle, unsigned flags),
        drv->cuIpcOpenMemHandle_v2((CUdeviceptr *)out, handle, flags))
RUNTIME(cudaIpcCloseMemHandle, (void *device), drv->cuIpcCloseMemHandle(DEVPTR(device)))
RUNTIME(cudaIpcGetEventHandle, (void *handle, cudaEvent_t event), drv->cuIpcGetEventHandle(handle, event))
RUNTIME(cudaIpcOpenEventHandle, (cudaEvent_t * event, struct ipc_handle handle),
        drv->cuIpcOpenEventHandle(event, handle))

/* Public CUpointer_attribute numbers. */
enum { ATTRIBUTE_TYPE = 2, ATTRIBUTE_IS_MANAGED = 8, ATTRIBUTE_ORDINAL = 9 };

static CUresult pointer_attributes(const struct driver_table *drv, struct cudaPointerAttributes *out,
                                   const void *pointer) {
  unsigned type = 0, managed = 0;
  if (!out || !pointer) return CUDA_ERROR_INVALID_VALUE;
  out->type = cudaMemoryTypeUnregistered;
  out->device = -2;
  out->devicePointer = NULL;
  out->hostPointer = (void *)(uintptr_t)pointer;
#if RUNTIME_MAJOR >= 13
  memset(out->reserved, 0, sizeof(out->reserved));
#endif
  if (drv->cuPointerGetAttribute(&type, ATTRIBUTE_TYPE, DEVPTR(pointer))) return CUDA_SUCCESS;
  drv->cuPointerGetAttribute(&managed, ATTRIBUTE_IS_MANAGED, DEVPTR(pointer));
  drv->cuPointerGetAttribute(&out->device, ATTRIBUTE_ORDINAL, DEVPTR(pointer));
  out->type = managed ? cudaMemoryTypeManaged : (int)type;
  out->devicePointer = out->hostPointer;
  if (out->type == cudaMemoryTypeDevice) out->hostPointer = NULL;
  return CUDA_SUCCESS;
}
RUNTIME(cudaPointerGetAttributes, (struct cudaPointerAttributes * attributes, const void *pointer),
        pointer_attributes(drv, attributes, pointer))

static CUresult symbol_address(const struct driver_table *drv, const void *symbol, void **address, size_t *bytes) {
  size_t size = 0;
  void *memory = rt_symbol(drv, symbol, &size);
  if (address) *address = memory;
  if (bytes) *bytes = size;
  return memory ? CUDA_SUCCESS : ERROR_INVALID_SYMBOL;
}
RUNTIME(cudaGetSymbolAddress, (void **address, const void *symbol), symbol_address(drv, symbol, address, NULL))
RUNTIME(cudaGetSymbolSize, (size_t * bytes, const void *symbol), symbol_address(drv, symbol, NULL, bytes))
