// SPDX-License-Identifier: Apache-2.0
#define _GNU_SOURCE
#include "control.h"
#include "inject.h"
#include "stub.h"
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#if defined(__x86_64__)
#include "job.h"
#include <cpuid.h>
#include <elf.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stddef.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define RESTART_SYSCALL 219
/* What a thread waits in that may be put back, and what gives EINTR for a stop although no signal came. */
static const uint16_t waits[] = {SYS_futex, SYS_nanosleep, SYS_clock_nanosleep, SYS_poll, SYS_ppoll, SYS_pselect6,
                                 SYS_read,  SYS_pause};
static const uint16_t touchy[] = {SYS_epoll_wait, SYS_epoll_pwait, 441 /* epoll_pwait2 */, SYS_rt_sigtimedwait,
                                  SYS_semop,      SYS_semtimedop,  SYS_io_getevents};
#define IS_ONE_OF(number, list) is_one_of(number, list, sizeof(list) / sizeof(*(list)))
/* Of the kernel, seen by ptrace alone: a system call that goes on when nothing is done. */
enum { RESTART_SYS = 512, RESTART_NOINTR = 513, RESTART_NOHAND = 514, RESTART_BLOCK = 516 };

static bool is_one_of(uint64_t number, const uint16_t *list, size_t n) {
  for (size_t i = 0; i < n; i++)
    if (list[i] == number) return true;
  return false;
}

static uint64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void rest_us(unsigned us) {
  struct timespec t = {0, us * 1000L};
  nanosleep(&t, NULL);
}

/* Its stop, and nobody else's: a wait for any child would take those of the caller's. 1 stopped, 0 not yet, -1 gone. */
static int poll_stop(pid_t tid, int *status) {
  pid_t got = waitpid(tid, status, WNOHANG | __WALL | __WNOTHREAD);
  if (got == 0) return 0;
  return got == tid && WIFSTOPPED(*status) ? 1 : -1;
}

static bool is_event(int status) {
  return status >> 16 == PTRACE_EVENT_STOP;
}

/* Stops that are none of ours go their way. The thread that is held as a lock is never asked to stop. */
static void pass_on(pid_t tid, int status) {
  bool is_group = is_event(status) && WSTOPSIG(status) != SIGTRAP;
  trace(is_group ? PTRACE_LISTEN : PTRACE_CONT, tid, 0, is_event(status) ? 0 : (uintptr_t)WSTOPSIG(status));
}

static void tend_lock(const struct job *j) {
  int status;
  if (j->plan->lock && j->plan->lock != j->plan->tid && poll_stop(j->plan->lock, &status) == 1)
    pass_on(j->plan->lock, status);
}

/* PTRACE_INTERRUPT, and the stop that comes of it, within `us`; signals that come first are kept. It has stopped no
 * earlier than at the last look that saw it run. */
static int stop(struct job *j, uint32_t us) {
  pid_t tid = j->plan->tid;
  uint64_t end_ns = now_ns() + us * 1000ull;
  if (trace(PTRACE_INTERRUPT, tid, 0, 0)) return said(j, INJECT_GONE, errno, "PTRACE_INTERRUPT");
  for (;;) {
    uint64_t looked_ns = now_ns();
    int status, got = poll_stop(tid, &status);
    if (got < 0) return said(j, INJECT_GONE, 0, "waitpid");
    if (got && is_event(status)) return 0;
    if (got && !j->held) {
      j->held = WSTOPSIG(status);
      return 0; /* a stop before a signal is as good: registers can be read and set */
    }
    if (got) pass_on(tid, status);
    if (now_ns() > end_ns) return said(j, INJECT_NO_STOP, 0, "");
    tend_lock(j);
    if (!got) j->since_ns = looked_ns, rest_us(20);
  }
}

