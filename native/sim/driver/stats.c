/* The process's page of figures for the simulated NVML (include/sim_stats.h). */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "engine.h"
#include "sim_stats.h"

static struct sim_stats nowhere; /* until the first cuInit, and where no file can be had */
static struct sim_stats *page = &nowhere;
static int page_fd = -1;

/* In the folder STALLSCOPE_SIM_STATS, for readers who may not look at this process's descriptors, else without a name. */
static int new_file(void) {
  const char *folder = getenv("STALLSCOPE_SIM_STATS");
  if (!folder || !*folder) return memfd_create(SIM_STATS_NAME, MFD_CLOEXEC);
  char path[SIM_STATS_PATH_BYTES];
  snprintf(path, sizeof(path), "%s/%d", folder, (int)getpid());
  int fd = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (fd >= 0) (void)fchmod(fd, 0644); /* whatever the umask */
  return fd;
}

void sim_stats_open(void) {
  if (page != &nowhere) return;
  int fd = new_file();
  if (fd < 0) return;
  void *memory = MAP_FAILED;
  if (ftruncate(fd, sizeof(*page)) == 0) memory = mmap(NULL, sizeof(*page), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (memory == MAP_FAILED) {
    close(fd);
    return;
  }
  struct sim_stats *made = memory;
  made->version = SIM_STATS_VERSION;
  made->pid = getpid();
  made->devices = sim_config()->devices;
  const char *machine = getenv("STALLSCOPE_SIM_MACHINE");
  snprintf(made->machine, sizeof(made->machine), "%s", machine ? machine : "");
  atomic_thread_fence(memory_order_release);
  made->magic = SIM_STATS_MAGIC;
  page = made;
  page_fd = fd;
}

/* A forked child has the parent's page mapped: it lets go of it, and gets its own at its first cuInit. */
void sim_stats_forget(void) {
  if (page == &nowhere) return;
  munmap(page, sizeof(*page));
  close(page_fd);
  page = &nowhere;
}

static struct sim_device_stats *of(int device) {
  return &page->device[sim_physical(device)];
}

void sim_stats_worked(int device, uint64_t start_ns, uint64_t end_ns) {
  struct sim_device_stats *stats = of(device);
  if (end_ns == NEVER_NS) {
    uint64_t none = 0;
    atomic_compare_exchange_strong(&stats->endless_since_ns, &none, start_ns);
    return;
  }
  uint64_t until_ns = atomic_load_explicit(&stats->worked_until_ns, memory_order_relaxed);
  do {
    if (until_ns >= end_ns) return;
  } while (!atomic_compare_exchange_weak(&stats->worked_until_ns, &until_ns, end_ns));
  atomic_fetch_add_explicit(&stats->worked_ns, end_ns - (until_ns > start_ns ? until_ns : start_ns),
                            memory_order_relaxed);
}

/* With sim_lock held, both. */
void sim_stats_hold_begin(int device) {
  struct sim_device_stats *stats = of(device);
  if (atomic_load(&stats->held) == 0) atomic_store(&stats->held_since_ns, sim_now_ns());
  atomic_fetch_add(&stats->held, 1);
}

void sim_stats_hold_end(int device) {
  struct sim_device_stats *stats = of(device);
  if (atomic_fetch_sub(&stats->held, 1) == 1)
    atomic_fetch_add(&stats->held_ns, sim_now_ns() - atomic_load(&stats->held_since_ns));
}

void sim_stats_memory(int device, size_t used_bytes) {
  atomic_store_explicit(&of(device)->used_bytes, used_bytes, memory_order_relaxed);
}

void sim_stats_context(int device, int change) {
  atomic_fetch_add(&of(device)->contexts, change);
}

/* For work on the device that is not in a stream of this driver. */
CUresult sim_stallscope_sim_wait_begin(CUdevice device) {
  if (device < 0 || device >= sim_config()->devices) return CUDA_ERROR_INVALID_DEVICE;
  pthread_mutex_lock(&sim_lock);
  sim_stats_hold_begin(device);
  pthread_mutex_unlock(&sim_lock);
  return CUDA_SUCCESS;
}

CUresult sim_stallscope_sim_wait_end(CUdevice device) {
  if (device < 0 || device >= sim_config()->devices) return CUDA_ERROR_INVALID_DEVICE;
  pthread_mutex_lock(&sim_lock);
  sim_stats_hold_end(device);
  pthread_mutex_unlock(&sim_lock);
  return CUDA_SUCCESS;
}
