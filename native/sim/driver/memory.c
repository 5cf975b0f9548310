/* Memory: host memory for everything, and a map that says which range is what. */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "shared.h"

struct range {
  uintptr_t start;
  size_t bytes;
  enum memory_kind kind;
  int device;
  bool registered; /* not ours to free: the program's own memory, another process's, a mapping */
  bool pooled;     /* from a stream-ordered allocation */
  int fd;          /* of memory given to other processes; 0: none */
  uint64_t id;
};

static pthread_rwlock_t map_lock = PTHREAD_RWLOCK_INITIALIZER;
static struct range *ranges; /* sorted by start */
static size_t range_count, range_capacity;
static size_t used_bytes[MAX_DEVICES], pool_bytes[MAX_DEVICES], pool_high[MAX_DEVICES];

enum { PITCH = 512, LARGE = 1 << 16 };

/* After a fork, in the child: the lock's owner is the parent's thread id, so unlocking would leave it locked for ever. */
void sim_memory_lock_renew(void) {
  pthread_rwlock_init(&map_lock, NULL);
}

void sim_memory_lock(void) {
  pthread_rwlock_wrlock(&map_lock);
}

void sim_memory_unlock(void) {
  pthread_rwlock_unlock(&map_lock);
}

/* Index of the first range that starts after the address. */
static size_t upper_bound(uintptr_t address) {
  size_t low = 0, high = range_count;
  while (low < high) {
    size_t middle = (low + high) / 2;
    if (ranges[middle].start <= address) low = middle + 1;
    else high = middle;
  }
  return low;
}

static struct range *find(const void *pointer) {
  uintptr_t address = (uintptr_t)pointer;
  size_t index = upper_bound(address);
  if (index == 0 || address - ranges[index - 1].start >= ranges[index - 1].bytes) return NULL;
  return &ranges[index - 1];
}

static bool lookup(const void *pointer, struct range *out) {
  pthread_rwlock_rdlock(&map_lock);
  struct range *range = find(pointer);
  if (range) *out = *range;
  pthread_rwlock_unlock(&map_lock);
  return range != NULL;
}

enum memory_kind sim_memory_kind(const void *pointer) {
  struct range range;
  return lookup(pointer, &range) ? range.kind : MEMORY_PAGEABLE;
}

static CUresult insert(const struct range *range) {
  if (range_count == range_capacity) {
    size_t capacity = range_capacity ? 2 * range_capacity : 64;
    struct range *grown = realloc(ranges, capacity * sizeof(*grown));
    if (!grown) return CUDA_ERROR_OUT_OF_MEMORY;
    ranges = grown;
    range_capacity = capacity;
  }
  size_t index = upper_bound(range->start);
  memmove(&ranges[index + 1], &ranges[index], (range_count - index) * sizeof(*ranges));
  ranges[index] = *range;
  range_count++;
  return CUDA_SUCCESS;
}

/* With the map locked for writing, both. */
static void pool_charge(int device, ptrdiff_t bytes) {
  pool_bytes[device] += (size_t)bytes;
  if (pool_bytes[device] > pool_high[device]) pool_high[device] = pool_bytes[device];
}

static void charge(int device, ptrdiff_t bytes) {
  used_bytes[device] += (size_t)bytes;
  sim_stats_memory(device, used_bytes[device]);
}

/* Takes out the range that starts exactly there. */
static bool take(const void *pointer, struct range *out) {
  sim_memory_lock();
  struct range *range = find(pointer);
  bool found = range && range->start == (uintptr_t)pointer;
  if (found) {
    *out = *range;
    size_t index = (size_t)(range - ranges);
    memmove(range, range + 1, (range_count - index - 1) * sizeof(*ranges));
    range_count--;
    if (out->kind == MEMORY_DEVICE && !out->registered) charge(out->device, -(ptrdiff_t)out->bytes);
    if (out->pooled) pool_charge(out->device, -(ptrdiff_t)out->bytes);
  }
  sim_memory_unlock();
  return found;
}

