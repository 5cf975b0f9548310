// SPDX-License-Identifier: Apache-2.0
/* Whether a stopped thread may be borrowed. It calls pthread_create, which allocates: a thread that is inside malloc, even
 * below a signal handler, would wait for itself, or find half-made lists where no lock is taken yet. */
#define _GNU_SOURCE
#include "inject.h"
#if defined(__x86_64__)
#include "job.h"

#define NEAR 2048 /* bytes of stack where malloc's and the loader's own frames would stand */
#define CODE_64 0x33
#define GET_RSEQ 0x420f /* PTRACE_GET_RSEQ_CONFIGURATION, Linux 5.13 */
#define RSEQ_CS_AT 8

static bool is_call_before(pid_t pid, uint64_t address) {
  uint8_t code[8] = {0};
  if (read_memory(pid, address - 8, code, 8) != 8) return true; /* not known: rather not */
  if (code[3] == 0xe8) return true;
  for (int at = 1; at <= 6; at++) /* ff /2 with its address byte, and what belongs to it, 2 to 7 bytes long */
    if (code[at] == 0xff && (code[at + 1] >> 3 & 7) == 2) return true;
  return false;
}

static bool is_avoided(const struct inject_plan *p, uint64_t address) {
  for (uint32_t i = 0; i < p->n_avoid && i < INJECT_RANGES; i++)
    if (address >= p->avoid[i].from && address < p->avoid[i].to) return true;
  return false;
}

/* Whether its stack says that pthread_create must not be called now. */
static int look_at_stack(struct job *j) {
  uint64_t *words = j->stack;
  size_t n = read_memory(j->plan->pid, j->regs.rsp, words, NEAR) / 8;
  if (n) n = (read_memory(j->plan->pid, j->regs.rsp, words, FAR) / 8) ?: n;
  for (size_t i = 0; i < n; i++) {
    bool is_near = i < NEAR / 8 && is_avoided(j->plan, words[i]);
    if (is_near && is_call_before(j->plan->pid, words[i])) {
      j->result->pc = words[i];
      return said(j, INJECT_AVOIDED, 0, "stack");
    }
    if (j->plan->restorer && words[i] == j->plan->restorer) return said(j, INJECT_SIGNAL, 0, "stack");
  }
  return n ? 0 : said(j, INJECT_ODD, 0, "its stack can't be read");
}

/* The frame of a handler: where it returns to, and in what the kernel saved (arch/x86/include/asm/sigframe.h,
 * struct rt_sigframe) the instruction pointer. */
#define RIP_AT ((8 + 40 + 16 * 8) / 8) /* words: return address, flags, link and stack, sixteen registers */

bool inject_returns_to(struct job *j, uint64_t rsp, uint64_t from, uint64_t to) {
  size_t n = read_memory(j->plan->pid, rsp, j->stack, FAR) / 8;
  for (size_t i = 0; i < n; i++) {
    bool is_there = j->stack[i] >= from && j->stack[i] < to;
    if (is_there && (!j->plan->restorer || (i >= RIP_AT && j->stack[i - RIP_AT] == j->plan->restorer))) return true;
  }
  return false;
}

static bool is_in_rseq(pid_t tid) {
  struct {
    uint64_t address;
    uint32_t bytes, signature, flags, pad;
  } area = {0};
  uint64_t section = 0;
  if (ptrace(GET_RSEQ, tid, (void *)sizeof(area), &area) <= 0 || !area.address) return false;
  return read_memory(tid, area.address + RSEQ_CS_AT, &section, 8) != 8 || section;
}

int inject_look(struct job *j) {
  const struct inject_plan *p = j->plan;
  j->result->pc = j->regs.rip;
  if (j->held) return said(j, INJECT_SIGNAL, 0, "a signal is about to be delivered");
  if (j->regs.cs != CODE_64) return said(j, INJECT_ODD, 0, "32-bit code");
  if (is_avoided(p, j->regs.rip)) return said(j, INJECT_AVOIDED, 0, "pc");
  if ((int64_t)j->regs.orig_rax < 0 && is_in_rseq(p->tid)) return said(j, INJECT_ODD, 0, "a restartable sequence");
  return look_at_stack(j);
}
#endif
