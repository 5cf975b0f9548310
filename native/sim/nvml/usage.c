/* Finds the pages that the simulated driver writes (include/sim_stats.h) in every process that lets us look, or in the
 * folder STALLSCOPE_SIM_STATS, and adds them up. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "nvml.h"
#include "sim_stats.h"

#define LINK_NAME "/memfd:" SIM_STATS_NAME
#define NEVER_NS UINT64_MAX
enum { SCAN_EVERY_NS = 100000000, WINDOW_NS = 200000000, LEAST_WINDOW_NS = 10000000, SAMPLES = 8, PATH_BYTES = 288 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static const struct sim_stats *pages[NVML_MAX_PROCESSES];
static int page_count;
static uint64_t scanned_ns;

/* Per device, moments to compare with; the oldest is overwritten. */
static struct {
  struct {
    uint64_t at_ns, worked_ns, held_ns;
  } samples[SAMPLES];
  unsigned next;
} history[NVML_MAX_DEVICES];

static uint64_t now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static const struct sim_stats *map_page(const char *path, int pid) {
  int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return NULL;
  const struct sim_stats *page = mmap(NULL, sizeof(*page), PROT_READ, MAP_SHARED, fd, 0);
  bool whole = page != MAP_FAILED && lseek(fd, 0, SEEK_END) >= (off_t)sizeof(*page);
  close(fd);
  const char *machine = getenv("STALLSCOPE_SIM_MACHINE");
  whole = whole && strncmp(page->machine, machine ? machine : "", sizeof(page->machine) - 1) == 0;
  /* A forked child has its parent's descriptor until it starts anew: that page is not its own. */
  if (whole && page->magic == SIM_STATS_MAGIC && page->version == SIM_STATS_VERSION && page->pid == pid) return page;
  if (page != MAP_FAILED) munmap((void *)(uintptr_t)page, sizeof(*page));
  return NULL;
}

static void scan_process(int pid) {
  char folder[64], path[PATH_BYTES], target[64];
  snprintf(folder, sizeof(folder), "/proc/%d/fd", pid);
  DIR *fds = opendir(folder);
  struct dirent *entry;
  const struct sim_stats *page = NULL;
  while (fds && !page && page_count < NVML_MAX_PROCESSES && (entry = readdir(fds))) {
    snprintf(path, sizeof(path), "%s/%.200s", folder, entry->d_name);
    ssize_t length = readlink(path, target, sizeof(target) - 1);
    if (length < (ssize_t)strlen(LINK_NAME) || strncmp(target, LINK_NAME, strlen(LINK_NAME)) != 0) continue;
    page = map_page(path, pid);
    if (page) pages[page_count++] = page;
  }
  if (fds) closedir(fds);
}

/* A page in a folder stays behind when its process is killed. */
static void scan_file(const char *folder, int pid) {
  char path[SIM_STATS_PATH_BYTES];
  if (page_count >= NVML_MAX_PROCESSES || (kill(pid, 0) != 0 && errno != EPERM)) return;
  snprintf(path, sizeof(path), "%s/%d", folder, pid);
  const struct sim_stats *page = map_page(path, pid);
  if (page) pages[page_count++] = page;
}

/* With the lock held. */
static void scan(void) {
  uint64_t at_ns = now_ns();
  if (scanned_ns && at_ns - scanned_ns < SCAN_EVERY_NS) return;
  scanned_ns = at_ns;
  for (int i = 0; i < page_count; i++) munmap((void *)(uintptr_t)pages[i], sizeof(*pages[i]));
  page_count = 0;
  const char *folder = getenv("STALLSCOPE_SIM_STATS");
  bool named = folder && *folder;
  DIR *processes = opendir(named ? folder : "/proc");
  struct dirent *entry;
  while (processes && (entry = readdir(processes))) {
    int pid = atoi(entry->d_name);
    if (pid > 0 && named) scan_file(folder, pid);
    if (pid > 0 && !named) scan_process(pid);
  }
  if (processes) closedir(processes);
}

static double env_number(const char *name, double otherwise) {
  const char *text = getenv(name);
  return text && *text ? strtod(text, NULL) : otherwise;
}

int nvml_device_count(void) {
  double count = env_number("STALLSCOPE_SIM_DEVICES", 2);
  return count > NVML_MAX_DEVICES ? NVML_MAX_DEVICES : count < 0 ? 0 : (int)count;
}

