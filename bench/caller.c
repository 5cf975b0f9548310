// SPDX-License-Identifier: Apache-2.0
/* A steadily calling CUDA program for attach: caller LIBCUDART [busy]
 * Prints "ready", then synchronizes a stream every millisecond (busy: all the time) until it is killed. Without a GPU each call returns 35,
 * and is a call all the same. */
#define _DEFAULT_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <time.h>

int main(int argc, char **argv) {
  void *library = argc >= 2 ? dlopen(argv[1], RTLD_NOW) : NULL;
  int (*synchronize)(void *) = library ? (int (*)(void *))dlsym(library, "cudaStreamSynchronize") : NULL;
  if (!synchronize) {
    fprintf(stderr, "%s\n", argc >= 2 ? dlerror() : "usage: caller LIBCUDART [busy]");
    return 2;
  }
  puts("ready");
  fflush(stdout);
  for (;;) {
    synchronize(NULL);
    if (argc < 3) nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
  }
}
