/* Prototypes of the simulated libcuda.so.1, from the list in sim_cuda_driver.def. */
#ifndef SIM_CUDA_DRIVER_H
#define SIM_CUDA_DRIVER_H

#include "sim_cuda_types.h"

#define DRV(name, params, args) CUresult name params;
#define DRV_TWIN(name, suffix, params, args)                                                                           \
  CUresult name params;                                                                                                \
  CUresult name##suffix params;
#include "sim_cuda_driver.def"
#undef DRV
#undef DRV_TWIN

#endif
