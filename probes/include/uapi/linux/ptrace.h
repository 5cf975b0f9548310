/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
 * The registers at a probe hit, by the kernel's names. */
#ifndef STALLSCOPE_LINUX_PTRACE_H
#define STALLSCOPE_LINUX_PTRACE_H
#if defined(__x86_64__)
struct pt_regs {
  unsigned long r15, r14, r13, r12, bp, bx, r11, r10, r9, r8, ax, cx, dx, si, di, orig_ax, ip, cs, flags, sp, ss;
};
#elif defined(__aarch64__)
struct pt_regs {
  unsigned long long regs[31], sp, pc, pstate;
};
#else
#error "stallscope knows the registers of x86-64 and arm64 only"
#endif
#endif
