/* The driver as a table of functions: what the runtime calls through, whichever way it got there. */
#ifndef SIM_DRIVER_TABLE_H
#define SIM_DRIVER_TABLE_H

#include "sim_cuda_types.h"

struct driver_table {
#define DRV(name, params, args) CUresult(*name) params;
#define DRV_TWIN(name, suffix, params, args) CUresult(*name) params;
#include "sim_cuda_driver.def"
#undef DRV
#undef DRV_TWIN
};

/* [0]: stream 0 is the legacy stream; [1]: the same fields hold the twins, where stream 0 is the thread's own. */
extern const struct driver_table sim_inner_table[2];

/* Exported by libcuda.so.1 and not CUDA: addresses no symbol stands at. */
const struct driver_table *stallscope_sim_private_table(void);

#endif
