/* odd MODE [COUNT]: processes and threads that do unusual things around COUNT waits.
 *
 * nonleader-exec  a thread that is not the main one execs this program again (mode "plain") while main sleeps
 * leaderless      main ends by pthread_exit after "ready"; another thread makes the calls
 * leaderless-load the same, and that thread loads the runtime only then
 * longjmp         a signal handler leaves a long wait by siglongjmp; then the thread sleeps for 3 s
 * signals         a timer's handler makes waits while the main loop is inside waits
 * plain           just the waits
 * Prints "ready" (except after an exec) and waits for a line; ends with one line of JSON.
 */
#include <dlfcn.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/time.h>
#include <unistd.h>

#include "sim_cuda_types.h"

/* clang-format off */
#define APIS(X) X(cudaStreamSynchronize) X(cudaLaunchKernel)
/* clang-format on */
#include "target.h"

static int (*synchronize)(cudaStream_t);
static int (*launch)(const void *, dim3, dim3, void **, size_t, cudaStream_t);
static void (*set_next_ns)(uint64_t);
static unsigned long count;
static const char *mode, *self;
static struct tally tally;
static atomic_ulong in_handler;
static sigjmp_buf out;

static void stub(void) {}

static void load(void) {
  void *library = dlopen("libcudart.so.12", RTLD_NOW);
  if (!library) exit(3);
  *(void **)&synchronize = dlsym(library, "cudaStreamSynchronize");
  *(void **)&launch = dlsym(library, "cudaLaunchKernel");
  *(void **)&set_next_ns = dlsym(library, "stallscope_sim_set_next_kernel_ns");
  synchronize(NULL);
}

static void waits(void) {
  for (unsigned long i = 0; i < count; i++) {
    synchronize(NULL);
    tally.calls[API_cudaStreamSynchronize]++;
  }
}

static void finish(void) {
  tally.calls[API_cudaStreamSynchronize] += atomic_load(&in_handler);
  printf("{\"target\": \"odd\", \"pid\": %d, ", getpid());
  tally_print("", &tally);
  puts("}");
  fflush(stdout);
  _exit(0);
}

static void *exec_here(void *unused) {
  char text[32];
  (void)unused;
  snprintf(text, sizeof(text), "%lu", count);
  execl("/proc/self/exe", self, "plain", text, (char *)NULL);
  _exit(4);
}

static void *lone(void *unused) {
  (void)unused;
  usleep(100000);
  ready();
  if (strcmp(mode, "leaderless-load") == 0) {
    load();
    usleep(300000);
  }
  waits();
  finish();
  return NULL;
}

static void leave(int number) {
  (void)number;
  siglongjmp(out, 1);
}

static void call_in_handler(int number) {
  (void)number;
  synchronize(NULL);
  in_handler++;
}

static void longjmp_out(void) {
  static const dim3 one = {1, 1, 1};
  signal(SIGALRM, leave);
  set_next_ns(60000000000u);
  launch((void *)stub, one, one, NULL, 0, NULL);
  tally.calls[API_cudaLaunchKernel]++;
  tally.calls[API_cudaStreamSynchronize]++;
  ualarm(200000, 0);
  if (!sigsetjmp(out, 1)) synchronize(NULL);
  sleep(3);
}

static void under_signals(void) {
  struct itimerval every = {{0, 500}, {0, 500}}, never = {{0, 0}, {0, 0}};
  struct sigaction action = {.sa_handler = call_in_handler, .sa_flags = SA_RESTART};
  sigaction(SIGALRM, &action, NULL);
  setitimer(ITIMER_REAL, &every, NULL);
  waits();
  setitimer(ITIMER_REAL, &never, NULL);
}

int main(int argc, char **argv) {
  pthread_t thread;
  if (argc < 2) return 2;
  mode = argv[1];
  self = argv[0];
  count = argument(argc, argv, 2, 1000);
  setenv("STALLSCOPE_SIM_KERNEL_NS", "1", 0);
  if (strcmp(mode, "leaderless-load") != 0) load();
  if (strncmp(mode, "leaderless", 10) == 0) {
    pthread_create(&thread, NULL, lone, NULL);
    pthread_exit(NULL);
  }
  if (strcmp(mode, "plain") == 0) usleep(300000); /* after an exec: time to be linked again */
  else ready();
  if (strcmp(mode, "nonleader-exec") == 0) {
    waits();
    pthread_create(&thread, NULL, exec_here, NULL);
    for (;;) pause();
  }
  if (strcmp(mode, "longjmp") == 0) longjmp_out();
  else if (strcmp(mode, "signals") == 0) under_signals();
  else waits();
  finish();
}
