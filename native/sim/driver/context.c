/* Contexts: primary ones, made ones, and which one a thread uses. */
#include <stdlib.h>

#include "engine.h"

static struct CUctx_st *contexts, *primary[MAX_DEVICES];
static unsigned primary_flags[MAX_DEVICES];
static pthread_mutex_t primary_lock = PTHREAD_MUTEX_INITIALIZER;
static atomic_bool initialised;
static _Thread_local struct CUctx_st *current[MAX_CONTEXT_DEPTH];
static _Thread_local int depth;

/* The real driver cannot be used in a child forked after cuInit; this one forgets its work and starts anew there. */
static void before_fork(void) {
  pthread_mutex_lock(&primary_lock);
  pthread_mutex_lock(&sim_module_lock);
  pthread_mutex_lock(&sim_lock);
  sim_vmm_lock();
  sim_memory_lock();
}

static void after_fork_parent(void) {
  sim_memory_unlock();
  sim_vmm_unlock();
  pthread_mutex_unlock(&sim_lock);
  pthread_mutex_unlock(&sim_module_lock);
  pthread_mutex_unlock(&primary_lock);
}

static void after_fork_child(void) {
  pthread_cond_init(&sim_known, NULL);
  for (struct CUctx_st *context = contexts; context; context = context->next) {
    atomic_store(&context->queued_streams, 0);
    for (struct CUstream_st *stream = context->streams; stream; stream = stream->next) sim_queue_forget(stream);
  }
  for (int i = 0; i < MAX_DEVICES; i++) primary[i] = NULL;
  depth = 0;
  sim_stats_forget();
  atomic_store(&initialised, false);
  sim_memory_lock_renew();
  sim_vmm_unlock();
  pthread_mutex_unlock(&sim_lock);
  pthread_mutex_unlock(&sim_module_lock);
  pthread_mutex_unlock(&primary_lock);
}

static void register_fork_handlers(void) {
  pthread_atfork(before_fork, after_fork_parent, after_fork_child);
}

CUresult sim_cuInit(unsigned flags) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  if (flags) return CUDA_ERROR_INVALID_VALUE;
  pthread_once(&once, register_fork_handlers);
  if (sim_config()->devices == 0) return CUDA_ERROR_NO_DEVICE;
  if (atomic_load(&initialised)) return CUDA_SUCCESS;
  pthread_mutex_lock(&sim_lock);
  sim_stats_open();
  pthread_mutex_unlock(&sim_lock);
  atomic_store(&initialised, true);
  return CUDA_SUCCESS;
}

/* With sim_lock held. */
struct CUctx_st *sim_context_list(void) {
  return contexts;
}

CUresult sim_current(struct CUctx_st **context) {
  if (depth == 0 || !current[depth - 1])
    return atomic_load(&initialised) ? CUDA_ERROR_INVALID_CONTEXT : CUDA_ERROR_NOT_INITIALIZED;
  *context = current[depth - 1];
  return CUDA_SUCCESS;
}

static CUresult check_device(CUdevice device) {
  if (!atomic_load(&initialised)) return CUDA_ERROR_NOT_INITIALIZED;
  return device < 0 || device >= sim_config()->devices ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS;
}

static struct CUctx_st *context_new(CUdevice device, unsigned flags) {
  struct CUctx_st *context = sim_new(sizeof(*context));
  context->magic = MAGIC_CONTEXT;
  context->device = device;
  atomic_store(&context->flags, flags);
  context->legacy = sim_stream_new(context, CU_STREAM_DEFAULT, 0);
  pthread_mutex_lock(&sim_lock);
  context->next = contexts;
  contexts = context;
  sim_stats_context(device, 1);
  pthread_mutex_unlock(&sim_lock);
  return context;
}

CUresult sim_cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
  CUresult error = check_device(device);
  if (error || !context) return error ? error : CUDA_ERROR_INVALID_VALUE;
  pthread_mutex_lock(&primary_lock);
  if (!primary[device]) primary[device] = context_new(device, primary_flags[device]);
  primary[device]->references++;
  *context = primary[device];
  pthread_mutex_unlock(&primary_lock);
  return CUDA_SUCCESS;
}

/* Streams and events may still point at a released context, so it stays in memory, as an idle one. */
CUresult sim_cuDevicePrimaryCtxRelease_v2(CUdevice device) {
  CUresult error = check_device(device);
  if (error) return error;
  if (!primary[device] || primary[device]->references == 0) return CUDA_ERROR_INVALID_CONTEXT;
  primary[device]->references--;
  return CUDA_SUCCESS;
}

CUresult sim_cuDevicePrimaryCtxReset_v2(CUdevice device) {
  CUresult error = check_device(device);
  if (error || !primary[device]) return error;
  return sim_wait_context(primary[device]);
}

