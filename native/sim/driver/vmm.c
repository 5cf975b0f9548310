/* Virtual memory management: reserved addresses, memory without an address, and the mapping of one to the other. */
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "shared.h"

enum { GRANULARITY = 2 << 20, TYPE_PINNED = 1, LOCATION_DEVICE = 1, HANDLE_POSIX_FD = 1, MAGIC_MEMORY = 0x564d4d31 };

struct CUmemory_st {
  unsigned magic;
  int fd, references; /* the program's and one for each mapping; under `lock` */
  bool imported;      /* counted in the process that made it */
  size_t bytes;
  CUmemAllocationProp properties;
};

struct mapping {
  uintptr_t start;
  size_t bytes;
  struct CUmemory_st *memory;
  struct mapping *next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct mapping *mappings;

void sim_vmm_lock(void) {
  pthread_mutex_lock(&lock);
}

void sim_vmm_unlock(void) {
  pthread_mutex_unlock(&lock);
}

static struct CUmemory_st *of(CUmemGenericAllocationHandle handle) {
  struct CUmemory_st *memory = (struct CUmemory_st *)(uintptr_t)handle;
  return IS_A(memory, (unsigned)MAGIC_MEMORY) ? memory : NULL;
}

/* With the lock held. */
static void let_go(struct CUmemory_st *memory) {
  if (--memory->references) return;
  if (!memory->imported) sim_memory_charge(memory->properties.location.id, -(ptrdiff_t)memory->bytes);
  close(memory->fd);
  memory->magic = 0;
  free(memory);
}

CUresult sim_cuMemGetAllocationGranularity(size_t *out, const CUmemAllocationProp *properties, int option) {
  (void)option;
  if (!out || !properties) return CUDA_ERROR_INVALID_VALUE;
  *out = GRANULARITY;
  return CUDA_SUCCESS;
}

CUresult sim_cuMemAddressReserve(CUdeviceptr *out, size_t bytes, size_t alignment, CUdeviceptr wanted,
                                 unsigned long long flags) {
  if (!out || !bytes || bytes % GRANULARITY || flags) return CUDA_ERROR_INVALID_VALUE;
  if (alignment < GRANULARITY) alignment = GRANULARITY;
  char *memory = mmap((void *)wanted, bytes + alignment, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  size_t before = (alignment - (uintptr_t)memory % alignment) % alignment;
  if (before) munmap(memory, before);
  munmap(memory + before + bytes, alignment - before);
  *out = (CUdeviceptr)(memory + before);
  return CUDA_SUCCESS;
}

CUresult sim_cuMemAddressFree(CUdeviceptr address, size_t bytes) {
  if (!address || !bytes) return CUDA_ERROR_INVALID_VALUE;
  return munmap((void *)address, bytes) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

static CUresult memory_new(CUmemGenericAllocationHandle *out, int fd, size_t bytes, bool imported,
                           const CUmemAllocationProp *properties) {
  struct CUmemory_st *memory = sim_new(sizeof(*memory));
  *memory = (struct CUmemory_st){.magic = MAGIC_MEMORY,
                                 .fd = fd,
                                 .references = 1,
                                 .imported = imported,
                                 .bytes = bytes,
                                 .properties = *properties};
  *out = (CUmemGenericAllocationHandle)(uintptr_t)memory;
  return CUDA_SUCCESS;
}

CUresult sim_cuMemCreate(CUmemGenericAllocationHandle *out, size_t bytes, const CUmemAllocationProp *properties,
                         unsigned long long flags) {
  if (!out || !properties || !bytes || bytes % GRANULARITY || flags) return CUDA_ERROR_INVALID_VALUE;
  int device = properties->location.id;
  if (properties->location.type != LOCATION_DEVICE || device < 0 || device >= sim_config()->devices)
    return CUDA_ERROR_INVALID_DEVICE;
  if (properties->handle_types & ~HANDLE_POSIX_FD) return CUDA_ERROR_NOT_SUPPORTED;
  if (!sim_memory_charge(device, (ptrdiff_t)bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
  int fd = sim_shared_file(bytes);
  if (fd >= 0) return memory_new(out, fd, bytes, false, properties);
  sim_memory_charge(device, -(ptrdiff_t)bytes);
  return CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult sim_cuMemRelease(CUmemGenericAllocationHandle handle) {
  struct CUmemory_st *memory = of(handle);
  if (!memory) return CUDA_ERROR_INVALID_VALUE;
  pthread_mutex_lock(&lock);
  let_go(memory);
  pthread_mutex_unlock(&lock);
  return CUDA_SUCCESS;
}

CUresult sim_cuMemMap(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                      unsigned long long flags) {
  struct CUmemory_st *memory = of(handle);
  if (!memory || !address || !bytes || flags || offset > memory->bytes || bytes > memory->bytes - offset)
    return CUDA_ERROR_INVALID_VALUE;
  void *at = (void *)address;
  if (mmap(at, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, memory->fd, (off_t)offset) == MAP_FAILED)
    return CUDA_ERROR_OUT_OF_MEMORY;
  CUresult error = sim_memory_add(at, bytes, memory->properties.location.id);
  if (error) return error;
  struct mapping *mapping = sim_new(sizeof(*mapping));
  pthread_mutex_lock(&lock);
  *mapping = (struct mapping){address, bytes, memory, mappings};
  mappings = mapping;
  memory->references++;
  pthread_mutex_unlock(&lock);
  return CUDA_SUCCESS;
}

/* Whole mappings that lie in the range; the addresses stay reserved. */
CUresult sim_cuMemUnmap(CUdeviceptr address, size_t bytes) {
  bool found = false;
  pthread_mutex_lock(&lock);
  for (struct mapping **link = &mappings, *mapping; (mapping = *link);) {
    if (mapping->start < address || mapping->start + mapping->bytes > address + bytes) {
      link = &mapping->next;
      continue;
    }
    found = true;
    sim_memory_drop((void *)mapping->start);
    mmap((void *)mapping->start, mapping->bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1,
         0);
    let_go(mapping->memory);
    *link = mapping->next;
    free(mapping);
  }
  pthread_mutex_unlock(&lock);
  return found ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* Every device may use every mapping here. */
CUresult sim_cuMemSetAccess(CUdeviceptr address, size_t bytes, const void *descriptors, size_t count) {
  return address && bytes && descriptors && count ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult sim_cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *out, void *address) {
  struct CUmemory_st *found = NULL;
  pthread_mutex_lock(&lock);
  for (struct mapping *m = mappings; m && !found; m = m->next)
    if ((uintptr_t)address - m->start < m->bytes) found = m->memory;
  if (found) found->references++;
  pthread_mutex_unlock(&lock);
  if (!found || !out) return CUDA_ERROR_INVALID_VALUE;
  *out = (CUmemGenericAllocationHandle)(uintptr_t)found;
  return CUDA_SUCCESS;
}

CUresult sim_cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *out, CUmemGenericAllocationHandle handle) {
  struct CUmemory_st *memory = of(handle);
  if (!memory || !out) return CUDA_ERROR_INVALID_VALUE;
  *out = memory->properties;
  return CUDA_SUCCESS;
}

CUresult sim_cuMemExportToShareableHandle(void *out, CUmemGenericAllocationHandle handle, int type,
                                          unsigned long long flags) {
  struct CUmemory_st *memory = of(handle);
  if (!memory || !out || flags) return CUDA_ERROR_INVALID_VALUE;
  if (type != HANDLE_POSIX_FD || !(memory->properties.handle_types & HANDLE_POSIX_FD)) return CUDA_ERROR_NOT_SUPPORTED;
  int fd = dup(memory->fd);
  if (fd < 0) return CUDA_ERROR_OUT_OF_MEMORY;
  *(int *)out = fd;
  return CUDA_SUCCESS;
}

/* No switch joins these devices. */
CUresult sim_cuMulticastCreate(CUmemGenericAllocationHandle *out, const void *properties) {
  return out && properties ? CUDA_ERROR_NOT_SUPPORTED : CUDA_ERROR_INVALID_VALUE;
}

CUresult sim_cuMulticastAddDevice(CUmemGenericAllocationHandle handle, CUdevice device) {
  (void)handle;
  (void)device;
  return CUDA_ERROR_NOT_SUPPORTED;
}

CUresult sim_cuMulticastBindMem(CUmemGenericAllocationHandle handle, size_t offset, CUmemGenericAllocationHandle memory,
                                size_t memory_offset, size_t bytes, unsigned long long flags) {
  (void)handle, (void)offset, (void)memory, (void)memory_offset, (void)bytes, (void)flags;
  return CUDA_ERROR_NOT_SUPPORTED;
}

CUresult sim_cuMulticastUnbind(CUmemGenericAllocationHandle handle, CUdevice device, size_t offset, size_t bytes) {
  (void)handle, (void)device, (void)offset, (void)bytes;
  return CUDA_ERROR_NOT_SUPPORTED;
}

CUresult sim_cuMulticastGetGranularity(size_t *out, const void *properties, int option) {
  (void)option;
  return out && properties ? CUDA_ERROR_NOT_SUPPORTED : CUDA_ERROR_INVALID_VALUE;
}

/* The memory belongs to the device that is current here: an anonymous file doesn't say where it came from. */
CUresult sim_cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *out, void *os_handle, int type) {
  struct CUctx_st *context;
  struct stat status;
  CUresult error = sim_current(&context);
  if (error || !out) return error ? error : CUDA_ERROR_INVALID_VALUE;
  if (type != HANDLE_POSIX_FD) return CUDA_ERROR_NOT_SUPPORTED;
  int fd = dup((int)(intptr_t)os_handle);
  if (fd < 0 || fstat(fd, &status) || status.st_size <= 0) {
    if (fd >= 0) close(fd);
    return CUDA_ERROR_INVALID_VALUE;
  }
  CUmemAllocationProp properties = {.type = TYPE_PINNED, .handle_types = HANDLE_POSIX_FD};
  properties.location.type = LOCATION_DEVICE;
  properties.location.id = context->device;
  return memory_new(out, fd, (size_t)status.st_size, true, &properties);
}
