/* rough MODE [ROUNDS]: what programs do that probes could disturb, between and inside hooked calls.
 *
 * Prints "ready", waits for a line, and ends with one line that is the same whether it is traced or not. Modes:
 *   backtrace  a handler takes backtraces while its thread waits; others are taken between calls
 *   cancel     threads are cancelled in a wait
 *   longjmp    over frames that made hooked calls; out of a handler that interrupted a wait
 *   altstack   handlers on a stack of their own make hooked calls while their thread waits
 *   seccomp    a filter kills the process at any system call it does not need
 */
#include <errno.h>
#include <execinfo.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "sim_cudart.h"

enum { DEPTH = 64, STACK_BYTES = 1 << 16, SHORT_NS = 1000000, CANCELLED = 8 };
#define FOREVER_NS 600000000000ull

static unsigned long rounds = 300;
static cudaStream_t stream;
static atomic_ulong handled, launched, cleaned;
static atomic_int over;
static pthread_t waiter;
static sigjmp_buf back;

static void kernel_stub(void) {}

static void must(int failed, const char *what) {
  if (!failed) return;
  fprintf(stderr, "rough: %s\n", what);
  _exit(3);
}

static void launch(cudaStream_t where, uint64_t ns) {
  dim3 one = {1, 1, 1};
  stallscope_sim_set_next_kernel_ns(ns);
  must(cudaLaunchKernel((void *)kernel_stub, one, one, NULL, 0, where) != 0, "launch");
  launched++;
}

static void wait_for(cudaStream_t where) {
  must(cudaStreamSynchronize(where) != 0, "synchronize");
}

static void on_signal(int number, void (*handler)(int), int flags) {
  struct sigaction action = {.sa_handler = handler, .sa_flags = flags};
  must(sigaction(number, &action, NULL), "sigaction");
}

static void ready(void) {
  char line[64];
  puts("ready");
  fflush(stdout);
  if (!fgets(line, sizeof(line), stdin)) exit(0);
}

/* One thread waits `rounds` times; the main thread keeps sending it signals. */
static void *wait_often(void *unused) {
  (void)unused;
  cudaStream_t own;
  must(cudaStreamCreateWithFlags(&own, cudaStreamNonBlocking) != 0, "stream");
  for (unsigned long i = 0; i < rounds; i++) {
    launch(own, SHORT_NS);
    wait_for(own);
  }
  over = 1;
  while (over == 1) usleep(100);
  return NULL;
}

static void pester(void *(*work)(void *)) {
  must(pthread_create(&waiter, NULL, work, NULL), "thread");
  while (!over) {
    pthread_kill(waiter, SIGUSR1);
    usleep(500);
  }
  over = 2;
  pthread_join(waiter, NULL);
}

static void take_backtrace(int number) {
  void *frames[DEPTH];
  (void)number;
  handled += backtrace(frames, DEPTH) > 0;
}

static int __attribute__((noinline)) depth_here(void) {
  void *frames[DEPTH];
  return backtrace(frames, DEPTH);
}

static void mode_backtrace(void) {
  unsigned long same = 0;
  int first = depth_here();
  on_signal(SIGUSR1, take_backtrace, SA_RESTART);
  ready();
  for (unsigned long i = 0; i < rounds * 10; i++) {
    launch(stream, 1);
    same += depth_here() == first;
    wait_for(stream);
    same += depth_here() == first;
  }
  pester(wait_often);
  printf("backtrace: %lu as deep as before, handler ran: %s\n", same, handled ? "yes" : "no");
}

static void cleanup(void *unused) {
  (void)unused;
  cleaned++;
}

static void *wait_forever(void *unused) {
  cudaStream_t own;
  (void)unused;
  must(cudaStreamCreateWithFlags(&own, cudaStreamNonBlocking) != 0, "stream");
  launch(own, FOREVER_NS);
  pthread_cleanup_push(cleanup, NULL);
  wait_for(own);
  pthread_cleanup_pop(0);
  return NULL;
}

static void mode_cancel(void) {
  unsigned long cancelled = 0;
  ready();
  for (unsigned long round = 0; round < rounds / 10; round++) {
    pthread_t threads[CANCELLED];
    for (int i = 0; i < CANCELLED; i++) must(pthread_create(&threads[i], NULL, wait_forever, NULL), "thread");
    usleep(5000);
    for (int i = 0; i < CANCELLED; i++) {
      void *result;
      pthread_cancel(threads[i]);
      pthread_join(threads[i], &result);
      cancelled += result == PTHREAD_CANCELED;
    }
  }
  printf("cancel: %lu cancelled, %lu cleaned up\n", cancelled, (unsigned long)cleaned);
}

static void __attribute__((noinline)) dig(sigjmp_buf where, int depth) {
  launch(stream, 1);
  wait_for(stream);
  if (depth) dig(where, depth - 1);
  siglongjmp(where, 1);
}