CUresult sim_cuDevicePrimaryCtxSetFlags_v2(CUdevice device, unsigned flags) {
  CUresult error = check_device(device);
  if (error) return error;
  primary_flags[device] = flags;
  if (primary[device]) atomic_store(&primary[device]->flags, flags);
  return CUDA_SUCCESS;
}

CUresult sim_cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
  CUresult error = check_device(device);
  if (error) return error;
  *flags = primary_flags[device];
  *active = primary[device] && primary[device]->references > 0;
  return CUDA_SUCCESS;
}

CUresult sim_cuCtxCreate_v2(CUcontext *context, unsigned flags, CUdevice device) {
  CUresult error = check_device(device);
  if (error || !context) return error ? error : CUDA_ERROR_INVALID_VALUE;
  if (depth == MAX_CONTEXT_DEPTH) return CUDA_ERROR_OUT_OF_MEMORY;
  *context = current[depth++] = context_new(device, flags);
  return CUDA_SUCCESS;
}

CUresult sim_cuCtxCreate_v4(CUcontext *context, void *params, unsigned flags, CUdevice device) {
  (void)params;
  return sim_cuCtxCreate_v2(context, flags, device);
}

CUresult sim_cuCtxDestroy_v2(CUcontext context) {
  if (!IS_A(context, MAGIC_CONTEXT)) return CUDA_ERROR_INVALID_CONTEXT;
  sim_wait_context(context);
  if (depth && current[depth - 1] == context) depth--;
  return CUDA_SUCCESS;
}

CUresult sim_cuCtxGetCurrent(CUcontext *context) {
  if (!atomic_load(&initialised)) return CUDA_ERROR_NOT_INITIALIZED;
  *context = depth ? current[depth - 1] : NULL;
  return CUDA_SUCCESS;
}

CUresult sim_cuCtxSetCurrent(CUcontext context) {
  if (context && !IS_A(context, MAGIC_CONTEXT)) return CUDA_ERROR_INVALID_CONTEXT;
  if (!depth) depth = 1;
  current[depth - 1] = context;
  return CUDA_SUCCESS;
}

CUresult sim_cuCtxPushCurrent_v2(CUcontext context) {
  if (!IS_A(context, MAGIC_CONTEXT)) return CUDA_ERROR_INVALID_CONTEXT;
  if (depth == MAX_CONTEXT_DEPTH) return CUDA_ERROR_OUT_OF_MEMORY;
  current[depth++] = context;
  return CUDA_SUCCESS;
}

CUresult sim_cuCtxPopCurrent_v2(CUcontext *context) {
  if (!depth) return CUDA_ERROR_INVALID_CONTEXT;
  depth--;
  if (context) *context = current[depth];
  return CUDA_SUCCESS;
}

CUresult sim_cuCtxGetDevice(CUdevice *device) {
  struct CUctx_st *context;
  CUresult error = sim_current(&context);
  if (!error) *device = context->device;
  return error;
}

CUresult sim_cuCtxGetFlags(unsigned *flags) {
  struct CUctx_st *context;
  CUresult error = sim_current(&context);
  if (!error) *flags = atomic_load(&context->flags);
  return error;
}

CUresult sim_cuCtxSetFlags(unsigned flags) {
  struct CUctx_st *context;
  CUresult error = sim_current(&context);
  if (!error) atomic_store(&context->flags, flags);
  return error;
}

CUresult sim_cuCtxGetApiVersion(CUcontext context, unsigned *version) {
  (void)context;
  *version = 3020;
  return CUDA_SUCCESS;
}

CUresult sim_cuCtxGetStreamPriorityRange(int *least, int *greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return CUDA_SUCCESS;
}

CUresult sim_cuCtxGetLimit(size_t *value, int limit) {
  (void)limit;
  *value = 1024;
  return CUDA_SUCCESS;
}

CUresult sim_cuCtxSetLimit(int limit, size_t value) {
  (void)limit;
  (void)value;
  return CUDA_SUCCESS;
}

CUresult sim_cuCtxEnablePeerAccess(CUcontext peer, unsigned flags) {
  return flags || !IS_A(peer, MAGIC_CONTEXT) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult sim_cuCtxDisablePeerAccess(CUcontext peer) {
  return IS_A(peer, MAGIC_CONTEXT) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

CUresult sim_cuCtxSynchronize(void) {
  struct CUctx_st *context;
  CUresult error = sim_current(&context);
  return error ? error : sim_wait_context(context);
}

CUresult sim_cuCtxSynchronize_v2(CUcontext context) {
  if (!context) return sim_cuCtxSynchronize();
  return IS_A(context, MAGIC_CONTEXT) ? sim_wait_context(context) : CUDA_ERROR_INVALID_CONTEXT;
}
