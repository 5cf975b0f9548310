/* flood SECONDS: launches as fast as it can, each with words that follow from its number. The rings are small. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
int cudaLaunchKernel(uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t);
int main(int argc, char **argv) {
  uint64_t i = 0;
  time_t end = time(NULL) + (argc > 1 ? atoi(argv[1]) : 1);
  do
    for (int j = 0; j < 100000; j++, i++)
      cudaLaunchKernel(i, 0, 0, 0, 0, 0, 0, (i * 2654435761u ^ 0x5a5a5a) & 0xffffffffffff);
  while (time(NULL) < end);
  printf("{\"cudaLaunchKernel\": %lu}\n", (unsigned long)i);
  return 0;
}
