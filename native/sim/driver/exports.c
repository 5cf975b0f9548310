/* What libcuda.so.1 exports: one wrapper a function round the inner one.
 *
 * Built with a frame pointer and without sibling calls, so that each starts with `push` and really calls: a uprobe
 * there is cheap, and a probe at an exported address sees only calls that came through the export.
 */
#include "driver_table.h"
#include "engine.h"
#include "sim_cuda_driver.h"

#define EXPORT __attribute__((visibility("default")))

#define DRV(name, params, args)                                                                                        \
  EXPORT CUresult name params {                                                                                        \
    return sim_##name args;                                                                                            \
  }
#define DRV_TWIN(name, suffix, params, args)                                                                           \
  DRV(name, params, args)                                                                                              \
  EXPORT CUresult name##suffix params {                                                                                \
    return sim_##name##suffix args;                                                                                    \
  }
#define DRV_WITHOUT_LOOK_UP
#include "sim_cuda_driver.def"
#undef DRV
#undef DRV_TWIN
#undef DRV_WITHOUT_LOOK_UP

static const struct proc exported_procs[] = {
#define DRV(name, params, args) {#name, (void *)name},
#define DRV_TWIN(name, suffix, params, args) {#name, (void *)name}, {#name #suffix, (void *)name##suffix},
#include "sim_cuda_driver.def"
};

EXPORT CUresult cuGetProcAddress_v2(const char *symbol, void **address, int version, uint64_t flags, int *status) {
  return sim_find_proc(exported_procs, sizeof(exported_procs) / sizeof(exported_procs[0]), symbol, version, flags,
                       address, status);
}

EXPORT CUresult cuGetProcAddress(const char *symbol, void **address, int version, uint64_t flags) {
  return sim_find_proc(exported_procs, sizeof(exported_procs) / sizeof(exported_procs[0]), symbol, version, flags,
                       address, NULL);
}

EXPORT const struct driver_table *stallscope_sim_private_table(void) {
  return sim_inner_table;
}
