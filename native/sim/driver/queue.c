/* Streams whose end nobody knows: a queue and a worker thread, for as long as something in it is open.
 *
 * The worker does not live through durations: it only stands still at what is open (a host function, a hold, a point
 * of another stream) and puts everything else on the time line as soon as it comes to it.
 */
#include <stdlib.h>

#include "engine.h"

pthread_mutex_t sim_lock = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t sim_known = PTHREAD_COND_INITIALIZER;

struct point *sim_point_new(struct CUevent_st *event) {
  struct point *point = sim_new(sizeof(*point));
  point->references = 1;
  point->event = event;
  return point;
}

void sim_point_release(struct point *point) {
  if (--point->references == 0) free(point);
}

void sim_point_resolve(struct point *point, uint64_t time_ns) {
  point->time_ns = time_ns;
  atomic_store(&point->known, true);
  if (point->event) {
    sim_event_set_time(point->event, time_ns);
    point->event->pending = NULL;
    sim_point_release(point);
  }
  pthread_cond_broadcast(&sim_known);
}

/* Waits for the point and then for its time; gives up the caller's reference. */
void sim_wait_point(struct point *point, bool spin) {
  while (spin && !atomic_load(&point->known)) __builtin_ia32_pause();
  pthread_mutex_lock(&sim_lock);
  while (!atomic_load(&point->known)) pthread_cond_wait(&sim_known, &sim_lock);
  uint64_t time_ns = point->time_ns;
  sim_point_release(point);
  pthread_mutex_unlock(&sim_lock);
  sim_wait_until(time_ns, spin);
}

static void run_host(struct CUstream_st *stream, const struct op *op) {
  pthread_mutex_unlock(&sim_lock);
  sim_wait_until(sim_ready_ns(stream), false);
  if (op->kind == OP_HOST) op->host.func(op->host.data);
  else op->host.callback(op->host.stream, CUDA_SUCCESS, op->host.data);
  pthread_mutex_lock(&sim_lock);
  sim_not_before(stream, sim_now_ns());
}

/* Worker, with sim_lock held: one operation, however long it stays open. */
static void run_op(struct CUstream_st *stream, struct op *op) {
  switch (op->kind) {
  case OP_HOST:
  case OP_CALLBACK:
    run_host(stream, op);
    break;
  case OP_HOLD:
    sim_stats_hold_begin(stream->context->device);
    while (!op->hold->released) pthread_cond_wait(&sim_known, &sim_lock);
    sim_stats_hold_end(stream->context->device);
    free(op->hold);
    sim_not_before(stream, sim_now_ns());
    break;
  case OP_AWAIT:
    while (!atomic_load(&op->point->known)) pthread_cond_wait(&sim_known, &sim_lock);
    sim_not_before(stream, op->point->time_ns);
    sim_point_release(op->point);
    break;
  case OP_RECORD:
    sim_point_resolve(op->point, sim_advance(stream, 0));
    sim_point_release(op->point);
    break;
  default:
    sim_apply(stream, op);
  }
}

static void leave_queue(struct CUstream_st *stream) {
  atomic_fetch_and(&stream->slow, ~(unsigned)SLOW_QUEUED);
  atomic_fetch_sub(&stream->context->queued_streams, 1);
}

static void worker_end(struct CUstream_st *stream) {
  struct CUstream_st **link = &stream->context->streams;
  while (*link && *link != stream) link = &(*link)->next;
  if (*link) *link = stream->next;
  sim_raise(&stream->context->retired_until_ns, atomic_load(&stream->busy_until_ns));
  pthread_cond_destroy(&stream->more);
  free(stream);
}

static void *worker(void *argument) {
  struct CUstream_st *stream = argument;
  pthread_setname_np(pthread_self(), "sim-stream");
  pthread_mutex_lock(&sim_lock);
  while (stream->head || !stream->dying) {
    struct op *op = stream->head;
    if (!op) {
      pthread_cond_wait(&stream->more, &sim_lock);
      continue;
    }
    run_op(stream, op);
    stream->head = op->next;
    free(op);
    if (!stream->head) leave_queue(stream);
  }
  worker_end(stream);
  pthread_mutex_unlock(&sim_lock);
  return NULL;
}

static CUresult worker_start(struct CUstream_st *stream) {
  pthread_t thread;
  if (stream->has_worker) return CUDA_SUCCESS;
  if (pthread_create(&thread, NULL, worker, stream)) return CUDA_ERROR_OUT_OF_MEMORY;
  pthread_detach(thread);
  stream->has_worker = true;
  return CUDA_SUCCESS;
}

