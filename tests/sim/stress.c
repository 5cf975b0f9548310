/* stress [ROUNDS]: threads that mix everything that shares state, for the sanitizers; prints "done" at the end.
 *
 * Streams come and go, some are queues because of host functions and holds, events and the legacy stream tie them
 * together, memory is mapped and unmapped beside it, and children are forked in the middle of all that.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "sim_cudart.h"

enum { THREADS = 4, BYTES = 4096 };

static int rounds;
static atomic_int host_calls;
static cudaEvent_t shared_event;
static const dim3 one = {1, 1, 1};

#define OK(call)                                                                                                       \
  do {                                                                                                                 \
    int result = (call);                                                                                               \
    if (result) {                                                                                                      \
      fprintf(stderr, "%s: %d\n", #call, result);                                                                      \
      abort();                                                                                                         \
    }                                                                                                                  \
  } while (0)

static void host(void *data) {
  (void)data;
  host_calls++;
}

static void launch(cudaStream_t stream) {
  stallscope_sim_set_next_kernel_ns(1000);
  OK(cudaLaunchKernel((void *)launch, one, one, NULL, 0, stream));
}

static void queued(cudaStream_t stream, cudaStream_t other, cudaEvent_t event) {
  void *hold;
  OK(cudaLaunchHostFunc(stream, host, NULL));
  OK(stallscope_sim_hold(other, &hold));
  OK(cudaEventRecord(event, other));
  OK(cudaStreamWaitEvent(stream, event, 0));
  launch(stream);
  OK(stallscope_sim_release(hold));
  OK(cudaEventSynchronize(event));
  OK(cudaStreamSynchronize(stream));
}

static void copies(cudaStream_t stream) {
  void *device, *pinned;
  OK(cudaMalloc(&device, BYTES));
  OK(cudaMallocHost(&pinned, BYTES));
  OK(cudaMemsetAsync(device, 7, BYTES, stream));
  OK(cudaLaunchHostFunc(stream, host, NULL));
  OK(cudaMemcpyAsync(pinned, device, BYTES, cudaMemcpyDeviceToHost, stream));
  OK(cudaStreamSynchronize(stream));
  if (*(char *)pinned != 7) abort();
  OK(cudaFree(device));
  OK(cudaFreeHost(pinned));
}

/* Events of others: only that it ends is asked for. */
static void shared(cudaStream_t stream) {
  OK(cudaEventRecord(shared_event, stream));
  cudaEventQuery(shared_event);
  OK(cudaStreamWaitEvent(stream, shared_event, 0));
  launch(NULL);
  OK(cudaEventSynchronize(shared_event));
}

static void *work(void *argument) {
  unsigned index = (unsigned)(uintptr_t)argument;
  for (int i = 0; i < rounds; i++) {
    cudaStream_t stream, other;
    cudaEvent_t event;
    OK(cudaSetDevice((int)((index + (unsigned)i / 8) % 2)));
    OK(cudaStreamCreateWithFlags(&stream, i % 2 ? cudaStreamNonBlocking : 0));
    OK(cudaStreamCreate(&other));
    OK(cudaEventCreate(&event));
    queued(stream, other, event);
    copies(stream);
    shared(other);
    OK(cudaStreamDestroy(other));
    OK(cudaEventDestroy(event));
    if (i % 4 == 0) OK(cudaDeviceSynchronize());
    OK(cudaStreamDestroy(stream));
  }
  return NULL;
}

static void fork_children(void) {
  for (int i = 0; i < 5; i++) {
    int status;
    pid_t pid = fork();
    if (pid == 0) {
      launch(NULL);
      OK(cudaDeviceSynchronize());
      _exit(0);
    }
    waitpid(pid, &status, 0);
    if (status) abort();
  }
}

int main(int argc, char **argv) {
  pthread_t threads[THREADS];
  rounds = argc > 1 ? atoi(argv[1]) : 50;
  OK(cudaEventCreate(&shared_event));
  for (uintptr_t i = 0; i < THREADS; i++) pthread_create(&threads[i], NULL, work, (void *)i);
  /* TSan gives up on threads in a child of a threaded parent. */
  if (!getenv("STRESS_NO_FORK")) fork_children();
  for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
  OK(cudaDeviceSynchronize());
  if (host_calls < 2 * THREADS * rounds) abort();
  puts("done");
  return 0;
}
