// SPDX-License-Identifier: Apache-2.0
/* One calling process among many that map the same library: crowd LIBCUDART CHILDREN
 * Forks CHILDREN idle processes and prints "ready". For each line on stdin: the median ns of a launch and of a wait over
 * windows of calls, as one line "LAUNCH WAIT". Ends with stdin, and its children with it. */
#define _DEFAULT_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

enum { WINDOWS = 15, CALLS = 4000 };
typedef struct {
  unsigned x, y, z;
} dim3;
static int (*launch)(const void *, dim3, dim3, void **, size_t, void *);
static int (*wait_for)(void *);

static uint64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static int by_value(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

static double cost_ns(int waits) {
  static const dim3 one = {1, 1, 1};
  double window[WINDOWS];
  for (int w = 0; w < WINDOWS; w++) {
    uint64_t from = now_ns();
    for (int i = 0; i < CALLS; i++) {
      if (waits) wait_for(NULL);
      else launch((const void *)cost_ns, one, one, NULL, 0, NULL);
    }
    window[w] = (double)(now_ns() - from) / CALLS;
    wait_for(NULL);
  }
  qsort(window, WINDOWS, sizeof(*window), by_value);
  return window[WINDOWS / 2];
}

int main(int argc, char **argv) {
  char line[8];
  void *library = argc == 3 ? dlopen(argv[1], RTLD_NOW) : NULL;
  if (!library) return 2;
  *(void **)&launch = dlsym(library, "cudaLaunchKernel");
  *(void **)&wait_for = dlsym(library, "cudaStreamSynchronize");
  wait_for(NULL);
  for (int i = atoi(argv[2]); i > 0; i--)
    if (fork() == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      for (;;) pause();
    }
  puts("ready");
  fflush(stdout);
  while (fgets(line, sizeof(line), stdin)) {
    printf("%.3f %.3f\n", cost_ns(0), cost_ns(1));
    fflush(stdout);
  }
  return 0;
}
