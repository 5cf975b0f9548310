/* execer HOW CALLS: executes itself anew, from its first thread or ("thread") from another one, and then allocates.
 *
 * Prints "ready" and waits for a line before the exec.
 */
#include <pthread.h>

#include "sim_cudart.h"

/* clang-format off */
#define APIS(X) X(cudaMalloc)
/* clang-format on */
#include "target.h"

static char *calls;

static void *execute(void *unused) {
  (void)unused;
  execl("/proc/self/exe", "execer", "--again", calls, (char *)NULL);
  _exit(127);
}

static int again(unsigned long count) {
  struct tally tally = {0};
  void *memory;
  check("cudaFree", (int)cudaFree(NULL), 0); /* loads the driver */
  usleep(300000);                            /* what is linked late must be linked by now */
  for (unsigned long i = 0; i < count; i++) CALL(&tally, cudaMalloc, &memory, 64);
  printf("{\"target\": \"execer\", \"pid\": %d, ", getpid());
  tally_print("", &tally);
  puts("}");
  return 0;
}

int main(int argc, char **argv) {
  pthread_t thread;
  if (argc != 3) return 2;
  calls = argv[2];
  if (!strcmp(argv[1], "--again")) return again(strtoul(calls, NULL, 10));
  ready();
  if (!strcmp(argv[1], "thread") && !pthread_create(&thread, NULL, execute, NULL)) pthread_join(thread, NULL);
  execute(NULL);
}
