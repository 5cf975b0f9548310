// SPDX-License-Identifier: Apache-2.0
/* Calls stub functions and times them: driver CORE LIBRARY...
 * Prints "PID ADDRESS" (of f_000 in the first library), then answers lines "FUNCTION CALLS WINDOWS" on stdin with the
 * median over the windows of ns per call. Ends with stdin. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#define MAX_WINDOWS 64
#define COMM 0x7f00c0ffee00ull /* where an NCCL call has its communicator */
typedef int stub(uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t);

static void *library;

static stub *function(int index) {
  char name[16];
  snprintf(name, sizeof(name), "f_%03d", index);
  void *found = dlsym(library, name);
  if (!found) exit(2);
  return (stub *)found;
}

static uint64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000 + (uint64_t)t.tv_nsec;
}

static double window(stub *f, long calls) {
  uint64_t start = now_ns();
  for (long i = 0; i < calls; i++) f(1, 2, 3, 4, 5, COMM, 7, 8);
  return (double)(now_ns() - start) / (double)calls;
}

static int ascending(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

static double median_of(stub *f, long calls, int windows) {
  double times[MAX_WINDOWS];
  for (int i = 0; i < windows; i++) times[i] = window(f, calls);
  qsort(times, (size_t)windows, sizeof(times[0]), ascending);
  return (times[(windows - 1) / 2] + times[windows / 2]) / 2;
}

static void pin(int core) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(core, &set);
  if (sched_setaffinity(0, sizeof(set), &set)) exit(3);
}

int main(int argc, char **argv) {
  int index, windows;
  long calls;
  if (argc < 3) return 1;
  pin(atoi(argv[1]));
  for (int i = argc - 1; i >= 2; i--)
    if (!(library = dlopen(argv[i], RTLD_NOW | RTLD_LOCAL))) return 2;
  printf("%d %p\n", getpid(), (void *)function(0));
  fflush(stdout);
  while (scanf("%d %ld %d", &index, &calls, &windows) == 3) {
    if (calls < 1 || windows < 1 || windows > MAX_WINDOWS) return 1;
    printf("%.4f\n", median_of(function(index), calls, windows));
    fflush(stdout);
  }
  return 0;
}
