// SPDX-License-Identifier: Apache-2.0
/* Round what a rank puts on a stream (an operation, or a group with its end) the calling thread records two events of our
 * own: one before the first of its calls that can launch, one behind the last. It never asks them: a query here could
 * break a capture that another thread makes. Nothing waits; what is in the way is counted and goes without a pair.
 *
 *   wrapper  seg_pairs_entered    a pair from the communicator's ring; its first event
 *   NCCL     launches
 *   wrapper  seg_pairs_returned   its second event; from now on the watcher sees it
 *   watcher  pairs_watch.c        asks, tells, and gives it back to the ring */
#define _GNU_SOURCE
#include "pairs.h"

#include <errno.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "gpu.h"
#include "shim.h"

enum {
  WIPE_ON_FORK = 18,
  NO_TIMES = 2,     /* CU_EVENT_DISABLE_TIMING */
  LAST_SPECIAL = 2, /* stream handles up to here stand for a stream of the current context */
  MOST_PARTS = 8,
  MOST_REFUSALS = 256,
  TRIES = 1000,
  FIRST_COLLECTIVE = 300,
  LAST_COLLECTIVE = 316,
  SEND = 330,
  RECV = 331,
  GROUP_START = 340,
  GROUP_END = 341,
  DESTROY = 359,
  ABORT = 360,
};

/* What a thread's call, or its group, puts on one communicator. */
struct part {
  struct pair_comm *comm;
  uint64_t stream;
  struct pair_name name;
  bool is_split; /* over streams: the events of one would say nothing of the others */
  bool has_pair; /* its first event is recorded, and `producer` is ours */
};

static struct pair_state *_Atomic state;
static _Atomic bool is_wanted;
static __thread struct part parts[MOST_PARTS];
static __thread uint32_t n_parts;
static __thread bool is_inside; /* a call that may launch is under way */

/* The beginning and the end. */

/* Where the kernel does not empty the pages. */
static void forget(void) {
  atomic_store(&state, NULL);
  n_parts = is_inside = 0;
}

