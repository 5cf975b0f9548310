/* real_cudart LIBRARY [ROUNDS]: known calls with telling arguments into a real libcudart on a machine without a GPU.
 *
 * There every call returns 35 (cudaErrorInsufficientDriver) before it looks at a handle, so handles are made-up
 * numbers. Do not run it where there is a driver. Prints "ready" and waits for a line before the first call.
 */
#include <dlfcn.h>

#include "sim_cuda_types.h"

/* clang-format off */
#define APIS(X) \
  X(cudaLaunchKernel) X(__cudaLaunchKernel) X(cudaLaunchKernelExC) X(cudaMemcpyAsync) X(cudaMemcpy) \
  X(cudaStreamSynchronize) X(cudaEventRecord) X(cudaEventSynchronize) X(cudaDeviceSynchronize) X(cudaMalloc)
/* clang-format on */
#include "target.h"

#define HANDLE(value) ((void *)(uintptr_t)(value))
enum {
  FUNC = 0xf00d000,
  STREAM = 0x5eed000,
  EVENT = 0xe7e7000,
  DST = 0xd57000,
  SRC = 0x52c000,
  SMEM = 0x1234,
  BYTES = 0x7654321
};
static const dim3 grid = {11, 12, 13}, block = {21, 22, 23};

static void *library;
static struct tally tally;
static int returned[API_COUNT];

static void note(int api, int value) {
  tally.calls[api]++;
  returned[api] = value;
}

/* Calls it if this version of the library has it. */
#define REAL(api, type, ...)                                                                                           \
  do {                                                                                                                 \
    __typeof__(type) *function;                                                                                        \
    *(void **)&function = dlsym(library, #api);                                                                        \
    if (function) note(API_##api, function(__VA_ARGS__));                                                              \
  } while (0)

typedef int launch_fn(const void *, dim3, dim3, void **, size_t, void *);

static void one_round(unsigned i) {
  /* The stream tells the rounds apart. */
  void *stream = HANDLE(STREAM + i), *out;
  cudaLaunchConfig_t config = {.gridDim = grid, .blockDim = block, .dynamicSmemBytes = SMEM, .stream = stream};
  REAL(cudaLaunchKernel, launch_fn, HANDLE(FUNC), grid, block, NULL, SMEM, stream);
  REAL(__cudaLaunchKernel, launch_fn, HANDLE(FUNC), grid, block, NULL, SMEM, stream);
  REAL(cudaLaunchKernelExC, int(const cudaLaunchConfig_t *, const void *, void **), &config, HANDLE(FUNC), NULL);
  REAL(cudaMemcpyAsync, int(void *, const void *, size_t, int, void *), HANDLE(DST), HANDLE(SRC), BYTES,
       cudaMemcpyHostToDevice, stream);
  REAL(cudaMemcpy, int(void *, const void *, size_t, int), HANDLE(DST), HANDLE(SRC), BYTES, cudaMemcpyDeviceToHost);
  REAL(cudaStreamSynchronize, int(void *), stream);
  REAL(cudaEventRecord, int(void *, void *), HANDLE(EVENT), stream);
  REAL(cudaEventSynchronize, int(void *), HANDLE(EVENT));
  REAL(cudaDeviceSynchronize, int(void), );
  REAL(cudaMalloc, int(void **, size_t), &out, BYTES);
}

int main(int argc, char **argv) {
  unsigned rounds = (unsigned)argument(argc, argv, 2, 1);
  library = argc > 1 ? dlopen(argv[1], RTLD_NOW) : NULL;
  if (!library) {
    fprintf(stderr, "real_cudart: %s\n", argc > 1 ? dlerror() : "LIBRARY is missing");
    return 2;
  }
  ready();
  for (unsigned i = 0; i < rounds; i++) one_round(i);
  printf("{\"target\": \"real_cudart\", \"pid\": %d, \"arguments\": {\"func\": %d, \"stream\": %d, \"event\": %d, "
         "\"dst\": %d, \"src\": %d, "
         "\"smem\": %d, \"bytes\": %d, \"grid\": [%u, %u, %u], \"block\": [%u, %u, %u]}, \"returned\": {",
         getpid(), FUNC, STREAM, EVENT, DST, SRC, SMEM, BYTES, grid.x, grid.y, grid.z, block.x, block.y, block.z);
  for (int i = 0, first = 1; i < API_COUNT; i++) {
    if (tally.calls[i]) {
      printf("%s\"%s\": %d", first ? "" : ", ", api_names[i], returned[i]);
      first = 0;
    }
  }
  printf("}, ");
  tally_print("", &tally);
  puts("}");
  return 0;
}
