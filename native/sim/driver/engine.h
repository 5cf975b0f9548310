/* Inside of the simulated driver: streams as time lines, and what is shared between its source files.
 *
 * A stream is a number, `busy_until_ns`: work submitted to it starts at max(now, busy_until, what it depends on) and
 * moves that number forward. As long as every end is known beforehand nothing else is needed: no thread, no lock.
 * Work whose end nobody knows (a host function, a hold, an event that waits for one of those) turns its stream into a
 * queue with a worker thread, until the queue has run empty (queue.c).
 */
#ifndef SIM_ENGINE_H
#define SIM_ENGINE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "sim_cuda_types.h"

enum { MAX_DEVICES = 16, MAX_CONTEXT_DEPTH = 16 };
#define NEVER_NS UINT64_MAX

struct sim_config {
  int devices;
  int physical[MAX_DEVICES]; /* which of the machine's devices each one is: CUDA_VISIBLE_DEVICES */
  bool spin;
  uint64_t kernel_ns;
  const char *kernels;
  double copy_bytes_per_ns;
  uint64_t copy_latency_ns;
  size_t device_bytes;
};

/* A moment on a time line that is not known yet: what an event or a fence in a queued stream turns into. */
struct point {
  atomic_bool known;
  uint64_t time_ns;
  int references;
  struct CUevent_st *event;
};

enum op_kind { OP_KERNEL, OP_COPY, OP_SET, OP_RECORD, OP_AWAIT, OP_HOST, OP_CALLBACK, OP_HOLD };

struct copy_shape {
  char *dst;
  const char *src;
  size_t width, height, depth, dst_pitch, src_pitch, dst_slice, src_slice;
};

struct set_shape {
  char *dst;
  uint64_t value; /* its low bytes */
  unsigned element_bytes;
  size_t count, height, pitch;
};

struct hold {
  bool released;
};

struct op {
  enum op_kind kind;
  uint64_t duration_ns;
  union {
    struct copy_shape copy;
    struct set_shape set;
    struct point *point; /* OP_RECORD, OP_AWAIT: owns one reference */
    struct hold *hold;
    struct {
      CUhostFn func;
      CUstreamCallback callback;
      CUstream stream;
      void *data;
    } host;
  };
  struct op *next;
};

enum { SLOW_QUEUED = 1, SLOW_CAPTURING = 2 };

struct CUstream_st {
  unsigned magic, flags;
  int priority;
  uint64_t id;
  struct CUctx_st *context;
  _Atomic uint64_t busy_until_ns;
  atomic_uint slow;
  /* the rest under sim_lock */
  struct CUgraph_st *capture;
  uint64_t capture_ns; /* how far this branch of the capture has come, from the start of the graph */
  bool capture_origin, dying, has_worker;
  struct op *head, *tail;
  pthread_cond_t more;
  struct CUstream_st *next;
};

struct CUctx_st {
  unsigned magic;
  int device, references;
  atomic_uint flags;
  struct CUstream_st *legacy, *streams;
  _Atomic uint64_t blocking_until_ns; /* latest end in any blocking stream: what the legacy stream waits for */
  _Atomic uint64_t retired_until_ns;  /* latest end of streams that are gone */
  atomic_int queued_streams;
  struct CUctx_st *next;
};

struct CUevent_st {
  unsigned magic, flags;
  struct CUctx_st *context;
  _Atomic uint64_t time_ns;      /* 0: never recorded, PENDING_NS: see `pending` */
  struct point *pending;         /* under sim_lock */
  _Atomic uint64_t *shared_time; /* NULL, or the time that other processes see too */
  int shared_fd;
  _Atomic uint64_t capture_id;
  uint64_t capture_ns; /* under sim_lock: where in the capture it was recorded */
};
#define PENDING_NS (UINT64_MAX - 1)

struct CUfunc_st {
  unsigned magic;
  char *name;
  uint64_t duration_ns;
  struct CUmod_st *module;
  struct CUfunc_st *next;
};

/* A program's object that lives as long as graphs refer to it. */
struct CUuserObject_st {
  atomic_int references;
  CUhostFn destroy;
  void *data;
};

struct user_reference {
  struct CUuserObject_st *object;
  unsigned count;
  struct user_reference *next;
};

struct CUgraph_st {
  unsigned magic;
  uint64_t id;
  size_t count, capacity;
  struct op *ops;
  uint64_t length_ns; /* of its longest branch */
  struct user_reference *objects;
  bool is_global, is_broken; /* while it is captured: in the global mode; a forbidden call was made */
};

struct CUgraphExec_st {
  unsigned magic;
  size_t count;
  struct op *ops;
  struct user_reference *objects;
  uint64_t length_ns;
  bool calls_host; /* then it is a list in one stream, since nobody knows how long a branch is */
};

enum {
  MAGIC_STREAM = 0x53545231,
  MAGIC_CONTEXT = 0x43545831,
  MAGIC_EVENT = 0x45565431,
  MAGIC_FUNCTION = 0x464e4331,
  MAGIC_MODULE = 0x4d4f4431,
  MAGIC_GRAPH = 0x47524631,
  MAGIC_EXEC = 0x47455831,
};

/* Not valid: NULL, small numbers, or an object of another kind. Wild pointers crash, as they do on the real driver. */
#define IS_A(object, kind) ((uintptr_t)(object) > 4096 && (object)->magic == (kind))

