/* Stand-in for libcublasLt: descriptors are opaque blocks, there is always one algorithm, a matmul is one kernel. */
#include <stdlib.h>
#include <string.h>

#include "blas.h"

#ifndef BLAS_MAJOR
#define BLAS_MAJOR 13
#endif
enum { DESCRIPTOR_BYTES = 512, VERSION = BLAS_MAJOR * 10000 + 100 };

/* Public layout of cublasLtMatmulHeuristicResult_t. */
struct heuristic {
  uint64_t algorithm[8];
  size_t workspace_bytes;
  int state;
  float waves;
  int reserved[4];
};

static int descriptor_new(void **out) {
  return out && (*out = calloc(1, DESCRIPTOR_BYTES)) ? BLAS_SUCCESS : BLAS_INVALID_VALUE;
}

#define LT(name, params, expression)                                                                                   \
  int name params;                                                                                                     \
  EXPORT int name params {                                                                                             \
    return expression;                                                                                                 \
  }
LT(cublasLtCreate, (void **handle), descriptor_new(handle))
LT(cublasLtDestroy, (void *handle), (free(handle), BLAS_SUCCESS))
LT(cublasLtMatmulDescCreate, (void **out, int compute, int scale), ((void)compute, (void)scale, descriptor_new(out)))
LT(cublasLtMatmulDescDestroy, (void *descriptor), (free(descriptor), BLAS_SUCCESS))
LT(cublasLtMatrixLayoutCreate, (void **out, int type, uint64_t rows, uint64_t columns, int64_t leading),
   ((void)type, (void)rows, (void)columns, (void)leading, descriptor_new(out)))
LT(cublasLtMatrixLayoutDestroy, (void *layout), (free(layout), BLAS_SUCCESS))
LT(cublasLtMatmulPreferenceCreate, (void **out), descriptor_new(out))
LT(cublasLtMatmulPreferenceDestroy, (void *preference), (free(preference), BLAS_SUCCESS))
LT(cublasLtMatrixTransformDescCreate, (void **out, int scale), ((void)scale, descriptor_new(out)))
LT(cublasLtMatrixTransformDescDestroy, (void *descriptor), (free(descriptor), BLAS_SUCCESS))

size_t cublasLtGetVersion(void);
EXPORT size_t cublasLtGetVersion(void) {
  return VERSION;
}

size_t cublasLtGetCudartVersion(void);
EXPORT size_t cublasLtGetCudartVersion(void) {
  return BLAS_MAJOR * 1000;
}

const char *cublasLtGetStatusString(int status);
EXPORT const char *cublasLtGetStatusString(int status) {
  return status ? "error of the simulated cuBLASLt" : "success";
}

const char *cublasLtGetStatusName(int status);
EXPORT const char *cublasLtGetStatusName(int status) {
  return status ? "CUBLAS_STATUS_OF_SIMULATION" : "CUBLAS_STATUS_SUCCESS";
}

static int one_algorithm(struct heuristic *results, int wanted, int *found) {
  if (wanted < 1 || !results) return BLAS_INVALID_VALUE;
  memset(results, 0, sizeof(*results));
  if (found) *found = 1;
  return BLAS_SUCCESS;
}
LT(cublasLtMatmulAlgoGetHeuristic,
   (void *handle, void *operation, void *a, void *b, void *c, void *d, void *preference, int wanted,
    struct heuristic *results, int *found),
   ((void)handle, (void)operation, (void)a, (void)b, (void)c, (void)d, (void)preference,
    one_algorithm(results, wanted, found)))
LT(cublasLtMatmulAlgoCheck,
   (void *handle, void *operation, void *a, void *b, void *c, void *d, const void *algorithm, struct heuristic *result),
   ((void)handle, (void)operation, (void)a, (void)b, (void)c, (void)d, (void)algorithm, one_algorithm(result, 1, NULL)))
LT(cublasLtMatmulAlgoInit,
   (void *handle, int compute, int scale, int a, int b, int c, int d, int id, uint64_t algorithm[8]),
   ((void)handle, (void)compute, (void)scale, (void)a, (void)b, (void)c, (void)d, (void)id,
    memset(algorithm, 0, 8 * sizeof(*algorithm)) ? BLAS_SUCCESS : BLAS_SUCCESS))
LT(cublasLtMatmul,
   (void *handle, void *operation, const void *alpha, const void *a, void *a_layout, const void *b, void *b_layout,
    const void *beta, const void *c, void *c_layout, void *d, void *d_layout, const void *algorithm, void *workspace,
    size_t workspace_bytes, CUstream stream),
   ((void)handle, (void)operation, (void)alpha, (void)a, (void)a_layout, (void)b, (void)b_layout, (void)beta, (void)c,
    (void)c_layout, (void)d, (void)d_layout, (void)algorithm, (void)workspace, (void)workspace_bytes,
    sim_blas_kernel("cublasLtMatmul", stream)))
