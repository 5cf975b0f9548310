/* Exported: versions and words, memory, registrations, the program's own reductions. */
#include <string.h>

#include "api.h"

API ncclGetVersion(int *version) {
  if (!version) return ncclInvalidArgument;
  *version = VERSION;
  return ncclSuccess;
}
ALIAS(GetVersion);

API_RETURNING(const char *) ncclGetErrorString(ncclResult_t result) {
  static const char *const words[ncclNumResults] = {
      "no error",
      "unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
      "unhandled system error (run with NCCL_DEBUG=INFO for details)",
      "internal error - please report this issue to the NCCL developers",
      "invalid argument (run with NCCL_DEBUG=WARN for details)",
      "invalid usage (run with NCCL_DEBUG=WARN for details)",
      "remote process exited or there was a network error",
      "NCCL operation in progress",
  };
  return result < 0 || result >= ncclNumResults ? "unknown result code" : words[result];
}
ALIAS(GetErrorString);

EXPORT void ncclResetDebugInit(void) {}

/* By the inner way: the real one reserves and maps, which no hook on cudaMalloc sees. */
API ncclMemAlloc(void **memory, size_t size) {
  CUdeviceptr device;
  CUcontext context;
  const struct driver_table *drv = sim_driver();
  if (!memory) return ncclInvalidArgument;
  if (!drv) return sim_fail(NULL, ncclUnhandledCudaError, "no device");
  bool bound = drv->cuCtxGetCurrent(&context) == 0 && context;
  if (!bound && drv->cuDevicePrimaryCtxRetain(&context, 0)) return sim_fail(NULL, ncclUnhandledCudaError, "no device");
  drv->cuCtxPushCurrent_v2(context);
  CUresult error = drv->cuMemAlloc_v2(&device, size);
  drv->cuCtxPopCurrent_v2(NULL);
  *memory = error ? NULL : (void *)device;
  return error ? sim_fail(NULL, ncclUnhandledCudaError, "no memory") : ncclSuccess;
}
ALIAS(MemAlloc);

API ncclMemFree(void *memory) {
  const struct driver_table *drv = sim_driver();
  if (!memory) return ncclSuccess;
  return drv && drv->cuMemFree_v2((CUdeviceptr)memory) == 0 ? ncclSuccess : ncclUnhandledCudaError;
}
ALIAS(MemFree);

/* Nothing is gained by registering here; a handle is what was registered. */
API ncclCommRegister(ncclComm_t comm, void *buffer, size_t size, void **handle) {
  ncclResult_t result = sim_comm_check(comm);
  if (result) return result;
  if (!buffer || !size || !handle) return sim_fail(comm, ncclInvalidArgument, "nothing to register");
  *handle = buffer;
  return ncclSuccess;
}
ALIAS(CommRegister);

API ncclCommDeregister(ncclComm_t comm, void *handle) {
  (void)handle;
  return sim_comm_check(comm);
}
ALIAS(CommDeregister);

API ncclCommWindowRegister(ncclComm_t comm, void *buffer, size_t size, ncclWindow_t *window, int flags) {
  ncclResult_t result = sim_comm_check(comm);
  (void)flags;
  if (result) return result;
  if (!buffer || !size || !window) return sim_fail(comm, ncclInvalidArgument, "nothing to register");
  *window = buffer;
  return ncclSuccess;
}
ALIAS(CommWindowRegister);

API ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t window) {
  return ncclCommDeregister(comm, window);
}
ALIAS(CommWindowDeregister);

static int free_user_op(const struct state *state) {
  for (int i = 0; i < MAX_USER_OPS; i++)
    if (!state->user_ops[i].used) return i;
  return -1;
}

API ncclRedOpCreatePreMulSum(ncclRedOp_t *op, void *scalar, ncclDataType_t type, ncclScalarResidence_t residence,
                             ncclComm_t comm) {
  ncclResult_t result = sim_comm_ready(comm);
  if (result) return result;
  if (!op || !scalar || !sim_can_reduce(type) || !sim_type_bytes(type))
    return sim_fail(comm, ncclInvalidArgument, "scalar of type %d", type);
  struct user_op own = {.used = true, .type = type, .device = residence == ncclScalarDevice ? scalar : NULL};
  if (!own.device) memcpy(&own.value, scalar, sim_type_bytes(type));
  pthread_mutex_lock(&comm->state->lock);
  int index = free_user_op(comm->state);
  if (index >= 0) comm->state->user_ops[index] = own;
  pthread_mutex_unlock(&comm->state->lock);
  *op = ncclNumOps + index;
  return index >= 0 ? ncclSuccess : sim_fail(comm, ncclInternalError, "too many operations");
}
ALIAS(RedOpCreatePreMulSum);

API ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm) {
  ncclResult_t result = sim_comm_check(comm);
  if (result) return result;
  int index = op - ncclNumOps;
  if (index < 0 || index >= MAX_USER_OPS) return sim_fail(comm, ncclInvalidArgument, "operation %d", op);
  pthread_mutex_lock(&comm->state->lock);
  bool used = comm->state->user_ops[index].used;
  comm->state->user_ops[index].used = false;
  pthread_mutex_unlock(&comm->state->lock);
  return used ? ncclSuccess : sim_fail(comm, ncclInvalidArgument, "operation %d", op);
}
ALIAS(RedOpDestroy);
