/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
 * bcc includes this before everything else; of the configuration only these two switches matter to it. */
#define CONFIG_64BIT 1
#define CONFIG_BPF_SYSCALL 1