static CUresult enqueue(struct CUstream_st *stream, const struct op *op) {
  CUresult error = worker_start(stream);
  if (error) return error;
  struct op *copy = sim_new(sizeof(*copy));
  *copy = *op;
  copy->next = NULL;
  if (!stream->head) {
    stream->head = copy;
    atomic_fetch_or(&stream->slow, SLOW_QUEUED);
    atomic_fetch_add(&stream->context->queued_streams, 1);
  } else {
    stream->tail->next = copy;
  }
  stream->tail = copy;
  pthread_cond_signal(&stream->more);
  return CUDA_SUCCESS;
}

/* An operation that can take its place on the time line the moment it is reached. */
static bool is_settled(const struct op *op) {
  switch (op->kind) {
  case OP_HOST:
  case OP_CALLBACK:
  case OP_HOLD:
    return false;
  case OP_AWAIT:
    return atomic_load(&op->point->known);
  default:
    return true;
  }
}

static CUresult place(struct CUstream_st *stream, struct op *op) {
  if (stream->head || !is_settled(op)) return enqueue(stream, op);
  run_op(stream, op);
  return CUDA_SUCCESS;
}

/* A point at the end of what the stream holds now; the caller owns one reference. */
static struct point *fence_alone(struct CUstream_st *stream) {
  struct point *point = sim_point_new(NULL);
  struct op record = {.kind = OP_RECORD, .point = point};
  point->references++;
  if (place(stream, &record)) sim_point_resolve(point, sim_ready_ns(stream));
  return point;
}

static void await_stream(struct CUstream_st *stream, struct CUstream_st *other) {
  if (other == stream || !(atomic_load(&other->slow) & SLOW_QUEUED)) return;
  struct op await = {.kind = OP_AWAIT, .point = fence_alone(other)};
  if (place(stream, &await)) sim_point_release(await.point);
}

/* The legacy stream's two-way order, for streams whose end is not a number yet. */
static void await_default_order(struct CUstream_st *stream) {
  struct CUctx_st *context = stream->context;
  if (stream->flags & CU_STREAM_NON_BLOCKING || atomic_load(&context->queued_streams) == 0) return;
  if (stream != context->legacy) {
    await_stream(stream, context->legacy);
    return;
  }
  for (struct CUstream_st *other = context->streams; other; other = other->next)
    if (!(other->flags & CU_STREAM_NON_BLOCKING)) await_stream(stream, other);
}

struct point *sim_fence(struct CUstream_st *stream) {
  await_default_order(stream);
  return fence_alone(stream);
}

CUresult sim_submit_slow(struct CUstream_st *stream, const struct op *op) {
  struct op copy = *op;
  CUresult error;
  pthread_mutex_lock(&sim_lock);
  if (stream->capture) {
    error = sim_graph_append(stream, op);
    if (op->kind == OP_AWAIT) sim_point_release(op->point);
  } else {
    await_default_order(stream);
    error = place(stream, &copy);
  }
  pthread_mutex_unlock(&sim_lock);
  return error;
}

/* In a forked child the workers are gone, and what they waited for will never come: drop it. */
void sim_queue_forget(struct CUstream_st *stream) {
  stream->head = stream->tail = NULL;
  stream->has_worker = false;
  atomic_store(&stream->slow, 0);
  stream->capture = NULL;
  pthread_cond_init(&stream->more, NULL);
}

CUresult sim_cuLaunchHostFunc(CUstream handle, CUhostFn func, void *data) {
  struct CUstream_st *stream;
  CUresult error = sim_stream(handle, &stream);
  if (error || !func) return error ? error : CUDA_ERROR_INVALID_VALUE;
  struct op op = {.kind = OP_HOST, .host = {.func = func, .data = data}};
  return sim_submit(stream, &op);
}

CUresult sim_cuStreamAddCallback(CUstream handle, CUstreamCallback callback, void *data, unsigned flags) {
  struct CUstream_st *stream;
  CUresult error = sim_stream(handle, &stream);
  if (error || !callback || flags) return error ? error : CUDA_ERROR_INVALID_VALUE;
  struct op op = {.kind = OP_CALLBACK, .host = {.callback = callback, .stream = handle, .data = data}};
  return sim_submit(stream, &op);
}

/* Work that ends when somebody says so: what a collective is to the stream it was put on. */
CUresult sim_stallscope_sim_hold(CUstream handle, void **out) {
  struct CUstream_st *stream;
  CUresult error = sim_stream(handle, &stream);
  if (error) return error;
  struct hold *hold = sim_new(sizeof(*hold));
  struct op op = {.kind = OP_HOLD, .hold = hold};
  *out = hold;
  error = sim_submit(stream, &op);
  if (error) free(hold);
  return error;
}

CUresult sim_stallscope_sim_release(void *hold) {
  if (!hold) return CUDA_ERROR_INVALID_VALUE;
  pthread_mutex_lock(&sim_lock);
  ((struct hold *)hold)->released = true;
  pthread_cond_broadcast(&sim_known);
  pthread_mutex_unlock(&sim_lock);
  return CUDA_SUCCESS;
}
