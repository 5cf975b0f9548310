/* Capture and graphs: a graph is the list of captured operations, launched as one piece in one stream. Its branches (one
 * a captured stream, joined by events) run side by side: it lasts as long as the longest way through them. */
#include <stdlib.h>

#include "engine.h"

enum { MODE_GLOBAL = 0 };
static atomic_int global_captures; /* that began, and did not end */
static _Thread_local int capture_mode;

/* While a stream captures in the global mode, no thread may ask an event that has not left that mode itself: it breaks
 * the capture. A stream that is destroyed while it captures leaves the count too high: what is there is looked at. */
bool sim_capture_forbids(void) {
  bool found = false;
  if (!atomic_load_explicit(&global_captures, memory_order_relaxed) || capture_mode != MODE_GLOBAL) return false;
  pthread_mutex_lock(&sim_lock);
  for (struct CUctx_st *c = sim_context_list(); c; c = c->next)
    for (struct CUstream_st *s = c->streams; s; s = s->next)
      if (s->capture && s->capture->is_global) found = s->capture->is_broken = true;
  pthread_mutex_unlock(&sim_lock);
  return found;
}

static CUresult append(struct CUgraph_st *graph, const struct op *op) {
  if (graph->count == graph->capacity) {
    size_t capacity = graph->capacity ? 2 * graph->capacity : 16;
    struct op *ops = realloc(graph->ops, capacity * sizeof(*ops));
    if (!ops) return CUDA_ERROR_OUT_OF_MEMORY;
    graph->ops = ops;
    graph->capacity = capacity;
  }
  graph->ops[graph->count++] = *op;
  return CUDA_SUCCESS;
}

/* With sim_lock held. Events only join branches, see sim_capture_join. */
CUresult sim_graph_append(struct CUstream_st *stream, const struct op *op) {
  if (op->kind == OP_AWAIT || op->kind == OP_RECORD || op->kind == OP_HOLD)
    return op->kind == OP_HOLD ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : CUDA_SUCCESS;
  CUresult error = append(stream->capture, op);
  if (error) return error;
  bool endless = op->duration_ns > NEVER_NS - stream->capture_ns;
  stream->capture_ns = endless ? NEVER_NS : stream->capture_ns + op->duration_ns;
  if (stream->capture_ns > stream->capture->length_ns) stream->capture->length_ns = stream->capture_ns;
  return CUDA_SUCCESS;
}

static struct CUgraph_st *graph_new(void) {
  struct CUgraph_st *graph = sim_new(sizeof(*graph));
  graph->magic = MAGIC_GRAPH;
  graph->id = sim_next_id();
  return graph;
}

static void capture_into(struct CUstream_st *stream, struct CUgraph_st *graph) {
  stream->capture = graph;
  stream->capture_ns = 0;
  atomic_fetch_or(&stream->slow, SLOW_CAPTURING);
}

/* A stream that waits for an event of a capture belongs to that capture from then on. */
void sim_capture_join(struct CUstream_st *stream, const struct CUevent_st *event) {
  pthread_mutex_lock(&sim_lock);
  for (struct CUstream_st *s = stream->context->streams; s && !stream->capture; s = s->next)
    if (s->capture && s->capture->id == event->capture_id) capture_into(stream, s->capture);
  if (stream->capture && event->capture_ns > stream->capture_ns) stream->capture_ns = event->capture_ns;
  pthread_mutex_unlock(&sim_lock);
}

CUresult sim_cuStreamBeginCapture_v2(CUstream handle, int mode) {
  struct CUstream_st *stream;
  CUresult error = sim_stream(handle, &stream);
  if (error) return error;
  if (stream == stream->context->legacy) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  pthread_mutex_lock(&sim_lock);
  if (stream->capture) {
    error = CUDA_ERROR_ILLEGAL_STATE;
  } else {
    capture_into(stream, graph_new());
    stream->capture_origin = true;
    stream->capture->is_global = mode == MODE_GLOBAL;
    atomic_fetch_add(&global_captures, mode == MODE_GLOBAL);
  }
  pthread_mutex_unlock(&sim_lock);
  return error;
}

