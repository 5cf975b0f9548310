/* Streams as time lines: the fast path of every submission, and the waits. */
#include <stdlib.h>

#include "engine.h"

enum { PER_THREAD_CACHE = 8 };

_Thread_local bool sim_stream_zero_is_per_thread;

/* The calling thread's own default streams, one a context. */
struct own_streams {
  struct CUctx_st *context[PER_THREAD_CACHE];
  struct CUstream_st *stream[PER_THREAD_CACHE];
};
static _Thread_local struct own_streams *own;
static pthread_key_t own_key;
static pthread_once_t own_once = PTHREAD_ONCE_INIT;

static void own_destroy(void *value) {
  struct own_streams *streams = value;
  for (int i = 0; i < PER_THREAD_CACHE; i++)
    if (streams->stream[i]) sim_stream_free(streams->stream[i]);
  free(streams);
}

static void own_key_create(void) {
  pthread_key_create(&own_key, own_destroy);
}

static struct CUstream_st *own_stream(struct CUctx_st *context) {
  if (!own) {
    pthread_once(&own_once, own_key_create);
    own = sim_new(sizeof(*own));
    pthread_setspecific(own_key, own);
  }
  for (int i = 0; i < PER_THREAD_CACHE; i++) {
    if (own->context[i] == context) return own->stream[i];
    if (!own->context[i]) {
      own->context[i] = context;
      return own->stream[i] = sim_stream_new(context, CU_STREAM_DEFAULT, 0);
    }
  }
  return context->legacy;
}

struct CUstream_st *sim_stream_new(struct CUctx_st *context, unsigned flags, int priority) {
  struct CUstream_st *stream = sim_new(sizeof(*stream));
  *stream = (struct CUstream_st){.magic = MAGIC_STREAM, .flags = flags, .priority = priority, .context = context};
  stream->id = sim_next_id();
  pthread_cond_init(&stream->more, NULL);
  pthread_mutex_lock(&sim_lock);
  stream->next = context->streams;
  context->streams = stream;
  pthread_mutex_unlock(&sim_lock);
  return stream;
}

static void stream_unlink(struct CUstream_st *stream) {
  struct CUstream_st **link = &stream->context->streams;
  while (*link && *link != stream) link = &(*link)->next;
  if (*link) *link = stream->next;
}

/* Returns at once, as CUDA does: work that is still under way counts for the context, and a worker frees its own. */
void sim_stream_free(struct CUstream_st *stream) {
  pthread_mutex_lock(&sim_lock);
  stream->magic = 0;
  sim_raise(&stream->context->retired_until_ns, atomic_load(&stream->busy_until_ns));
  if (stream->has_worker) {
    stream->dying = true;
    pthread_cond_broadcast(&stream->more);
  } else {
    stream_unlink(stream);
    pthread_cond_destroy(&stream->more);
    free(stream);
  }
  pthread_mutex_unlock(&sim_lock);
}

CUresult sim_stream(CUstream handle, struct CUstream_st **stream) {
  if ((uintptr_t)handle > (uintptr_t)CU_STREAM_PER_THREAD) {
    *stream = handle;
    return IS_A(handle, MAGIC_STREAM) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
  }
  struct CUctx_st *context;
  CUresult error = sim_current(&context);
  if (error) return error;
  bool per_thread = handle == CU_STREAM_PER_THREAD || (!handle && sim_stream_zero_is_per_thread);
  *stream = per_thread ? own_stream(context) : context->legacy;
  return CUDA_SUCCESS;
}

void sim_raise(_Atomic uint64_t *value, uint64_t at_least) {
  uint64_t old = atomic_load_explicit(value, memory_order_relaxed);
  while (old < at_least && !atomic_compare_exchange_weak(value, &old, at_least))
    ;
}

static bool is_blocking(const struct CUstream_st *stream) {
  return stream != stream->context->legacy && !(stream->flags & CU_STREAM_NON_BLOCKING);
}

/* The legacy stream waits for all blocking streams and they wait for it. */
static uint64_t depends_ns(const struct CUstream_st *stream) {
  const struct CUctx_st *context = stream->context;
  if (stream == context->legacy) return atomic_load(&context->blocking_until_ns);
  return is_blocking(stream) ? atomic_load(&context->legacy->busy_until_ns) : 0;
}

uint64_t sim_ready_ns(const struct CUstream_st *stream) {
  uint64_t busy_ns = atomic_load(&stream->busy_until_ns), others_ns = depends_ns(stream);
  return busy_ns > others_ns ? busy_ns : others_ns;
}

void sim_not_before(struct CUstream_st *stream, uint64_t time_ns) {
  sim_raise(&stream->busy_until_ns, time_ns);
  if (is_blocking(stream)) sim_raise(&stream->context->blocking_until_ns, time_ns);
}

/* Puts work of that length at the end of the time line; returns when it will be done. */
uint64_t sim_advance(struct CUstream_st *stream, uint64_t duration_ns) {
  uint64_t earliest_ns = sim_now_ns(), others_ns = depends_ns(stream), start_ns, end_ns;
  if (others_ns > earliest_ns) earliest_ns = others_ns;
  uint64_t busy_ns = atomic_load_explicit(&stream->busy_until_ns, memory_order_relaxed);
  do {
    start_ns = busy_ns > earliest_ns ? busy_ns : earliest_ns;
    end_ns = duration_ns > NEVER_NS - start_ns ? NEVER_NS : start_ns + duration_ns;
  } while (!atomic_compare_exchange_weak(&stream->busy_until_ns, &busy_ns, end_ns));
  if (is_blocking(stream)) sim_raise(&stream->context->blocking_until_ns, end_ns);
  if (duration_ns) sim_stats_worked(stream->context->device, start_ns, end_ns);
  return end_ns;
}

