/* host MODE: a program that something is put into while it does what is easily disturbed, and that checks itself.
 *
 * Says "ready", goes on until stdin has a line, then prints one line of JSON: {"target": "host", "rounds": n, "wrong": n}.
 *
 *   registers  one thread that holds known values in all registers
 *   heap       one thread that allocates, fills, checks and frees
 *   waits      threads in calls that wait for a time; each has to take that time, and to return what it does undisturbed
 *   signals    the heap, with a timer's signal every millisecond
 *   inmalloc   one thread that stays inside malloc, in a signal handler: says "ready" when it is there
 *   inloader   a thread inside the constructor of a library, the second argument
 */
#include <dlfcn.h>
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/select.h>
#include <sys/time.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

static atomic_bool stopping;
static atomic_ulong rounds, wrong;

static uint64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void say(const char *line) {
  (void)!write(1, line, strlen(line));
}

static bool has_line(void) {
  struct pollfd p = {0, POLLIN, 0};
  return poll(&p, 1, 0) > 0;
}

#if defined(__x86_64__)
/* Values in general registers, in the upper halves of vector registers too, in the flags; how many differ after so many
 * turns. Once in a while the caller gets its turn, so that it can end. */
static uint64_t hold_registers(uint64_t turns) {
  static const uint64_t pattern[4] = {0x1111111111111111, 0x2222222222222222, 0x3333333333333333, 0x4444444444444444};
  uint64_t bad = 0;
  __asm__ volatile("vmovdqu (%[p]), %%ymm0\n vmovdqu (%[p]), %%ymm7\n vmovdqu (%[p]), %%ymm15\n"
                   "mov $101, %%r8\n mov $103, %%r9\n mov $107, %%r10\n mov $109, %%r11\n mov $113, %%r12\n"
                   "mov $127, %%r13\n mov $131, %%r14\n mov $137, %%r15\n"
                   "1: stc\n"
                   "mov $64, %%ecx\n"
                   "2: jnc 8f\n"
                   "dec %%ecx\n"
                   "jnz 2b\n"
                   "cmp $101, %%r8\n jne 8f\n cmp $103, %%r9\n jne 8f\n cmp $107, %%r10\n jne 8f\n"
                   "cmp $109, %%r11\n jne 8f\n cmp $113, %%r12\n jne 8f\n cmp $127, %%r13\n jne 8f\n"
                   "cmp $131, %%r14\n jne 8f\n cmp $137, %%r15\n jne 8f\n"
                   "vpcmpeqq (%[p]), %%ymm0, %%ymm1\n vpcmpeqq (%[p]), %%ymm7, %%ymm2\n"
                   "vpcmpeqq (%[p]), %%ymm15, %%ymm3\n vpand %%ymm1, %%ymm2, %%ymm2\n vpand %%ymm2, %%ymm3, %%ymm3\n"
                   "vpmovmskb %%ymm3, %%ecx\n cmp $-1, %%ecx\n jne 8f\n"
                   "movq $0x77, -120(%%rsp)\n pause\n cmpq $0x77, -120(%%rsp)\n jne 8f\n"
                   "jmp 9f\n"
                   "8: inc %[bad]\n"
                   "9: dec %[turns]\n jnz 1b\n vzeroupper\n"
                   : [bad] "+&r"(bad), [turns] "+&r"(turns)
                   : [p] "r"(pattern)
                   : "rcx", "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15", "xmm0", "xmm1", "xmm2", "xmm3",
                     "xmm7", "xmm15", "cc", "memory");
  return bad;
}
#else
static uint64_t hold_registers(uint64_t turns) {
  return turns ? 0 : 1;
}
#endif

static void *registers(void *unused) {
  (void)unused;
  while (!stopping) {
    errno = 77;
    wrong += hold_registers(20000);
    wrong += errno != 77;
    rounds++;
    stopping = has_line();
  }
  return NULL;
}

static void heap_round(unsigned seed) {
  enum { BLOCKS = 64 };
  unsigned char *blocks[BLOCKS];
  size_t sizes[BLOCKS];
  for (int i = 0; i < BLOCKS; i++) {
    seed = seed * 1103515245u + 12345u;
    sizes[i] = 1 + seed % (i % 16 ? 2000 : 300000);
    blocks[i] = malloc(sizes[i]);
    memset(blocks[i], i, sizes[i]);
  }
  for (int i = 0; i < BLOCKS; i += 3) blocks[i] = realloc(blocks[i], sizes[i] + 5000);
  for (int i = 0; i < BLOCKS; i++) {
    for (size_t j = 0; j < sizes[i]; j += 97) wrong += blocks[i][j] != i;
    free(blocks[i]);
  }
}

static void *heap(void *unused) {
  (void)unused;
  for (unsigned seed = 1; !stopping; seed++) {
    heap_round(seed);
    rounds++;
    stopping = has_line();
  }
  return NULL;
}

enum { WAIT_MS = 40 };

