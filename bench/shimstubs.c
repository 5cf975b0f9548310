// SPDX-License-Identifier: Apache-2.0
/* A library with functions of the CUDA runtime and NCCL that do nothing, each also as bare_NAME, which nobody wraps. */
#include <stdint.h>
#define STUB(name)                                                                                                     \
  int name(uint64_t a, uint64_t b, uint64_t c, uint64_t d, uint64_t e, uint64_t f, uint64_t g, uint64_t h);            \
  int name(uint64_t a, uint64_t b, uint64_t c, uint64_t d, uint64_t e, uint64_t f, uint64_t g, uint64_t h) {           \
    __asm__ volatile("" ::"r"(a), "r"(b), "r"(c), "r"(d), "r"(e), "r"(f) : "memory");                                  \
    (void)g, (void)h;                                                                                                  \
    return 0;                                                                                                          \
  }
#define BOTH(name) STUB(name) STUB(bare_##name)
BOTH(cudaLaunchKernel)
BOTH(cudaStreamSynchronize)
BOTH(ncclAllReduce)
