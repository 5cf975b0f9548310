/* A profiler plugin that writes down what it is told, one line each, to the file NCCL_PLUGIN_LOG; version 4. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

struct event {
  uint8_t type;
  void *parent;
  int rank;
  union {
    struct {
      uint64_t number;
      const char *function;
      const void *send;
      void *recv;
      size_t count;
      int root;
      const char *type;
    } coll;
    struct {
      const char *function;
      void *buffer;
      const char *type;
      size_t count;
      int peer;
    } p2p;
  };
};

static FILE *out;
static uintptr_t events;

static int init(void **context, int *mask, const char *name, uint64_t hash, int nodes, int ranks, int rank, void *log) {
  (void)log;
  if (!out) out = fopen(getenv("NCCL_PLUGIN_LOG"), "w");
  *context = out;
  *mask = 1 | 2 | 4 | 64;
  fprintf(out, "init %s %016llx %d %d %d\n", name ? name : "-", (unsigned long long)hash, nodes, ranks, rank);
  return fflush(out);
}

static int start(void *context, void **handle, struct event *event) {
  if (context != out) return 1;
  *handle = (void *)++events;
  fprintf(out, "start %u type %d parent %u rank %d", (unsigned)events, event->type, (unsigned)(uintptr_t)event->parent,
          event->rank);
  if (event->type == 2)
    fprintf(out, " %s %zu %s %d", event->coll.function, event->coll.count, event->coll.type, (int)event->coll.number);
  if (event->type == 4)
    fprintf(out, " %s %zu %s %d", event->p2p.function, event->p2p.count, event->p2p.type, event->p2p.peer);
  fputc('\n', out);
  return fflush(out);
}

static int stop(void *handle) {
  fprintf(out, "stop %u\n", (unsigned)(uintptr_t)handle);
  return fflush(out);
}

static int state(void *handle, int number, uint64_t *arguments) {
  fprintf(out, "state %u %d %d\n", (unsigned)(uintptr_t)handle, number, arguments[0] != 0);
  return fflush(out);
}

static int finalize(void *context) {
  fprintf(context, "finalize\n");
  return fflush(context);
}

struct {
  const char *name;
  int (*init)(void **, int *, const char *, uint64_t, int, int, int, void *);
  int (*start)(void *, void **, struct event *);
  int (*stop)(void *);
  int (*state)(void *, int, uint64_t *);
  int (*finalize)(void *);
} ncclProfiler_v4 = {"test", init, start, stop, state, finalize};
