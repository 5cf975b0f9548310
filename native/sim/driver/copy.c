/* Copies and memsets.
 *
 * The data moves when the operation takes its place on the time line (at the call, or when a queued stream comes to
 * it), earlier than the simulated end. Nobody may look before a wait, so the result after a wait is right.
 */
#include <string.h>

#include "engine.h"

/* A memset runs at ten times a copy's speed. */
enum { SET_SPEED = 10 };

void sim_do_copy(const struct copy_shape *c) {
  if (c->height == 1 && c->depth == 1) {
    memmove(c->dst, c->src, c->width);
    return;
  }
  for (size_t z = 0; z < c->depth; z++)
    for (size_t y = 0; y < c->height; y++)
      memmove(c->dst + z * c->dst_slice + y * c->dst_pitch, c->src + z * c->src_slice + y * c->src_pitch, c->width);
}

static void set_row(char *row, const struct set_shape *s) {
  for (size_t i = 0; i < s->count; i++) memcpy(row + i * s->element_bytes, &s->value, s->element_bytes);
}

void sim_do_set(const struct set_shape *s) {
  for (size_t y = 0; y < s->height; y++) {
    if (s->element_bytes == 1) memset(s->dst + y * s->pitch, (int)(unsigned char)s->value, s->count);
    else set_row(s->dst + y * s->pitch, s);
  }
}

/* Who waits: a synchronous copy unless it stays on the device, and an asynchronous one that touches pageable memory. */
enum copy_mode { SYNC, ASYNC };

static bool copy_waits(const struct copy_shape *c, enum copy_mode mode, bool host_dst, bool host_src) {
  if (mode == SYNC) return host_dst || host_src;
  return (host_dst && sim_memory_kind(c->dst) == MEMORY_PAGEABLE) ||
         (host_src && sim_memory_kind(c->src) == MEMORY_PAGEABLE);
}

static CUresult copy(const struct copy_shape *shape, CUstream handle, enum copy_mode mode, bool host_dst,
                     bool host_src) {
  struct CUstream_st *stream;
  CUresult error = sim_stream(handle, &stream);
  size_t bytes = shape->width * shape->height * shape->depth;
  if (error || !bytes) return error;
  if (!shape->dst || !shape->src) return CUDA_ERROR_INVALID_VALUE;
  bool waits = copy_waits(shape, mode, host_dst, host_src);
  if (waits && atomic_load(&stream->slow) & SLOW_CAPTURING) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  struct op op = {.kind = OP_COPY, .duration_ns = sim_copy_ns(bytes), .copy = *shape};
  error = sim_submit(stream, &op);
  return error || !waits ? error : sim_wait_stream(stream);
}

static CUresult copy_flat(void *dst, const void *src, size_t bytes, CUstream stream, enum copy_mode mode, bool host_dst,
                          bool host_src) {
  struct copy_shape shape = {.dst = dst, .src = src, .width = bytes, .height = 1, .depth = 1};
  return copy(&shape, stream, mode, host_dst, host_src);
}

static bool is_host(const void *pointer) {
  enum memory_kind kind = sim_memory_kind(pointer);
  return kind == MEMORY_PAGEABLE || kind == MEMORY_PINNED;
}

CUresult sim_cuMemcpy(CUdeviceptr dst, CUdeviceptr src, size_t bytes) {
  return copy_flat((void *)dst, (void *)src, bytes, NULL, SYNC, is_host((void *)dst), is_host((void *)src));
}

CUresult sim_cuMemcpyAsync(CUdeviceptr dst, CUdeviceptr src, size_t bytes, CUstream stream) {
  return copy_flat((void *)dst, (void *)src, bytes, stream, ASYNC, is_host((void *)dst), is_host((void *)src));
}

CUresult sim_cuMemcpyHtoD_v2(CUdeviceptr dst, const void *src, size_t bytes) {
  return copy_flat((void *)dst, src, bytes, NULL, SYNC, false, true);
}

CUresult sim_cuMemcpyHtoDAsync_v2(CUdeviceptr dst, const void *src, size_t bytes, CUstream stream) {
  return copy_flat((void *)dst, src, bytes, stream, ASYNC, false, true);
}

CUresult sim_cuMemcpyDtoH_v2(void *dst, CUdeviceptr src, size_t bytes) {
  return copy_flat(dst, (void *)src, bytes, NULL, SYNC, true, false);
}

