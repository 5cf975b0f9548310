// SPDX-License-Identifier: Apache-2.0
/* Programs that clear their environment would lose their children to us: our own entry of LD_PRELOAD and our settings
 * are put back when another program is started. STALLSCOPE_SHIM=off in its environment is left alone.
 *
 * All of it may run in the child of a vfork, between a fork and an exec, or in a signal handler: it uses the stack only,
 * and the real functions are looked up at the start, because the loader's lock may be held for ever in a child. */
#define _GNU_SOURCE
#include "objects.h"
#include "system.h"
#include <spawn.h>
#include <stdarg.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
#define MOST_LINES 4096 /* 32 KiB of stack */
#define ADDED 4

extern char **environ;
typedef char *const *lines;
static int (*real_execve)(const char *, lines, lines);
static int (*real_execvpe)(const char *, lines, lines);
static int (*real_fexecve)(int, lines, lines);
static int (*real_execveat)(int, const char *, lines, lines, int);
typedef int spawn_function(pid_t *, const char *, const posix_spawn_file_actions_t *, const posix_spawnattr_t *, lines,
                           lines);
static spawn_function *real_posix_spawn, *real_posix_spawnp;

void seg_find_spawns(void) {
  real_execve = seg_libc("execve");
  real_execvpe = seg_libc("execvpe");
  real_fexecve = seg_libc("fexecve");
  real_execveat = seg_libc("execveat");
  real_posix_spawn = seg_libc("posix_spawn");
  real_posix_spawnp = seg_libc("posix_spawnp");
}

static const char *line_of(lines env, const char *name) {
  size_t length = strlen(name);
  for (; env && *env; env++)
    if (!strncmp(*env, name, length) && (*env)[length] == '=') return *env;
  return NULL;
}

static bool has_entry(const char *list) {
  size_t length = strlen(seg_set.preload);
  for (const char *at = list; (at = strstr(at, seg_set.preload)); at += length) {
    char before = at == list ? ':' : at[-1], after = at[length];
    if ((before == ':' || before == ' ' || before == '=') && (!after || after == ':' || after == ' ')) return true;
  }
  return false;
}

static bool lacks(lines env, const char *name, const char *line) {
  return line[0] && !line_of(env, name);
}

/* How many lines there are, 0 = the environment is passed on as it is. */
static size_t lines_to_mend(lines env) {
  const char *preload = line_of(env, "LD_PRELOAD"), *way = line_of(env, "STALLSCOPE_SHIM");
  size_t n = 0;
  if (!seg_set.preload[0] || (way && !strcmp(way, "STALLSCOPE_SHIM=off"))) return 0;
  bool whole = preload && has_entry(preload) && !lacks(env, "STALLSCOPE_SHIM", seg_set.shim) &&
               !lacks(env, "STALLSCOPE_SHIM_MODE", seg_set.mode);
  while (env && env[n]) n++;
  return whole || n >= MOST_LINES ? 0 : n + 1;
}

static size_t preload_bytes(lines env) {
  const char *old = line_of(env, "LD_PRELOAD");
  return sizeof("LD_PRELOAD=") + strlen(seg_set.preload) + (old ? strlen(old) : 0) + 1;
}

static void write_preload(char *to, const char *old) {
  strcpy(to, "LD_PRELOAD=");
  strcat(to, seg_set.preload);
  if (!old || !old[strlen("LD_PRELOAD=")]) return;
  strcat(to, ":");
  strcat(to, old + strlen("LD_PRELOAD="));
}

static lines mend(lines env, char **to, char *preload) {
  const char *old = line_of(env, "LD_PRELOAD");
  size_t n = 0;
  bool add = !old || !has_entry(old);
  for (lines e = env; e && *e; e++)
    if (!add || *e != old) to[n++] = *e;
  if (add) write_preload(preload, old), to[n++] = preload;
  if (lacks(env, "STALLSCOPE_SHIM", seg_set.shim)) to[n++] = seg_set.shim;
  if (lacks(env, "STALLSCOPE_SHIM_MODE", seg_set.mode)) to[n++] = seg_set.mode;
  to[n] = NULL;
  return to;
}

/* `call` with env mended; a stack of its own for each, because the room depends on env. */
#define MENDED(env, call)                                                                                              \
  do {                                                                                                                 \
    size_t n_lines = lines_to_mend(env);                                                                               \
    char *to[n_lines + ADDED], preload[n_lines ? preload_bytes(env) : 1];                                              \
    lines mended = n_lines ? mend(env, to, preload) : (env);                                                           \
    return call;                                                                                                       \
  } while (0)

EXPORT int execve(const char *path, lines argv, lines env) {
  MENDED(env, real_execve(path, argv, mended));
}
EXPORT int execv(const char *path, lines argv) {
  MENDED(environ, real_execve(path, argv, mended));
}
EXPORT int execvpe(const char *file, lines argv, lines env) {
  MENDED(env, real_execvpe(file, argv, mended));
}
EXPORT int execvp(const char *file, lines argv) {
  MENDED(environ, real_execvpe(file, argv, mended));
}
EXPORT int fexecve(int fd, lines argv, lines env) {
  MENDED(env, real_fexecve(fd, argv, mended));
}
EXPORT int execveat(int fd, const char *path, lines argv, lines env, int flags) {
  if (!real_execveat) MENDED(env, (int)syscall(SYS_execveat, fd, path, argv, mended, flags));
  MENDED(env, real_execveat(fd, path, argv, mended, flags));
}
EXPORT int posix_spawn(pid_t *pid, const char *path, const posix_spawn_file_actions_t *actions,
                       const posix_spawnattr_t *attributes, lines argv, lines env) {
  MENDED(env, real_posix_spawn(pid, path, actions, attributes, argv, mended));
}
EXPORT int posix_spawnp(pid_t *pid, const char *file, const posix_spawn_file_actions_t *actions,
                        const posix_spawnattr_t *attributes, lines argv, lines env) {
  MENDED(env, real_posix_spawnp(pid, file, actions, attributes, argv, mended));
}

/* The arguments up to the NULL, then in `after` what stands behind it. */
#define COLLECT(first)                                                                                                 \
  va_list ap;                                                                                                          \
  size_t count = 1;                                                                                                    \
  va_start(ap, first);                                                                                                 \
  while (va_arg(ap, char *)) count++;                                                                                  \
  va_end(ap);                                                                                                          \
  char *argv[count + 1];                                                                                               \
  argv[0] = (char *)(uintptr_t)first;                                                                                  \
  va_start(ap, first);                                                                                                 \
  for (size_t i = 1; i <= count; i++) argv[i] = va_arg(ap, char *)

EXPORT int execl(const char *path, const char *first, ...) {
  COLLECT(first);
  va_end(ap);
  return execv(path, argv);
}
EXPORT int execlp(const char *file, const char *first, ...) {
  COLLECT(first);
  va_end(ap);
  return execvp(file, argv);
}
EXPORT int execle(const char *path, const char *first, ...) {
  COLLECT(first);
  lines env = va_arg(ap, lines);
  va_end(ap);
  return execve(path, argv, env);
}
