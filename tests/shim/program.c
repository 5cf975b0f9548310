/* What the shim's tests run: program MODE [NUMBER...]. Prints one line of JSON, {"api": calls}, its own truth. */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <unistd.h>

typedef int plain(uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t);
plain cudaLaunchKernel, cudaStreamSynchronize, cudaDeviceSynchronize, cudaMemcpyAsync, cudaEventQuery, cudaFree;
plain ncclAllReduce, ncclGroupStart, ncclGroupEnd;
extern void (*stub_hook)(const char *);
extern int stub_result;

#define COMM 0x7000
static long numbers[8];
static unsigned long in_handler, in_main;

static void say(const char *more) {
  printf("{\"cudaLaunchKernel\": %lu%s}\n", __atomic_load_n(&in_main, __ATOMIC_RELAXED) + in_handler, more);
  fflush(stdout);
}

static int launch(void) {
  __atomic_fetch_add(&in_main, 1, __ATOMIC_RELAXED);
  return cudaLaunchKernel(0x1234, 1, 2, 3, 4, 5, 6, 0x5678);
}

static unsigned long reduced;
static void reduce(void) {
  __atomic_fetch_add(&reduced, 1, __ATOMIC_RELAXED);
  ncclAllReduce(1, 2, 3, 4, 5, COMM, 7, 0);
}

static void on_alarm(int number) {
  (void)number;
  in_handler++;
  cudaLaunchKernel(0x1234, 1, 2, 3, 4, 5, 6, 0x5678);
  if (numbers[1]) reduce();
}

/* CALLS calls; calls from a signal handler in the middle of them. NCCL = 1: also operations of a communicator. */
static void storm(void) {
  struct itimerval every = {{0, 60}, {0, 60}};
  launch();
  signal(SIGALRM, on_alarm);
  setitimer(ITIMER_REAL, &every, NULL);
  for (long i = 0; i < numbers[0]; i++) numbers[1] ? reduce() : (void)launch();
  setitimer(ITIMER_REAL, &(struct itimerval){0}, NULL);
  char more[96];
  snprintf(more, sizeof(more), ", \"ncclAllReduce\": %lu, \"in_handler\": %lu", reduced, in_handler);
  say(more);
}

static pthread_barrier_t barrier;
static void *thread(void *argument) {
  if (argument) pthread_barrier_wait(&barrier);
  for (long i = 0; i < numbers[2]; i++) launch();
  if (argument) pthread_barrier_wait(&barrier);
  return NULL;
}

/* THREADS at once, in GROUPS, each with CALLS calls; all of a group are alive while any of it calls. */
static void threads(void) {
  pthread_t ids[1024];
  pthread_barrier_init(&barrier, NULL, (unsigned)numbers[0]);
  for (long group = 0; group < numbers[1]; group++) {
    for (long i = 0; i < numbers[0]; i++) pthread_create(&ids[i], NULL, thread, numbers[0] > 1 ? &barrier : NULL);
    for (long i = 0; i < numbers[0]; i++) pthread_join(ids[i], NULL);
  }
  say("");
}

/* FORKS children, each with CALLS calls; the parent makes as many in between. */
static void forks(void) {
  for (long i = 0; i < numbers[0]; i++) {
    for (long j = 0; j < numbers[1]; j++) launch();
    pid_t child = fork();
    if (!child) {
      for (long j = 0; j < numbers[1]; j++) launch();
      _exit(0);
    }
    waitpid(child, NULL, 0);
  }
  say("");
}

/* The child of a vfork makes calls on its parent's memory. */
static void vforks(void) {
  for (volatile long i = 0; i < numbers[0]; i++) {
    launch();
    pid_t child = vfork();
    if (!child) {
      launch();
      _exit(0);
    }
    waitpid(child, NULL, 0);
  }
  say("");
}

static void hang(const char *name) {
  if (strcmp(name, "cudaStreamSynchronize")) return;
  puts("hanging");
  fflush(stdout);
  pause();
}

/* CALLS calls, then the end: by a signal, inside a call. */
static void dies(bool by_fault) {
  for (long i = 0; i < numbers[0]; i++) launch();
  say("");
  if (by_fault) *(volatile int *)8 = 1;
  stub_hook = hang;
  cudaStreamSynchronize(0x77, 0, 0, 0, 0, 0, 0, 0);
}

static void set_errno(const char *name) {
  (void)name;
  if (errno != 1234) abort();
  errno = 4321;
}

