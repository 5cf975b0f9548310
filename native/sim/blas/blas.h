/* What the stand-ins for cuBLAS and cuBLASLt share: a kernel by name, launched through the driver as the real ones do. */
#ifndef SIM_BLAS_H
#define SIM_BLAS_H

#include "sim_cuda_types.h"

#define EXPORT __attribute__((visibility("default")))

enum { BLAS_SUCCESS = 0, BLAS_NOT_INITIALIZED = 1, BLAS_INVALID_VALUE = 7, BLAS_EXECUTION_FAILED = 13 };

/* Puts one kernel of that name on the stream. No maths is done: the output keeps what it held. */
int sim_blas_kernel(const char *name, CUstream stream);

#endif
