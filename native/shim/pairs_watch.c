// SPDX-License-Identifier: Apache-2.0
/* A thread that asks the events, five times a second. It has to be one of its own: in a block the program makes no call
 * in which it could be asked. It tells only of operations that are older than a second, so that of a job that ticks on
 * nothing is written. */
#define _GNU_SOURCE
#include "system.h"
#include <pthread.h>
#include <signal.h>
#include <sys/prctl.h>

#include "gpu.h"
#include "pairs.h"

#if defined(__x86_64__)
#define OLDEST "GLIBC_2.2.5"
#else
#define OLDEST "GLIBC_2.17"
#endif
__asm__(".symver pthread_create,pthread_create@" OLDEST);
__asm__(".symver pthread_attr_init,pthread_attr_init@" OLDEST);
__asm__(".symver pthread_attr_destroy,pthread_attr_destroy@" OLDEST);
__asm__(".symver pthread_attr_setstacksize,pthread_attr_setstacksize@" OLDEST);
__asm__(".symver pthread_attr_setdetachstate,pthread_attr_setdetachstate@" OLDEST);

void *seg_libc(const char *name);

enum {
  TICK_NS = PAIR_TICK_NS,
  OLD_NS = PAIR_OLD_NS,
  STACK = 256 << 10,
  MOST_TOLD = 8, /* of the unfinished ones of a communicator: what stands first decides */
  RATE = PAIR_RATE,
  MOST_SKIPS = 16,
  TRIES = 1000,
  EXIT_MS = 100,
  RELAXED = 2, /* CU_STREAM_CAPTURE_MODE_RELAXED */
  SIGNAL_BYTES = 8,
};
/* What glibc itself needs to be heard: 32 cancels threads, 33 changes the user of all of them. */
#define ALL_SIGNALS (~(1ull << 31 | 1ull << 32))

uint64_t seg_pair_now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

bool seg_pair_lock(_Atomic uint32_t *lock) {
  return !atomic_exchange_explicit(lock, 1, memory_order_acquire);
}

void seg_pair_unlock(_Atomic uint32_t *lock) {
  atomic_store_explicit(lock, 0, memory_order_release);
}

static void sleep_ns(long ns) {
  struct timespec t = {.tv_nsec = ns};
  syscall(SYS_nanosleep, &t, NULL);
}

/* Telling. */

static void tell(const struct pair_comm *c, struct pair_name name, uint8_t kind) {
  struct seg_vital v = {.ts = seg_ticks(), .hook = name.hook, .kind = kind, .n = name.n};
  v.a[name.word % 8] = atomic_load_explicit(&c->comm, memory_order_relaxed);
  if (v.a[name.word % 8] > PAIR_GONE) seg_emit_vital(&v);
}

static void tell_of(const struct pair_comm *c, struct pair *p, uint8_t bit, uint8_t kind) {
  if (p->told & bit) return;
  p->told |= bit;
  tell(c, p->name, kind);
}

static struct pair_last *last_on(struct pair_comm *c, uint64_t stream) {
  struct pair_last *oldest = &c->last[0];
  for (int i = 0; i < PAIR_STREAMS; i++) {
    struct pair_last *l = &c->last[i];
    if (!l->name.hook || l->stream == stream) return l;
    if (l->issued_ns < oldest->issued_ns) oldest = l;
  }
  return oldest;
}

static void ended(struct pair_comm *c, struct pair *p) {
  if (p->told) {
    tell_of(c, p, PAIR_STARTED, WIRE_STARTED);
    tell_of(c, p, PAIR_FINISHED, WIRE_FINISHED);
  }
  *last_on(c, p->stream) = (struct pair_last){p->name, p->told & PAIR_FINISHED, p->stream, p->issued_ns};
}

/* Looking. */

/* Of a job that ticks on mostly the newest has ended, and with it all of its stream. False: the context has failed. */
static bool take_ended(struct pair_comm *c, const struct pair_driver *d) {
  uint64_t head = atomic_load_explicit(&c->head, memory_order_acquire), tail = c->tail;
  const struct pair *newest = &c->ring[(head - 1) % PAIR_ROOM];
  bool has_newest = !d->query(newest->done);
  for (; tail != head; tail++) {
    struct pair *p = &c->ring[tail % PAIR_ROOM];
    int status = has_newest && p->stream == newest->stream ? 0 : d->query(p->done);
    if (status == PAIR_NOT_READY) break;
    if (status) return false;
    ended(c, p);
    atomic_store_explicit(&c->tail, tail + 1, memory_order_release);
  }
  return true;
}

/* Only the first can have begun: the others stand behind it, whatever their streams say. */
static void tell_unfinished(struct pair_comm *c, const struct pair_driver *d, uint64_t now_ns) {
  uint64_t head = atomic_load_explicit(&c->head, memory_order_acquire), tail = c->tail;
  for (uint64_t i = tail; i != head && i - tail < MOST_TOLD; i++) {
    struct pair *p = &c->ring[i % PAIR_ROOM];
    if (now_ns - p->issued_ns < OLD_NS) break;
    tell_of(c, p, PAIR_QUEUED, WIRE_QUEUED);
    if (i == tail && !(p->told & PAIR_STARTED) && !d->query(p->begin)) tell_of(c, p, PAIR_STARTED, WIRE_STARTED);
  }
}

