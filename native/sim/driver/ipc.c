/* Handles for other processes of this machine: memory and events. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "shared.h"

int sim_shared_file(size_t bytes) {
  int fd = memfd_create("stallscope-sim-memory", MFD_CLOEXEC);
  if (fd >= 0 && ftruncate(fd, (off_t)bytes)) {
    close(fd);
    return -1;
  }
  return fd;
}

bool sim_ipc_handle(struct ipc_handle *out, uint32_t magic, int fd, int device, size_t bytes) {
  struct stat status;
  if (fstat(fd, &status)) return false;
  *out = (struct ipc_handle){.magic = magic, .pid = getpid(), .fd = fd, .device = device, .bytes = bytes};
  out->inode = status.st_ino;
  return true;
}

int sim_ipc_open(const struct ipc_handle *handle, uint32_t magic) {
  char path[64];
  struct stat status;
  if (handle->magic != magic) return -1;
  snprintf(path, sizeof(path), "/proc/%d/fd/%d", handle->pid, handle->fd);
  int fd = open(path, O_RDWR | O_CLOEXEC);
  if (fd < 0) return -1;
  if (!fstat(fd, &status) && status.st_ino == handle->inode && (uint64_t)status.st_size >= handle->bytes) return fd;
  close(fd);
  return -1;
}

CUresult sim_cuIpcGetMemHandle(void *out, CUdeviceptr pointer) {
  struct CUctx_st *context;
  struct ipc_handle handle;
  size_t bytes;
  int fd, device;
  CUresult error = sim_current(&context);
  if (error || !out) return error ? error : CUDA_ERROR_INVALID_VALUE;
  error = sim_memory_share((void *)pointer, &fd, &bytes, &device);
  if (error) return error;
  if (!sim_ipc_handle(&handle, IPC_MEMORY, fd, device, bytes)) return CUDA_ERROR_UNKNOWN;
  memcpy(out, &handle, sizeof(handle));
  return CUDA_SUCCESS;
}

/* A process can't open what it gave out itself. */
CUresult sim_cuIpcOpenMemHandle_v2(CUdeviceptr *out, struct ipc_handle handle, unsigned flags) {
  struct CUctx_st *context;
  CUresult error = sim_current(&context);
  if (error || !out || flags > 1) return error ? error : CUDA_ERROR_INVALID_VALUE;
  if (handle.pid == getpid()) return CUDA_ERROR_INVALID_CONTEXT;
  int fd = sim_ipc_open(&handle, IPC_MEMORY);
  if (fd < 0) return CUDA_ERROR_INVALID_VALUE;
  void *memory = mmap(NULL, handle.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  if (memory == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  error = sim_memory_add(memory, handle.bytes, context->device);
  if (error) munmap(memory, handle.bytes);
  else *out = (CUdeviceptr)memory;
  return error;
}

CUresult sim_cuIpcCloseMemHandle(CUdeviceptr pointer) {
  struct CUctx_st *context;
  CUresult error = sim_current(&context);
  if (error) return error;
  sim_wait_context(context);
  size_t bytes = sim_memory_drop((void *)pointer);
  if (!bytes) return CUDA_ERROR_INVALID_VALUE;
  munmap((void *)pointer, bytes);
  return CUDA_SUCCESS;
}

/* An event's time lies in a page that both processes map: the clock is the machine's. */
static _Atomic uint64_t *map_time(int fd) {
  void *page = mmap(NULL, sizeof(uint64_t), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  return page == MAP_FAILED ? NULL : page;
}

CUresult sim_cuIpcGetEventHandle(void *out, CUevent event) {
  struct ipc_handle handle;
  if (!out || !IS_A(event, MAGIC_EVENT)) return out ? CUDA_ERROR_INVALID_HANDLE : CUDA_ERROR_INVALID_VALUE;
  if ((event->flags & CU_EVENT_INTERPROCESS) == 0) return CUDA_ERROR_INVALID_HANDLE;
  CUresult error = CUDA_SUCCESS;
  pthread_mutex_lock(&sim_lock);
  if (!event->shared_time) {
    event->shared_fd = sim_shared_file(sizeof(uint64_t));
    _Atomic uint64_t *cell = event->shared_fd >= 0 ? map_time(event->shared_fd) : NULL;
    if (cell) {
      atomic_store(cell, atomic_load(&event->time_ns));
      event->shared_time = cell;
    } else {
      error = CUDA_ERROR_OUT_OF_MEMORY;
    }
  }
  pthread_mutex_unlock(&sim_lock);
  if (error) return error;
  if (!sim_ipc_handle(&handle, IPC_EVENT, event->shared_fd, event->context->device, sizeof(uint64_t)))
    return CUDA_ERROR_UNKNOWN;
  memcpy(out, &handle, sizeof(handle));
  return CUDA_SUCCESS;
}

CUresult sim_cuIpcOpenEventHandle(CUevent *out, struct ipc_handle handle) {
  CUresult error = sim_cuEventCreate(out, CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS);
  if (error) return error;
  int fd = sim_ipc_open(&handle, IPC_EVENT);
  (*out)->shared_fd = fd;
  (*out)->shared_time = fd >= 0 ? map_time(fd) : NULL;
  if ((*out)->shared_time) return CUDA_SUCCESS;
  sim_cuEventDestroy_v2(*out);
  *out = NULL;
  return CUDA_ERROR_INVALID_VALUE;
}

void sim_event_unshare(struct CUevent_st *event) {
  if (event->shared_time) munmap((void *)(uintptr_t)event->shared_time, sizeof(uint64_t));
  if (event->shared_fd > 0) close(event->shared_fd);
}