static void jump(int number) {
  (void)number;
  handled++;
  siglongjmp(back, 1);
}

static void mode_longjmp(void) {
  volatile unsigned long returned = 0, left = 0;
  sigjmp_buf here;
  ready();
  for (volatile unsigned long i = 0; i < rounds; i++) {
    if (sigsetjmp(here, 1)) returned++;
    else dig(here, 5);
  }
  /* Out of the middle of a wait; the calls after it use the stack that the lost frame used. */
  on_signal(SIGALRM, jump, 0);
  for (volatile unsigned long i = 0; i < rounds / 10; i++) {
    if (sigsetjmp(back, 1)) left++;
    else {
      launch(stream, 20 * SHORT_NS);
      ualarm(3000, 0);
      wait_for(stream);
    }
    wait_for(stream);
  }
  printf("longjmp: %lu returned, %lu left a wait\n", returned, left);
}

static void call_on_altstack(int number) {
  char here;
  (void)number;
  int saved = errno;
  launch(stream, 1);
  wait_for(stream);
  handled += (uintptr_t)&here != 0;
  errno = saved;
}

/* The handler's stack lies above what it interrupts. The kernel tells live return probes from left ones by comparing
 * stack pointers, and takes the interrupted wait's for left (docs/limits.md). */
static void *wait_below_its_handlers(void *unused) {
  char low[STACK_BYTES];
  stack_t alternative = {.ss_sp = low, .ss_size = sizeof(low)};
  must(sigaltstack(&alternative, NULL), "sigaltstack");
  void *result = wait_often(unused);
  alternative.ss_flags = SS_DISABLE;
  must(sigaltstack(&alternative, NULL), "sigaltstack");
  return result;
}

static void *wait_above_its_handlers(void *unused) {
  /* From the heap's arena, which lies below every thread's stack. */
  stack_t alternative = {.ss_sp = sbrk(STACK_BYTES), .ss_size = STACK_BYTES};
  must(sigaltstack(&alternative, NULL), "sigaltstack");
  return wait_often(unused);
}

static void mode_altstack(void) {
  on_signal(SIGUSR1, call_on_altstack, SA_ONSTACK | SA_RESTART);
  ready();
  pester(getenv("ROUGH_ABOVE") ? wait_below_its_handlers : wait_above_its_handlers);
  printf("altstack: handler ran: %s\n", handled ? "yes" : "no");
}

static void forbid(void) {
  static const int needed[] = {SYS_read,       SYS_write,        SYS_futex,    SYS_clock_nanosleep,
                               SYS_exit_group, SYS_rt_sigreturn, SYS_mmap,     SYS_munmap,
                               SYS_brk,        SYS_mprotect,     SYS_madvise,  SYS_fstat,
                               SYS_newfstatat, SYS_sched_yield,  SYS_nanosleep};
  enum { N = sizeof(needed) / sizeof(*needed) };
  struct sock_filter code[N + 3];
  code[0] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr));
  for (int i = 0; i < N; i++)
    code[i + 1] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (unsigned)needed[i], (uint8_t)(N - i), 0);
  code[N + 1] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS);
  code[N + 2] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
  struct sock_fprog program = {N + 3, code};
  must(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs");
  must(syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &program) != 0, "seccomp");
}

static void mode_seccomp(void) {
  void *memory;
  unsigned long calls = 0;
  launch(stream, 1);
  wait_for(stream);
  forbid();
  ready();
  for (unsigned long i = 0; i < rounds * 10; i++, calls += 4) {
    must(cudaMalloc(&memory, 4096) != 0, "malloc");
    launch(stream, i % 10 ? 1 : SHORT_NS);
    wait_for(stream);
    must(cudaFree(memory) != 0, "free");
  }
  printf("seccomp: %lu calls\n", calls);
  if (getenv("ROUGH_FORBIDDEN")) syscall(SYS_getppid);
}

int main(int argc, char **argv) {
  static const struct {
    const char *name;
    void (*run)(void);
  } modes[] = {{"backtrace", mode_backtrace},
               {"cancel", mode_cancel},
               {"longjmp", mode_longjmp},
               {"altstack", mode_altstack},
               {"seccomp", mode_seccomp}};
  if (argc > 2) rounds = strtoul(argv[2], NULL, 10);
  setenv("STALLSCOPE_SIM_KERNEL_NS", "1", 0);
  must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) != 0, "stream");
  for (unsigned i = 0; argc > 1 && i < sizeof(modes) / sizeof(*modes); i++) {
    if (strcmp(modes[i].name, argv[1])) continue;
    modes[i].run();
    fflush(stdout);
    return 7; /* not 0: the code has to come through as well */
  }
  return 2;
}
