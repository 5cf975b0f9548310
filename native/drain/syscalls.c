// SPDX-License-Identifier: Apache-2.0
/* System calls that libc has no wrapper for; the numbers are those of the machine this is compiled for. */
#define _GNU_SOURCE
#include "drain.h"
#include <errno.h>
#include <sys/syscall.h>
#include <unistd.h>

int sys__bpf(int command, void *attr, uint32_t size) {
  long ret = syscall(SYS_bpf, command, attr, size);
  return ret < 0 ? -errno : (int)ret;
}

int sys__perf_event_open(void *attr, int pid, int cpu, int group, uint64_t flags) {
  long ret = syscall(SYS_perf_event_open, attr, pid, cpu, group, flags);
  return ret < 0 ? -errno : (int)ret;
}
