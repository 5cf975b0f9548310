/* Capture and graphs: a graph is the list of captured operations, launched as one piece in one stream. */
#include <stdlib.h>

#include "engine.h"

CUresult sim_graph_append(struct CUgraph_st *graph, const struct op *op) {
  if (op->kind == OP_AWAIT || op->kind == OP_RECORD || op->kind == OP_HOLD)
    return op->kind == OP_HOLD ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : CUDA_SUCCESS;
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

static struct CUgraph_st *graph_new(void) {
  struct CUgraph_st *graph = sim_new(sizeof(*graph));
  graph->magic = MAGIC_GRAPH;
  graph->id = sim_next_id();
  return graph;
}

static void capture_into(struct CUstream_st *stream, struct CUgraph_st *graph) {
  stream->capture = graph;
  atomic_fetch_or(&stream->slow, SLOW_CAPTURING);
}

/* A stream that waits for an event of a capture belongs to that capture from then on. */
void sim_capture_join(struct CUstream_st *stream, uint64_t capture_id) {
  pthread_mutex_lock(&sim_lock);
  for (struct CUstream_st *s = stream->context->streams; s && !stream->capture; s = s->next)
    if (s->capture && s->capture->id == capture_id) capture_into(stream, s->capture);
  pthread_mutex_unlock(&sim_lock);
}

CUresult sim_cuStreamBeginCapture_v2(CUstream handle, int mode) {
  struct CUstream_st *stream;
  CUresult error = sim_stream(handle, &stream);
  (void)mode;
  if (error) return error;
  if (stream == stream->context->legacy) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  pthread_mutex_lock(&sim_lock);
  if (stream->capture) {
    error = CUDA_ERROR_ILLEGAL_STATE;
  } else {
    capture_into(stream, graph_new());
    stream->capture_origin = true;
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
  pthread_mutex_unlock(&sim_lock);
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
  static _Thread_local int current;
  int old = current;
  current = *mode;
  *mode = old;
  return CUDA_SUCCESS;
}

CUresult sim_cuGraphCreate(CUgraph *graph, unsigned flags) {
  if (!graph || flags) return CUDA_ERROR_INVALID_VALUE;
  *graph = graph_new();
  return CUDA_SUCCESS;
}

CUresult sim_cuGraphDestroy(CUgraph graph) {
  if (!IS_A(graph, MAGIC_GRAPH)) return CUDA_ERROR_INVALID_HANDLE;
  graph->magic = 0;
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
  *made = (struct CUgraphExec_st){.magic = MAGIC_EXEC, .count = graph->count, .timed_only = true};
  made->ops = sim_new(graph->count * sizeof(*made->ops) + 1);
  for (size_t i = 0; i < graph->count; i++) {
    made->ops[i] = graph->ops[i];
    made->total_ns += graph->ops[i].duration_ns;
    made->timed_only &= graph->ops[i].kind == OP_KERNEL;
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
  struct op total = {.kind = OP_KERNEL, .duration_ns = exec->total_ns};
  if (exec->timed_only) return sim_submit(stream, &total);
  for (size_t i = 0; i < exec->count && !error; i++) error = sim_submit(stream, &exec->ops[i]);
  return error;
}
