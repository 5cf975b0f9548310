/* SPDX-License-Identifier: Apache-2.0
 *
 * The few system calls, made directly: glibc's newer wrappers would be newer symbols. */
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
void seg_objects_at_start(void); /* objects.c */
void seg_find_dlsym(void);       /* names.c */
void seg_find_spawns(void);      /* spawn.c */
/* system.c */
void *seg_private(size_t bytes); /* zeroed pages that a fork empties; NULL = none */
void seg_pair(uint64_t *counter, uint64_t *mono_ns);
uint64_t seg_clock_ns(int clock);
uint64_t seg_start_ticks(void); /* of this process: /proc/self/stat, field 22; 0 = unknown */
void seg_hello(struct seg_process *p);
bool seg_same_file(int fd, uint64_t device, uint64_t inode);
void seg_identify(int fd, uint64_t *device, uint64_t *inode);

/* The fields of struct statx that are read; the kernel's own header may be too old to have it. */
#define SEG_WIPEONFORK 18
#endif
