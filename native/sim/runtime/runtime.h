/* Inside of the simulated runtime: every exported function is one entry check and one call through the driver table. */
#ifndef SIM_RUNTIME_H
#define SIM_RUNTIME_H

#include "driver_table.h"
#include "sim_cudart.h"

#ifndef RUNTIME_MAJOR
#define RUNTIME_MAJOR 12
#endif
#define RUNTIME_VERSION (RUNTIME_MAJOR == 12 ? 12090 : 13000)

#define EXPORT __attribute__((visibility("default")))

enum { PLAIN, TWIN };

/* The driver as this thread uses it, bound to the thread's device; NULL when there is none (see rt_failed). */
const struct driver_table *rt_enter(int twin);
/* The driver without a device: for what a program may ask before it has chosen one. */
const struct driver_table *rt_driver(int twin);
cudaError_t rt_failed(void);
cudaError_t rt_finish(cudaError_t result);
int rt_device(void);
CUcontext rt_context_of(int device);

CUfunction rt_function(const struct driver_table *drv, const void *func);
void rt_registry_lock(void);
void rt_registry_unlock(void);
void rt_function_handle(const void *handle);
void *rt_symbol(const struct driver_table *drv, const void *symbol, size_t *bytes);

/* RUNTIME(name, (parameters), expression over `drv`) defines the exported function; RUNTIME_TWIN also its twin. */
#define RUNTIME_ONE(name, twin, params, expression)                                                                    \
  EXPORT cudaError_t name params {                                                                                     \
    const struct driver_table *drv = rt_enter(twin);                                                                   \
    return drv ? rt_finish(expression) : rt_failed();                                                                  \
  }
#define RUNTIME(name, params, expression) RUNTIME_ONE(name, PLAIN, params, expression)
#define RUNTIME_TWIN(name, suffix, params, expression)                                                                 \
  RUNTIME_ONE(name, PLAIN, params, expression)                                                                         \
  RUNTIME_ONE(name##suffix, TWIN, params, expression)

#define DEVPTR(pointer) ((CUdeviceptr)(pointer))

#endif
