/* SPDX-License-Identifier: Apache-2.0
 *
 * Pairs of CUDA events round an operation of NCCL: the first is reached when the GPU comes to it, the second when it has
 * ended. Where NCCL itself tells nothing, and where the user asks for it. */
#ifndef STALLSCOPE_PAIRS_H
#define STALLSCOPE_PAIRS_H
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#ifndef PAIR_TICK_NS /* tests have their own */
#define PAIR_TICK_NS 200000000
#define PAIR_OLD_NS 1000000000
#define PAIR_RATE 1000 /* pairs a second and communicator */
#endif

enum {
  PAIR_COMMS = 128,
  PAIR_ROOM = 512, /* of a communicator, a power of two */
  PAIR_STREAMS = 4,
  PAIR_GONE = 1, /* instead of an address: its events are left alone for ever */
  PAIR_NOT_READY = 600,
};

/* What was told of it: bits. */
enum { PAIR_QUEUED = 1, PAIR_STARTED = 2, PAIR_FINISHED = 4 };

/* An operation, as its records have it; the first one of a group speaks for all. */
struct pair_name {
  uint32_t n;
  uint16_t hook; /* 0 = none */
  uint16_t word; /* of its arguments: the communicator */
};

struct pair {
  void *begin, *done; /* events; NULL = not made yet */
  uint64_t issued_ns, stream;
  struct pair_name name;
  uint32_t told;
};

/* The newest one that has ended on a stream. */
struct pair_last {
  struct pair_name name;
  uint32_t told; /* not 0: that it has ended */
  uint64_t stream, issued_ns;
};

/* One communicator. Its kernels run in the order of their launches, on whatever streams: so pairs end in their order.
 * The thread that calls NCCL adds at the head, the watcher takes from the tail. */
struct pair_comm {
  _Atomic uint64_t comm;              /* its address; 0 = free */
  _Atomic uint32_t producer, watcher; /* locks; nobody waits for them, but for the end of a communicator */
  _Atomic uint64_t head, tail;
  _Atomic uint64_t units; /* operations or groups so far, with a pair or without */
  _Atomic uint32_t skips; /* every 2^skips-th has a pair */
  void *context;
  struct pair *ring;
  bool is_alone;    /* it has one rank, and waits for nobody; or nothing could be learnt of it */
  uint64_t counted; /* from here on the watcher's own: units at its last look */
  struct pair_last last[PAIR_STREAMS];
};

/* In pages that a fork empties: in the child nothing of it is there. */
struct pair_state {
  _Atomic uint32_t is_alive, is_stopping, is_asking; /* is_asking: the watcher is inside the driver */
  _Atomic uint32_t used, making;
  bool is_watched;      /* from here on under `making` */
  uint32_t refusals;    /* looks at communicators that told nothing */
  uint64_t turned_away; /* the communicator that came last when there was no place */
  struct pair_comm comms[PAIR_COMMS];
};

/* Functions of the driver, found without the loader; all or none. */
struct pair_driver {
  int (*record)(void *event, void *stream);
  int (*query)(void *event);
  int (*create)(void **event, unsigned flags);
  int (*destroy)(void *event);
  int (*is_capturing)(void *stream, int *status);
  int (*context_of)(void *stream, void **context);
  int (*current)(void **context);
  int (*set_current)(void *context);
  int (*push)(void *context);
  int (*pop)(void **context);
  int (*device)(int *device);
  int (*capture_mode)(int *mode);
};
const struct pair_driver *seg_pair_driver(void); /* pairs_driver.c; NULL = none */

/* pairs_watch.c */
bool seg_pairs_watch(struct pair_state *state); /* a thread begins; false: there is none */
bool seg_pair_lock(_Atomic uint32_t *lock);
void seg_pair_unlock(_Atomic uint32_t *lock);
uint64_t seg_pair_now_ns(void);
#endif
