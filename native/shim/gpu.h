/* The GPU's witness: what NCCL's profiler interface tells this library when NCCL takes it as its plugin.
 *
 * Wrappers of NCCL functions call these for outermost calls, whatever the mode; each returns at once while NCCL has no
 * use for a plugin. Records leave by seg_emit_vital.
 */
#ifndef STALLSCOPE_SHIM_GPU_H
#define STALLSCOPE_SHIM_GPU_H

#include <stdint.h>

/* How far it came, for the segment's header. */
enum gpu_state {
  GPU_UNTRIED = 0,  /* no communicator was made yet */
  GPU_TAKEN = 1,    /* the user, a configuration file or the loader's path has another plugin */
  GPU_OLD = 2,      /* NCCL before 2.26 tells no begin on the GPU */
  GPU_NO_PATH = 3,  /* the path of this library is unknown or too long for NCCL */
  GPU_CLAIMED = 4,  /* NCCL_PROFILER_PLUGIN names this library */
  GPU_AT_WORK = 16, /* + version of the interface: NCCL has loaded it */
};

struct gpu_figures {
  uint64_t unmatched; /* what NCCL queued and no call of the program explains: graphs, parts of an all-to-all */
  uint64_t untold;    /* operations that were called and that NCCL did not tell of */
  uint64_t exhausted; /* begun operations whose place was needed for newer ones */
  uint64_t busy;      /* turned away because another thread held the lock */
  uint64_t unbound;   /* communicators without a place */
};

/* Before the real call of a function that makes a unique id or a communicator; `real`: an address in that NCCL. */
void gpu_before_creation(const void *real);

/* At the entry of every other NCCL function, once the number `n` is known, and at its return; `a`: the words recorded of
 * it, see probes/hooks.def. */
void gpu_entered(unsigned hook, const uint64_t *a, uint32_t n);
void gpu_returned(unsigned hook, const uint64_t *a, uint32_t n, int status);

unsigned gpu_state(void);
void gpu_figures(struct gpu_figures *out);
#endif