CUresult sim_cuMemcpyDtoHAsync_v2(void *dst, CUdeviceptr src, size_t bytes, CUstream stream) {
  return copy_flat(dst, (void *)src, bytes, stream, ASYNC, true, false);
}

CUresult sim_cuMemcpyDtoD_v2(CUdeviceptr dst, CUdeviceptr src, size_t bytes) {
  return copy_flat((void *)dst, (void *)src, bytes, NULL, SYNC, false, false);
}

CUresult sim_cuMemcpyDtoDAsync_v2(CUdeviceptr dst, CUdeviceptr src, size_t bytes, CUstream stream) {
  return copy_flat((void *)dst, (void *)src, bytes, stream, ASYNC, false, false);
}

CUresult sim_cuMemcpyPeer(CUdeviceptr dst, CUcontext dst_context, CUdeviceptr src, CUcontext src_context,
                          size_t bytes) {
  (void)dst_context;
  (void)src_context;
  return sim_cuMemcpyDtoD_v2(dst, src, bytes);
}

CUresult sim_cuMemcpyPeerAsync(CUdeviceptr dst, CUcontext dst_context, CUdeviceptr src, CUcontext src_context,
                               size_t bytes, CUstream stream) {
  (void)dst_context;
  (void)src_context;
  return sim_cuMemcpyDtoDAsync_v2(dst, src, bytes, stream);
}

/* The pointer of one side of a 2D or 3D description; host is set where the side is host memory. */
static char *side(int type, const void *host_pointer, CUdeviceptr device, bool *host) {
  if (type == CU_MEMORYTYPE_HOST) {
    *host = true;
    return (char *)(uintptr_t)host_pointer;
  }
  *host = type == CU_MEMORYTYPE_UNIFIED && is_host((void *)device);
  return (char *)device;
}

static CUresult copy_2d(const CUDA_MEMCPY2D *p, CUstream stream, enum copy_mode mode) {
  bool host_dst, host_src;
  if (!p) return CUDA_ERROR_INVALID_VALUE;
  if (p->srcMemoryType == CU_MEMORYTYPE_ARRAY || p->dstMemoryType == CU_MEMORYTYPE_ARRAY)
    return CUDA_ERROR_NOT_SUPPORTED;
  struct copy_shape shape = {.width = p->WidthInBytes, .height = p->Height, .depth = 1};
  shape.dst_pitch = p->dstPitch ? p->dstPitch : p->WidthInBytes;
  shape.src_pitch = p->srcPitch ? p->srcPitch : p->WidthInBytes;
  shape.dst = side(p->dstMemoryType, p->dstHost, p->dstDevice, &host_dst) + p->dstXInBytes + p->dstY * shape.dst_pitch;
  shape.src = side(p->srcMemoryType, p->srcHost, p->srcDevice, &host_src) + p->srcXInBytes + p->srcY * shape.src_pitch;
  return copy(&shape, stream, mode, host_dst, host_src);
}

CUresult sim_cuMemcpy2D_v2(const CUDA_MEMCPY2D *params) {
  return copy_2d(params, NULL, SYNC);
}

CUresult sim_cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D *params, CUstream stream) {
  return copy_2d(params, stream, ASYNC);
}

static CUresult copy_3d(const CUDA_MEMCPY3D *p, CUstream stream, enum copy_mode mode) {
  bool host_dst, host_src;
  if (!p) return CUDA_ERROR_INVALID_VALUE;
  if (p->srcMemoryType == CU_MEMORYTYPE_ARRAY || p->dstMemoryType == CU_MEMORYTYPE_ARRAY)
    return CUDA_ERROR_NOT_SUPPORTED;
  struct copy_shape shape = {.width = p->WidthInBytes, .height = p->Height, .depth = p->Depth};
  shape.dst_pitch = p->dstPitch ? p->dstPitch : p->WidthInBytes;
  shape.src_pitch = p->srcPitch ? p->srcPitch : p->WidthInBytes;
  shape.dst_slice = shape.dst_pitch * (p->dstHeight ? p->dstHeight : p->Height);
  shape.src_slice = shape.src_pitch * (p->srcHeight ? p->srcHeight : p->Height);
  shape.dst = side(p->dstMemoryType, p->dstHost, p->dstDevice, &host_dst) + p->dstXInBytes + p->dstY * shape.dst_pitch +
              p->dstZ * shape.dst_slice;
  shape.src = side(p->srcMemoryType, p->srcHost, p->srcDevice, &host_src) + p->srcXInBytes + p->srcY * shape.src_pitch +
              p->srcZ * shape.src_slice;
  return copy(&shape, stream, mode, host_dst, host_src);
}

