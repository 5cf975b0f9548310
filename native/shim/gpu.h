/* SPDX-License-Identifier: Apache-2.0
 *
 * The GPU's witness: NCCL takes this library as its profiler plugin and tells it when kernels begin and end.
 *
 * The wrappers of NCCL functions call the functions here for outermost calls, in every mode. They return at once while no
 * communicator has the plugin. Records leave by seg_emit_vital, mostly from threads of NCCL's own. */
#ifndef STALLSCOPE_GPU_H
#define STALLSCOPE_GPU_H
#include "segment.h"
#include <stdint.h>

/* How far it came. */
enum seg_gpu_state {
  SEG_GPU_UNTRIED = 0,   /* no communicator was made yet */
  SEG_GPU_TAKEN = 1,     /* there is another plugin: of the environment, a configuration file or the loader's path */
  SEG_GPU_OLD = 2,       /* NCCL before 2.26 does not tell of kernels */
  SEG_GPU_NO_PATH = 3,   /* where this library lies is unknown, or too long for NCCL */
  SEG_GPU_CLAIMED = 4,   /* NCCL_PROFILER_PLUGIN names this library */
  SEG_GPU_OFF = 5,       /* STALLSCOPE_SHIM_GPU=off */
  SEG_GPU_RISK = 6,      /* NCCL before 2.31 may fail with a plugin (NVIDIA/nccl#2039, #2326) */
  SEG_GPU_SLOW = 7,      /* NCCL 2.31 loses up to a tenth of its throughput with one (NVIDIA/nccl#2355) */
  SEG_GPU_EVENTS = 8,    /* not NCCL tells it, but pairs of CUDA events (pairs.c) */
  SEG_GPU_NO_EVENTS = 9, /* they were asked for, and there is no driver, or no thread for them */
  SEG_GPU_AT_WORK = 16,  /* + version of the interface by which NCCL uses it */
};

/* Before the real call of what makes a unique id or a communicator. real: the function's address. */
void seg_gpu_before_creation(const void *real);

/* At the entry of any other NCCL function, its number `n` known, and at its return. a: the words of its record. */
void seg_gpu_entered(uint32_t hook, const uint64_t *a, uint32_t n);
void seg_gpu_returned(uint32_t hook, const uint64_t *a, uint32_t n, int32_t status);

/* pairs.c: the same with pairs of CUDA events; real: the function's address. */
struct seg_nccl;
void seg_pairs_open(void); /* they are wanted */
uint32_t seg_pairs_state(void);
void seg_pairs_entered(const struct seg_nccl *k, const uint64_t *a, uint32_t n, const void *real);
void seg_pairs_returned(const struct seg_nccl *k, int32_t status);

uint32_t seg_gpu_state(void);
uint32_t seg_gpu_depth(void);                /* of groups that this thread is in */
void seg_gpu_count(enum seg_gpu_figure one); /* what is turned away */
uint32_t seg_gpu_nccl_version(void);         /* e.g. 22705; 0 = not known yet */
void seg_gpu_hush(int change);               /* NCCL is to tell nothing of what is called from +1 to -1 */
/* rank.c: a function of the library that an address is in, or of the first one of such a name; NULL = none. */
void *seg_symbol_near(const void *address, const char *name);
void *seg_symbol_of(const char *soname, const char *name);
#endif
