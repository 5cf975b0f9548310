/* SPDX-License-Identifier: Apache-2.0
 *
 * The functions that hand out addresses of others: what they find is replaced by a wrapper of it. They count nothing. */
#ifndef STALLSCOPE_GETTERS_H
#define STALLSCOPE_GETTERS_H

#define SEG_GETTER(name, id, missing, params, types, args, symbol, address, flags)                                     \
  VISIBLE uint64_t NAME(name) params;                                                                                  \
  VISIBLE uint64_t NAME(name) params {                                                                                 \
    uint64_t(*real) types = seg_real_of(id, INSTANCE, BACK);                                                           \
    if (!real) return missing;                                                                                         \
    uint64_t result = real args;                                                                                       \
    if (!(int32_t)result && (address)) seg_found((const char *)(symbol), (void **)(address), flags);                   \
    return result;                                                                                                     \
  }
#define FOUR (uint64_t a0, uint64_t a1, uint64_t a2, uint64_t a3)
#define FIVE (uint64_t a0, uint64_t a1, uint64_t a2, uint64_t a3, uint64_t a4)
#define FOUR_TYPES (uint64_t, uint64_t, uint64_t, uint64_t)
#define FIVE_TYPES (uint64_t, uint64_t, uint64_t, uint64_t, uint64_t)
#define FOUR_ARGS (a0, a1, a2, a3)
#define FIVE_ARGS (a0, a1, a2, a3, a4)

/* 500: CUDA_ERROR_NOT_FOUND, cudaErrorSymbolNotFound. */
SEG_GETTER(cuGetProcAddress, 391, 500, FOUR, FOUR_TYPES, FOUR_ARGS, a0, a1, a3)
SEG_GETTER(cuGetProcAddress_v2, 392, 500, FIVE, FIVE_TYPES, FIVE_ARGS, a0, a1, a3)
SEG_GETTER(cudaGetDriverEntryPoint, 393, 500, FOUR, FOUR_TYPES, FOUR_ARGS, a0, a1, a2)
SEG_GETTER(cudaGetDriverEntryPoint_ptsz, 394, 500, FOUR, FOUR_TYPES, FOUR_ARGS, a0, a1, a2 | 2)
SEG_GETTER(cudaGetDriverEntryPointByVersion, 395, 500, FIVE, FIVE_TYPES, FIVE_ARGS, a0, a1, a3)
SEG_GETTER(cudaGetDriverEntryPointByVersion_ptsz, 396, 500, FIVE, FIVE_TYPES, FIVE_ARGS, a0, a1, a3 | 2)
#endif