uint64_t nvml_device_bytes(void) {
  return (uint64_t)env_number("STALLSCOPE_SIM_MEMORY_MB", 16384) << 20;
}

static void add(const struct sim_stats *page, const struct sim_device_stats *stats, struct nvml_usage *usage) {
  uint64_t until_ns = atomic_load(&stats->worked_until_ns), worked_ns = atomic_load(&stats->worked_ns);
  uint64_t endless_ns = atomic_load(&stats->endless_since_ns);
  if (until_ns > usage->at_ns) { /* what lies ahead has not been done yet */
    uint64_t ahead_ns = until_ns - usage->at_ns;
    worked_ns = worked_ns > ahead_ns ? worked_ns - ahead_ns : 0;
    usage->working_now = true;
  }
  if (endless_ns && endless_ns < usage->at_ns) {
    worked_ns += usage->at_ns - endless_ns;
    usage->working_now = true;
  }
  usage->worked_ns += worked_ns;
  usage->held_ns += atomic_load(&stats->held_ns);
  if (atomic_load(&stats->held) > 0) {
    uint64_t since_ns = atomic_load(&stats->held_since_ns);
    if (since_ns < usage->at_ns) usage->held_ns += usage->at_ns - since_ns;
    usage->busy_now = true;
  }
  usage->busy_now |= usage->working_now;
  if (atomic_load(&stats->contexts) <= 0 && !atomic_load(&stats->used_bytes)) return;
  usage->used_bytes += atomic_load(&stats->used_bytes);
  usage->processes[usage->process_count++] =
      (struct nvml_process){.pid = page->pid, .used_bytes = atomic_load(&stats->used_bytes)};
}

static void read_locked(int device, struct nvml_usage *usage) {
  scan();
  memset(usage, 0, sizeof(*usage));
  usage->at_ns = now_ns();
  for (int i = 0; i < page_count; i++) add(pages[i], &pages[i]->device[device], usage);
}

void nvml_read(int device, struct nvml_usage *usage) {
  pthread_mutex_lock(&lock);
  read_locked(device, usage);
  pthread_mutex_unlock(&lock);
}

static double share(uint64_t part_ns, uint64_t before_ns, uint64_t window_ns) {
  if (part_ns <= before_ns) return 0; /* also where a process has gone, and its part with it */
  double value = (double)(part_ns - before_ns) / (double)window_ns;
  return value > 1 ? 1 : value;
}

/* Compares with the youngest moment that is a window old, else with the oldest there is; the first call has none, so
 * what goes on at this moment counts alone. */
void nvml_shares(int device, double *busy, double *working) {
  struct nvml_usage usage;
  pthread_mutex_lock(&lock);
  read_locked(device, &usage);
  uint64_t best_ns = 0;
  int best = -1;
  for (int i = 0; i < SAMPLES; i++) {
    uint64_t at_ns = history[device].samples[i].at_ns;
    if (!at_ns || usage.at_ns - at_ns < LEAST_WINDOW_NS) continue;
    bool old = usage.at_ns - at_ns >= WINDOW_NS, best_old = best >= 0 && usage.at_ns - best_ns >= WINDOW_NS;
    if (best < 0 || (old && (!best_old || at_ns > best_ns)) || (!old && !best_old && at_ns < best_ns)) {
      best = i;
      best_ns = at_ns;
    }
  }
  if (best < 0) {
    *busy = usage.busy_now;
    *working = usage.working_now;
  } else {
    uint64_t window_ns = usage.at_ns - best_ns;
    *working = share(usage.worked_ns, history[device].samples[best].worked_ns, window_ns);
    *busy = *working + share(usage.held_ns, history[device].samples[best].held_ns, window_ns);
    if (*busy > 1) *busy = 1;
  }
  unsigned last = (history[device].next + SAMPLES - 1) % SAMPLES, next = history[device].next;
  if (usage.at_ns - history[device].samples[last].at_ns >= WINDOW_NS / SAMPLES * 2) {
    history[device].samples[next].at_ns = usage.at_ns;
    history[device].samples[next].worked_ns = usage.worked_ns;
    history[device].samples[next].held_ns = usage.held_ns;
    history[device].next = (next + 1) % SAMPLES;
  }
  pthread_mutex_unlock(&lock);
}
