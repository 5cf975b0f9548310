/* SPDX-License-Identifier: Apache-2.0
 *
 * What the program called and what NCCL queued, told to be the same operation. */
#ifndef STALLSCOPE_GPU_OPS_H
#define STALLSCOPE_GPU_OPS_H
#include <stdint.h>

enum seg_gpu_function {
  SEG_GPU_NONE = 0,
  SEG_GPU_BROADCAST,
  SEG_GPU_REDUCE,
  SEG_GPU_ALL_GATHER,
  SEG_GPU_REDUCE_SCATTER,
  SEG_GPU_ALL_REDUCE,
  SEG_GPU_SEND,
  SEG_GPU_RECV,
};

/* An operation as both sides know it. Not its count and type: NCCL counts some in bytes. */
struct seg_gpu_task {
  const void *send, *recv; /* of a transfer: its buffer, and NULL */
  int32_t peer;            /* of a transfer, else -1 */
  uint8_t function;
  uint8_t channels; /* kernel channels that will begin and end; 0 = not known */
};

/* A communicator has the plugin. address: of the place in it where the plugin's context will stand. 0 = no room. */
uint32_t seg_gpu_context_new(const void *address, int32_t nranks);
void seg_gpu_context_free(uint32_t context);

/* NCCL queues it. A name for it in the next two, 0 where no call explains it. */
uint64_t seg_gpu_queued(uint32_t context, const struct seg_gpu_task *task);
uint64_t seg_gpu_begun(uint64_t name);
void seg_gpu_ended(uint64_t name); /* one of its channels; `name` from seg_gpu_begun */
#endif
