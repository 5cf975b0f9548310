/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
 * Ring sizes are given to bcc in pages. The loader passes -DPAGE_SIZE: arm64 machines have 4, 16 or 64 KiB. */
#ifndef PAGE_SIZE
#define PAGE_SIZE 4096
#endif
