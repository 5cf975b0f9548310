// SPDX-License-Identifier: Apache-2.0
/* Calls the stubs of shimstubs.c: shimcall CORE. Prints its pid, then answers lines "WAY CALLS WINDOWS" with the least
 * over the windows of ns per call (cold: of one call after its cache lines were thrown out). Ends with stdin. Ways:
 *   0 bare  1 bare between two readings of the counter  2 wrapped  3, 4: the same two for a wait  5, 6: for NCCL
 *   7 bare, cold  8 two readings, cold  9 wrapped, cold
 *   10, 11: 2 us of work a call, bare and wrapped */
#define _GNU_SOURCE
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define EVICT_BYTES (2u << 20)
#define COMM 0x7f00c0ffee00ull
typedef int stub(uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t);
stub cudaLaunchKernel, bare_cudaLaunchKernel, cudaStreamSynchronize, bare_cudaStreamSynchronize, ncclAllReduce,
    bare_ncclAllReduce;
static volatile uint64_t sink;
static uint8_t evict[EVICT_BYTES];

static inline uint64_t ticks(void) {
#if defined(__x86_64__)
  return __builtin_ia32_rdtsc();
#else
  uint64_t now;
  __asm__ volatile("mrs %0, cntvct_el0" : "=r"(now));
  return now;
#endif
}

static int twice(uint64_t a, uint64_t b, uint64_t c, uint64_t d, uint64_t e, uint64_t f, uint64_t g, uint64_t h) {
  uint64_t from = ticks();
  int result = bare_cudaLaunchKernel(a, b, c, d, e, f, g, h);
  __asm__ volatile("" ::"r"(ticks() - from));
  return result;
}

static double now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

static void work(uint64_t steps) {
  uint64_t x = sink | 1;
  for (uint64_t i = 0; i < steps; i++) x = x * 6364136223846793005u + 1442695040888963407u;
  sink = x;
}

static uint64_t steps_of(double ns) {
  double from = now_ns();
  work(1000000);
  return (uint64_t)(ns * 1000000 / (now_ns() - from));
}

static double warm(stub *f, long calls, uint64_t steps) {
  double from = now_ns();
  for (long i = 0; i < calls; i++) {
    if (steps) work(steps);
    f(1, 2, 3, 4, 5, COMM, 7, 8);
  }
  return (now_ns() - from) / (double)calls;
}

static double cold(stub *f, long calls) {
  double sum = 0;
  for (long i = 0; i < calls; i++) {
    for (uint32_t j = 0; j < EVICT_BYTES; j += 64) evict[j]++;
    double from = now_ns();
    f(1, 2, 3, 4, 5, COMM, 7, 8);
    sum += now_ns() - from;
  }
  return sum / (double)calls;
}

int main(int argc, char **argv) {
  stub *ways[] = {bare_cudaLaunchKernel,
                  twice,
                  cudaLaunchKernel,
                  bare_cudaStreamSynchronize,
                  cudaStreamSynchronize,
                  bare_ncclAllReduce,
                  ncclAllReduce,
                  bare_cudaLaunchKernel,
                  twice,
                  cudaLaunchKernel,
                  bare_cudaLaunchKernel,
                  cudaLaunchKernel};
  cpu_set_t set;
  int way, windows;
  long calls;
  CPU_ZERO(&set);
  CPU_SET(argc > 1 ? atoi(argv[1]) : 0, &set);
  if (sched_setaffinity(0, sizeof(set), &set)) return 3;
  uint64_t steps = steps_of(2000);
  cudaLaunchKernel(1, 2, 3, 4, 5, COMM, 7, 8);
  printf("%d\n", getpid());
  fflush(stdout);
  while (scanf("%d %ld %d", &way, &calls, &windows) == 3 && way >= 0 && way < 12) {
    double least = 1e18;
    for (int i = 0; i < windows; i++) {
      double ns = way < 7    ? warm(ways[way], calls, 0)
                  : way < 10 ? cold(ways[way], calls)
                             : warm(ways[way], calls, steps);
      if (ns < least) least = ns;
    }
    printf("%.4f\n", least);
    fflush(stdout);
  }
  return 0;
}