/* Large blocks cost address space only, so that a program may "fill the device". */
static void *host_allocate(size_t bytes) {
  void *memory;
  if (bytes < LARGE) return posix_memalign(&memory, PITCH, bytes) ? NULL : memory;
  memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return memory == MAP_FAILED ? NULL : memory;
}

static void host_free(const struct range *range) {
  if (range->fd) close(range->fd);
  if (range->bytes < LARGE) free((void *)range->start);
  else munmap((void *)range->start, range->bytes);
}

CUresult sim_allocate(void **out, size_t bytes, enum memory_kind kind) {
  struct CUctx_st *context;
  CUresult error = sim_current(&context);
  if (error || !out) return error ? error : CUDA_ERROR_INVALID_VALUE;
  *out = NULL;
  if (bytes == 0) return CUDA_ERROR_INVALID_VALUE;
  struct range range = {.bytes = bytes, .kind = kind, .device = context->device, .id = sim_next_id()};
  sim_memory_lock();
  bool fits = kind != MEMORY_DEVICE || bytes <= sim_config()->device_bytes - used_bytes[range.device];
  range.start = fits ? (uintptr_t)host_allocate(bytes) : 0;
  error = range.start ? insert(&range) : CUDA_ERROR_OUT_OF_MEMORY;
  if (!error && kind == MEMORY_DEVICE) charge(range.device, (ptrdiff_t)bytes);
  sim_memory_unlock();
  *out = (void *)range.start;
  return error;
}

static CUresult release(void *pointer, bool wait) {
  struct CUctx_st *context;
  struct range range;
  CUresult error = sim_current(&context);
  if (error || !pointer) return error;
  if (wait) sim_wait_context(context);
  if (lookup(pointer, &range) && range.registered) return CUDA_ERROR_INVALID_VALUE;
  if (!take(pointer, &range)) return CUDA_ERROR_INVALID_VALUE;
  host_free(&range);
  return CUDA_SUCCESS;
}

CUresult sim_memory_add(void *memory, size_t bytes, int device) {
  struct range range = {
      .start = (uintptr_t)memory, .bytes = bytes, .kind = MEMORY_DEVICE, .device = device, .registered = true};
  range.id = sim_next_id();
  sim_memory_lock();
  CUresult error = insert(&range);
  sim_memory_unlock();
  return error;
}

size_t sim_memory_drop(void *memory) {
  struct range range;
  if (!lookup(memory, &range) || !range.registered || range.kind != MEMORY_DEVICE) return 0;
  return take(memory, &range) ? range.bytes : 0;
}

bool sim_memory_charge(int device, ptrdiff_t bytes) {
  sim_memory_lock();
  bool fits = bytes <= 0 || (size_t)bytes <= sim_config()->device_bytes - used_bytes[device];
  if (fits) charge(device, bytes);
  sim_memory_unlock();
  return fits;
}

uint64_t sim_pool_bytes(int device, bool high) {
  pthread_rwlock_rdlock(&map_lock);
  uint64_t bytes = high ? pool_high[device] : pool_bytes[device];
  pthread_rwlock_unlock(&map_lock);
  return bytes;
}

void sim_pool_reset_high(int device) {
  sim_memory_lock();
  pool_high[device] = pool_bytes[device];
  sim_memory_unlock();
}