/* That the newest one has ended says that all before it have: what stands still then, stands behind it. */
static void tell_last(struct pair_comm *c, uint64_t now_ns) {
  for (int i = 0; i < PAIR_STREAMS; i++) {
    struct pair_last *l = &c->last[i];
    if (!l->name.hook || l->told || now_ns - l->issued_ns < OLD_NS) continue;
    l->told = 1;
    tell(c, l->name, WIRE_FINISHED);
  }
}

/* All have a pair up to RATE, then every 2nd, 4th, ... by their number, which is the same on all ranks. */
static void pace(struct pair_comm *c, uint64_t passed_ns) {
  uint64_t units = atomic_load_explicit(&c->units, memory_order_relaxed), fresh = units - c->counted;
  uint32_t skips = atomic_load_explicit(&c->skips, memory_order_relaxed);
  c->counted = units;
  uint64_t rate = passed_ns ? fresh * 1000000000u / passed_ns : 0;
  while (skips < MOST_SKIPS && rate >> skips > RATE) skips++;
  if (skips && rate >> (skips - 1) < RATE * 3 / 4) skips--;
  atomic_store_explicit(&c->skips, skips, memory_order_relaxed);
}

/* Without this mode a query would break a capture that another thread makes at this moment. */
static bool is_harmless(const struct pair_comm *c, const struct pair_driver *d) {
  static bool is_relaxed;
  int mode = RELAXED;
  if (d->set_current(c->context)) return false;
  if (!is_relaxed) is_relaxed = !d->capture_mode(&mode);
  return is_relaxed;
}

static void look(struct pair_comm *c, const struct pair_driver *d, uint64_t now_ns, uint64_t passed_ns) {
  if (atomic_load_explicit(&c->comm, memory_order_acquire) <= PAIR_GONE || !seg_pair_lock(&c->watcher)) return;
  bool is_there = atomic_load_explicit(&c->comm, memory_order_acquire) > PAIR_GONE && !c->is_alone;
  if (is_there && c->tail != c->head && is_harmless(c, d)) {
    if (!take_ended(c, d)) atomic_store(&c->comm, PAIR_GONE), is_there = false;
    else tell_unfinished(c, d, now_ns);
  }
  if (is_there) {
    tell_last(c, now_ns);
    pace(c, passed_ns);
  }
  seg_pair_unlock(&c->watcher);
}

static void *watch(void *argument) {
  struct pair_state *s = argument;
  syscall(SYS_prctl, PR_SET_NAME, "stallscope");
  const struct pair_driver *d = seg_pair_driver();
  uint64_t before_ns = seg_pair_now_ns();
  while (!atomic_load(&s->is_stopping)) {
    sleep_ns(TICK_NS);
    uint64_t now_ns = seg_pair_now_ns();
    atomic_store(&s->is_asking, 1);
    for (uint32_t i = 0, end = atomic_load(&s->used); i < end && !atomic_load(&s->is_stopping); i++)
      look(&s->comms[i], d, now_ns, now_ns - before_ns);
    atomic_store(&s->is_asking, 0);
    before_ns = now_ns;
  }
  return NULL;
}

static struct pair_state *watched;

/* The driver goes away while a program ends, and whoever asks it then may crash. */
static void stop(void *nothing) {
  struct pair_state *s = watched;
  (void)nothing; /* sanitizers call handlers of the program's without their argument */
  atomic_store(&s->is_alive, 0);
  atomic_store(&s->is_stopping, 1);
  for (int i = 0; i < EXIT_MS && atomic_load(&s->is_asking); i++) sleep_ns(1000000);
}

static bool stop_at_end(struct pair_state *s) {
  int (*at_end)(void (*)(void *), void *, void *);
  *(void **)&at_end = seg_libc("__cxa_atexit");
  watched = s;
  return at_end && !at_end(stop, NULL, NULL);
}

/* stack 0: as large as the program has them. */
static bool create(struct pair_state *s, size_t stack) {
  pthread_attr_t attributes;
  pthread_t thread;
  if (pthread_attr_init(&attributes)) return false;
  pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
  int error = stack ? pthread_attr_setstacksize(&attributes, stack) : 0;
  if (!error) error = pthread_create(&thread, &attributes, watch, s);
  pthread_attr_destroy(&attributes);
  return !error;
}

/* It inherits that no signal of the program's is delivered to it. */
bool seg_pairs_watch(struct pair_state *s) {
  uint64_t all = ALL_SIGNALS, before = 0;
  if (!stop_at_end(s) || syscall(SYS_rt_sigprocmask, SIG_SETMASK, &all, &before, SIGNAL_BYTES)) return false;
  bool made = create(s, STACK) || create(s, 0); /* what libraries keep for each thread may not fit into a small one */
  syscall(SYS_rt_sigprocmask, SIG_SETMASK, &before, NULL, SIGNAL_BYTES);
  return made;
}