void seg_pairs_open(void) {
  struct pair_state *s = mmap(NULL, sizeof(*s), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (s == MAP_FAILED) return;
  madvise(s, sizeof(*s), WIPE_ON_FORK);
  pthread_atfork(NULL, NULL, forget);
  atomic_store(&s->is_alive, 1);
  atomic_store(&state, s);
  atomic_store(&is_wanted, true);
}

static struct pair_state *alive(void) {
  struct pair_state *s = atomic_load_explicit(&state, memory_order_acquire);
  return s && atomic_load_explicit(&s->is_alive, memory_order_relaxed) ? s : NULL;
}

/* The driver may be loaded later than a unique id is made. */
uint32_t seg_pairs_state(void) {
  if (!alive()) return SEG_GPU_NO_EVENTS;
  return seg_pair_driver() ? SEG_GPU_EVENTS : SEG_GPU_UNTRIED;
}

static bool fail(struct pair_state *s) {
  atomic_store(&s->is_alive, 0);
  if (seg_proc && seg_proc->header) __atomic_store_n(&seg_proc->header->gpu, SEG_GPU_NO_EVENTS, __ATOMIC_RELAXED);
  return false;
}

/* Communicators. */

static int ask(const void *real, const char *what, uint64_t comm) {
  int answer = -1;
  int (*function)(uint64_t, int *);
  *(void **)&function = seg_symbol_near(real, what);
  return function && function(comm, &answer) == 0 ? answer : -1;
}

/* The context of a stream; NULL: unknown, or of another device than the communicator's. */
static void *context_for(const struct pair_driver *d, uint64_t stream, int device) {
  void *context = NULL, *popped;
  int found = -1;
  int error = stream <= LAST_SPECIAL ? d->current(&context) : d->context_of((void *)(uintptr_t)stream, &context);
  if (error || !context || d->push(context)) return NULL;
  if (d->device(&found)) found = -1;
  d->pop(&popped);
  return found == device ? context : NULL;
}

static bool fit(struct pair_comm *c, uint64_t comm, uint64_t stream, const void *real) {
  int ranks = ask(real, "ncclCommCount", comm), device = ask(real, "ncclCommCuDevice", comm);
  void *context = ranks > 0 ? context_for(seg_pair_driver(), stream, device) : NULL;
  if (!context) return false;
  c->is_alone = ranks == 1;
  if (!c->is_alone && !c->ring) {
    void *ring = mmap(NULL, PAIR_ROOM * sizeof(*c->ring), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (ring == MAP_FAILED) return false;
    c->ring = ring;
  }
  c->context = context;
  return true;
}

/* It is looked at again with its next operation: it may not be ready yet. But not for ever. */
static bool give_up(struct pair_state *s, struct pair_comm *c) {
  if (s->refusals++ < MOST_REFUSALS) return false;
  seg_gpu_count(SEG_GPU_UNBOUND);
  return c->is_alone = true;
}

static struct pair_comm *place_for(struct pair_state *s, uint64_t comm) {
  uint32_t used = atomic_load(&s->used);
  for (uint32_t i = 0; i < used; i++)
    if (!atomic_load(&s->comms[i].comm)) return &s->comms[i];
  if (used < PAIR_COMMS) return &s->comms[used];
  if (s->turned_away != comm) seg_gpu_count(SEG_GPU_UNBOUND);
  s->turned_away = comm;
  return NULL;
}

/* What an operation needs that is the first of all. */
static bool is_ready(struct pair_state *s) {
  if (!s->is_watched) s->is_watched = seg_pair_driver() && seg_pairs_watch(s);
  return s->is_watched || fail(s);
}

static struct pair_comm *make(struct pair_state *s, uint64_t comm, uint64_t stream, const void *real) {
  if (!seg_pair_lock(&s->making)) return NULL;
  struct pair_comm *c = is_ready(s) ? place_for(s, comm) : NULL;
  if (c && (fit(c, comm, stream, real) || give_up(s, c))) atomic_store_explicit(&c->comm, comm, memory_order_release);
  else c = NULL;
  if (c && c == &s->comms[atomic_load(&s->used)]) atomic_fetch_add(&s->used, 1);
  seg_pair_unlock(&s->making);
  return c;
}

static struct pair_comm *known(struct pair_state *s, uint64_t comm) {
  for (uint32_t i = 0, end = atomic_load_explicit(&s->used, memory_order_acquire); i < end; i++)
    if (atomic_load_explicit(&s->comms[i].comm, memory_order_relaxed) == comm) return &s->comms[i];
  return NULL;
}

/* For the end of a communicator only. */
static bool lock_both(struct pair_comm *c) {
  if (!seg_pair_lock(&c->producer)) return false;
  for (int i = 0; i < TRIES; i++) {
    if (seg_pair_lock(&c->watcher)) return true;
    syscall(SYS_sched_yield);
  }
  return false;
}

static void drop_events(struct pair_comm *c) {
  const struct pair_driver *d = seg_pair_driver();
  void *popped;
  if (!c->ring || d->push(c->context)) return;
  for (uint32_t i = 0; i < PAIR_ROOM; i++) {
    struct pair *p = &c->ring[i];
    if (p->begin) d->destroy(p->begin);
    if (p->done) d->destroy(p->done);
    *p = (struct pair){.begin = NULL};
  }
  d->pop(&popped);
}

/* Before its context can be reset. After an abort, or where one is in the way, its events and its place are left alone:
 * they may be in use. */
static void drop(struct pair_state *s, uint64_t comm, bool is_abort) {
  struct pair_comm *c = known(s, comm);
  if (!c) return;
  atomic_store(&c->comm, PAIR_GONE);
  if (is_abort || !lock_both(c)) return;
  drop_events(c);
  c->counted = 0;
  for (int i = 0; i < PAIR_STREAMS; i++) c->last[i] = (struct pair_last){.told = 0};
  atomic_store(&c->head, 0);
  atomic_store(&c->tail, 0);
  atomic_store(&c->units, 0);
  atomic_store(&c->skips, 0);
  seg_pair_unlock(&c->watcher);
  seg_pair_unlock(&c->producer);
  atomic_store(&c->comm, 0);
}

/* Events. */

/* A record on a stream that captures would become a node of the program's graph; one on a special stream goes to the
 * current context. What is not known is no. */
static bool takes_records(const struct pair_driver *d, const struct pair_comm *c, uint64_t stream) {
  int status = 1;
  void *context = NULL;
  if (stream <= LAST_SPECIAL && (d->current(&context) || context != c->context)) return false;
  return !d->is_capturing((void *)(uintptr_t)stream, &status) && !status;
}

static bool has_events(const struct pair_driver *d, const struct pair_comm *c, struct pair *p) {
  void *popped;
  if (p->done) return true;
  if (d->push(c->context)) return false;
  bool made = (p->begin || !d->create(&p->begin, NO_TIMES)) && !d->create(&p->done, NO_TIMES);
  d->pop(&popped);
  return made;
}

/* Under `producer`. */
static bool begin(struct pair_comm *c, uint64_t stream) {
  const struct pair_driver *d = seg_pair_driver();
  uint64_t unit = atomic_fetch_add_explicit(&c->units, 1, memory_order_relaxed);
  uint64_t head = atomic_load_explicit(&c->head, memory_order_relaxed);
  if (unit & ((1ull << atomic_load_explicit(&c->skips, memory_order_relaxed)) - 1)) return false;
  if (head - atomic_load_explicit(&c->tail, memory_order_acquire) >= PAIR_ROOM) {
    seg_gpu_count(SEG_GPU_EXHAUSTED);
    return false;
  }
  struct pair *p = &c->ring[head % PAIR_ROOM];
  if (!takes_records(d, c, stream)) return false;
  bool is_recorded = has_events(d, c, p) && !d->record(p->begin, (void *)(uintptr_t)stream);
  if (!is_recorded) seg_gpu_count(SEG_GPU_UNTOLD);
  return is_recorded;
}

static void begin_part(struct part *part) {
  struct pair_comm *c = part->comm;
  if (part->is_split || c->is_alone || atomic_load(&c->comm) <= PAIR_GONE) return;
  if (!seg_pair_lock(&c->producer)) {
    seg_gpu_count(SEG_GPU_BUSY);
    return;
  }
  part->has_pair = begin(c, part->stream);
  if (!part->has_pair) seg_pair_unlock(&c->producer);
}

/* Where NCCL launches by another thread (status "in progress") the second event would stand before the kernel. */
static void end_part(struct part *part, bool is_launched) {
  struct pair_comm *c = part->comm;
  if (!part->has_pair) return;
  uint64_t head = atomic_load_explicit(&c->head, memory_order_relaxed);
  struct pair *p = &c->ring[head % PAIR_ROOM];
  if (is_launched && !seg_pair_driver()->record(p->done, (void *)(uintptr_t)part->stream)) {
    p->issued_ns = seg_pair_now_ns();
    p->stream = part->stream;
    p->name = part->name;
    p->told = 0;
    atomic_store_explicit(&c->head, head + 1, memory_order_release);
  } else seg_gpu_count(SEG_GPU_UNTOLD);
  seg_pair_unlock(&c->producer);
}

/* Calls. */

static void add_part(struct pair_comm *c, uint64_t stream, struct pair_name name) {
  for (uint32_t i = 0; i < n_parts; i++) {
    if (parts[i].comm != c) continue;
    parts[i].is_split |= parts[i].stream != stream;
    return;
  }
  if (n_parts == MOST_PARTS) seg_gpu_count(SEG_GPU_EXHAUSTED);
  else parts[n_parts++] = (struct part){.comm = c, .stream = stream, .name = name};
}

static void launches(void) {
  is_inside = true;
  for (uint32_t i = 0; i < n_parts; i++) begin_part(&parts[i]);
}

static void close_parts(bool is_launched) {
  for (uint32_t i = 0; i < n_parts; i++) end_part(&parts[i], is_launched);
  n_parts = is_inside = 0;
}

static bool is_operation(uint32_t hook) {
  return (hook >= FIRST_COLLECTIVE && hook <= LAST_COLLECTIVE) || hook == SEND || hook == RECV;
}

static void add(struct pair_state *s, const struct seg_nccl *k, const uint64_t *a, uint32_t n, const void *real) {
  uint32_t word = (k->cookie >> 40 & 15) - 1, count = k->count - 1u;
  bool is_transfer = k->hook == SEND || k->hook == RECV;
  if (word > 6 || count > 7 || !a[word] || (!a[count] && !is_transfer)) return;
  struct pair_comm *c = known(s, a[word]);
  if (!c) c = make(s, a[word], a[word + 1], real);
  if (c) add_part(c, a[word + 1], (struct pair_name){n, k->hook, (uint16_t)word});
}

/* Inside a group NCCL only takes notes: what counts is how its streams are when it ends. */
static void entered(struct pair_state *s, const struct seg_nccl *k, const uint64_t *a, uint32_t n, const void *real) {
  uint32_t depth = seg_gpu_depth();
  if (k->hook == DESTROY || k->hook == ABORT) drop(s, a[0], k->hook == ABORT);
  if (k->hook == GROUP_START && depth == 1) n_parts = 0;
  if (k->hook == GROUP_END && depth == 1) launches();
  if (!is_operation(k->hook)) return;
  if (!depth) n_parts = 0;
  add(s, k, a, n, real);
  if (!depth) launches();
}

void seg_pairs_entered(const struct seg_nccl *k, const uint64_t *a, uint32_t n, const void *real) {
  if (LIKELY(!atomic_load_explicit(&is_wanted, memory_order_relaxed))) return;
  struct pair_state *s = alive();
  if (!s) return;
  int kept = errno;
  if (is_inside) close_parts(false); /* a call that never returned: an exception, or longjmp, passed it */
  entered(s, k, a, n, real);
  errno = kept;
}

void seg_pairs_returned(const struct seg_nccl *k, int32_t status) {
  if (LIKELY(!is_inside) || seg_gpu_depth() || (k->hook != GROUP_END && !is_operation(k->hook))) return;
  int kept = errno;
  close_parts(!status && alive());
  errno = kept;
}