static int read_registers(struct job *j) {
  pid_t tid = j->plan->tid;
  struct iovec v = {j->extended, sizeof(j->extended)};
  if (trace(PTRACE_GETREGS, tid, 0, (uintptr_t)&j->regs)) return said(j, INJECT_ERROR, errno, "PTRACE_GETREGS");
  if (trace(PTRACE_GETREGSET, tid, NT_X86_XSTATE, (uintptr_t)&v))
    return said(j, INJECT_ERROR, errno, "PTRACE_GETREGSET");
  j->extended_bytes = v.iov_len;
  if (trace(PTRACE_GETSIGMASK, tid, 8, (uintptr_t)&j->mask)) return said(j, INJECT_ERROR, errno, "PTRACE_GETSIGMASK");
  return 0;
}

/* A system call that the stop interrupted is made again, as the kernel would do it. */
static void fill_registers(const struct user_regs_struct *r, struct stub_words *w) {
  bool in_call = (int64_t)r->orig_rax >= 0;
  int64_t why = -(int64_t)r->rax;
  bool again = in_call && (why == RESTART_SYS || why == RESTART_NOINTR || why == RESTART_NOHAND);
  again |= in_call && why == EINTR && IS_ONE_OF(r->orig_rax, touchy);
  w->rip = r->rip, w->rax = r->rax;
  if (again) w->rip -= 2, w->rax = r->orig_rax;
  if (in_call && why == RESTART_BLOCK) w->rip -= 2, w->rax = RESTART_SYSCALL;
  w->rbx = r->rbx, w->rcx = r->rcx, w->rdx = r->rdx, w->rsi = r->rsi, w->rdi = r->rdi, w->rbp = r->rbp;
  w->rsp = r->rsp, w->r8 = r->r8, w->r9 = r->r9, w->r10 = r->r10, w->r11 = r->r11, w->r12 = r->r12;
  w->r13 = r->r13, w->r14 = r->r14, w->r15 = r->r15, w->eflags = r->eflags;
}

/* All but those by which a fault in our code would be told. */
static uint64_t blocked_signals(void) {
  uint64_t mask = ~0ull;
  const int kept[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGTRAP, SIGSYS, SIGABRT};
  for (size_t i = 0; i < sizeof(kept) / sizeof(*kept); i++) mask &= ~(1ull << (kept[i] - 1));
  return mask;
}

/* Code, addresses and names; the registers are not known yet. 0: it is too long. */
static size_t make_code(const struct inject_plan *p, uint8_t *code) {
  size_t bytes = (size_t)(stub_words - stub_begin), path = strlen(p->path) + 1, entry = strlen(p->entry) + 1;
  size_t all = bytes + sizeof(struct stub_words) + path + entry;
  struct stub_words w = {.create = p->create, .self = p->self, .detach = p->detach, .open = p->open};
  if (all > INJECT_ROOM) return 0;
  w.symbol = p->symbol, w.error = p->error, w.errno_of = p->errno_of;
  w.control = p->control, w.mask = blocked_signals();
  memcpy(code, stub_begin, bytes);
  memcpy(code + bytes, &w, sizeof(w));
  memcpy(code + bytes + sizeof(w), p->path, path);
  memcpy(code + bytes + sizeof(w) + path, p->entry, entry);
  return all;
}

static bool write_room(const struct job *j, const void *from) {
  return pwrite(j->memory, from, INJECT_ROOM, (off_t)j->plan->room) == INJECT_ROOM;
}

/* While the thread runs: it is to be stopped for as short as can be. The page is private from now on, as a breakpoint of
 * a debugger makes it. */
static int write_code(struct job *j) {
  uint8_t code[INJECT_ROOM] = {0}, there[INJECT_ROOM];
  char path[64];
  const struct inject_plan *p = j->plan;
  if (!make_code(p, code)) return said(j, INJECT_ERROR, ENAMETOOLONG, "the path of the library");
  snprintf(path, sizeof(path), "/proc/%d/mem", p->pid);
  j->memory = open(path, O_RDWR | O_CLOEXEC);
  if (j->memory < 0) return said(j, INJECT_ERROR, errno, "opening its memory");
  if (read_memory(p->pid, p->room, there, sizeof(there)) != sizeof(there))
    return said(j, INJECT_ODD, 0, "the room for code can't be read");
  for (size_t i = 0; i < sizeof(there); i++)
    if (there[i]) return said(j, INJECT_ODD, 0, "the room for code is taken");
  if (!write_room(j, code)) return said(j, INJECT_ERROR, errno, "writing code into it");
  j->is_written = true;
  return 0;
}

