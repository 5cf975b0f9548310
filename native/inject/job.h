/* SPDX-License-Identifier: Apache-2.0
 *
 * What the files of the injector share; x86-64 only. */
#ifndef STALLSCOPE_JOB_H
#define STALLSCOPE_JOB_H
#include "inject.h"
#include <stdbool.h>
#include <stddef.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/uio.h>
#include <sys/user.h>

#define REGISTERS_MOST 16384
#define FAR (64 << 10) /* where a signal's frame would */

struct job {
  const struct inject_plan *plan;
  struct inject_result *result;
  struct user_regs_struct regs;
  uint8_t extended[REGISTERS_MOST];
  size_t extended_bytes;
  uint64_t mask;
  uint64_t since_ns, taken_ns; /* of the stop; of the first one */
  uint64_t stack[FAR / 8];
  int memory;      /* /proc/PID/mem */
  bool is_written; /* the code stands there, and no thread is in it */
  int held;        /* a signal that came while it was stopped: delivered when it goes on */
};

bool inject_returns_to(struct job *j, uint64_t rsp, uint64_t from, uint64_t to); /* out of a signal handler */
int inject_look(struct job *j); /* safe.c: 0: pthread_create may be called in this thread now */

static inline int said(struct job *j, enum inject_code code, int error, const char *at) {
  j->result->code = code;
  j->result->error = error;
  strncpy(j->result->at, at, sizeof(j->result->at) - 1);
  return -1;
}

static inline long trace(enum __ptrace_request request, pid_t tid, uintptr_t address, uintptr_t data) {
  return ptrace(request, tid, (void *)address, (void *)data);
}

static inline size_t read_memory(pid_t pid, uint64_t at, void *to, size_t bytes) {
  struct iovec local = {to, bytes}, remote = {(void *)(uintptr_t)at, bytes};
  ssize_t n = process_vm_readv(pid, &local, 1, &remote, 1, 0);
  return n > 0 ? (size_t)n : 0;
}
#endif
