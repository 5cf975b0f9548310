/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
 * Any value does: since 5.0 the kernel no longer looks at a program's version. */
#ifndef LINUX_VERSION_CODE
#define LINUX_VERSION_CODE KERNEL_VERSION(5, 8, 0)
#endif
#define KERNEL_VERSION(a, b, c) (((a) << 16) + ((b) << 8) + ((c) > 255 ? 255 : (c)))
