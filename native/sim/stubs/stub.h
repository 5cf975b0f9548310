/* What the functions that gen_stubs.py writes have in common: each counts its calls.
 *
 * The source that includes this defines STUB_COUNT and, behind the include, `stub_names`.
 */
#ifndef SIM_STUB_H
#define SIM_STUB_H

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifndef STUB_FINISH
#define STUB_FINISH(result) (result)
#endif
#define STUB_EXPORT __attribute__((visibility("default")))

static atomic_ulong stub_calls[STUB_COUNT];
static const char *const stub_names[STUB_COUNT];

/* Of cuBLAS: one kernel of that name on the stream of the handle. */
int sim_blas_launch(void *handle, const char *name);

#define STUB(index, name, result)                                                                                      \
  int name(void);                                                                                                      \
  STUB_EXPORT int name(void) {                                                                                         \
    atomic_fetch_add_explicit(&stub_calls[index], 1, memory_order_relaxed);                                            \
    return STUB_FINISH(result);                                                                                        \
  }

#define LAUNCH_STUB(index, name)                                                                                       \
  int name(void *handle);                                                                                              \
  STUB_EXPORT int name(void *handle) {                                                                                 \
    atomic_fetch_add_explicit(&stub_calls[index], 1, memory_order_relaxed);                                            \
    return sim_blas_launch(handle, #name);                                                                             \
  }

/* How often a generated function was called; 0 for any other name. */
unsigned long stallscope_sim_stub_calls(const char *name);
STUB_EXPORT unsigned long stallscope_sim_stub_calls(const char *name) {
  for (int i = 0; i < STUB_COUNT; i++)
    if (strcmp(stub_names[i], name) == 0) return atomic_load(&stub_calls[i]);
  return 0;
}

/* STALLSCOPE_SIM_STUBS=1: says on standard error at the end which of them were called. */
__attribute__((destructor)) static void stub_report(void) {
  const char *wanted = getenv("STALLSCOPE_SIM_STUBS");
  if (!wanted || strcmp(wanted, "1") != 0) return;
  for (int i = 0; i < STUB_COUNT; i++)
    if (atomic_load(&stub_calls[i]))
      fprintf(stderr, "stallscope sim: %s is a stub, called %lu times\n", stub_names[i], atomic_load(&stub_calls[i]));
}

#endif