CUresult sim_cuStreamEndCapture(CUstream handle, CUgraph *graph) {
  struct CUstream_st *stream;
  CUresult error = sim_stream(handle, &stream);
  if (error || !graph) return error ? error : CUDA_ERROR_INVALID_VALUE;
  pthread_mutex_lock(&sim_lock);
  *graph = stream->capture_origin ? stream->capture : NULL;
  for (struct CUstream_st *s = stream->context->streams; s && *graph; s = s->next) {
    if (s->capture != *graph) continue;
    s->capture = NULL;
    s->capture_origin = false;
    atomic_fetch_and(&s->slow, ~(unsigned)SLOW_CAPTURING);
  }
  if (*graph) atomic_fetch_sub(&global_captures, (*graph)->is_global);
  bool is_broken = *graph && (*graph)->is_broken;
  pthread_mutex_unlock(&sim_lock);
  if (is_broken) {
    sim_cuGraphDestroy(*graph);
    *graph = NULL;
    return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  }
  return *graph ? CUDA_SUCCESS : CUDA_ERROR_ILLEGAL_STATE;
}

CUresult sim_cuStreamGetCaptureInfo_v2(CUstream handle, int *status, uint64_t *id, CUgraph *graph,
                                       const CUgraphNode **nodes, size_t *count) {
  struct CUstream_st *stream;
  CUresult error = sim_stream(handle, &stream);
  if (error || !status) return error ? error : CUDA_ERROR_INVALID_VALUE;
  pthread_mutex_lock(&sim_lock);
  struct CUgraph_st *capture = stream->capture;
  *status = capture ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
  if (id && capture) *id = capture->id;
  if (graph) *graph = capture;
  if (nodes) *nodes = NULL;
  if (count) *count = 0;
  pthread_mutex_unlock(&sim_lock);
  return CUDA_SUCCESS;
}

CUresult sim_cuStreamGetCaptureInfo_v3(CUstream handle, int *status, uint64_t *id, CUgraph *graph,
                                       const CUgraphNode **nodes, const void **edges, size_t *count) {
  if (edges) *edges = NULL;
  return sim_cuStreamGetCaptureInfo_v2(handle, status, id, graph, nodes, count);
}

CUresult sim_cuStreamIsCapturing(CUstream handle, int *status) {
  return sim_cuStreamGetCaptureInfo_v2(handle, status, NULL, NULL, NULL, NULL);
}

CUresult sim_cuThreadExchangeStreamCaptureMode(int *mode) {
  int old = capture_mode;
  capture_mode = *mode;
  *mode = old;
  return CUDA_SUCCESS;
}

CUresult sim_cuGraphCreate(CUgraph *graph, unsigned flags) {
  if (!graph || flags) return CUDA_ERROR_INVALID_VALUE;
  *graph = graph_new();
  return CUDA_SUCCESS;
}

/* user objects */
CUresult sim_cuUserObjectCreate(CUuserObject *out, void *data, CUhostFn destroy, unsigned references, unsigned flags) {
  if (!out || !destroy || !references || flags != 1) return CUDA_ERROR_INVALID_VALUE; /* 1: no destructor sync */
  *out = sim_new(sizeof(**out));
  atomic_store(&(*out)->references, (int)references);
  (*out)->destroy = destroy;
  (*out)->data = data;
  return CUDA_SUCCESS;
}

CUresult sim_cuUserObjectRetain(CUuserObject object, unsigned count) {
  if (!object || !count) return CUDA_ERROR_INVALID_VALUE;
  atomic_fetch_add(&object->references, (int)count);
  return CUDA_SUCCESS;
}

/* The real one calls the destructor on a thread of its own. */
CUresult sim_cuUserObjectRelease(CUuserObject object, unsigned count) {
  if (!object || !count) return CUDA_ERROR_INVALID_VALUE;
  if (atomic_fetch_sub(&object->references, (int)count) > (int)count) return CUDA_SUCCESS;
  object->destroy(object->data);
  free(object);
  return CUDA_SUCCESS;
}

static void refer(struct user_reference **list, struct CUuserObject_st *object, unsigned count) {
  struct user_reference *reference = sim_new(sizeof(*reference));
  *reference = (struct user_reference){object, count, *list};
  *list = reference;
}

static void refer_no_more(struct user_reference *list) {
  while (list) {
    struct user_reference *next = list->next;
    sim_cuUserObjectRelease(list->object, list->count);
    free(list);
    list = next;
  }
}

/* Flag 1 moves the caller's references into the graph. */
CUresult sim_cuGraphRetainUserObject(CUgraph graph, CUuserObject object, unsigned count, unsigned flags) {
  if (!IS_A(graph, MAGIC_GRAPH) || !object || !count || flags > 1) return CUDA_ERROR_INVALID_VALUE;
  if (!flags) sim_cuUserObjectRetain(object, count);
  pthread_mutex_lock(&sim_lock);
  refer(&graph->objects, object, count);
  pthread_mutex_unlock(&sim_lock);
  return CUDA_SUCCESS;
}

