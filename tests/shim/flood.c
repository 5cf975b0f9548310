/* flood SECONDS [nccl]: launches as fast as it can, each with words that follow from its number; or NCCL's calls, some with
 * an id. The rings are small. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
struct id {
  uint64_t words[16];
};
int cudaLaunchKernel(uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t);
int ncclAllReduce(uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t);
int ncclCommInitRank(uint64_t *, int, struct id, int);

static uint64_t mixed(uint64_t i) {
  return (i * 2654435761u ^ 0x5a5a5a) & 0xffffffffffff;
}

static void operation(uint64_t i) {
  uint64_t comm;
  struct id id;
  ncclAllReduce(i, mixed(i), mixed(i), 7, 0, 0x5000, mixed(i), 0);
  if (i % 7) return;
  for (int k = 0; k < 16; k++) id.words[k] = mixed(i);
  ncclCommInitRank(&comm, (int)(i & 0xffff), id, (int)(mixed(i) & 0xffff));
}

int main(int argc, char **argv) {
  uint64_t i = 0;
  time_t end = time(NULL) + (argc > 1 ? atoi(argv[1]) : 1);
  do
    for (int j = 0; j < 100000; j++, i++)
      if (argc > 2) operation(i);
      else cudaLaunchKernel(i, 0, 0, 0, 0, 0, 0, mixed(i));
  while (time(NULL) < end);
  printf("{\"cudaLaunchKernel\": %lu}\n", (unsigned long)i);
  return 0;
}
