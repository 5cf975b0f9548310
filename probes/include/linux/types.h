/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
 * The kernel's type names, as far as bcc's own helpers.h and bpf.h use them. */
#ifndef STALLSCOPE_LINUX_TYPES_H
#define STALLSCOPE_LINUX_TYPES_H
typedef signed char __s8, s8, int8_t;
typedef unsigned char __u8, u8, uint8_t;
typedef short __s16, s16, int16_t;
typedef unsigned short __u16, u16, uint16_t;
typedef int __s32, s32, int32_t;
typedef unsigned int __u32, u32, uint32_t;
typedef long long __s64, s64, int64_t;
typedef unsigned long long __u64, u64, uint64_t;
typedef __u16 __be16, __le16, __sum16;
typedef __u32 __be32, __le32, __wsum;
typedef __u64 __be64, __le64;
#define __aligned_u64 __u64 __attribute__((aligned(8)))
#define __aligned_be64 __be64 __attribute__((aligned(8)))
typedef __SIZE_TYPE__ size_t;
typedef __PTRDIFF_TYPE__ ssize_t;
typedef __UINTPTR_TYPE__ uintptr_t;
typedef int pid_t;
typedef unsigned int gfp_t, uid_t, gid_t, dev_t;
typedef unsigned short umode_t, sa_family_t;
typedef long long loff_t;
typedef unsigned long long sector_t;
typedef _Bool bool;
#define true 1
#define false 0
#define NULL ((void *)0)
#define offsetof(type, member) __builtin_offsetof(type, member)
#define __always_inline inline __attribute__((always_inline))
#define __user
#define __kernel
#define __percpu
#define likely(x) __builtin_expect(!!(x), 1)
#define unlikely(x) __builtin_expect(!!(x), 0)
#define TASK_COMM_LEN 16
#endif
