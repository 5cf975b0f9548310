/* SPDX-License-Identifier: Apache-2.0
 *
 * What an injector and the library that it puts into a running process tell each other: a private mapping of the
 * process, which the injector reads and writes from outside (native/inject/, capture/injection.py).
 *
 *   struct seg_control | at SEG_CONTROL_XSAVE: registers of the borrowed thread | its stack, down from the end
 */
#ifndef STALLSCOPE_CONTROL_H
#define STALLSCOPE_CONTROL_H
#ifndef WIRE_CDEF
#include <stdint.h>
#endif

#define SEG_CONTROL_MAGIC 0x316c7274636c7473ull /* "stlctrl1" */

enum seg_control_layout { /* bytes */
                          SEG_CONTROL_TEXT = 400,
                          SEG_CONTROL_XSAVE = 4096,
                          SEG_CONTROL_XSAVE_MOST = 16384,
                          SEG_CONTROL_BYTES = 0x30000,
};

enum seg_control_state {
  SEG_CONTROL_BEGUN = 0,
  SEG_CONTROL_FAILED = 1,   /* text says why */
  SEG_CONTROL_READY = 2,    /* slots are patched */
  SEG_CONTROL_RELEASED = 3, /* and hold again what they held */
};

struct seg_control {
  uint64_t magic; /* the injector's; so are cancelled, seen, release and beat */
  uint64_t thread;
  uint32_t state;  /* seg_control_state */
  uint32_t left;   /* the borrowed thread is back where it was, and needs nothing here any more */
  uint32_t result; /* of pthread_create */
  uint32_t kept_errno;
  uint32_t cancelled;          /* whoever comes late does nothing */
  uint32_t seen;               /* the mapping is not needed any more */
  uint32_t release;            /* put the slots back */
  uint32_t beat;               /* changes while the injector lives */
  uint32_t slots, turned_away; /* patched ones; those that found no row in the table */
  uint32_t restored, foreign;  /* put back; those that held something of somebody else's by then, and were left */
  char text[400];              /* SEG_CONTROL_TEXT */
};

#ifndef WIRE_CDEF
_Static_assert(sizeof(struct seg_control) <= SEG_CONTROL_XSAVE, "seg_control");
#endif
#endif
