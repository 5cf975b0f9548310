/* inwait [THREADS [WAIT_MS [AFTER]]]: threads that sit in a long wait when somebody comes to look.
 *
 * Thread i waits in cudaStreamSynchronize, cudaEventSynchronize or cudaDeviceSynchronize (i modulo 3). "waiting" is
 * printed once all are inside; these calls stand under "before_". Then each makes AFTER rounds of one launch and one
 * wait of 1 ms, which stand under "calls".
 */
#include <pthread.h>
#include <stdatomic.h>

#include "sim_cudart.h"

/* clang-format off */
#define APIS(X) \
  X(cudaLaunchKernel) X(cudaStreamSynchronize) X(cudaEventSynchronize) X(cudaDeviceSynchronize) \
  X(cudaEventRecord) X(cudaStreamCreateWithFlags) X(cudaEventCreate)
/* clang-format on */
#include "target.h"

enum { MAX_THREADS = 256, SETTLE_NS = 50000000, AFTER_NS = 1000000 };

struct worker {
  pthread_t thread;
  int index;
  struct tally before, after;
  cudaStream_t stream;
  cudaEvent_t event;
};

static atomic_int inside, leaving;
static pthread_barrier_t go;
static unsigned long threads, wait_ms, after;

static void kernel_stub(void) {}

static void launch(struct worker *w, struct tally *tally, uint64_t duration_ns) {
  dim3 one = {1, 1, 1};
  stallscope_sim_set_next_kernel_ns(duration_ns);
  CALL(tally, cudaLaunchKernel, (void *)kernel_stub, one, one, NULL, 0, w->stream);
  CALL(tally, cudaEventRecord, w->event, w->stream);
}

static void wait(struct worker *w, struct tally *tally) {
  switch (w->index % 3) {
  case 0:
    TIMED(tally, cudaStreamSynchronize, w->stream);
    break;
  case 1:
    TIMED(tally, cudaEventSynchronize, w->event);
    break;
  default:
    TIMED(tally, cudaDeviceSynchronize);
  }
}

static void *work(void *argument) {
  struct worker *w = argument;
  CALL(&w->before, cudaStreamCreateWithFlags, &w->stream, cudaStreamNonBlocking);
  CALL(&w->before, cudaEventCreate, &w->event);
  launch(w, &w->before, wait_ms * 1000000u);
  pthread_barrier_wait(&go);
  inside++;
  wait(w, &w->before);
  leaving++;
  for (unsigned long i = 0; i < after; i++) {
    launch(w, &w->after, AFTER_NS);
    wait(w, &w->after);
  }
  return NULL;
}

int main(int argc, char **argv) {
  static struct worker workers[MAX_THREADS];
  struct tally before = {0}, sum = {0};
  struct timespec settle = {0, SETTLE_NS};
  threads = argument(argc, argv, 1, 3);
  wait_ms = argument(argc, argv, 2, 3000);
  after = argument(argc, argv, 3, 10);
  if (threads > MAX_THREADS) return 2;
  pthread_barrier_init(&go, NULL, (unsigned)threads);
  for (unsigned long i = 0; i < threads; i++) {
    workers[i].index = (int)i;
    pthread_create(&workers[i].thread, NULL, work, &workers[i]);
  }
  while ((unsigned long)inside < threads) nanosleep(&(struct timespec){0, 1000000}, NULL);
  nanosleep(&settle, NULL);
  /* A wait too short for this would make the marker a lie. */
  if (leaving) {
    fputs("inwait: WAIT_MS is too short\n", stderr);
    return 1;
  }
  say("waiting");
  for (unsigned long i = 0; i < threads; i++) {
    pthread_join(workers[i].thread, NULL);
    tally_add(&before, &workers[i].before);
    tally_add(&sum, &workers[i].after);
  }
  printf("{\"target\": \"inwait\", \"pid\": %d, \"threads\": %lu, ", getpid(), threads);
  tally_print("before_", &before);
  printf(", ");
  tally_print("", &sum);
  puts("}");
  return 0;
}
