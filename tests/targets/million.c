/* million [ITERATIONS [WAITS [WAIT_US]]]: four threads, a mixture of calls, all counted.
 *
 * Each thread makes ITERATIONS rounds of one enqueue each and spreads WAITS waits of WAIT_US over them. Prints
 * "ready" and waits for a line before the counted calls; those before it stand under "before_".
 */
#include <pthread.h>
#include <stdbool.h>

#include "sim_cuda_driver.h"
#include "sim_cudart.h"

/* clang-format off */
#define APIS(X) \
  X(cudaLaunchKernel) X(__cudaLaunchKernel) X(cudaLaunchKernelExC) X(cudaLaunchKernel_ptsz) X(cuLaunchKernel) \
  X(cudaMemcpyAsync) X(cudaEventRecord) X(cudaEventSynchronize) X(cudaStreamSynchronize) \
  X(cudaStreamSynchronize_ptsz) X(cuStreamSynchronize) X(cudaMalloc) X(cudaFree) X(cudaHostAlloc) \
  X(cudaFreeHost) X(cudaStreamCreateWithFlags) X(cudaStreamDestroy) X(cudaEventCreate) X(cudaEventDestroy) \
  X(cudaGetKernel) X(cudaDeviceSynchronize)
/* clang-format on */
#include "target.h"

enum { THREADS = 4, COPY_BYTES = 256, MALLOC_EVERY = 5000 };

struct worker {
  pthread_t thread;
  struct tally tally;
  cudaStream_t stream;
  cudaEvent_t event;
  void *device, *pinned;
  cudaKernel_t kernel;
};

static unsigned long iterations, waits;
static uint64_t wait_ns;
static const dim3 one = {1, 1, 1}, block = {128, 1, 1};

static void kernel_stub(void) {}

static void enqueue(struct worker *w, unsigned long i) {
  void *func = (void *)kernel_stub;
  cudaLaunchConfig_t config = {.gridDim = one, .blockDim = block, .stream = w->stream};
  switch (i % 8) {
  case 0:
  case 1:
    CALL(&w->tally, cudaLaunchKernel, func, one, block, NULL, 0, w->stream);
    break;
  case 2:
    CALL(&w->tally, __cudaLaunchKernel, w->kernel, one, block, NULL, 0, w->stream);
    break;
  case 3:
    CALL(&w->tally, cudaLaunchKernelExC, &config, func, NULL);
    break;
  case 4:
    CALL(&w->tally, cudaMemcpyAsync, w->device, w->pinned, COPY_BYTES, cudaMemcpyHostToDevice, w->stream);
    break;
  case 5:
    CALL(&w->tally, cudaLaunchKernel_ptsz, func, one, block, NULL, 0, NULL);
    break;
  case 6:
    CALL(&w->tally, cuLaunchKernel, (CUfunction)w->kernel, 1, 1, 1, 128, 1, 1, 0, w->stream, NULL, NULL);
    break;
  default:
    CALL(&w->tally, cudaEventRecord, w->event, w->stream);
  }
}

static void wait(struct worker *w, unsigned long i) {
  bool own_default = i % 4 == 2;
  stallscope_sim_set_next_kernel_ns(wait_ns);
  if (own_default) CALL(&w->tally, cudaLaunchKernel_ptsz, (void *)kernel_stub, one, block, NULL, 0, NULL);
  else CALL(&w->tally, cudaLaunchKernel, (void *)kernel_stub, one, block, NULL, 0, w->stream);
  switch (i % 4) {
  case 0:
    TIMED(&w->tally, cudaStreamSynchronize, w->stream);
    break;
  case 1:
    CALL(&w->tally, cudaEventRecord, w->event, w->stream);
    TIMED(&w->tally, cudaEventSynchronize, w->event);
    break;
  case 2:
    TIMED(&w->tally, cudaStreamSynchronize_ptsz, NULL);
    break;
  default:
    TIMED(&w->tally, cuStreamSynchronize, w->stream);
  }
}

static void churn(struct worker *w) {
  void *memory;
  CALL(&w->tally, cudaMalloc, &memory, 4096);
  TIMED(&w->tally, cudaFree, memory);
}

static void *work(void *argument) {
  struct worker *w = argument;
  unsigned long done_waits = 0;
  CALL(&w->tally, cudaStreamCreateWithFlags, &w->stream, cudaStreamNonBlocking);
  CALL(&w->tally, cudaEventCreate, &w->event);
  CALL(&w->tally, cudaMalloc, &w->device, COPY_BYTES);
  CALL(&w->tally, cudaHostAlloc, &w->pinned, COPY_BYTES, 0);
  CALL(&w->tally, cudaGetKernel, &w->kernel, (void *)kernel_stub);
  for (unsigned long i = 0; i < iterations; i++) {
    enqueue(w, i);
    if (i % MALLOC_EVERY == MALLOC_EVERY - 1) churn(w);
    if (done_waits < waits && i >= done_waits * (iterations / waits)) wait(w, done_waits++);
  }
  TIMED(&w->tally, cudaStreamSynchronize, w->stream);
  TIMED(&w->tally, cudaFree, w->device);
  TIMED(&w->tally, cudaFreeHost, w->pinned);
  CALL(&w->tally, cudaEventDestroy, w->event);
  CALL(&w->tally, cudaStreamDestroy, w->stream);
  return NULL;
}

int main(int argc, char **argv) {
  static struct worker workers[THREADS];
  struct tally before = {0}, sum = {0};
  iterations = argument(argc, argv, 1, 250000);
  waits = argument(argc, argv, 2, 20);
  wait_ns = argument(argc, argv, 3, 1000) * 1000;
  /* Enqueues are faster than any real kernel: with lengths of their own the queues would grow without end. */
  setenv("STALLSCOPE_SIM_KERNEL_NS", "1", 0);
  setenv("STALLSCOPE_SIM_COPY_LATENCY_NS", "1", 0);
  TIMED(&before, cudaFree, NULL);
  ready();
  uint64_t from_ns = now_ns();
  for (int i = 0; i < THREADS; i++) pthread_create(&workers[i].thread, NULL, work, &workers[i]);
  for (int i = 0; i < THREADS; i++) {
    pthread_join(workers[i].thread, NULL);
    tally_add(&sum, &workers[i].tally);
  }
  TIMED(&sum, cudaDeviceSynchronize);
  printf("{\"target\": \"million\", \"pid\": %d, \"threads\": %d, \"elapsed_ns\": %llu, ", getpid(), THREADS,
         (unsigned long long)(now_ns() - from_ns));
  tally_print("before_", &before);
  printf(", ");
  tally_print("", &sum);
  puts("}");
  fflush(stdout);
  if (getenv("MILLION_LINGER")) (void)!fgets((char[8]){0}, 8, stdin);
  return 0;
}
