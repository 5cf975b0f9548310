/* What one group puts on one communicator: one kernel on one stream, which ends when its operations have.
 *
 * The launch is a call of the driver that a tracer sees. What the kernel does runs on the stream's worker, as a host
 * function that is put behind it by a way no tracer sees.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "comm.h"

enum { DEFAULT_FIFO = 1024 };

struct plan {
  struct ncclComm *comm;
  uint64_t ticket;
  bool captured;
  size_t count;
  struct operation operations[];
};

static unsigned fifo_size(void) {
  static _Atomic unsigned known;
  if (!atomic_load(&known)) {
    const char *text = getenv("STALLSCOPE_SIM_NCCL_FIFO");
    long value = text ? strtol(text, NULL, 10) : DEFAULT_FIFO;
    atomic_store(&known, value > 0 ? (unsigned)value : DEFAULT_FIFO);
  }
  return atomic_load(&known);
}

/* Waits for room in the queue, on the host; takes the next place in the order of this communicator's kernels. */
static bool take_place(struct plan *plan) {
  struct state *state = plan->comm->state;
  pthread_mutex_lock(&state->lock);
  while (state->in_flight >= fifo_size() && !sim_aborted(plan->comm)) pthread_cond_wait(&state->changed, &state->lock);
  bool taken = !sim_aborted(plan->comm);
  if (taken) {
    state->in_flight += (unsigned)plan->count;
    plan->ticket = state->next_ticket++;
  }
  pthread_mutex_unlock(&state->lock);
  return taken;
}

/* A captured kernel takes its place each time its graph is launched. */
static bool await_turn(struct plan *plan) {
  struct state *state = plan->comm->state;
  pthread_mutex_lock(&state->lock);
  if (plan->captured) {
    state->in_flight += (unsigned)plan->count;
    plan->ticket = state->next_ticket++;
  }
  while (state->serving != plan->ticket && !sim_aborted(plan->comm)) pthread_cond_wait(&state->changed, &state->lock);
  bool runs = !sim_aborted(plan->comm);
  state->running += runs;
  pthread_mutex_unlock(&state->lock);
  return runs;
}

static void end(const struct plan *plan, bool ran) {
  struct state *state = plan->comm->state;
  pthread_mutex_lock(&state->lock);
  state->serving = plan->ticket + 1;
  state->in_flight -= (unsigned)plan->count;
  state->running -= ran;
  pthread_cond_broadcast(&state->changed);
  pthread_mutex_unlock(&state->lock);
}

static void *run_p2p(void *argument) {
  struct plan *plan = argument;
  sim_p2p(plan->operations, plan->count);
  return NULL;
}

static void run_collectives(const struct plan *plan) {
  bool goes_on = true;
  for (size_t i = 0; i < plan->count && goes_on; i++)
    if (plan->operations[i].function < SEND) goes_on = sim_collective(&plan->operations[i]);
}

static bool has_both(const struct plan *plan) {
  size_t pairs = 0;
  for (size_t i = 0; i < plan->count; i++) pairs += plan->operations[i].function >= SEND;
  return pairs && pairs < plan->count;
}

/* Collectives one after the other; transfers all at once, and beside the collectives. */
static void run_all(struct plan *plan) {
  pthread_t beside;
  bool both = has_both(plan) && pthread_create(&beside, NULL, run_p2p, plan) == 0;
  run_collectives(plan);
  if (both) pthread_join(beside, NULL);
  else run_p2p(plan);
}

static void run_profiled(struct plan *plan) {
  void *(*events)[MAX_CHANNELS] = sim_new(plan->count * sizeof(*events));
  for (size_t i = 0; i < plan->count; i++) sim_profiler_kernel(&plan->operations[i], events[i]);
  run_all(plan);
  for (size_t i = 0; i < plan->count; i++) sim_profiler_kernel_end(events[i]);
  free(events);
}

/* A captured kernel belongs to its graph: it stays, and may outlive its communicator. */
static void kernel(void *argument) {
  struct plan *plan = argument;
  if (plan->captured && sim_comm_check(plan->comm)) return;
  /* NVML: the device is busy from here on, and draws no power for it. */
  const struct driver_table *drv = sim_driver();
  int device = plan->comm->nvmlDev; /* the same number, and not poisoned when the communicator is retired */
  if (plan->captured) sim_profiler_stop(sim_profiler_queued(plan->comm, plan->operations, plan->count));
  drv->stallscope_sim_wait_begin(device);
  bool runs = await_turn(plan);
  if (runs) run_profiled(plan);
  drv->stallscope_sim_wait_end(device);
  end(plan, runs);
  if (!plan->captured) free(plan);
}

/* The biggest first, as NCCL sorts a group's collectives: ranks may name them in any order. */
static int by_size(const void *left, const void *right) {
  const struct operation *a = left, *b = right;
  bool a_pair = a->function >= SEND, b_pair = b->function >= SEND;
  if (a_pair != b_pair) return a_pair - b_pair;
  if (!a_pair && a->bytes != b->bytes) return a->bytes < b->bytes ? 1 : -1;
  if (!a_pair && a->function != b->function) return a->function < b->function ? -1 : 1;
  if (!a_pair && a->type != b->type) return a->type - b->type;
  if (!a_pair && a->redop != b->redop) return a->redop - b->redop;
  return a->index < b->index ? -1 : a->index > b->index;
}

