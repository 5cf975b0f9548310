/* How an exported function is written: ncclX, weak, and pncclX at the same address, as the real library has them. */
#ifndef SIM_NCCL_API_H
#define SIM_NCCL_API_H

#include "jobs.h"

#define API_RETURNING(type) EXPORT __attribute__((weak)) type
#define API API_RETURNING(ncclResult_t)
#define ALIAS(name) EXPORT __typeof(nccl##name) pnccl##name __attribute__((alias("nccl" #name)))

#endif
