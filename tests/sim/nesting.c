/* nesting LIBCUDART: which hooked functions does each runtime call run through?
 *
 * Puts a breakpoint on every function of probes/hooks.def in libcudart and, where it is loaded, libcuda, as a uprobe
 * would, and counts hits. Every traced function starts with `push %rbp`, which the handler does in its place. Makes
 * one call of each kind and prints {call: {hooked function: hits}} as one line of JSON.
 */
#include <dlfcn.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include "sim_cudart.h"

enum { PUSH_RBP = 0x55, INT3 = 0xcc, MAX_HOOKS = 512 };

static struct breakpoint {
  const char *name;
  unsigned char *address;
  unsigned hits;
} points[MAX_HOOKS];
static int point_count;
static void *runtime, *driver;

static void on_trap(int signal, siginfo_t *info, void *context) {
  greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
  unsigned char *at = (unsigned char *)registers[REG_RIP] - 1;
  (void)signal;
  (void)info;
  for (int i = 0; i < point_count; i++) {
    if (points[i].address == at) {
      points[i].hits++;
      registers[REG_RSP] -= 8;
      *(greg_t *)registers[REG_RSP] = registers[REG_RBP];
      return;
    }
  }
  _exit(99);
}

static void set_point(void *library, const char *name) {
  unsigned char *address = library ? dlsym(library, name) : NULL;
  long page = sysconf(_SC_PAGESIZE);
  if (!address) return;
  if (*address != PUSH_RBP) {
    fprintf(stderr, "%s does not start with push %%rbp\n", name);
    exit(1);
  }
  mprotect((void *)((uintptr_t)address & ~(uintptr_t)(page - 1)), (size_t)page, PROT_READ | PROT_WRITE | PROT_EXEC);
  *address = INT3;
  points[point_count++] = (struct breakpoint){.name = name, .address = address};
}

/* SHIM hooks jump into another hook: no breakpoint, as BPF has none there. */
#define LIBRARY_CUDART runtime
#define LIBRARY_CUDA driver
#define LIBRARY_NCCL NULL
#define SET_ENTRY(library, name) set_point(LIBRARY_##library, name);
#define SET_PAIR(library, name) set_point(LIBRARY_##library, name);
#define SET_SHIM(library, name)
#define HOOK(id, library, name, kind, mode, ...) SET_##mode(library, #name)
#define HOOK_PTSZ(id, library, name, kind, mode, ...) SET_##mode(library, #name) SET_##mode(library, #name "_ptsz")
#define HOOK_PTDS(id, library, name, kind, mode, ...) SET_##mode(library, #name) SET_##mode(library, #name "_ptds")

static void set_points(void) {
  struct sigaction action = {.sa_sigaction = on_trap, .sa_flags = SA_SIGINFO};
  sigaction(SIGTRAP, &action, NULL);
#include "hooks.def"
}

static void report(const char *call, int result) {
  static int first = 1;
  const char *comma = "";
  if (result) {
    fprintf(stderr, "%s returned %d\n", call, result);
    exit(1);
  }
  printf("%s\"%s\": {", first ? "" : ", ", call);
  first = 0;
  for (int i = 0; i < point_count; i++) {
    if (points[i].hits) printf("%s\"%s\": %u", comma, points[i].name, points[i].hits), comma = ", ";
    points[i].hits = 0;
  }
  printf("}");
}