CUresult sim_cuGraphReleaseUserObject(CUgraph graph, CUuserObject object, unsigned count) {
  if (!IS_A(graph, MAGIC_GRAPH) || !object || !count) return CUDA_ERROR_INVALID_VALUE;
  struct user_reference *found = NULL;
  pthread_mutex_lock(&sim_lock);
  for (struct user_reference **link = &graph->objects; *link && !found; link = &(*link)->next) {
    if ((*link)->object != object || (*link)->count != count) continue;
    found = *link;
    *link = found->next;
    break;
  }
  pthread_mutex_unlock(&sim_lock);
  if (!found) return CUDA_ERROR_INVALID_VALUE;
  free(found);
  return sim_cuUserObjectRelease(object, count);
}

CUresult sim_cuGraphDestroy(CUgraph graph) {
  if (!IS_A(graph, MAGIC_GRAPH)) return CUDA_ERROR_INVALID_HANDLE;
  graph->magic = 0;
  refer_no_more(graph->objects);
  free(graph->ops);
  free(graph);
  return CUDA_SUCCESS;
}

/* Only the number of nodes is real: nodes are not objects here. */
CUresult sim_cuGraphGetNodes(CUgraph graph, CUgraphNode *nodes, size_t *count) {
  if (!IS_A(graph, MAGIC_GRAPH) || !count) return CUDA_ERROR_INVALID_VALUE;
  for (size_t i = 0; nodes && i < *count; i++) nodes[i] = i < graph->count ? (CUgraphNode)&graph->ops[i] : NULL;
  *count = graph->count;
  return CUDA_SUCCESS;
}

CUresult sim_cuGraphInstantiateWithFlags(CUgraphExec *exec, CUgraph graph, unsigned long long flags) {
  (void)flags;
  if (!exec || !IS_A(graph, MAGIC_GRAPH)) return CUDA_ERROR_INVALID_VALUE;
  struct CUgraphExec_st *made = sim_new(sizeof(*made));
  *made = (struct CUgraphExec_st){.magic = MAGIC_EXEC, .count = graph->count, .length_ns = graph->length_ns};
  made->ops = sim_new(graph->count * sizeof(*made->ops) + 1);
  for (size_t i = 0; i < graph->count; i++) {
    made->ops[i] = graph->ops[i];
    made->calls_host |= graph->ops[i].kind == OP_HOST || graph->ops[i].kind == OP_CALLBACK;
  }
  for (struct user_reference *r = graph->objects; r; r = r->next) {
    sim_cuUserObjectRetain(r->object, r->count);
    refer(&made->objects, r->object, r->count);
  }
  *exec = made;
  return CUDA_SUCCESS;
}

CUresult sim_cuGraphInstantiateWithParams(CUgraphExec *exec, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *params) {
  if (!params) return CUDA_ERROR_INVALID_VALUE;
  params->result = 0;
  return sim_cuGraphInstantiateWithFlags(exec, graph, params->flags);
}

CUresult sim_cuGraphExecDestroy(CUgraphExec exec) {
  if (!IS_A(exec, MAGIC_EXEC)) return CUDA_ERROR_INVALID_HANDLE;
  exec->magic = 0;
  refer_no_more(exec->objects);
  free(exec->ops);
  free(exec);
  return CUDA_SUCCESS;
}

CUresult sim_cuGraphUpload(CUgraphExec exec, CUstream handle) {
  struct CUstream_st *stream;
  return IS_A(exec, MAGIC_EXEC) ? sim_stream(handle, &stream) : CUDA_ERROR_INVALID_HANDLE;
}

CUresult sim_cuGraphLaunch(CUgraphExec exec, CUstream handle) {
  struct CUstream_st *stream;
  CUresult error = sim_stream(handle, &stream);
  if (error || !IS_A(exec, MAGIC_EXEC)) return error ? error : CUDA_ERROR_INVALID_HANDLE;
  if (exec->calls_host) {
    for (size_t i = 0; i < exec->count && !error; i++) error = sim_submit(stream, &exec->ops[i]);
    return error;
  }
  for (size_t i = 0; i < exec->count && !error; i++) {
    struct op op = exec->ops[i];
    op.duration_ns = 0;
    if (op.kind != OP_KERNEL) error = sim_submit(stream, &op);
  }
  struct op whole = {.kind = OP_KERNEL, .duration_ns = exec->length_ns};
  return error ? error : sim_submit(stream, &whole);
}