/* Executes work whose place in time is known. Data moves now: nobody may look at it before a wait anyway. */
uint64_t sim_apply(struct CUstream_st *stream, const struct op *op) {
  switch (op->kind) {
  case OP_COPY:
    sim_do_copy(&op->copy);
    break;
  case OP_SET:
    sim_do_set(&op->set);
    break;
  default:
    break;
  }
  return sim_advance(stream, op->duration_ns);
}

CUresult sim_submit(struct CUstream_st *stream, const struct op *op) {
  if (atomic_load_explicit(&stream->slow, memory_order_acquire) ||
      atomic_load_explicit(&stream->context->queued_streams, memory_order_acquire) || op->kind >= OP_RECORD)
    return sim_submit_slow(stream, op);
  sim_apply(stream, op);
  return CUDA_SUCCESS;
}

CUresult sim_wait_stream(struct CUstream_st *stream) {
  bool spin = sim_spins(stream->context, 0);
  if (atomic_load(&stream->slow) & SLOW_CAPTURING) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  if (!atomic_load(&stream->slow) && !atomic_load(&stream->context->queued_streams)) {
    sim_wait_until(sim_ready_ns(stream), spin);
    return CUDA_SUCCESS;
  }
  pthread_mutex_lock(&sim_lock);
  struct point *point = sim_fence(stream);
  pthread_mutex_unlock(&sim_lock);
  sim_wait_point(point, spin);
  return CUDA_SUCCESS;
}

static struct point **fence_all(struct CUctx_st *context, size_t *count, uint64_t *until_ns) {
  size_t streams = 0;
  *count = 0;
  *until_ns = atomic_load(&context->retired_until_ns);
  for (struct CUstream_st *s = context->streams; s; s = s->next) streams++;
  struct point **points = sim_new(streams * sizeof(*points) + 1);
  for (struct CUstream_st *s = context->streams; s; s = s->next) {
    uint64_t busy_ns = atomic_load(&s->busy_until_ns);
    if (atomic_load(&s->slow) & SLOW_QUEUED) points[(*count)++] = sim_fence(s);
    if (busy_ns > *until_ns) *until_ns = busy_ns;
  }
  return points;
}

CUresult sim_wait_context(struct CUctx_st *context) {
  size_t count;
  uint64_t until_ns;
  bool spin = sim_spins(context, 0);
  pthread_mutex_lock(&sim_lock);
  struct point **points = fence_all(context, &count, &until_ns);
  pthread_mutex_unlock(&sim_lock);
  for (size_t i = 0; i < count; i++) sim_wait_point(points[i], spin);
  free(points);
  sim_wait_until(until_ns, spin);
  return CUDA_SUCCESS;
}

CUresult sim_cuStreamCreateWithPriority(CUstream *stream, unsigned flags, int priority) {
  struct CUctx_st *context;
  CUresult error = sim_current(&context);
  if (error) return error;
  if (!stream || flags > CU_STREAM_NON_BLOCKING) return CUDA_ERROR_INVALID_VALUE;
  *stream = sim_stream_new(context, flags, priority);
  return CUDA_SUCCESS;
}

CUresult sim_cuStreamCreate(CUstream *stream, unsigned flags) {
  return sim_cuStreamCreateWithPriority(stream, flags, 0);
}

CUresult sim_cuStreamDestroy_v2(CUstream stream) {
  if (!IS_A(stream, MAGIC_STREAM)) return CUDA_ERROR_INVALID_HANDLE;
  sim_stream_free(stream);
  return CUDA_SUCCESS;
}

CUresult sim_cuStreamSynchronize(CUstream handle) {
  struct CUstream_st *stream;
  CUresult error = sim_stream(handle, &stream);
  return error ? error : sim_wait_stream(stream);
}

CUresult sim_cuStreamQuery(CUstream handle) {
  struct CUstream_st *stream;
  CUresult error = sim_stream(handle, &stream);
  if (error) return error;
  unsigned slow = atomic_load(&stream->slow);
  if (slow & SLOW_CAPTURING) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  return slow || sim_now_ns() < sim_ready_ns(stream) ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS;
}

CUresult sim_cuStreamGetFlags(CUstream handle, unsigned *flags) {
  struct CUstream_st *stream;
  CUresult error = sim_stream(handle, &stream);
  if (!error) *flags = stream->flags;
  return error;
}

CUresult sim_cuStreamGetPriority(CUstream handle, int *priority) {
  struct CUstream_st *stream;
  CUresult error = sim_stream(handle, &stream);
  if (!error) *priority = stream->priority;
  return error;
}

CUresult sim_cuStreamGetCtx(CUstream handle, CUcontext *context) {
  struct CUstream_st *stream;
  CUresult error = sim_stream(handle, &stream);
  if (!error) *context = stream->context;
  return error;
}

CUresult sim_cuStreamGetId(CUstream handle, unsigned long long *id) {
  struct CUstream_st *stream;
  CUresult error = sim_stream(handle, &stream);
  if (!error) *id = stream->id;
  return error;
}
