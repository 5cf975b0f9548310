/* Settings from the environment, the clock, and waiting. */
#include <errno.h>
#include <fnmatch.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "engine.h"

/* Below this a blocking wait spins: a sleep would overshoot by more than the wait is long. */
enum { SHORT_WAIT_NS = 20000 };

static struct sim_config config;
static pthread_once_t config_once = PTHREAD_ONCE_INIT;

static double env_number(const char *name, double otherwise) {
  const char *text = getenv(name);
  char *end;
  if (!text || !*text) return otherwise;
  double value = strtod(text, &end);
  if (*end || value < 0) {
    fprintf(stderr, "stallscope sim: %s=%s is not a number; %g is used\n", name, text, otherwise);
    return otherwise;
  }
  return value;
}

/* As CUDA has it: a list of numbers, cut short at the first entry that is no device. */
static void visible_read(void) {
  const char *list = getenv("CUDA_VISIBLE_DEVICES");
  int count = 0, all = config.devices;
  for (int i = 0; i < MAX_DEVICES; i++) config.physical[i] = i;
  if (!list) return;
  while (*list && count < MAX_DEVICES) {
    char *end;
    long device = strtol(list, &end, 10);
    if (end == list || device < 0 || device >= all) break;
    config.physical[count++] = (int)device;
    list = end;
    while (*list == ',' || *list == ' ') list++;
  }
  config.devices = count;
}

static void config_read(void) {
  const char *wait = getenv("STALLSCOPE_SIM_WAIT");
  double devices = env_number("STALLSCOPE_SIM_DEVICES", 2);
  config.devices = devices > MAX_DEVICES ? MAX_DEVICES : (int)devices;
  visible_read();
  config.spin = wait && strcmp(wait, "spin") == 0;
  config.kernel_ns = (uint64_t)env_number("STALLSCOPE_SIM_KERNEL_NS", 2000);
  config.kernels = getenv("STALLSCOPE_SIM_KERNELS");
  config.copy_bytes_per_ns = env_number("STALLSCOPE_SIM_COPY_GBPS", 10);
  config.copy_latency_ns = (uint64_t)env_number("STALLSCOPE_SIM_COPY_LATENCY_NS", 5000);
  config.device_bytes = (size_t)env_number("STALLSCOPE_SIM_MEMORY_MB", 16384) << 20;
  if (config.copy_bytes_per_ns <= 0) config.copy_bytes_per_ns = 10;
}

const struct sim_config *sim_config(void) {
  pthread_once(&config_once, config_read);
  return &config;
}

int sim_physical(int device) {
  return sim_config()->physical[device];
}

uint64_t sim_now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* One entry of STALLSCOPE_SIM_KERNELS; a pattern without wildcards may stand anywhere in the name. */
static bool pattern_matches(const char *entry, size_t length, const char *name) {
  char pattern[256];
  if (length == 0 || length > sizeof(pattern) - 3) return false;
  bool wild = memchr(entry, '*', length) || memchr(entry, '?', length) || memchr(entry, '[', length);
  snprintf(pattern, sizeof(pattern), wild ? "%.*s" : "*%.*s*", (int)length, entry);
  return fnmatch(pattern, name, 0) == 0;
}

uint64_t sim_kernel_ns(const char *name) {
  const char *entry = sim_config()->kernels;
  while (entry && *entry) {
    size_t length = strcspn(entry, ",");
    const char *equals = memchr(entry, '=', length);
    if (equals && pattern_matches(entry, (size_t)(equals - entry), name)) return strtoull(equals + 1, NULL, 10);
    entry += length + (entry[length] == ',');
  }
  return sim_config()->kernel_ns;
}

uint64_t sim_copy_ns(size_t bytes) {
  return sim_config()->copy_latency_ns + (uint64_t)((double)bytes / sim_config()->copy_bytes_per_ns);
}

/* The context's flags win, then the environment; an event made with BLOCKING_SYNC always blocks. */
bool sim_spins(const struct CUctx_st *context, unsigned event_flags) {
  unsigned flags = atomic_load_explicit(&context->flags, memory_order_relaxed) & CU_CTX_SCHED_MASK;
  if (event_flags & CU_EVENT_BLOCKING_SYNC || flags & CU_CTX_SCHED_BLOCKING_SYNC) return false;
  return flags ? true : sim_config()->spin;
}

static void sleep_until(uint64_t time_ns) {
  struct timespec at = {(time_t)(time_ns / 1000000000u), (long)(time_ns % 1000000000u)};
  while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &at, NULL) == EINTR)
    ;
}

void sim_wait_until(uint64_t time_ns, bool spin) {
  uint64_t now_ns = sim_now_ns();
  if (now_ns < time_ns && !spin && time_ns - now_ns > SHORT_WAIT_NS) sleep_until(time_ns);
  while (sim_now_ns() < time_ns) __builtin_ia32_pause();
}

void *sim_new(size_t bytes) {
  void *memory = calloc(1, bytes);
  if (!memory) {
    fputs("stallscope sim: out of host memory\n", stderr);
    abort();
  }
  return memory;
}

uint64_t sim_next_id(void) {
  static _Atomic uint64_t last;
  return atomic_fetch_add(&last, 1) + 1;
}
