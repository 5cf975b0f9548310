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
  if (!pool || !properties) return CUDA_ERROR_INVALID_VALUE;
  *pool = sim_new(sizeof(**pool));
  return CUDA_SUCCESS;
}

static bool is_default(CUmemoryPool pool) {
  return pool >= defaults && pool < defaults + MAX_DEVICES;
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

/* Attributes 1 to 3 are ints, the rest 64-bit numbers; only the release threshold (4) is kept. */
CUresult sim_cuMemPoolSetAttribute(CUmemoryPool pool, int attribute, void *value) {
  if (!pool || !value) return CUDA_ERROR_INVALID_VALUE;
  if (attribute == 4) pool->release_threshold = *(uint64_t *)value;
  return CUDA_SUCCESS;
}

CUresult sim_cuMemPoolGetAttribute(CUmemoryPool pool, int attribute, void *value) {
  if (!pool || !value) return CUDA_ERROR_INVALID_VALUE;
  if (attribute < 4) *(int *)value = 1;
  else *(uint64_t *)value = attribute == 4 ? pool->release_threshold : 0;
  return CUDA_SUCCESS;
}

CUresult sim_cuMemPoolSetAccess(CUmemoryPool pool, const void *descriptors, size_t count) {
  return pool && (descriptors || !count) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