static int write_registers(struct job *j) {
  struct stub_words w = {0};
  size_t from = offsetof(struct stub_words, rax), bytes = offsetof(struct stub_words, names) - from;
  off_t at = (off_t)(j->plan->room + (size_t)(stub_words - stub_begin) + from);
  fill_registers(&j->regs, &w);
  w.kept = j->mask;
  if (pwrite(j->memory, (const uint8_t *)&w + from, bytes, at) != (ssize_t)bytes)
    return said(j, INJECT_ERROR, errno, "writing code into it");
  return 0;
}

static void erase_code(struct job *j) {
  static const uint8_t nothing[INJECT_ROOM];
  if (j->is_written) write_room(j, nothing);
  j->is_written = false;
}

static int divert(struct job *j) {
  struct user_regs_struct r = j->regs;
  r.rip = j->plan->room;
  r.eflags = 0x202;
  r.orig_rax = UINT64_MAX; /* no system call is restarted */
  if (trace(PTRACE_SETREGS, j->plan->tid, 0, (uintptr_t)&r)) return said(j, INJECT_ERROR, errno, "PTRACE_SETREGS");
  j->is_written = false;
  /* A signal that waits already would come first of all, and end this try. Where it interrupts a system call it has to:
   * some end then, and the handler's own flags say which. Last, since the code sets the mask by itself, and back. */
  uint64_t mask = blocked_signals() | j->mask;
  if ((int64_t)j->regs.orig_rax < 0) trace(PTRACE_SETSIGMASK, j->plan->tid, 8, (uintptr_t)&mask);
  return 0;
}

static void let_go(struct job *j) {
  uint64_t stopped_ns = now_ns() - j->since_ns;
  trace(PTRACE_DETACH, j->plan->tid, 0, (uintptr_t)j->held);
  if (stopped_ns > j->result->stopped_ns) j->result->stopped_ns = stopped_ns;
  j->result->away_ns = now_ns() - j->taken_ns;
}

static void set_word(const struct job *j, size_t at, uint32_t value) {
  struct iovec local = {&value, 4}, remote = {(void *)(uintptr_t)(j->plan->control + at), 4};
  (void)!process_vm_writev(j->plan->pid, &local, 1, &remote, 1, 0);
}

static uint32_t get_word(const struct job *j, size_t at) {
  uint32_t value = 0;
  read_memory(j->plan->pid, j->plan->control + at, &value, 4);
  return value;
}

/* It is stopped: everything as it was found, and the kernel restarts what it interrupted. */
static void put_back(struct job *j) {
  struct iovec v = {j->extended, j->extended_bytes};
  trace(PTRACE_SETREGSET, j->plan->tid, NT_X86_XSTATE, (uintptr_t)&v);
  trace(PTRACE_SETSIGMASK, j->plan->tid, 8, (uintptr_t)&j->mask);
  if (trace(PTRACE_SETREGS, j->plan->tid, 0, (uintptr_t)&j->regs)) return;
  j->is_written = !get_word(j, offsetof(struct seg_control, thread)); /* else the new thread may be there already */
}

enum where { ELSEWHERE, IN_ROOM, IN_CONTROL_RUNNING, IN_CONTROL_WAITING };

static enum where where_is(const struct job *j, const struct user_regs_struct *r) {
  const struct inject_plan *p = j->plan;
  bool is_waiting = -(int64_t)r->rax >= RESTART_SYS && -(int64_t)r->rax <= RESTART_BLOCK;
  is_waiting &= IS_ONE_OF(r->orig_rax, waits);
  if (r->rip >= p->room && r->rip < p->room + INJECT_ROOM) return IN_ROOM;
  if (r->rsp < p->control || r->rsp >= p->control + SEG_CONTROL_BYTES) return ELSEWHERE;
  return is_waiting ? IN_CONTROL_WAITING : IN_CONTROL_RUNNING;
}

