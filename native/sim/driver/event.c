/* Events: a moment on a stream's time line, or a point of a queued stream. */
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>

#include "engine.h"

enum { FOREIGN_NS = 50000 };

/* Of an event that other processes know too, the time lies where they see it. */
uint64_t sim_event_time(const struct CUevent_st *event) {
  return atomic_load(event->shared_time ? event->shared_time : &event->time_ns);
}

void sim_event_set_time(struct CUevent_st *event, uint64_t time_ns) {
  atomic_store(&event->time_ns, time_ns);
  if (event->shared_time) atomic_store(event->shared_time, time_ns);
}

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
  sim_event_unshare(event);
  free(event);
  return CUDA_SUCCESS;
}

static CUresult record_slow(struct CUevent_st *event, struct CUstream_st *stream) {
  pthread_mutex_lock(&sim_lock);
  drop_pending(event);
  event->capture_id = stream->capture ? stream->capture->id : 0;
  event->capture_ns = stream->capture_ns;
  if (!stream->capture) {
    struct point *point = sim_fence(stream);
    if (atomic_load(&point->known)) {
      sim_event_set_time(event, point->time_ns);
      sim_point_release(point);
    } else {
      point->event = event;
      event->pending = point;
      sim_event_set_time(event, PENDING_NS);
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
      sim_event_time(event) == PENDING_NS)
    return record_slow(event, stream);
  sim_event_set_time(event, sim_advance(stream, 0));
  return CUDA_SUCCESS;
}

CUresult sim_cuEventRecordWithFlags(CUevent event, CUstream handle, unsigned flags) {
  (void)flags;
  return sim_cuEventRecord(event, handle);
}

CUresult sim_cuEventQuery(CUevent event) {
  if (!IS_A(event, MAGIC_EVENT)) return CUDA_ERROR_INVALID_HANDLE;
  if (sim_capture_forbids()) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  uint64_t time_ns = sim_event_time(event);
  return time_ns == 0 || sim_now_ns() >= time_ns ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

/* What another process recorded has no point here: a thread looks until its time is known. It holds a mapping of its
 * own, since the event may be gone before that. */
struct foreign {
  _Atomic uint64_t *time;
  struct point *point;
};

static void *watch_foreign(void *argument) {
  struct foreign *foreign = argument;
  uint64_t time_ns;
  while ((time_ns = atomic_load(foreign->time)) == PENDING_NS)
    nanosleep(&(struct timespec){.tv_nsec = FOREIGN_NS}, NULL);
  pthread_mutex_lock(&sim_lock);
  sim_point_resolve(foreign->point, time_ns);
  sim_point_release(foreign->point);
  pthread_mutex_unlock(&sim_lock);
  munmap((void *)(uintptr_t)foreign->time, sizeof(*foreign->time));
  free(foreign);
  return NULL;
}

/* With sim_lock held. */
static struct point *foreign_point(const struct CUevent_st *event) {
  pthread_t thread;
  void *time = mmap(NULL, sizeof(uint64_t), PROT_READ, MAP_SHARED, event->shared_fd, 0);
  if (time == MAP_FAILED) return NULL;
  struct foreign *foreign = sim_new(sizeof(*foreign));
  *foreign = (struct foreign){time, sim_point_new(NULL)};
  struct point *point = foreign->point;
  point->references++;
  if (pthread_create(&thread, NULL, watch_foreign, foreign)) {
    point->references--;
    munmap(time, sizeof(uint64_t));
    free(foreign);
    sim_point_resolve(point, sim_now_ns());
  } else {
    pthread_detach(thread);
  }
  return point;
}

/* One reference to what the event stands for now, or NULL when its time is known. */
static struct point *pending_of(struct CUevent_st *event) {
  pthread_mutex_lock(&sim_lock);
  struct point *point = event->pending;
  if (point) point->references++;
  else if (event->shared_time && sim_event_time(event) == PENDING_NS) point = foreign_point(event);
  pthread_mutex_unlock(&sim_lock);
  return point;
}

CUresult sim_cuEventSynchronize(CUevent event) {
  if (!IS_A(event, MAGIC_EVENT)) return CUDA_ERROR_INVALID_HANDLE;
  bool spin = sim_spins(event->context, event->flags);
  struct point *point = sim_event_time(event) == PENDING_NS ? pending_of(event) : NULL;
  if (point) sim_wait_point(point, spin);
  else sim_wait_until(sim_event_time(event), spin);
  return CUDA_SUCCESS;
}

CUresult sim_cuStreamWaitEvent(CUstream handle, CUevent event, unsigned flags) {
  struct CUstream_st *stream;
  CUresult error = sim_stream(handle, &stream);
  (void)flags;
  if (error || !IS_A(event, MAGIC_EVENT)) return error ? error : CUDA_ERROR_INVALID_HANDLE;
  if (event->capture_id) {
    sim_capture_join(stream, event);
    return CUDA_SUCCESS;
  }
  struct point *point = sim_event_time(event) == PENDING_NS ? pending_of(event) : NULL;
  if (!point && !atomic_load(&stream->slow)) {
    sim_not_before(stream, sim_event_time(event));
    return CUDA_SUCCESS;
  }
  if (!point) {
    point = sim_point_new(NULL);
    point->time_ns = sim_event_time(event);
    atomic_store(&point->known, true);
  }
  struct op op = {.kind = OP_AWAIT, .point = point};
  return sim_submit(stream, &op);
}

CUresult sim_cuEventElapsedTime(float *ms, CUevent start, CUevent end) {
  if (!ms || !IS_A(start, MAGIC_EVENT) || !IS_A(end, MAGIC_EVENT))
    return ms ? CUDA_ERROR_INVALID_HANDLE : CUDA_ERROR_INVALID_VALUE;
  uint64_t from_ns = sim_event_time(start), to_ns = sim_event_time(end), now_ns = sim_now_ns();
  if (!from_ns || !to_ns || (start->flags | end->flags) & CU_EVENT_DISABLE_TIMING) return CUDA_ERROR_INVALID_HANDLE;
  if (now_ns < from_ns || now_ns < to_ns) return CUDA_ERROR_NOT_READY;
  *ms = (float)((double)((int64_t)(to_ns - from_ns)) / 1e6);
  return CUDA_SUCCESS;
}

CUresult sim_cuEventElapsedTime_v2(float *ms, CUevent start, CUevent end) {
  return sim_cuEventElapsedTime(ms, start, end);
}
