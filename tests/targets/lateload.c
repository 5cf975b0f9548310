/* lateload LIBRARY [CALLS [RATE [WAIT_EVERY]]]: a program without CUDA until it is told.
 *
 * Prints "ready"; after a line on stdin it dlopens LIBRARY and makes CALLS launches at RATE a second, every
 * WAIT_EVERY-th followed by a wait of 1 ms. first_ns and last_ns are CLOCK_MONOTONIC before the first call and after
 * the last one.
 */
#include <dlfcn.h>

#include "sim_cuda_types.h"

/* clang-format off */
#define APIS(X) \
  X(cudaLaunchKernel) X(cudaStreamSynchronize)
/* clang-format on */
#include "target.h"

static int (*cudaLaunchKernel)(const void *, dim3, dim3, void **, size_t, cudaStream_t);
static int (*cudaStreamSynchronize)(cudaStream_t);
static void (*set_next_kernel_ns)(uint64_t);

static void kernel_stub(void) {}

static void *symbol(void *library, const char *name) {
  void *address = dlsym(library, name);
  if (!address) {
    fprintf(stderr, "lateload: no %s\n", name);
    exit(1);
  }
  return address;
}

static void load(const char *path) {
  void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    fprintf(stderr, "lateload: %s\n", dlerror());
    exit(1);
  }
  *(void **)&cudaLaunchKernel = symbol(library, "cudaLaunchKernel");
  *(void **)&cudaStreamSynchronize = symbol(library, "cudaStreamSynchronize");
  *(void **)&set_next_kernel_ns = symbol(library, "stallscope_sim_set_next_kernel_ns");
}

int main(int argc, char **argv) {
  unsigned long calls = argument(argc, argv, 2, 1000), rate = argument(argc, argv, 3, 1000),
                every = argument(argc, argv, 4, 100);
  struct tally tally = {0};
  dim3 one = {1, 1, 1};
  if (argc < 2 || !rate || !every) return 2;
  setenv("STALLSCOPE_SIM_KERNEL_NS", "1", 0);
  ready();
  load(argv[1]);
  uint64_t first_ns = now_ns();
  for (unsigned long i = 0; i < calls; i++) {
    uint64_t due_ns = first_ns + i * 1000000000u / rate;
    struct timespec due = {(time_t)(due_ns / 1000000000u), (long)(due_ns % 1000000000u)};
    clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &due, NULL);
    set_next_kernel_ns(i % every == every - 1 ? 1000000 : 1);
    CALL(&tally, cudaLaunchKernel, (void *)kernel_stub, one, one, NULL, 0, NULL);
    if (i % every == every - 1) TIMED(&tally, cudaStreamSynchronize, NULL);
  }
  uint64_t last_ns = now_ns();
  printf("{\"target\": \"lateload\", \"pid\": %d, \"first_ns\": %llu, \"last_ns\": %llu, ", getpid(),
         (unsigned long long)first_ns, (unsigned long long)last_ns);
  tally_print("", &tally);
  puts("}");
  return 0;
}
