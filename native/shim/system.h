/* SPDX-License-Identifier: Apache-2.0
 *
 * The few system calls, made directly: some of glibc's functions are newer symbols, others are places where a thread can
 * be cancelled, and a launch is none. */
#ifndef STALLSCOPE_SYSTEM_H
#define STALLSCOPE_SYSTEM_H
#include "shim.h"
#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

void seg_start(void);            /* settings.c */
void seg_thread_key(void);       /* thread.c */
void seg_leave_behind(void);     /* thread.c: the calling thread is no thread of this process's segment */
void seg_objects_at_start(void); /* objects.c */
void seg_find_dlsym(void);       /* names.c */
void seg_find_spawns(void);      /* spawn.c */
/* system.c */
void *seg_private(size_t bytes); /* zeroed pages that a fork empties; NULL = none */
void seg_pair(uint64_t *counter, uint64_t *mono_ns);
uint64_t seg_clock_ns(int clock);
uint64_t seg_start_ticks(void); /* of this process: /proc/self/stat, field 22; 0 = unknown */
void seg_hello(struct seg_process *p);
void seg_introduce(struct seg_who *who);
bool seg_same_file(int fd, uint64_t device, uint64_t inode);
void seg_identify(int fd, uint64_t *device, uint64_t *inode);

#define SEG_WIPEONFORK 18

INLINE int sys_open(const char *path, int flags, int mode) {
  return (int)syscall(SYS_openat, AT_FDCWD, path, flags, mode);
}
INLINE long sys_read(int fd, void *to, size_t bytes) {
  return syscall(SYS_read, fd, to, bytes);
}
INLINE int sys_close(int fd) {
  return (int)syscall(SYS_close, fd);
}
#endif
