/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
 * Instruction classes; bcc's bpf.h carries the rest. */
#ifndef STALLSCOPE_LINUX_BPF_COMMON_H
#define STALLSCOPE_LINUX_BPF_COMMON_H
#define BPF_CLASS(code) ((code)&0x07)
#define BPF_LD 0x00
#define BPF_LDX 0x01
#define BPF_ST 0x02
#define BPF_STX 0x03
#define BPF_ALU 0x04
#define BPF_JMP 0x05
#define BPF_RET 0x06
#define BPF_MISC 0x07
#define BPF_MAXINSNS 4096
#endif
