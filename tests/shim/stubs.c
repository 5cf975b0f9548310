/* Functions of CUDA and NCCL for the shim's tests; one source, several libraries. -DLIBRARY_cudart, _cuda, _nccl.
 * Each function does what `stub_hook` says, if it is set, and returns `stub_result`. */
#include <stdint.h>
#include <stddef.h>

#define PUBLIC __attribute__((visibility("default")))
#ifndef MARK
#define MARK 0
#endif
struct id {
  char bytes[128];
};
PUBLIC void (*stub_hook)(const char *name);
PUBLIC int stub_result;
PUBLIC const int stub_mark = MARK;

#define CALLED(name)                                                                                                   \
  if (stub_hook) stub_hook(name);                                                                                      \
  return stub_result
#define STUB(name)                                                                                                     \
  PUBLIC int name(uint64_t a, uint64_t b, uint64_t c, uint64_t d, uint64_t e, uint64_t f, uint64_t g, uint64_t h);     \
  PUBLIC int name(uint64_t a, uint64_t b, uint64_t c, uint64_t d, uint64_t e, uint64_t f, uint64_t g, uint64_t h) {    \
    (void)a, (void)b, (void)c, (void)d, (void)e, (void)f, (void)g, (void)h;                                            \
    CALLED(#name);                                                                                                     \
  }

#ifdef LIBRARY_cudart
STUB(cudaLaunchKernel)
STUB(cudaStreamSynchronize)
STUB(cudaDeviceSynchronize)
STUB(cudaMemcpyAsync)
STUB(cudaEventQuery)
STUB(cudaFree)
PUBLIC int cudaRuntimeGetVersion(int *version);
PUBLIC int cudaRuntimeGetVersion(int *version) {
  *version = MARK;
  return 0;
}
/* Which library answered: through a hooked function. */
PUBLIC int cudaMalloc(uint64_t *out, uint64_t bytes);
PUBLIC int cudaMalloc(uint64_t *out, uint64_t bytes) {
  (void)bytes;
  *out = MARK;
  CALLED("cudaMalloc");
}
#endif
#ifdef LIBRARY_cuda
STUB(cuLaunchKernel)
STUB(cuStreamSynchronize)
STUB(cuCtxSynchronize)
extern int cuGetProcAddress_v2(const char *, void **, int, uint64_t, int *);
static int hidden_launch(uint64_t a) {
  (void)a;
  CALLED("hidden cuLaunchKernel");
}
PUBLIC int cuGetProcAddress_v2(const char *symbol, void **address, int version, uint64_t flags, int *status) {
  (void)version;
  *address = NULL;
  if (status) *status = 1;
  for (const char *want = "cuLaunchKernel"; *want == *symbol; want++, symbol++)
    if (!*want) *address = flags & 1 ? (void *)hidden_launch : (void *)cuLaunchKernel;
  if (*address && status) *status = 0;
  return *address ? 0 : 500;
}
#endif
#ifdef LIBRARY_nccl
STUB(ncclAllReduce)
STUB(ncclGroupStart)
STUB(ncclGroupEnd)
STUB(ncclBroadcast)
STUB(ncclCommDestroy)
/* As NCCL does it: through the PLT, one inside the other. */
PUBLIC int ncclBcast(uint64_t a, uint64_t b, uint64_t c, uint64_t d, uint64_t e, uint64_t f);
PUBLIC int ncclBcast(uint64_t a, uint64_t b, uint64_t c, uint64_t d, uint64_t e, uint64_t f) {
  return ncclBroadcast(a, a, b, c, d, e, f, 0);
}
static uint64_t next_comm = 0x1000;
PUBLIC int ncclGetUniqueId(struct id *out);
PUBLIC int ncclGetUniqueId(struct id *out) {
  for (int i = 0; i < 128; i++) out->bytes[i] = (char)(i + 1);
  return 0;
}
static int init(uint64_t *comm, struct id id) {
  *comm = next_comm += 0x1000;
  return id.bytes[5] == 6 ? stub_result : 5;
}
PUBLIC int ncclCommInitRank(uint64_t *comm, int ranks, struct id id, int rank);
PUBLIC int ncclCommInitRank(uint64_t *comm, int ranks, struct id id, int rank) {
  (void)ranks, (void)rank;
  return init(comm, id);
}
PUBLIC int ncclCommInitRankConfig(uint64_t *comm, int ranks, struct id id, int rank, void *config);
PUBLIC int ncclCommInitRankConfig(uint64_t *comm, int ranks, struct id id, int rank, void *config) {
  (void)ranks, (void)rank, (void)config;
  return init(comm, id);
}
#endif