static bool wait_once(int kind) {
  static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
  static pthread_cond_t never = PTHREAD_COND_INITIALIZER;
  struct timespec span = {0, WAIT_MS * 1000000}, until;
  struct timeval tv = {0, WAIT_MS * 1000};
  switch (kind) {
  case 0:
    return nanosleep(&span, NULL) == 0;
  case 1:
    return poll(NULL, 0, WAIT_MS) == 0;
  case 2:
    return select(0, NULL, NULL, NULL, &tv) == 0;
  case 3: {
    int fd = epoll_create1(EPOLL_CLOEXEC), got = epoll_wait(fd, &(struct epoll_event){0}, 1, WAIT_MS);
    close(fd);
    return got == 0;
  }
  case 4: {
    sigset_t none;
    sigemptyset(&none);
    sigaddset(&none, SIGUSR2);
    return sigtimedwait(&none, NULL, &span) == -1 && errno == EAGAIN;
  }
  default:
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += span.tv_nsec;
    until.tv_sec += until.tv_nsec / 1000000000;
    until.tv_nsec %= 1000000000;
    pthread_mutex_lock(&mutex);
    int got = pthread_cond_timedwait(&never, &mutex, &until);
    pthread_mutex_unlock(&mutex);
    return got == ETIMEDOUT;
  }
}

static void *waiting(void *kind) {
  while (!stopping) {
    uint64_t from_ns = now_ns();
    bool ok = wait_once((int)(intptr_t)kind);
    wrong += !ok || now_ns() - from_ns < (WAIT_MS - 1) * 1000000ull;
    rounds++;
  }
  return NULL;
}

static void *wait_for_line(void *unused) {
  char line[8];
  (void)unused;
  (void)!read(0, line, sizeof(line));
  stopping = true;
  return NULL;
}

static void waits(void) {
  pthread_t threads[6];
  for (intptr_t i = 0; i < 6; i++) pthread_create(&threads[i], NULL, waiting, (void *)i);
  wait_for_line(NULL);
  for (int i = 0; i < 6; i++) pthread_join(threads[i], NULL);
}

static void on_tick(int number) {
  int saved = errno;
  rounds += number == SIGALRM;
  errno = saved;
}

static void start_timer(void (*handler)(int), int flags) {
  struct sigaction action = {.sa_handler = handler, .sa_flags = flags};
  struct itimerval often = {{0, 1000}, {0, 1000}};
  sigaction(SIGALRM, &action, NULL);
  setitimer(ITIMER_REAL, &often, NULL);
}

static atomic_bool is_inside;
static uintptr_t malloc_from, malloc_to;

static void stay_in_malloc(int number, siginfo_t *info, void *context) {
  (void)number, (void)info;
#if defined(__x86_64__)
  uintptr_t pc = (uintptr_t)((ucontext_t *)context)->uc_mcontext.gregs[REG_RIP];
#else
  uintptr_t pc = (uintptr_t)context;
#endif
  if (is_inside || pc < malloc_from || pc >= malloc_to) return;
  is_inside = true;
  say("ready\n");
  wait_for_line(NULL);
}

/* The timer's signal comes until it finds malloc at work; its handler stays. */
static void in_malloc(void) {
  malloc_from = (uintptr_t)dlsym(RTLD_DEFAULT, "malloc") - 0x3000;
  malloc_to = (uintptr_t)dlsym(RTLD_DEFAULT, "malloc_info");
  start_timer(NULL, 0);
  struct sigaction action = {.sa_sigaction = stay_in_malloc, .sa_flags = SA_SIGINFO};
  sigaction(SIGALRM, &action, NULL);
  for (unsigned seed = 1; !stopping; seed++) heap_round(seed), rounds++;
}

static const char *slow_library;

static void *load_slowly(void *unused) {
  (void)unused;
  wrong += !dlopen(slow_library, RTLD_NOW);
  rounds++;
  return NULL;
}

static void in_loader(void) {
  pthread_t thread;
  pthread_create(&thread, NULL, load_slowly, NULL);
  usleep(200000);
  say("ready\n");
  wait_for_line(NULL);
  pthread_join(thread, NULL);
}

int main(int argc, char **argv) {
  const char *mode = argc > 1 ? argv[1] : "heap";
  bool says_itself = !strcmp(mode, "inmalloc") || !strcmp(mode, "inloader");
  slow_library = argc > 2 ? argv[2] : "";
  if (!says_itself) say("ready\n");
  if (!strcmp(mode, "registers")) registers(NULL);
  else if (!strcmp(mode, "waits")) waits();
  else if (!strcmp(mode, "inmalloc")) in_malloc();
  else if (!strcmp(mode, "inloader")) in_loader();
  else {
    if (!strcmp(mode, "signals")) start_timer(on_tick, SA_RESTART);
    heap(NULL);
  }
  setitimer(ITIMER_REAL, &(struct itimerval){0}, NULL);
  printf("{\"target\": \"host\", \"rounds\": %lu, \"wrong\": %lu}\n", (unsigned long)rounds, (unsigned long)wrong);
  return 0;
}
