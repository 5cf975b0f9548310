/* SPDX-License-Identifier: Apache-2.0
 *
 * What runs in the borrowed thread and in the new one: position-independent, with its words behind it. */
#ifndef STALLSCOPE_STUB_H
#define STALLSCOPE_STUB_H
#include <stdint.h>

/* Behind the code. The registers are those to go back to. */
struct stub_words {
  uint64_t create, self, detach, open, symbol, error, errno_of;
  uint64_t control, mask;
  uint64_t rax, rbx, rcx, rdx, rsi, rdi, rbp, rsp, r8, r9, r10, r11, r12, r13, r14, r15, rip, eflags;
  uint64_t kept; /* its signal mask */
  char names[];  /* path, entry */
};

extern const uint8_t stub_begin[], stub_thread[], stub_words[], stub_end[];
#endif