#define RUN(name, ...)                                                                                                 \
  do {                                                                                                                 \
    __typeof__(name) *function;                                                                                        \
    *(void **)&function = dlsym(runtime, #name);                                                                       \
    if (function) report(#name, function(__VA_ARGS__));                                                                \
  } while (0)
#define RUN_TWIN(name, suffix, ...)                                                                                    \
  do {                                                                                                                 \
    RUN(name, __VA_ARGS__);                                                                                            \
    RUN(name##suffix, __VA_ARGS__);                                                                                    \
  } while (0)

static const dim3 one = {1, 1, 1};
static void *const func = (void *)0x1000;
static char host[64];

static void no_op(void *data) {
  (void)data;
}

static void run_launches(cudaStream_t stream) {
  cudaLaunchConfig_t config = {.gridDim = one, .blockDim = one, .stream = stream};
  RUN_TWIN(cudaLaunchKernel, _ptsz, func, one, one, NULL, 0, stream);
  RUN_TWIN(__cudaLaunchKernel, _ptsz, func, one, one, NULL, 0, stream);
  RUN_TWIN(cudaLaunchKernelExC, _ptsz, &config, func, NULL);
  RUN_TWIN(cudaLaunchCooperativeKernel, _ptsz, func, one, one, NULL, 0, stream);
  RUN_TWIN(cudaLaunchHostFunc, _ptsz, stream, no_op, NULL);
}

static void run_graphs(cudaStream_t stream) {
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  CUDA_GRAPH_INSTANTIATE_PARAMS params = {0};
  RUN(cudaStreamBeginCapture, stream, 0);
  RUN(cudaStreamEndCapture, stream, &graph);
  RUN(cudaStreamBeginCapture_ptsz, stream, 0);
  RUN(cudaStreamEndCapture_ptsz, stream, &graph);
  RUN(cudaGraphInstantiate, &exec, graph, 0);
  RUN(cudaGraphInstantiateWithFlags, &exec, graph, 0);
  RUN_TWIN(cudaGraphInstantiateWithParams, _ptsz, &exec, graph, &params);
  RUN_TWIN(cudaGraphUpload, _ptsz, exec, stream);
  RUN_TWIN(cudaGraphLaunch, _ptsz, exec, stream);
}

static void run_waits(cudaStream_t stream) {
  cudaEvent_t event;
  RUN(cudaEventCreate, &event);
  RUN_TWIN(cudaEventRecord, _ptsz, event, stream);
  RUN_TWIN(cudaEventRecordWithFlags, _ptsz, event, stream, 0);
  RUN_TWIN(cudaStreamWaitEvent, _ptsz, stream, event, 0);
  RUN(cudaEventSynchronize, event);
  RUN_TWIN(cudaStreamSynchronize, _ptsz, stream);
  RUN(cudaDeviceSynchronize);
  RUN(cudaThreadSynchronize);
  RUN(cudaEventDestroy, event);
}

static void run_copies(cudaStream_t stream, void *device) {
  static char symbol;
  struct cudaMemcpy3DParms box = {
      .srcPtr = {host, 8, 8, 2}, .dstPtr = {device, 8, 8, 2}, .extent = {8, 2, 1}, .kind = cudaMemcpyHostToDevice};
  __typeof__(__cudaRegisterVar) *register_var;
  *(void **)&register_var = dlsym(runtime, "__cudaRegisterVar");
  register_var(NULL, &symbol, NULL, "symbol", 0, sizeof(host), 0, 0);
  RUN_TWIN(cudaMemcpy, _ptds, device, host, 8, cudaMemcpyHostToDevice);
  RUN_TWIN(cudaMemcpyAsync, _ptsz, device, host, 8, cudaMemcpyHostToDevice, stream);
  RUN_TWIN(cudaMemcpy2D, _ptds, device, 8, host, 8, 8, 2, cudaMemcpyHostToDevice);
  RUN_TWIN(cudaMemcpy2DAsync, _ptsz, device, 8, host, 8, 8, 2, cudaMemcpyHostToDevice, stream);
  RUN_TWIN(cudaMemcpy3D, _ptds, &box);
  RUN_TWIN(cudaMemcpy3DAsync, _ptsz, &box, stream);
  RUN(cudaMemcpyPeer, device, 1, device, 0, 8);
  RUN(cudaMemcpyPeerAsync, device, 1, device, 0, 8, stream);
  RUN_TWIN(cudaMemcpyToSymbol, _ptds, &symbol, host, 8, 0, cudaMemcpyHostToDevice);
  RUN_TWIN(cudaMemcpyToSymbolAsync, _ptsz, &symbol, host, 8, 0, cudaMemcpyHostToDevice, stream);
  RUN_TWIN(cudaMemcpyFromSymbol, _ptds, host, &symbol, 8, 0, cudaMemcpyDeviceToHost);
  RUN_TWIN(cudaMemcpyFromSymbolAsync, _ptsz, host, &symbol, 8, 0, cudaMemcpyDeviceToHost, stream);
  RUN_TWIN(cudaMemset, _ptds, device, 0, 8);
  RUN_TWIN(cudaMemsetAsync, _ptsz, device, 0, 8, stream);
  RUN_TWIN(cudaMemset2D, _ptds, device, 8, 0, 8, 2);
  RUN_TWIN(cudaMemset2DAsync, _ptsz, device, 8, 0, 8, 2, stream);
}

static void run_memory(cudaStream_t stream) {
  void *memory, *pinned, *managed, *pitched;
  size_t pitch;
  cudaMemPool_t pool;
  cudaLibrary_t library;
  RUN(cudaMalloc, &memory, 64);
  run_copies(stream, memory);
  RUN(cudaFree, memory);
  RUN(cudaMallocManaged, &managed, 64, 1);
  RUN(cudaMallocPitch, &pitched, &pitch, 8, 8);
  RUN(cudaMallocHost, &pinned, 64);
  RUN(cudaFreeHost, pinned);
  RUN(cudaHostAlloc, &pinned, 64, 0);
  RUN(cudaHostRegister, host, sizeof(host), 0);
  RUN(cudaHostUnregister, host);
  RUN(cudaMallocAsync, &memory, 64, stream);
  RUN(cudaFreeAsync, memory, stream);
  RUN(cudaMallocAsync_ptsz, &memory, 64, stream);
  RUN(cudaFreeAsync_ptsz, memory, stream);
  RUN(cudaDeviceGetDefaultMemPool, &pool, 0);
  RUN_TWIN(cudaMallocFromPoolAsync, _ptsz, &memory, 64, pool, stream);
  RUN(cudaMemPoolTrimTo, pool, 0);
  RUN(cudaLibraryLoadData, &library, host, NULL, NULL, 0, NULL, NULL, 0);
}

int main(int argc, char **argv) {
  cudaStream_t stream;
  __typeof__(cudaFree) *first;
  runtime = argc > 1 ? dlopen(argv[1], RTLD_NOW) : NULL;
  if (!runtime) return 2;
  *(void **)&first = dlsym(runtime, "cudaFree");
  first(NULL);
  driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  set_points();
  printf("{\"libcuda\": %s, \"points\": %d, \"calls\": {", driver ? "true" : "false", point_count);
  RUN(cudaStreamCreateWithFlags, &stream, cudaStreamNonBlocking);
  run_launches(stream);
  run_graphs(stream);
  run_waits(stream);
  run_memory(stream);
  RUN(cudaStreamDestroy, stream);
  RUN(cudaDeviceReset);
  puts("}}");
  return 0;
}
