/* SPDX-License-Identifier: Apache-2.0
 *
 * Lends a thread of a running process for a moment, to start a thread there that loads our library. x86-64.
 *
 * The borrowed thread gets another instruction pointer once, and finds its way back by itself: code and its registers
 * stand in the unused end of an executable page. So whoever kills the injector at any moment leaves nothing undone. */
#ifndef STALLSCOPE_INJECT_H
#define STALLSCOPE_INJECT_H
#ifndef WIRE_CDEF
#include <stdint.h>
#endif

#define INJECT_ROOM 1024 /* bytes of code and data */
#define INJECT_RANGES 32

enum inject_sizes { INJECT_MARK = 32 };

enum inject_code {
  INJECT_DONE = 0,      /* it is back, and the new thread has begun */
  INJECT_ERROR = 1,     /* `error` is the errno of what stands in `at` */
  INJECT_NO_STOP = 2,   /* it does not stop: in the kernel, without an end */
  INJECT_AVOIDED = 3,   /* it is where it must not be disturbed: `pc` */
  INJECT_SIGNAL = 4,    /* inside a signal handler, or about to be */
  INJECT_ODD = 5,       /* 32-bit code, a restartable sequence, the room is taken */
  INJECT_ABANDONED = 6, /* it waited for something in pthread_create; it was put back */
  INJECT_REFUSED = 7,   /* pthread_create, or the mapping before it, failed: `error` */
  INJECT_GONE = 8,      /* thread or process ended meanwhile */
};

struct inject_range {
  uint64_t from, to;
};

/* Addresses are the target's. */
struct inject_plan {
  int32_t pid, tid;
  int32_t lock; /* a thread to hold for as long as this takes, so that no two injectors come at once; 0 = none */
  uint32_t n_avoid;
  uint64_t create, self, detach, open, symbol, error, errno_of; /* pthread_create, pthread_self, ..., dlopen */
  uint64_t room;                                                /* INJECT_ROOM zero bytes that can be executed */
  uint64_t control;                                             /* where struct seg_control is to be: unmapped yet */
  uint64_t restorer;   /* where signal handlers of libc return to; 0 = unknown */
  uint32_t stop_us;    /* how long to wait until the thread stops */
  uint32_t blocked_us; /* how long it may wait inside pthread_create */
  uint32_t back_us;    /* until when it has to be back, if it does not wait */
  uint32_t reserved;
  struct inject_range avoid[32];
  char path[320], entry[64];
};

struct inject_result {
  int32_t code, error; /* inject_code */
  uint64_t pc;
  uint64_t stopped_ns; /* while the thread was stopped, the longest time at a stretch */
  uint64_t away_ns;    /* from its stop until it was back */
  char at[64];
};

/* 0, or -errno where not even a thread could be made. Takes at most stop_us + back_us, and a few milliseconds. */
int inject__try(const struct inject_plan *plan, struct inject_result *result);
/* With what the code begins that an injector leaves behind when it is killed; INJECT_MARK bytes. */
const uint8_t *inject__mark(void);
#endif