/* It waits in pthread_create for what it holds itself, or what nobody gives. What it has locked so far it has not: the
 * first things that pthread_create waits for are malloc's. */
static int abandon(struct job *j) {
  set_word(j, offsetof(struct seg_control, cancelled), 1);
  put_back(j);
  set_word(j, offsetof(struct seg_control, left), 1);
  if (get_word(j, offsetof(struct seg_control, thread)))
    j->is_written = false; /* the new thread may be there already */
  return said(j, INJECT_ABANDONED, 0, "");
}

static int crashed(struct job *j, int number) {
  abandon(j);
  j->held = 0;
  return said(j, INJECT_REFUSED, number, "a fault in pthread_create");
}

/* Runs on after a look; `number`: a signal that is to be delivered. */
static void go_on(struct job *j, int number) {
  uint64_t stopped_ns = now_ns() - j->since_ns;
  if (stopped_ns > j->result->stopped_ns) j->result->stopped_ns = stopped_ns;
  trace(PTRACE_CONT, j->plan->tid, 0, (uintptr_t)number);
}

static bool is_fault(pid_t tid, int number) {
  siginfo_t info;
  const int faults[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGTRAP, SIGSYS, SIGABRT};
  if (trace(PTRACE_GETSIGINFO, tid, 0, (uintptr_t)&info) || info.si_code <= 0) return false;
  for (size_t i = 0; i < sizeof(faults) / sizeof(*faults); i++)
    if (faults[i] == number) return true;
  return false;
}

/* A stop that we did not ask for. 0: it goes on. */
static int serve_stop(struct job *j, int status) {
  struct user_regs_struct r;
  int number = WSTOPSIG(status);
  j->since_ns = now_ns();
  if (is_event(status)) {
    pass_on(j->plan->tid, status);
    return 0;
  }
  if (trace(PTRACE_GETREGS, j->plan->tid, 0, (uintptr_t)&r)) return said(j, INJECT_GONE, errno, "PTRACE_GETREGS");
  if (r.rip == j->plan->room) { /* it came while the thread was stopped, and interrupts what that did */
    put_back(j);
    j->held = number;
    return said(j, INJECT_SIGNAL, 0, "a signal came");
  }
  if (where_is(j, &r) != ELSEWHERE && is_fault(j->plan->tid, number)) return crashed(j, number);
  go_on(j, number);
  return 0;
}

/* It is back already, in a call that the second stop has ended: it makes it again. */
static void mend_touchy(struct job *j, struct user_regs_struct *r) {
  if (j->held || !IS_ONE_OF(r->orig_rax, touchy) || (int64_t)r->rax != -EINTR) return;
  r->rip -= 2;
  r->rax = r->orig_rax;
  r->orig_rax = UINT64_MAX;
  trace(PTRACE_SETREGS, j->plan->tid, 0, (uintptr_t)r);
}

/* Stops it once more. 1: it is back, 0: not yet, -1: it was given up. */
static int look_again(struct job *j, uint64_t blocked_ns, bool is_over) {
  struct user_regs_struct r;
  j->since_ns = now_ns();
  if (stop(j, j->plan->back_us)) return -1;
  if (trace(PTRACE_GETREGS, j->plan->tid, 0, (uintptr_t)&r)) return said(j, INJECT_GONE, errno, "PTRACE_GETREGS");
  enum where where = where_is(j, &r);
  bool is_handling = where == ELSEWHERE && inject_returns_to(j, r.rsp, j->plan->room, j->plan->room + INJECT_ROOM);
  if (where == ELSEWHERE && !is_handling) {
    mend_touchy(j, &r);
    return 1;
  }
  if (where == IN_CONTROL_WAITING && now_ns() > blocked_ns) return abandon(j);
  if (is_over) return said(j, INJECT_NO_STOP, 0, "it did not come back"); /* its own code brings it back yet */
  int number = j->held;
  j->held = 0;
  go_on(j, number);
  return 0;
}

