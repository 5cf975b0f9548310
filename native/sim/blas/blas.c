/* Stand-in for libcublas: handles with their settings; each computing function launches one kernel of its own name.
 *
 * The computing functions are written by gen_stubs.py from stubs/cublas.txt.
 */
#include <stdlib.h>

#include "blas.h"

#ifndef BLAS_MAJOR
#define BLAS_MAJOR 13
#endif
enum { HANDLE_MAGIC = 0x424c4153, VERSION = BLAS_MAJOR * 10000 + 100 };

struct handle {
  unsigned magic;
  CUstream stream;
  int math_mode, pointer_mode, atomics_mode, sm_target;
};
typedef struct handle *cublasHandle_t;

static int is_handle(const struct handle *handle) {
  return (uintptr_t)handle > 4096 && handle->magic == HANDLE_MAGIC;
}

int sim_blas_launch(void *handle, const char *name);
int sim_blas_launch(void *handle, const char *name) {
  struct handle *h = handle;
  return is_handle(h) ? sim_blas_kernel(name, h->stream) : BLAS_NOT_INITIALIZED;
}

/* BLAS(name, (parameters), statement): a function that needs a valid handle. */
#define BLAS(name, params, statement)                                                                                  \
  int name params;                                                                                                     \
  EXPORT int name params {                                                                                             \
    if (!is_handle(handle)) return BLAS_NOT_INITIALIZED;                                                               \
    statement;                                                                                                         \
    return BLAS_SUCCESS;                                                                                               \
  }

int cublasCreate_v2(cublasHandle_t *handle);
EXPORT int cublasCreate_v2(cublasHandle_t *handle) {
  if (!handle || !(*handle = calloc(1, sizeof(**handle)))) return BLAS_INVALID_VALUE;
  (*handle)->magic = HANDLE_MAGIC;
  return BLAS_SUCCESS;
}

BLAS(cublasDestroy_v2, (cublasHandle_t handle), {
  handle->magic = 0;
  free(handle);
})
BLAS(cublasSetStream_v2, (cublasHandle_t handle, CUstream stream), handle->stream = stream)
BLAS(cublasGetStream_v2, (cublasHandle_t handle, CUstream *stream), *stream = handle->stream)
BLAS(cublasSetMathMode, (cublasHandle_t handle, int mode), handle->math_mode = mode)
BLAS(cublasGetMathMode, (cublasHandle_t handle, int *mode), *mode = handle->math_mode)
BLAS(cublasSetPointerMode_v2, (cublasHandle_t handle, int mode), handle->pointer_mode = mode)
BLAS(cublasGetPointerMode_v2, (cublasHandle_t handle, int *mode), *mode = handle->pointer_mode)
BLAS(cublasSetAtomicsMode, (cublasHandle_t handle, int mode), handle->atomics_mode = mode)
BLAS(cublasGetAtomicsMode, (cublasHandle_t handle, int *mode), *mode = handle->atomics_mode)
BLAS(cublasSetSmCountTarget, (cublasHandle_t handle, int count), handle->sm_target = count)
BLAS(cublasGetSmCountTarget, (cublasHandle_t handle, int *count), *count = handle->sm_target)
BLAS(cublasGetVersion_v2, (cublasHandle_t handle, int *version), *version = VERSION)

size_t cublasGetCudartVersion(void);
EXPORT size_t cublasGetCudartVersion(void) {
  return BLAS_MAJOR * 1000;
}

/* Major, minor, patch. */
int cublasGetProperty(int type, int *value);
EXPORT int cublasGetProperty(int type, int *value) {
  if (type < 0 || type > 2 || !value) return BLAS_INVALID_VALUE;
  *value = type == 0 ? BLAS_MAJOR : type == 1;
  return BLAS_SUCCESS;
}

const char *cublasGetStatusString(int status);
EXPORT const char *cublasGetStatusString(int status) {
  return status ? "error of the simulated cuBLAS" : "success";
}

const char *cublasGetStatusName(int status);
EXPORT const char *cublasGetStatusName(int status) {
  return status ? "CUBLAS_STATUS_OF_SIMULATION" : "CUBLAS_STATUS_SUCCESS";
}
