// SPDX-License-Identifier: Apache-2.0
/* Takes the place of NCCL's one profiler plugin, where it is free: sets NCCL_PROFILER_PLUGIN before NCCL looks at it. */
#define _GNU_SOURCE
#include <stdatomic.h>
#include <string.h>

#include "gpu.h"
#include "loader.h"
#include "objects.h"
#include "system.h"

#define NAME "NCCL_PROFILER_PLUGIN"
/* on: also where it may do harm; off: nothing; events: pairs of CUDA events instead; auto: those where it does not do */
#define SWITCH "STALLSCOPE_SHIM_GPU"

enum {
  FIRST_VERSION = 22600,
  OWN_THREAD = 23100,
  MENDED = 23200,
  LONGEST_PATH = 254,
  CONFIG_BYTES = 64 << 10,
  CONFIG_PATH = 4096
};

extern char **environ;
uint32_t seg_gpu_at_work(void);

static _Atomic uint32_t claimed, tried, nccl_version;
static char setting[sizeof(NAME) + 1 + LONGEST_PATH + 1]; /* stands in the environment */

/* Not getenv and setenv: the one may wait for a thread that forked, the other frees what another thread reads. */
static const char *value_of(const char *name) {
  size_t length = strlen(name);
  for (char **at = environ; at && *at; at++)
    if (strncmp(*at, name, length) == 0 && (*at)[length] == '=') return *at + length + 1;
  return NULL;
}

static bool is_set_in(const char *text) {
  for (const char *at = text; (at = strstr(at, NAME)); at += sizeof(NAME) - 1) {
    const char *begin = at;
    while (begin > text && (begin[-1] == ' ' || begin[-1] == '\t')) begin--;
    if (begin == text || begin[-1] == '\n') return true;
  }
  return false;
}

/* NCCL reads it into the environment, where what is there already wins. */
static bool is_set_in_file(const char *path) {
  static char text[CONFIG_BYTES];
  int fd = sys_open(path, O_RDONLY | O_CLOEXEC, 0);
  if (fd < 0) return false;
  long bytes = sys_read(fd, text, sizeof(text) - 1);
  sys_close(fd);
  text[bytes > 0 ? bytes : 0] = 0;
  return is_set_in(text);
}

static bool is_set_at_home(void) {
  const char *home = value_of("HOME");
  char path[CONFIG_PATH];
  size_t length = home ? strlen(home) : 0;
  if (!length || length + sizeof("/.nccl.conf") > sizeof(path)) return false;
  memcpy(path, home, length);
  memcpy(path + length, "/.nccl.conf", sizeof("/.nccl.conf"));
  return is_set_in_file(path);
}

static bool is_configured(void) {
  const char *named = value_of("NCCL_CONF_FILE");
  if (named && *named ? is_set_in_file(named) : is_set_at_home()) return true;
  return is_set_in_file("/etc/nccl.conf");
}

/* The default, which NCCL would load itself. */
static bool is_installed(void) {
  return loader_open("libnccl-profiler.so", RTLD_NOW | RTLD_LOCAL) != NULL;
}

static int version_of(const void *real) {
  int version = 0;
  int (*get)(int *) = NULL;
  *(void **)&get = seg_symbol_near(real, "ncclGetVersion");
  return get && get(&version) == 0 ? version : 0;
}

/* The old array is left as it is, for those that read it. */
static bool put(void) {
  size_t count = 0;
  while (environ && environ[count]) count++;
  size_t bytes = (count + 2) * sizeof(char *);
  char **larger = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (larger == MAP_FAILED) return false;
  for (size_t i = 0; i < count; i++) larger[i] = environ[i];
  larger[count] = setting;
  __atomic_store_n(&environ, larger, __ATOMIC_RELEASE);
  return true;
}

static bool is_switched(const char *to) {
  const char *value = value_of(SWITCH);
  return value && strcmp(value, to) == 0;
}

/* Whether the program would suffer. */
static uint32_t harm(uint32_t version) {
  if (version >= MENDED || is_switched("on")) return 0;
  return version >= OWN_THREAD ? SEG_GPU_SLOW : SEG_GPU_RISK;
}

static uint32_t claim_plugin(const void *real) {
  const char *own = loader_file_of((const void *)seg_gpu_before_creation), *value = value_of(NAME);
  const char *path = own && strlen(own) <= LONGEST_PATH ? own : NULL;
  uint32_t version = (uint32_t)version_of(real), reason;
  atomic_store(&nccl_version, version);
  if (value) return path && strcmp(value, path) == 0 ? SEG_GPU_CLAIMED : SEG_GPU_TAKEN;
  if (version < FIRST_VERSION) return SEG_GPU_OLD;
  if ((reason = harm(version))) return reason;
  if (is_configured() || is_installed()) return SEG_GPU_TAKEN;
  if (!path) return SEG_GPU_NO_PATH;
  memcpy(setting, NAME "=", sizeof(NAME));
  memcpy(setting + sizeof(NAME), path, strlen(path) + 1);
  return put() ? SEG_GPU_CLAIMED : SEG_GPU_NO_PATH;
}

static uint32_t claim(const void *real) {
  /* An injected library goes, and its name must not stay in the environment. */
  if (is_switched("off") || seg_injected) return SEG_GPU_OFF;
  uint32_t found = is_switched("events") ? SEG_GPU_EVENTS : claim_plugin(real);
  if (found != SEG_GPU_CLAIMED && is_switched("auto")) found = SEG_GPU_EVENTS;
  if (found == SEG_GPU_EVENTS) seg_pairs_open();
  return found;
}

/* Others that come meanwhile go on: NCCL itself makes them wait for the first one. */
void seg_gpu_before_creation(const void *real) {
  if (atomic_exchange(&tried, 1)) return;
  int kept = errno;
  atomic_store(&claimed, claim(real));
  errno = kept;
}

uint32_t seg_gpu_nccl_version(void) {
  return atomic_load(&nccl_version);
}

uint32_t seg_gpu_state(void) {
  uint32_t at_work = seg_gpu_at_work(), found = atomic_load(&claimed);
  if (found == SEG_GPU_EVENTS) return seg_pairs_state();
  return at_work ? at_work : found;
}
