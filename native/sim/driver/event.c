/* Events: a moment on a stream's time line, or a point of a queued stream. */
#include <stdlib.h>

#include "engine.h"

CUresult sim_cuEventCreate(CUevent *event, unsigned flags) {
  struct CUctx_st *context;
  CUresult error = sim_current(&context);
  if (error || !event) return error ? error : CUDA_ERROR_INVALID_VALUE;
  *event = sim_new(sizeof(**event));
  (*event)->magic = MAGIC_EVENT;
  (*event)->flags = flags;
  (*event)->context = context;
  return CUDA_SUCCESS;
}

/* With sim_lock held: whoever waits for the old recording keeps it, the event itself turns away from it. */
static void drop_pending(struct CUevent_st *event) {
  if (!event->pending) return;
  event->pending->event = NULL;
  sim_point_release(event->pending);
  event->pending = NULL;
}

CUresult sim_cuEventDestroy_v2(CUevent event) {
  if (!IS_A(event, MAGIC_EVENT)) return CUDA_ERROR_INVALID_HANDLE;
  pthread_mutex_lock(&sim_lock);
  event->magic = 0;
  drop_pending(event);
  pthread_mutex_unlock(&sim_lock);
  free(event);
  return CUDA_SUCCESS;
}

static CUresult record_slow(struct CUevent_st *event, struct CUstream_st *stream) {
  pthread_mutex_lock(&sim_lock);
  drop_pending(event);
  event->capture_id = stream->capture ? stream->capture->id : 0;
  if (!stream->capture) {
    struct point *point = sim_fence(stream);
    if (atomic_load(&point->known)) {
      atomic_store(&event->time_ns, point->time_ns);
      sim_point_release(point);
    } else {
      point->event = event;
      event->pending = point;
      atomic_store(&event->time_ns, PENDING_NS);
    }
  }
  pthread_mutex_unlock(&sim_lock);
  return CUDA_SUCCESS;
}

CUresult sim_cuEventRecord(CUevent event, CUstream handle) {
  struct CUstream_st *stream;
  CUresult error = sim_stream(handle, &stream);
  if (error || !IS_A(event, MAGIC_EVENT)) return error ? error : CUDA_ERROR_INVALID_HANDLE;
  if (atomic_load(&stream->slow) || atomic_load(&stream->context->queued_streams) || event->capture_id ||
      atomic_load(&event->time_ns) == PENDING_NS)
    return record_slow(event, stream);
  atomic_store(&event->time_ns, sim_advance(stream, 0));
  return CUDA_SUCCESS;
}

CUresult sim_cuEventRecordWithFlags(CUevent event, CUstream handle, unsigned flags) {
  (void)flags;
  return sim_cuEventRecord(event, handle);
}

CUresult sim_cuEventQuery(CUevent event) {
  if (!IS_A(event, MAGIC_EVENT)) return CUDA_ERROR_INVALID_HANDLE;
  uint64_t time_ns = atomic_load(&event->time_ns);
  return time_ns == 0 || sim_now_ns() >= time_ns ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

/* One reference to what the event stands for now, or NULL when its time is known. */
static struct point *pending_of(struct CUevent_st *event) {
  pthread_mutex_lock(&sim_lock);
  struct point *point = event->pending;
  if (point) point->references++;
  pthread_mutex_unlock(&sim_lock);
  return point;
}

CUresult sim_cuEventSynchronize(CUevent event) {
  if (!IS_A(event, MAGIC_EVENT)) return CUDA_ERROR_INVALID_HANDLE;
  bool spin = sim_spins(event->context, event->flags);
  struct point *point = atomic_load(&event->time_ns) == PENDING_NS ? pending_of(event) : NULL;
  if (point) sim_wait_point(point, spin);
  else sim_wait_until(atomic_load(&event->time_ns), spin);
  return CUDA_SUCCESS;
}

CUresult sim_cuStreamWaitEvent(CUstream handle, CUevent event, unsigned flags) {
  struct CUstream_st *stream;
  CUresult error = sim_stream(handle, &stream);
  (void)flags;
  if (error || !IS_A(event, MAGIC_EVENT)) return error ? error : CUDA_ERROR_INVALID_HANDLE;
  if (event->capture_id) {
    sim_capture_join(stream, event->capture_id);
    return CUDA_SUCCESS;
  }
  struct point *point = atomic_load(&event->time_ns) == PENDING_NS ? pending_of(event) : NULL;
  if (!point && !atomic_load(&stream->slow)) {
    sim_not_before(stream, atomic_load(&event->time_ns));
    return CUDA_SUCCESS;
  }
  if (!point) {
    point = sim_point_new(NULL);
    point->time_ns = atomic_load(&event->time_ns);
    atomic_store(&point->known, true);
  }
  struct op op = {.kind = OP_AWAIT, .point = point};
  return sim_submit(stream, &op);
}

CUresult sim_cuEventElapsedTime(float *ms, CUevent start, CUevent end) {
  if (!ms || !IS_A(start, MAGIC_EVENT) || !IS_A(end, MAGIC_EVENT))
    return ms ? CUDA_ERROR_INVALID_HANDLE : CUDA_ERROR_INVALID_VALUE;
  uint64_t from_ns = atomic_load(&start->time_ns), to_ns = atomic_load(&end->time_ns), now_ns = sim_now_ns();
  if (!from_ns || !to_ns || (start->flags | end->flags) & CU_EVENT_DISABLE_TIMING) return CUDA_ERROR_INVALID_HANDLE;
  if (now_ns < from_ns || now_ns < to_ns) return CUDA_ERROR_NOT_READY;
  *ms = (float)((double)((int64_t)(to_ns - from_ns)) / 1e6);
  return CUDA_SUCCESS;
}

CUresult sim_cuEventElapsedTime_v2(float *ms, CUevent start, CUevent end) {
  return sim_cuEventElapsedTime(ms, start, end);
}
