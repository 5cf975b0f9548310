// SPDX-License-Identifier: Apache-2.0
/* What the environment says at the start; it is never asked again, because programs change it. */
#define _GNU_SOURCE
#include "shim.h"
#include "system.h"
#include <string.h>

struct seg_settings seg_set;
struct seg_process *seg_proc;
extern char **environ;
static uint32_t started;

static const char *value_of(const char *name) {
  size_t length = strlen(name);
  for (char **e = environ; e && *e; e++)
    if (!strncmp(*e, name, length) && (*e)[length] == '=') return *e + length + 1;
  return NULL;
}

static bool keep(char *to, size_t size, const char *from, size_t length) {
  if (length >= size) return false;
  memcpy(to, from, length);
  to[length] = 0;
  return true;
}

static void keep_line(char *to, size_t size, const char *name, const char *value) {
  size_t head = strlen(name);
  if (!value || head + 1 + strlen(value) >= size) return;
  memcpy(to, name, head);
  to[head] = '=';
  strcpy(to + head + 1, value);
}

/* Entries of LD_PRELOAD stand between colons and blanks. */
static void find_preload(const char *list) {
  static const char name[] = "libstallscope.so";
  while (list && *list) {
    size_t length = strcspn(list, ": "), tail = sizeof(name) - 1;
    bool is_ours = length >= tail && !memcmp(list + length - tail, name, tail);
    if (is_ours && keep(seg_set.preload, sizeof(seg_set.preload), list, length)) return;
    list += length + strspn(list + length, ": ");
  }
}

static int32_t number_of(const char *text) {
  int32_t value = 0;
  if (!text || !*text || strlen(text) > 9) return -1;
  for (; *text; text++) {
    if (*text < '0' || *text > '9') return -1;
    value = value * 10 + (*text - '0');
  }
  return value;
}

static void read_ranks(void) {
  static const char *const names[SEG_RANKS] = {"RANK",         "WORLD_SIZE",           "LOCAL_RANK", "SLURM_PROCID",
                                               "SLURM_NTASKS", "OMPI_COMM_WORLD_RANK", "PMI_RANK"};
  for (int i = 0; i < SEG_RANKS; i++) seg_set.ranks[i] = number_of(value_of(names[i]));
}

static void read_environment(void) {
  const char *way = value_of("STALLSCOPE_SHIM"), *mode = value_of("STALLSCOPE_SHIM_MODE");
  keep_line(seg_set.shim, sizeof(seg_set.shim), "STALLSCOPE_SHIM", way);
  keep_line(seg_set.mode, sizeof(seg_set.mode), "STALLSCOPE_SHIM_MODE", mode);
  find_preload(value_of("LD_PRELOAD"));
  read_ranks();
  seg_set.word = (uint64_t)UINT32_MAX << 32 | SEG_FULL;
  if (mode && !strcmp(mode, "lite")) seg_set.word = (uint64_t)UINT32_MAX << 32 | SEG_LITE;
  if (mode && !strcmp(mode, "min")) seg_set.word = (uint64_t)(UINT32_MAX / 1000) << 32 | SEG_MIN;
  if (!way) return;
  seg_set.off = !strcmp(way, "off");
  if (!strncmp(way, "dir:", 4)) seg_set.off |= !keep(seg_set.folder, sizeof(seg_set.folder), way + 4, strlen(way + 4));
  if (!strncmp(way, "socket:", 7)) keep(seg_set.socket, sizeof(seg_set.socket), way + 7, strlen(way + 7));
}

/* Once; the first to come does it. Others that come meanwhile find seg_proc NULL. */
void seg_start(void) {
  if (__atomic_exchange_n(&started, 1, __ATOMIC_ACQ_REL)) return;
  read_environment();
  seg_pair(&seg_set.counter, &seg_set.mono_ns);
  seg_objects_at_start();
  seg_find_dlsym();
  seg_find_spawns();
  seg_thread_key();
  __atomic_store_n(&seg_proc, seg_private(sizeof(struct seg_process)), __ATOMIC_RELEASE);
}

__attribute__((constructor)) static void begin(void) {
  int saved = errno;
  seg_start();
  errno = saved;
}
