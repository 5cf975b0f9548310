/* Names to addresses: the `_ptsz` and `_ptds` twins, the inner table, and the look-up of cuGetProcAddress. */
#include <stdio.h>
#include <string.h>

#include "driver_table.h"
#include "engine.h"

/* A twin is the same function with "stream 0 is the calling thread's own" switched on for the length of the call. */
#define DRV(name, params, args)
#define DRV_TWIN(name, suffix, params, args)                                                                           \
  CUresult sim_##name##suffix params {                                                                                 \
    sim_stream_zero_is_per_thread = true;                                                                              \
    CUresult result = sim_##name args;                                                                                 \
    sim_stream_zero_is_per_thread = false;                                                                             \
    return result;                                                                                                     \
  }
#include "sim_cuda_driver.def"
#undef DRV
#undef DRV_TWIN

static const struct proc inner_procs[] = {
#define DRV(name, params, args) {#name, (void *)sim_##name},
#define DRV_TWIN(name, suffix, params, args) {#name, (void *)sim_##name}, {#name #suffix, (void *)sim_##name##suffix},
#include "sim_cuda_driver.def"
#undef DRV
#undef DRV_TWIN
};

const struct driver_table sim_inner_table[2] = {
    {
#define DRV(name, params, args) .name = sim_##name,
#define DRV_TWIN(name, suffix, params, args) .name = sim_##name,
#include "sim_cuda_driver.def"
#undef DRV_TWIN
    },
    {
#define DRV_TWIN(name, suffix, params, args) .name = sim_##name##suffix,
#include "sim_cuda_driver.def"
#undef DRV
#undef DRV_TWIN
    },
};

static void *find_exact(const struct proc *procs, size_t count, const char *symbol) {
  for (size_t i = 0; i < count; i++)
    if (strcmp(procs[i].name, symbol) == 0) return procs[i].address;
  return NULL;
}

/* Base names whose unsuffixed form exists beside a newer one: the newer one is meant from that version on. */
static const struct {
  const char *base, *symbol;
  int since;
} newer[] = {
    {"cuGetProcAddress", "cuGetProcAddress_v2", 12000},
    {"cuCtxSynchronize", "cuCtxSynchronize_v2", 13000},
    {"cuEventElapsedTime", "cuEventElapsedTime_v2", 12080},
    {"cuDeviceGetUuid", "cuDeviceGetUuid_v2", 11040},
    {"cuCtxCreate", "cuCtxCreate_v4", 12050},
    {"cuStreamGetCaptureInfo", "cuStreamGetCaptureInfo_v3", 12030},
    {"cuGraphInstantiate", "cuGraphInstantiateWithFlags", 12000},
};

static const char *current_name(const char *symbol, int version) {
  for (size_t i = 0; i < sizeof(newer) / sizeof(newer[0]); i++)
    if (version >= newer[i].since && strcmp(symbol, newer[i].base) == 0) return newer[i].symbol;
  return symbol;
}

/* Flag 2 asks for the per-thread default stream's twins. */
CUresult sim_find_proc(const struct proc *procs, size_t count, const char *symbol, int version, uint64_t flags,
                       void **address, int *status) {
  static const char *const versions[] = {"", "_v2", "_v3"};
  static const char *const twins[] = {"_ptsz", "_ptds", ""};
  char name[128];
  if (!symbol || !address) return CUDA_ERROR_INVALID_VALUE;
  *address = NULL;
  symbol = current_name(symbol, version);
  for (size_t v = 0; v < 3 && !*address; v++) {
    for (size_t t = flags & 2 ? 0 : 2; t < 3 && !*address; t++) {
      snprintf(name, sizeof(name), "%s%s%s", symbol, versions[v], twins[t]);
      *address = find_exact(procs, count, name);
    }
  }
  if (status) *status = *address ? 0 : 1;
  return *address || status ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

CUresult sim_cuGetProcAddress_v2(const char *symbol, void **address, int version, uint64_t flags, int *status) {
  return sim_find_proc(inner_procs, sizeof(inner_procs) / sizeof(inner_procs[0]), symbol, version, flags, address,
                       status);
}

CUresult sim_cuGetProcAddress(const char *symbol, void **address, int version, uint64_t flags) {
  return sim_cuGetProcAddress_v2(symbol, address, version, flags, NULL);
}
