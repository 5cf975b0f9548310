/* What a framework does inside of one call from Python: copies that wait by themselves, and waits behind copies. */
#include "sim_cudart.h"

/* `.item()`, `.cpu()`, a blocking `.cuda()`: an asynchronous copy, then a wait for the same stream. */
int copy_and_wait(void *dst, const void *src, size_t bytes, int kind, cudaStream_t stream) {
  int error = cudaMemcpyAsync(dst, src, bytes, kind, stream);
  return error ? error : cudaStreamSynchronize(stream);
}

/* A copy into one stream and a wait for another one: nothing of each other's. */
int copy_and_wait_elsewhere(void *dst, const void *src, size_t bytes, int kind, cudaStream_t stream,
                            cudaStream_t other) {
  int error = cudaMemcpyAsync(dst, src, bytes, kind, stream);
  return error ? error : cudaStreamSynchronize(other);
}