/* Until it is back. The code stays: the new thread needs it. */
static int wait_back(struct job *j) {
  uint64_t begun_ns = now_ns(), end_ns = begun_ns + j->plan->back_us * 1000ull;
  uint64_t blocked_ns = begun_ns + j->plan->blocked_us * 1000ull, next_ns = blocked_ns;
  for (unsigned us = 20;; us = us < 500 ? us + 20 : us) {
    int status, got = poll_stop(j->plan->tid, &status);
    if (got < 0) return said(j, INJECT_GONE, 0, "waitpid");
    if (got && serve_stop(j, status)) return -1;
    tend_lock(j);
    bool has_left = get_word(j, offsetof(struct seg_control, left)), is_over = now_ns() > end_ns;
    if (has_left || now_ns() > next_ns) {
      int is_back = look_again(j, blocked_ns, is_over);
      if (is_back) return is_back;
      next_ns = now_ns() + 5000000;
    }
    if (!got) rest_us(us);
  }
}

static int finish(struct job *j) {
  uint32_t result = get_word(j, offsetof(struct seg_control, result));
  if (!get_word(j, offsetof(struct seg_control, left)) || result) {
    j->is_written = true;
    if (!result) return said(j, INJECT_REFUSED, ENOMEM, "mmap");
    return said(j, INJECT_REFUSED, (int)result, "pthread_create");
  }
  j->result->code = INJECT_DONE;
  return 0;
}

static int borrow(struct job *j) {
  j->since_ns = j->taken_ns = now_ns();
  if (stop(j, j->plan->stop_us)) {
    j->taken_ns = now_ns(); /* it was never taken */
    return -1;
  }
  j->taken_ns = j->since_ns;
  if (read_registers(j) || inject_look(j) || write_registers(j) || divert(j)) return -1;
  go_on(j, 0);
  return wait_back(j) < 0 ? -1 : finish(j);
}

/* By this thread, whose end lets everything go, whatever state it is in. */
static void *work(void *argument) {
  struct job *j = argument;
  const struct inject_plan *p = j->plan;
  struct sched_param first = {.sched_priority = 1};
  sched_setscheduler(0, SCHED_RR,
                     &first); /* while it waits for a processor another thread stands still; where permitted */
  if (p->lock && p->lock != p->tid && trace(PTRACE_SEIZE, p->lock, 0, 0)) {
    said(j, INJECT_ERROR, errno, "PTRACE_SEIZE");
    return NULL;
  }
  if (trace(PTRACE_SEIZE, p->tid, 0, 0)) {
    said(j, errno == ESRCH ? INJECT_GONE : INJECT_ERROR, errno, "PTRACE_SEIZE");
    return NULL;
  }
  if (!write_code(j)) {
    borrow(j);
    let_go(j);
  }
  erase_code(j);
  if (j->memory >= 0) close(j->memory);

  return NULL;
}

const uint8_t *inject__mark(void) {
  return stub_begin;
}

static bool fits_registers(void) {
  uint32_t a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE)) return false;
  return __get_cpuid_count(0xd, 0, &a, &b, &c, &d) && b <= SEG_CONTROL_XSAVE_MOST;
}

int inject__try(const struct inject_plan *plan, struct inject_result *result) {
  struct job *job = calloc(1, sizeof(*job));
  pthread_t thread;
  int error = 0;
  memset(result, 0, sizeof(*result));
  if (!job) return -ENOMEM;
  job->plan = plan;
  job->memory = -1;
  job->result = result;
  if (!fits_registers()) said(job, INJECT_ERROR, ENOSYS, "the processor's registers");
  else if (!(error = pthread_create(&thread, NULL, work, job))) pthread_join(thread, NULL);
  free(job);
  return -error;
}

#else
const uint8_t *inject__mark(void) {
  static const uint8_t none[INJECT_MARK];
  return none;
}

int inject__try(const struct inject_plan *plan, struct inject_result *result) {
  (void)plan;
  memset(result, 0, sizeof(*result));
  result->code = INJECT_ERROR;
  result->error = ENOSYS;
  return 0;
}
#endif