/* The first and later calls leave errno alone, on the way in and out. */
static void keeps_errno(void) {
  stub_hook = set_errno;
  for (int i = 0; i < 100; i++) {
    plain *const all[] = {cudaLaunchKernel, cudaStreamSynchronize, cudaMemcpyAsync, cudaEventQuery, ncclAllReduce};
    for (size_t j = 0; j < sizeof(all) / sizeof(all[0]); j++) {
      errno = 1234;
      all[j](1, 2, 3, 4, 5, COMM, 7, 8);
      if (errno != 4321) abort();
    }
  }
  puts("{}");
}

/* Any system call but the last ones kills. */
static void forbid(void) {
  struct sock_filter filter[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_write, 3, 0),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_exit_group, 2, 0),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_rt_sigreturn, 1, 0),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  struct sock_fprog program = {sizeof(filter) / sizeof(filter[0]), filter};
  if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program)) abort();
}

static void one_of_each(void) {
  launch();
  cudaStreamSynchronize(1, 0, 0, 0, 0, 0, 0, 0);
  cudaMemcpyAsync(1, 2, 3, 4, 5, 0, 0, 0);
  cudaEventQuery(1, 0, 0, 0, 0, 0, 0, 0);
  ncclGroupStart(0, 0, 0, 0, 0, 0, 0, 0);
  ncclAllReduce(1, 2, 3, 4, 5, COMM, 7, 0);
  ncclGroupEnd(0, 0, 0, 0, 0, 0, 0, 0);
}

static void quiet(void) {
  char line[64];
  one_of_each();
  forbid();
  for (long i = 0; i < numbers[0]; i++) one_of_each();
  int n = snprintf(line, sizeof(line), "{\"cudaLaunchKernel\": %lu}\n", in_main);
  if (write(1, line, (size_t)n) != n) abort();
  syscall(SYS_exit_group, 0);
}

static jmp_buf out;
static void jump(const char *name) {
  (void)name;
  longjmp(out, 1);
}

/* Calls that are left by longjmp, and later ones at the same depth. */
static void jumps(void) {
  for (volatile long i = 0; i < numbers[0]; i++) {
    stub_hook = jump;
    if (!setjmp(out)) cudaStreamSynchronize(1, 0, 0, 0, 0, 0, 0, 0);
    stub_hook = NULL;
    launch();
  }
  char more[64];
  snprintf(more, sizeof(more), ", \"cudaStreamSynchronize\": %ld", numbers[0]);
  say(more);
}

static void *leaves(void *argument) {
  launch();
  stub_hook = argument;
  cudaStreamSynchronize(1, 0, 0, 0, 0, 0, 0, 0);
  return NULL;
}
static void end_thread(const char *name) {
  (void)name;
  pthread_exit(NULL);
}

/* A thread that ends inside a call. */
static void ends(void) {
  pthread_t id;
  void (*end)(const char *) = end_thread;
  pthread_create(&id, NULL, leaves, (void *)end);
  pthread_join(id, NULL);
  stub_hook = NULL;
  launch();
  say(", \"cudaStreamSynchronize\": 1");
}

static void calls(void) {
  for (long i = 0; i < numbers[0]; i++) launch();
  say("");
}

/* Waits for lines: each a number of calls, negative for cudaEventQuery. */
static void obeys(void) {
  char line[64];
  launch();
  say("");
  while (fgets(line, sizeof(line), stdin)) {
    long n = atol(line);
    for (long i = 0; i < n; i++) launch();
    for (long i = n; i < 0; i++) cudaEventQuery(7, 0, 0, 0, 0, 0, 0, 0);
    say("");
  }
}

static void fails(void) {
  stub_result = (int)numbers[0];
  launch();
  cudaStreamSynchronize(1, 0, 0, 0, 0, 0, 0, 0);
  cudaEventQuery(9, 0, 0, 0, 0, 0, 0, 0);
  say(", \"cudaStreamSynchronize\": 1, \"cudaEventQuery\": 1");
}

static void mute(void) {
  puts("{}");
}

static void segv(void) {
  dies(true);
}
static void killed(void) {
  dies(false);
}

int main(int argc, char **argv) {
  static const struct {
    const char *name;
    void (*run)(void);
  } modes[] = {{"storm", storm},   {"threads", threads},   {"forks", forks}, {"vforks", vforks}, {"segv", segv},
               {"killed", killed}, {"errno", keeps_errno}, {"quiet", quiet}, {"jumps", jumps},   {"ends", ends},
               {"calls", calls},   {"obeys", obeys},       {"fails", fails}, {"mute", mute}};
  for (int i = 2; i < argc && i < 10; i++) numbers[i - 2] = atol(argv[i]);
  for (size_t i = 0; argc > 1 && i < sizeof(modes) / sizeof(modes[0]); i++)
    if (!strcmp(argv[1], modes[i].name)) return modes[i].run(), 0;
  return 2;
}
