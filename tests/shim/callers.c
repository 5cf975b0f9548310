/* A library that calls the runtime: -DNAME=..., linked with -lcudart of one version. caller_NAME() says which answered. */
#include <stdint.h>
int cudaMalloc(uint64_t *out, uint64_t bytes);
int NAME(void);
int NAME(void) {
  uint64_t mark = 0;
  cudaMalloc(&mark, 1);
  return (int)mark;
}
