/* Memory pools: handles only, memory comes from where all memory comes from. */
#include <stdlib.h>

#include "engine.h"

struct CUmemPool_st {
  int device;
  uint64_t release_threshold;
};

static struct CUmemPool_st defaults[MAX_DEVICES];

CUresult sim_cuDeviceGetDefaultMemPool(CUmemoryPool *pool, CUdevice device) {
  if (!pool || device < 0 || device >= sim_config()->devices) return CUDA_ERROR_INVALID_VALUE;
  *pool = &defaults[device];
  return CUDA_SUCCESS;
}

CUresult sim_cuDeviceGetMemPool(CUmemoryPool *pool, CUdevice device) {
  return sim_cuDeviceGetDefaultMemPool(pool, device);
}

CUresult sim_cuMemPoolCreate(CUmemoryPool *pool, const void *properties) {
  /* allocation type, handle types, location type, device */
  int device = properties ? ((const int *)properties)[3] : -1;
  if (!pool || device < 0 || device >= sim_config()->devices) return CUDA_ERROR_INVALID_VALUE;
  *pool = sim_new(sizeof(**pool));
  (*pool)->device = device;
  return CUDA_SUCCESS;
}

static bool is_default(CUmemoryPool pool) {
  return pool >= defaults && pool < defaults + MAX_DEVICES;
}

static int device_of(CUmemoryPool pool) {
  return is_default(pool) ? (int)(pool - defaults) : pool->device;
}

CUresult sim_cuMemPoolDestroy(CUmemoryPool pool) {
  if (!pool || is_default(pool)) return CUDA_ERROR_INVALID_VALUE;
  free(pool);
  return CUDA_SUCCESS;
}

/* Nothing is kept back after a free, so there is nothing to trim. */
CUresult sim_cuMemPoolTrimTo(CUmemoryPool pool, size_t bytes) {
  (void)bytes;
  return pool ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* Attributes 1 to 3 are ints, the rest 64-bit numbers: 4 release threshold, 5 reserved now, 6 at most, 7 used now, 8 at
 * most. Nothing is kept back, so what is reserved is what is used. Pools of one device share their figures. */
enum { ATTRIBUTE_THRESHOLD = 4, ATTRIBUTE_RESERVED_HIGH = 6, ATTRIBUTE_USED_HIGH = 8 };

CUresult sim_cuMemPoolSetAttribute(CUmemoryPool pool, int attribute, void *value) {
  if (!pool || !value) return CUDA_ERROR_INVALID_VALUE;
  if (attribute == ATTRIBUTE_THRESHOLD) pool->release_threshold = *(uint64_t *)value;
  else if (attribute > ATTRIBUTE_THRESHOLD) sim_pool_reset_high(device_of(pool));
  return CUDA_SUCCESS;
}

CUresult sim_cuMemPoolGetAttribute(CUmemoryPool pool, int attribute, void *value) {
  if (!pool || !value) return CUDA_ERROR_INVALID_VALUE;
  bool high = attribute == ATTRIBUTE_RESERVED_HIGH || attribute == ATTRIBUTE_USED_HIGH;
  if (attribute < ATTRIBUTE_THRESHOLD) *(int *)value = 1;
  else if (attribute == ATTRIBUTE_THRESHOLD) *(uint64_t *)value = pool->release_threshold;
  else *(uint64_t *)value = sim_pool_bytes(device_of(pool), high);
  return CUDA_SUCCESS;
}

CUresult sim_cuMemPoolSetAccess(CUmemoryPool pool, const void *descriptors, size_t count) {
  return pool && (descriptors || !count) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
