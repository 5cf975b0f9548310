// SPDX-License-Identifier: Apache-2.0
/* The bare stub call, and the same between two LTTng events: lttngcall CORE. Speaks as shimcall.c does; ways 0 and 1. */
#define _GNU_SOURCE
#define LTTNG_UST_TRACEPOINT_CREATE_PROBES
#define LTTNG_UST_TRACEPOINT_DEFINE
#include "lttng_events.h"
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

typedef int stub(uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t);
stub bare_cudaLaunchKernel;

static int traced(uint64_t a, uint64_t b, uint64_t c, uint64_t d, uint64_t e, uint64_t f, uint64_t g, uint64_t h) {
  lttng_ust_tracepoint(stallscope_bench, enter, a, h);
  int result = bare_cudaLaunchKernel(a, b, c, d, e, f, g, h);
  lttng_ust_tracepoint(stallscope_bench, leave, result);
  return result;
}

static double now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

int main(int argc, char **argv) {
  stub *ways[] = {bare_cudaLaunchKernel, traced};
  cpu_set_t set;
  int way, windows;
  long calls;
  CPU_ZERO(&set);
  CPU_SET(argc > 1 ? atoi(argv[1]) : 0, &set);
  if (sched_setaffinity(0, sizeof(set), &set)) return 3;
  printf("%d\n", getpid());
  fflush(stdout);
  while (scanf("%d %ld %d", &way, &calls, &windows) == 3 && way >= 0 && way < 2) {
    double least = 1e18;
    for (int i = 0; i < windows; i++) {
      double from = now_ns();
      for (long j = 0; j < calls; j++) ways[way](1, 2, 3, 4, 5, 6, 7, 8);
      double ns = (now_ns() - from) / (double)calls;
      if (ns < least) least = ns;
    }
    printf("%.4f\n", least);
    fflush(stdout);
  }
  return 0;
}