/* The bytes move into a file that is then mapped over them. Small blocks share pages with others and can't move. */
static CUresult make_shared(struct range *range) {
  if (range->registered || range->kind != MEMORY_DEVICE) return CUDA_ERROR_INVALID_VALUE;
  if (range->bytes < LARGE) return CUDA_ERROR_NOT_SUPPORTED;
  if (range->fd) return CUDA_SUCCESS;
  int fd = sim_shared_file(range->bytes);
  if (fd < 0) return CUDA_ERROR_OUT_OF_MEMORY;
  void *copy = mmap(NULL, range->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (copy != MAP_FAILED) {
    memcpy(copy, (void *)range->start, range->bytes);
    if (mremap(copy, range->bytes, range->bytes, MREMAP_MAYMOVE | MREMAP_FIXED, (void *)range->start) != MAP_FAILED) {
      range->fd = fd;
      return CUDA_SUCCESS;
    }
    munmap(copy, range->bytes);
  }
  close(fd);
  return CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult sim_memory_share(void *pointer, int *fd, size_t *bytes, int *device) {
  sim_memory_lock();
  struct range *range = find(pointer);
  CUresult error = range && range->start == (uintptr_t)pointer ? make_shared(range) : CUDA_ERROR_INVALID_VALUE;
  if (!error) {
    *fd = range->fd;
    *bytes = range->bytes;
    *device = range->device;
  }
  sim_memory_unlock();
  return error;
}

CUresult sim_cuMemAlloc_v2(CUdeviceptr *out, size_t bytes) {
  return sim_allocate((void **)out, bytes, MEMORY_DEVICE);
}

CUresult sim_stallscope_sim_alloc(CUdeviceptr *out, size_t bytes) {
  return sim_allocate((void **)out, bytes, MEMORY_DEVICE);
}

CUresult sim_cuMemAllocManaged(CUdeviceptr *out, size_t bytes, unsigned flags) {
  (void)flags;
  return sim_allocate((void **)out, bytes, MEMORY_MANAGED);
}

CUresult sim_cuMemAllocPitch_v2(CUdeviceptr *out, size_t *pitch, size_t width, size_t height, unsigned element) {
  if (!pitch || (element != 4 && element != 8 && element != 16)) return CUDA_ERROR_INVALID_VALUE;
  *pitch = (width + PITCH - 1) / PITCH * PITCH;
  return sim_allocate((void **)out, *pitch * height, MEMORY_DEVICE);
}

CUresult sim_cuMemAllocHost_v2(void **out, size_t bytes) {
  return sim_allocate(out, bytes, MEMORY_PINNED);
}

CUresult sim_cuMemHostAlloc(void **out, size_t bytes, unsigned flags) {
  (void)flags;
  return sim_allocate(out, bytes, MEMORY_PINNED);
}

CUresult sim_cuMemHostRegister_v2(void *host, size_t bytes, unsigned flags) {
  struct CUctx_st *context;
  CUresult error = sim_current(&context);
  (void)flags;
  if (error || !host || !bytes) return error ? error : CUDA_ERROR_INVALID_VALUE;
  struct range range = {
      .start = (uintptr_t)host, .bytes = bytes, .kind = MEMORY_PINNED, .device = context->device, .registered = true};
  range.id = sim_next_id();
  sim_memory_lock();
  error = find(host) ? CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED : insert(&range);
  sim_memory_unlock();
  return error;
}

CUresult sim_cuMemHostUnregister(void *host) {
  struct CUctx_st *context;
  struct range range;
  CUresult error = sim_current(&context);
  if (error) return error;
  sim_wait_context(context);
  if (!lookup(host, &range) || !range.registered || !take(host, &range)) return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
  return CUDA_SUCCESS;
}

CUresult sim_cuMemHostGetDevicePointer_v2(CUdeviceptr *out, void *host, unsigned flags) {
  if (flags || !out || sim_memory_kind(host) == MEMORY_PAGEABLE) return CUDA_ERROR_INVALID_VALUE;
  *out = (CUdeviceptr)host;
  return CUDA_SUCCESS;
}

CUresult sim_cuMemFree_v2(CUdeviceptr device) {
  return release((void *)device, true);
}

CUresult sim_cuMemFreeHost(void *host) {
  return release(host, true);
}

CUresult sim_cuMemGetInfo_v2(size_t *free_bytes, size_t *total_bytes) {
  struct CUctx_st *context;
  CUresult error = sim_current(&context);
  if (error) return error;
  pthread_rwlock_rdlock(&map_lock);
  *total_bytes = sim_config()->device_bytes;
  *free_bytes = *total_bytes - used_bytes[context->device];
  pthread_rwlock_unlock(&map_lock);
  return CUDA_SUCCESS;
}

CUresult sim_cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *bytes, CUdeviceptr pointer) {
  struct range range;
  if (!lookup((void *)pointer, &range)) return CUDA_ERROR_NOT_FOUND;
  if (base) *base = range.start;
  if (bytes) *bytes = range.bytes;
  return CUDA_SUCCESS;
}

/* Numbers of the public CUpointer_attribute. */
enum {
  ATTR_CONTEXT = 1,
  ATTR_TYPE,
  ATTR_DEVICE_POINTER,
  ATTR_HOST_POINTER,
  ATTR_BUFFER_ID = 7,
  ATTR_IS_MANAGED,
  ATTR_ORDINAL,
  ATTR_START = 11,
  ATTR_SIZE,
  ATTR_MAPPED
};

CUresult sim_cuPointerGetAttribute(void *data, int attribute, CUdeviceptr pointer) {
  struct range range;
  if (!data || !lookup((void *)pointer, &range)) return CUDA_ERROR_INVALID_VALUE;
  switch (attribute) {
  case ATTR_CONTEXT:
    return sim_cuCtxGetCurrent(data);
  case ATTR_TYPE:
    *(unsigned *)data = range.kind == MEMORY_PINNED ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
    return CUDA_SUCCESS;
  case ATTR_HOST_POINTER:
    if (range.kind == MEMORY_DEVICE) return CUDA_ERROR_INVALID_VALUE;
    /* fall through */
  case ATTR_DEVICE_POINTER:
    *(uintptr_t *)data = pointer;
    return CUDA_SUCCESS;
  case ATTR_BUFFER_ID:
    *(uint64_t *)data = range.id;
    return CUDA_SUCCESS;
  case ATTR_IS_MANAGED:
    *(unsigned *)data = range.kind == MEMORY_MANAGED;
    return CUDA_SUCCESS;
  case ATTR_ORDINAL:
    *(int *)data = range.device;
    return CUDA_SUCCESS;
  case ATTR_START:
    *(uintptr_t *)data = range.start;
    return CUDA_SUCCESS;
  case ATTR_SIZE:
    *(size_t *)data = range.bytes;
    return CUDA_SUCCESS;
  case ATTR_MAPPED:
    *(unsigned *)data = 1;
    return CUDA_SUCCESS;
  default:
    return CUDA_ERROR_NOT_SUPPORTED;
  }
}

/* What a pointer has nothing to say about is left alone, as the manual has it. */
CUresult sim_cuPointerGetAttributes(unsigned count, int *attributes, void **data, CUdeviceptr pointer) {
  for (unsigned i = 0; i < count; i++)
    if (sim_cuPointerGetAttribute(data[i], attributes[i], pointer) && attributes[i] == ATTR_TYPE)
      *(unsigned *)data[i] = 0;
  return CUDA_SUCCESS;
}

CUresult sim_cuMemAllocAsync(CUdeviceptr *out, size_t bytes, CUstream handle) {
  struct CUstream_st *stream;
  CUresult error = sim_stream(handle, &stream);
  if (!error) error = sim_allocate((void **)out, bytes, MEMORY_DEVICE);
  if (error) return error;
  sim_memory_lock();
  struct range *range = find((void *)*out);
  if (range) {
    range->pooled = true;
    pool_charge(range->device, (ptrdiff_t)range->bytes);
  }
  sim_memory_unlock();
  return CUDA_SUCCESS;
}

CUresult sim_cuMemAllocFromPoolAsync(CUdeviceptr *out, size_t bytes, CUmemoryPool pool, CUstream handle) {
  (void)pool;
  return sim_cuMemAllocAsync(out, bytes, handle);
}

/* At once: what was submitted before has moved its data already. A queued stream first has to get there. */
CUresult sim_cuMemFreeAsync(CUdeviceptr device, CUstream handle) {
  struct CUstream_st *stream;
  CUresult error = sim_stream(handle, &stream);
  if (error) return error;
  if (atomic_load(&stream->slow) & SLOW_QUEUED) sim_wait_stream(stream);
  return release((void *)device, false);
}