static const char *name_of(const struct plan *plan, char *name, size_t size) {
  static const char *const functions[] = {"Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce"};
  static const char *const types[] = {"i8", "u8", "i32", "u32", "i64", "u64", "f16", "f32", "f64", "bf16"};
  static const char *const ops[] = {"Sum", "Prod", "MinMax", "MinMax", "SumPostDiv"};
  const struct operation *op = &plan->operations[0];
  char plain[96];
  if (op->function >= SEND) snprintf(plain, sizeof(plain), "ncclDevKernel_SendRecv");
  else if (op->function == BROADCAST || op->function == ALL_GATHER)
    snprintf(plain, sizeof(plain), "ncclDevKernel_%s_RING_LL", functions[op->function]);
  else
    snprintf(plain, sizeof(plain), "ncclDevKernel_%s_%s_%s_RING_LL", functions[op->function],
             op->scale.used || (op->redop == ncclAvg && op->type >= ncclFloat16) ? "PreMulSum" : ops[op->redop],
             types[op->type]);
  snprintf(name, size, "_Z%zu%s24ncclDevKernelArgsStorageILm4096EE", strlen(plain), plain);
  return name;
}

/* `later` goes on when what `earlier` holds now is done. */
static CUresult order(CUstream earlier, CUstream later) {
  const struct driver_table *drv = sim_driver();
  CUevent event;
  CUresult error = drv->cuEventCreate(&event, CU_EVENT_DISABLE_TIMING);
  if (error) return error;
  error = drv->cuEventRecord(event, earlier);
  if (!error) error = drv->cuStreamWaitEvent(later, event, 0);
  drv->cuEventDestroy_v2(event);
  return error;
}

/* The kernel runs on the first operation's stream; all other streams of the plan wait with it. */
static CUresult submit(struct plan *plan, CUstream stream) {
  char name[192];
  CUresult error = CUDA_SUCCESS;
  for (size_t i = 1; i < plan->count && !error; i++)
    if (plan->operations[i].stream != stream) error = order(plan->operations[i].stream, stream);
  CUstream *others = sim_new(plan->count * sizeof(*others));
  size_t count = plan->count;
  for (size_t i = 0; i < count; i++) others[i] = plan->operations[i].stream;
  if (!error) error = sim_launch_visible(stream, name_of(plan, name, sizeof(name)));
  if (!error) error = sim_driver()->cuLaunchHostFunc(stream, kernel, plan); /* the plan may be gone now */
  for (size_t i = 1; i < count && !error; i++)
    if (others[i] != stream) error = order(stream, others[i]);
  free(others);
  return error;
}

static struct plan *plan_new(struct ncclComm *comm, const struct operation *operations, size_t count, bool captured) {
  struct plan *plan = sim_new(sizeof(*plan) + count * sizeof(*operations));
  plan->comm = comm;
  plan->captured = captured;
  plan->count = count;
  memcpy(plan->operations, operations, count * sizeof(*operations));
  qsort(plan->operations, count, sizeof(*operations), by_size);
  return plan;
}

/* As NCCL's own, for its RAS: collectives, at the launch, and none of a graph. */
static void number(struct ncclComm *comm, const struct operation *operation) {
  int capturing = 0;
  if (operation->function > ALL_REDUCE || comm->nRanks == 1) return;
  if (sim_driver()->cuStreamIsCapturing(operation->stream, &capturing) || capturing) return;
  __atomic_fetch_add(&comm->seqNumber[operation->function], 1, __ATOMIC_RELAXED);
}

static ncclResult_t launch(struct ncclComm *comm, struct operation *operations, size_t count) {
  int capturing = 0;
  CUstream stream = operations[0].stream;
  if (sim_driver()->cuStreamIsCapturing(stream, &capturing))
    return sim_fail(comm, ncclUnhandledCudaError, "invalid stream");
  struct plan *plan = plan_new(comm, operations, count, capturing != 0);
  if (!capturing && !take_place(plan)) {
    free(plan);
    return sim_fail(comm, ncclInternalError, "the communicator was aborted");
  }
  void *group = capturing ? NULL : sim_profiler_queued(comm, plan->operations, count);
  for (size_t i = 0; i < count; i++) number(comm, &plan->operations[i]);
  CUresult error = submit(plan, stream);
  sim_profiler_stop(group);
  return error ? sim_fail(comm, ncclUnhandledCudaError, "the launch failed") : ncclSuccess;
}

ncclResult_t sim_plan_launch(struct ncclComm *comm, struct operation *operations, size_t count) {
  sim_driver()->cuCtxPushCurrent_v2(comm->state->context);
  ncclResult_t result = launch(comm, operations, count);
  sim_driver()->cuCtxPopCurrent_v2(NULL);
  return result;
}