/* Locks are taken in the order: primary contexts, modules, sim_lock, mappings, memory map. */
extern pthread_mutex_t sim_lock; /* everything but the time lines and the memory map; never on the fast path */
extern pthread_cond_t sim_known; /* broadcast when a point becomes known or a hold is released */
extern _Thread_local bool sim_stream_zero_is_per_thread;

/* config.c */
const struct sim_config *sim_config(void);
int sim_physical(int device);
uint64_t sim_now_ns(void);
uint64_t sim_kernel_ns(const char *name);
uint64_t sim_copy_ns(size_t bytes);
bool sim_spins(const struct CUctx_st *context, unsigned event_flags);
void sim_wait_until(uint64_t time_ns, bool spin);
void *sim_new(size_t bytes);
uint64_t sim_next_id(void);

/* context.c */
CUresult sim_current(struct CUctx_st **context);
struct CUctx_st *sim_context_list(void);

/* stream.c */
CUresult sim_stream(CUstream handle, struct CUstream_st **stream);
struct CUstream_st *sim_stream_new(struct CUctx_st *context, unsigned flags, int priority);
void sim_stream_free(struct CUstream_st *stream);
uint64_t sim_ready_ns(const struct CUstream_st *stream);
uint64_t sim_advance(struct CUstream_st *stream, uint64_t duration_ns);
void sim_not_before(struct CUstream_st *stream, uint64_t time_ns);
void sim_raise(_Atomic uint64_t *value, uint64_t at_least);
uint64_t sim_apply(struct CUstream_st *stream, const struct op *op);
CUresult sim_submit(struct CUstream_st *stream, const struct op *op);
CUresult sim_wait_stream(struct CUstream_st *stream);
CUresult sim_wait_context(struct CUctx_st *context);

/* queue.c */
CUresult sim_submit_slow(struct CUstream_st *stream, const struct op *op);
struct point *sim_fence(struct CUstream_st *stream);
struct point *sim_point_new(struct CUevent_st *event);
void sim_point_release(struct point *point);
void sim_point_resolve(struct point *point, uint64_t time_ns);
void sim_wait_point(struct point *point, bool spin);
void sim_queue_forget(struct CUstream_st *stream);

/* event.c */
uint64_t sim_event_time(const struct CUevent_st *event);
void sim_event_set_time(struct CUevent_st *event, uint64_t time_ns);
CUresult sim_event_captured(struct CUstream_st *stream, struct CUevent_st *event);

/* graph.c */
CUresult sim_graph_append(struct CUstream_st *stream, const struct op *op);
void sim_capture_join(struct CUstream_st *stream, const struct CUevent_st *event);
bool sim_capture_forbids(void);

/* memory.c */
enum memory_kind { MEMORY_PAGEABLE, MEMORY_DEVICE, MEMORY_PINNED, MEMORY_MANAGED };
enum memory_kind sim_memory_kind(const void *pointer);
/* Ranges that come from elsewhere: from another process, or mapped by the program. */
CUresult sim_memory_add(void *memory, size_t bytes, int device);
size_t sim_memory_drop(void *memory);
/* Counts memory of the device as used, or with a negative number as free again; false: there is not so much. */
bool sim_memory_charge(int device, ptrdiff_t bytes);
/* What stream-ordered allocations of the device hold now, or held at most. */
uint64_t sim_pool_bytes(int device, bool high);
void sim_pool_reset_high(int device);
/* Turns the memory of a cudaMalloc into a file that another process may map. */
CUresult sim_memory_share(void *pointer, int *fd, size_t *bytes, int *device);
CUresult sim_allocate(void **out, size_t bytes, enum memory_kind kind);
void sim_memory_lock(void);
void sim_memory_lock_renew(void);
void sim_memory_unlock(void);

/* ipc.c */
void sim_event_unshare(struct CUevent_st *event);

/* vmm.c: before the memory map's */
void sim_vmm_lock(void);
void sim_vmm_unlock(void);

/* copy.c */
void sim_do_copy(const struct copy_shape *shape);
void sim_do_set(const struct set_shape *shape);

/* stats.c */
void sim_stats_open(void);
void sim_stats_forget(void);
void sim_stats_worked(int device, uint64_t start_ns, uint64_t end_ns);
void sim_stats_hold_begin(int device);
void sim_stats_hold_end(int device);
void sim_stats_memory(int device, size_t used_bytes);
void sim_stats_context(int device, int change);

/* module.c */
extern pthread_mutex_t sim_module_lock;
extern _Thread_local uint64_t sim_next_kernel_ns;

/* proc.c */
struct proc {
  const char *name;
  void *address;
};
CUresult sim_find_proc(const struct proc *procs, size_t count, const char *symbol, int version, uint64_t flags,
                       void **address, int *status);

/* Prototypes of the inner functions: sim_cuInit and so on. Exported wrappers call them, and so do the runtime's
 * private and inside ways, past the exported symbols. */
#define DRV(name, params, args) CUresult sim_##name params;
#define DRV_TWIN(name, suffix, params, args)                                                                           \
  CUresult sim_##name params;                                                                                          \
  CUresult sim_##name##suffix params;
#include "sim_cuda_driver.def"
#undef DRV
#undef DRV_TWIN

#endif