CUresult sim_cuMemcpy3D_v2(const CUDA_MEMCPY3D *params) {
  return copy_3d(params, NULL, SYNC);
}

CUresult sim_cuMemcpy3DAsync_v2(const CUDA_MEMCPY3D *params, CUstream stream) {
  return copy_3d(params, stream, ASYNC);
}

/* As the manual has it, a synchronous memset waits only where its target is pinned host memory. */
static CUresult set(const struct set_shape *shape, CUstream handle, enum copy_mode mode) {
  struct CUstream_st *stream;
  CUresult error = sim_stream(handle, &stream);
  size_t bytes = shape->count * shape->element_bytes * shape->height;
  if (error || !bytes) return error;
  if (!shape->dst) return CUDA_ERROR_INVALID_VALUE;
  struct op op = {.kind = OP_SET, .duration_ns = sim_copy_ns(bytes / SET_SPEED), .set = *shape};
  error = sim_submit(stream, &op);
  if (error || mode == ASYNC || !is_host(shape->dst)) return error;
  return sim_wait_stream(stream);
}

static CUresult set_flat(CUdeviceptr dst, unsigned value, unsigned element_bytes, size_t count, CUstream stream,
                         enum copy_mode mode) {
  struct set_shape shape = {
      .dst = (char *)dst, .value = value, .element_bytes = element_bytes, .count = count, .height = 1};
  return set(&shape, stream, mode);
}

CUresult sim_cuMemsetD8_v2(CUdeviceptr dst, unsigned char value, size_t count) {
  return set_flat(dst, value, 1, count, NULL, SYNC);
}

CUresult sim_cuMemsetD16_v2(CUdeviceptr dst, unsigned short value, size_t count) {
  return set_flat(dst, value, 2, count, NULL, SYNC);
}

CUresult sim_cuMemsetD32_v2(CUdeviceptr dst, unsigned value, size_t count) {
  return set_flat(dst, value, 4, count, NULL, SYNC);
}

CUresult sim_cuMemsetD8Async(CUdeviceptr dst, unsigned char value, size_t count, CUstream stream) {
  return set_flat(dst, value, 1, count, stream, ASYNC);
}

CUresult sim_cuMemsetD16Async(CUdeviceptr dst, unsigned short value, size_t count, CUstream stream) {
  return set_flat(dst, value, 2, count, stream, ASYNC);
}

CUresult sim_cuMemsetD32Async(CUdeviceptr dst, unsigned value, size_t count, CUstream stream) {
  return set_flat(dst, value, 4, count, stream, ASYNC);
}

CUresult sim_cuMemsetD2D8_v2(CUdeviceptr dst, size_t pitch, unsigned char value, size_t width, size_t height) {
  struct set_shape shape = {
      .dst = (char *)dst, .value = value, .element_bytes = 1, .count = width, .height = height, .pitch = pitch};
  return set(&shape, NULL, SYNC);
}

CUresult sim_cuMemsetD2D8Async(CUdeviceptr dst, size_t pitch, unsigned char value, size_t width, size_t height,
                               CUstream stream) {
  struct set_shape shape = {
      .dst = (char *)dst, .value = value, .element_bytes = 1, .count = width, .height = height, .pitch = pitch};
  return set(&shape, stream, ASYNC);
}

/* A value written in stream order; it costs the stream nothing. */
static CUresult write_value(CUstream handle, CUdeviceptr address, uint64_t value, size_t bytes) {
  struct CUstream_st *stream;
  CUresult error = sim_stream(handle, &stream);
  if (error || !address || address % bytes) return error ? error : CUDA_ERROR_INVALID_VALUE;
  struct op op = {.kind = OP_SET};
  op.set = (struct set_shape){
      .dst = (char *)address, .value = value, .element_bytes = (unsigned)bytes, .count = 1, .height = 1};
  return sim_submit(stream, &op);
}

CUresult sim_cuStreamWriteValue32_v2(CUstream stream, CUdeviceptr address, unsigned value, unsigned flags) {
  (void)flags;
  return write_value(stream, address, value, sizeof(value));
}

CUresult sim_cuStreamWriteValue64_v2(CUstream stream, CUdeviceptr address, uint64_t value, unsigned flags) {
  (void)flags;
  return write_value(stream, address, value, sizeof(value));
}
