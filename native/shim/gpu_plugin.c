// SPDX-License-Identifier: Apache-2.0
/* NCCL's profiler interface, versions 3 (NCCL 2.26) to 6; a newer NCCL finds version 6. Versions 1 and 2 know no kernels.
 *
 * Layouts as NCCL's public headers give them, only as far as they are read. In all versions a description begins with
 * its type (one byte, from version 5 on eight), the parent at 8, the rank at 16 and the type's own part at 24. */
#include <stdatomic.h>
#include <stddef.h>
#include <string.h>

#include "gpu.h"
#include "gpu_ops.h"

#define EXPORT __attribute__((visibility("default")))

enum { COLLECTIVE = 2, TRANSFER = 4, KERNEL = 64, PART_AT = 24, MOST_CHANNELS = 64 };

struct named_part { /* version 3: in front of the two below */
  const char *communicator;
  uint64_t hash;
};

struct collective {
  uint64_t number;
  const char *function;
  const void *send;
  void *recv;
  size_t count;
  int root;
  const char *type;
  uint8_t channels;
};

struct transfer {
  const char *function;
  void *buffer;
  const char *type;
  size_t count;
  int peer;
  uint8_t channels;
};

_Static_assert(offsetof(struct collective, channels) == 56, "collective");
_Static_assert(offsetof(struct transfer, channels) == 36, "transfer");

static _Atomic uint32_t at_work;

/* NCCL's own mask of events, which it reads at each call: one for all communicators. */
static int *_Atomic mask_of_nccl;
static _Atomic int hushed;
enum { WANTED = COLLECTIVE | TRANSFER | KERNEL };

void seg_gpu_hush(int change) {
  int *mask = atomic_load(&mask_of_nccl);
  int now = atomic_fetch_add(&hushed, change) + change;
  if (mask) __atomic_store_n(mask, now > 0 ? 0 : WANTED, __ATOMIC_RELAXED);
}

static uint8_t function_of(const char *name) {
  static const char *const names[] = {"",          "Broadcast", "Reduce", "AllGather", "ReduceScatter",
                                      "AllReduce", "Send",      "Recv"};
  for (uint8_t i = 1; name && i < sizeof(names) / sizeof(*names); i++)
    if (strcmp(name, names[i]) == 0) return i;
  return SEG_GPU_NONE;
}

/* Version 3 tells the most channels there may be. */
static uint8_t channels_of(uint8_t told, unsigned version) {
  return version > 3 && told <= MOST_CHANNELS ? told : 0;
}

static uint64_t collective_of(uint32_t context, const char *part, unsigned version) {
  const struct collective *c = (const void *)(part + (version == 3 ? sizeof(struct named_part) : 0));
  struct seg_gpu_task task = {c->send, c->recv, -1, function_of(c->function), channels_of(c->channels, version)};
  return task.function ? seg_gpu_queued(context, &task) : 0;
}

static uint64_t transfer_of(uint32_t context, const char *part, unsigned version) {
  const struct transfer *t = (const void *)(part + (version == 3 ? sizeof(struct named_part) : 0));
  struct seg_gpu_task task = {t->buffer, NULL, t->peer, function_of(t->function), 0};
  if (version > 3) task.channels = channels_of(t->channels, version);
  return task.function ? seg_gpu_queued(context, &task) : 0;
}

static int start(void *context, void **event, const char *description, unsigned version) {
  uint64_t type = version < 5 ? (uint8_t)*description : *(const uint64_t *)(const void *)description;
  uint32_t own = (uint32_t)(uintptr_t)context;
  void *parent = *(void *const *)(const void *)(description + 8);
  uint64_t name = 0;
  if (type == COLLECTIVE) name = collective_of(own, description + PART_AT, version);
  if (type == TRANSFER) name = transfer_of(own, description + PART_AT, version);
  if (type == KERNEL) name = seg_gpu_begun((uintptr_t)parent);
  *event = (void *)(uintptr_t)name;
  return 0;
}

/* A collective or transfer stops as soon as it is queued: seg_gpu_ended knows these from kernels. */
static int stop(void *event) {
  seg_gpu_ended((uintptr_t)event);
  return 0;
}

static int state(void *event, int number, const void *arguments) {
  (void)event, (void)number, (void)arguments;
  return 0;
}

/* Without room the context is NULL, and nothing is told of this communicator. An error would end the plugin for all. */
static int init(void **context, int *mask, int ranks, unsigned version) {
  *context = (void *)(uintptr_t)seg_gpu_context_new(context, ranks);
  atomic_store(&mask_of_nccl, mask);
  *mask = WANTED;
  atomic_store(&at_work, SEG_GPU_AT_WORK + version);
  return 0;
}

static int finalize(void *context) {
  seg_gpu_context_free((uint32_t)(uintptr_t)context);
  return 0;
}

uint32_t seg_gpu_at_work(void) {
  return atomic_load(&at_work);
}

struct plugin {
  const char *name;
  void *init;
  int (*start)(void *, void **, const char *);
  int (*stop)(void *);
  int (*state)(void *, int, const void *);
  int (*finalize)(void *);
};

#define VERSION(number, parameters)                                                                                    \
  static int start_##number(void *context, void **event, const char *description) {                                    \
    return start(context, event, description, number);                                                                 \
  }                                                                                                                    \
  static int init_##number parameters;                                                                                 \
  extern const struct plugin ncclProfiler_v##number;                                                                   \
  EXPORT const struct plugin ncclProfiler_v##number = {                                                                \
      "stallscope", (void *)init_##number, start_##number, stop, state, finalize};                                     \
  static int init_##number parameters

#define NEWER (void **context, uint64_t hash, int *mask, const char *name, int nodes, int ranks, int rank, void *log)

VERSION(3, (void **context, int *mask)) {
  return init(context, mask, 0, 3);
}

VERSION(4, (void **context, int *mask, const char *name, uint64_t hash, int nodes, int ranks, int rank, void *log)) {
  (void)name, (void)hash, (void)nodes, (void)rank, (void)log;
  return init(context, mask, ranks, 4);
}

VERSION(5, NEWER) {
  (void)name, (void)hash, (void)nodes, (void)rank, (void)log;
  return init(context, mask, ranks, 5);
}

VERSION(6, NEWER) {
  (void)name, (void)hash, (void)nodes, (void)rank, (void)log;
  return init(context, mask, ranks, 6);
}
