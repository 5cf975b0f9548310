// SPDX-License-Identifier: Apache-2.0
/* Byte-identical functions that do nothing: f_000 .. f_159. Six arguments in registers, two on the stack, result 0.
 * Compiled so that each begins with a push, as almost all functions of the CUDA runtime do: the kernel emulates it. */
#include <stdint.h>
#define STUB(n)                                                                                                        \
  int f_##n(uint64_t a, uint64_t b, uint64_t c, uint64_t d, uint64_t e, uint64_t f, uint64_t g, uint64_t h);           \
  int f_##n(uint64_t a, uint64_t b, uint64_t c, uint64_t d, uint64_t e, uint64_t f, uint64_t g, uint64_t h) {          \
    uint64_t frame[2]; /* without a use of the stack gcc makes no frame, whatever the option says */                   \
    __asm__ volatile("" ::"r"(frame), "r"(a), "r"(b), "r"(c), "r"(d), "r"(e), "r"(f) : "memory");                      \
    (void)g, (void)h;                                                                                                  \
    return 0;                                                                                                          \
  }
#define TEN(t)                                                                                                         \
  STUB(t##0) STUB(t##1) STUB(t##2) STUB(t##3) STUB(t##4) STUB(t##5) STUB(t##6) STUB(t##7) STUB(t##8) STUB(t##9)
TEN(00)
TEN(01)
TEN(02)
TEN(03)
TEN(04)
TEN(05)
TEN(06)
TEN(07)
TEN(08)
TEN(09)
TEN(10)
TEN(11)
TEN(12)
TEN(13)
TEN(14)
TEN(15)
