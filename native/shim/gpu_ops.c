// SPDX-License-Identifier: Apache-2.0
/* NCCL tells of operations by its own names: a communicator is the context that the plugin gave it, an operation is its
 * function, its buffers and its peer, in the order in which NCCL launches. Inside a group that order is not the
 * program's; groups follow each other as they were called. Here the two come together:
 *
 *   wrapper  seg_gpu_entered   puts the call into its communicator's list of expected ones
 *   NCCL     seg_gpu_queued    takes the first one that fits; expected ones of earlier groups did not come and are dropped
 *   NCCL     seg_gpu_begun, seg_gpu_ended
 *
 * A communicator's context stands inside the communicator, at a distance from its beginning that is the same for all of
 * one libnccl: so its address tells which communicator it is. */
#define _GNU_SOURCE
#include "gpu_ops.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <sys/mman.h>

#include "gpu.h"
#include "shim.h"

enum {
  CONTEXTS = 256,
  SLOTS = 4096, /* a power of two */
  TRIES = 2000,
  LARGEST_COMM = 16 << 20,
  GROUP_START = 340,
  GROUP_END = 341,
  IN_PROGRESS = 7,    /* ncclInProgress: accepted */
  OWN_THREAD = 23100, /* NCCL from which on it has a thread for its profiler */
  TASK = 1,           /* kinds of names */
  KERNEL = 2,
};

/* An operation. state: ticket << 1 | begun; ended: ticket << 16 | channels that have. So a late event of an operation
 * whose place was taken by another one changes nothing. what: number | hook << 32 | channels << 48. */
struct slot {
  _Atomic uint64_t state, ended, what, comm;
  uint64_t batch; /* from here on: under the lock */
  struct seg_gpu_task task;
  bool queued;
};

/* What is told of an operation, read while its place may become another's. */
struct told {
  uint64_t what, comm;
};

struct context {
  _Atomic uintptr_t comm;    /* 0 = not known yet */
  _Atomic uintptr_t address; /* 0 = free */
  _Atomic uint32_t lock;
  int32_t nranks;
  uint64_t head, oldest; /* the newest ticket; no expected one is older than `oldest` */
  _Atomic uint64_t begun;
  struct slot *slots;
  uint32_t *keys; /* of expected ones, else 0: what a search reads */
};

static struct context contexts[CONTEXTS]; /* 0 is not used */
static _Atomic uint32_t used = 1, unbound;
static _Atomic uint32_t table_lock;
static _Atomic uintptr_t distance; /* from a communicator to its context; 0 = not known yet */
static _Atomic uint64_t batches = 1;
static _Atomic uint64_t figures[SEG_GPU_FIGURES];
static int (*is_capturing)(void *stream, int *status);
static __thread uint32_t group_depth __attribute__((tls_model("initial-exec")));
static __thread uint32_t group_transfers __attribute__((tls_model("initial-exec")));
static __thread uint32_t hushes __attribute__((tls_model("initial-exec"))); /* seg_gpu_hush(1) without -1 */
static __thread uint64_t group_batch __attribute__((tls_model("initial-exec")));

void seg_gpu_count(enum seg_gpu_figure which) {
  uint64_t now = atomic_fetch_add_explicit(&figures[which], 1, memory_order_relaxed) + 1;
  struct seg_header *header = seg_proc ? seg_proc->header : NULL;
  if (header) __atomic_store_n(&header->gpu_untold[which], now, __ATOMIC_RELAXED);
}

/* Never for long: its holders run a few instructions, unless they are preempted, or a signal came on top of one. */
static bool take(_Atomic uint32_t *lock) {
  for (int i = 0; i < TRIES; i++)
    if (!atomic_load_explicit(lock, memory_order_relaxed) && !atomic_exchange_explicit(lock, 1, memory_order_acquire))
      return true;
  seg_gpu_count(SEG_GPU_BUSY);
  return false;
}

static void give(_Atomic uint32_t *lock) {
  atomic_store_explicit(lock, 0, memory_order_release);
}

/* Calls. */

struct shape { /* places of the words */
  uint8_t function, recv, peer, count, comm;
};

static struct shape shape_of(uint32_t hook) {
  switch (hook) {
  case 300:
  case 309:
    return (struct shape){SEG_GPU_ALL_REDUCE, 1, SEG_NO_WORD, 2, 5};
  case 301:
  case 310:
    return (struct shape){SEG_GPU_REDUCE_SCATTER, 1, SEG_NO_WORD, 2, 5};
  case 302:
  case 311:
    return (struct shape){SEG_GPU_REDUCE, 1, SEG_NO_WORD, 2, 6};
  case 303:
  case 312:
    return (struct shape){SEG_GPU_BROADCAST, 1, SEG_NO_WORD, 2, 5};
  case 304:
    return (struct shape){SEG_GPU_BROADCAST, 0, SEG_NO_WORD, 1, 4};
  case 305:
  case 313:
    return (struct shape){SEG_GPU_ALL_GATHER, 1, SEG_NO_WORD, 2, 4};
  case 330:
    return (struct shape){SEG_GPU_SEND, SEG_NO_WORD, 3, 1, 4};
  case 331:
    return (struct shape){SEG_GPU_RECV, SEG_NO_WORD, 3, 1, 4};
  default:
    return (struct shape){SEG_GPU_NONE, 0, 0, 0, 0};
  }
}

static struct seg_gpu_task task_of(struct shape s, const uint64_t *a) {
  struct seg_gpu_task task = {.send = (const void *)(uintptr_t)a[0], .peer = -1, .function = s.function};
  if (s.recv != SEG_NO_WORD) task.recv = (const void *)(uintptr_t)a[s.recv];
  if (s.peer != SEG_NO_WORD) task.peer = (int32_t)a[s.peer];
  return task;
}

static bool same(const struct seg_gpu_task *a, const struct seg_gpu_task *b) {
  return a->function == b->function && a->send == b->send && a->recv == b->recv && a->peer == b->peer;
}

/* Up to 2.30 kernels are told through NCCL's proxy, which has room for the channels of one transfer in a group and fails
 * when more ask for it (NVIDIA/nccl#2039): an all-to-all ends the program. The first one speaks for all, since a group is
 * one kernel. */
static bool is_unbearable(uint32_t hook) {
  uint32_t version = seg_gpu_nccl_version();
  if (!version || version >= OWN_THREAD) return false;
  bool is_many = (hook >= 306 && hook <= 308) || (hook >= 314 && hook <= 316);
  return is_many || ((hook == 330 || hook == 331) && group_depth && group_transfers++);
}

static uint32_t key_of(const struct seg_gpu_task *task) {
  uint64_t x = (uintptr_t)task->send * 0x9e3779b97f4a7c15ull ^ (uintptr_t)task->recv;
  x = (x ^ (uint32_t)task->peer ^ (uint64_t)task->function << 56) * 0xc2b2ae3d27d4eb4full;
  return (uint32_t)(x >> 32) | 1;
}

/* Contexts and communicators. */

static bool map_slots(struct context *c) {
  if (c->slots) return true;
  size_t bytes = SLOTS * (sizeof(*c->slots) + sizeof(*c->keys));
  void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return false;
  c->slots = memory;
  c->keys = (uint32_t *)(c->slots + SLOTS);
  return true;
}

static void release(struct context *c) {
  if (!c->comm) atomic_fetch_sub(&unbound, 1);
  atomic_store(&c->comm, 0);
  atomic_store(&c->address, 0);
}

/* The place of a communicator that was freed without a word, or a free one. */
static uint32_t place_for(uintptr_t address) {
  uint32_t free = 0, end = used;
  for (uint32_t i = 1; i < end; i++) {
    if (contexts[i].address == address) {
      release(&contexts[i]);
      return i;
    }
    if (!contexts[i].address && !free) free = i;
  }
  return free ? free : end < CONTEXTS ? end : 0;
}

static void find_driver(void) {
  if (is_capturing) return;
  *(void **)&is_capturing = seg_symbol_of("libcuda.so.1", "cuStreamIsCapturing");
}

static uint32_t make(uintptr_t address, int32_t nranks) {
  uint32_t i = place_for(address);
  struct context *c = &contexts[i];
  if (!i || !map_slots(c)) return 0;
  for (uint64_t t = c->oldest; t <= c->head; t++) c->keys[t % SLOTS] = 0;
  c->nranks = nranks;
  c->oldest = c->head + 1; /* tickets go on: late events of the communicator before have other ones */
  atomic_store(&c->begun, c->head);
  atomic_fetch_add(&unbound, 1);
  atomic_store(&c->address, address);
  if (i == used) atomic_store(&used, i + 1);
  return i;
}

uint32_t seg_gpu_context_new(const void *address, int32_t nranks) {
  find_driver();
  if (!take(&table_lock)) return 0;
  uint32_t i = make((uintptr_t)address, nranks);
  give(&table_lock);
  if (!i) seg_gpu_count(SEG_GPU_UNBOUND);
  return i;
}

void seg_gpu_context_free(uint32_t context) {
  if (!context || context >= used || !take(&table_lock)) return;
  if (contexts[context].address) release(&contexts[context]);
  give(&table_lock);
}

/* The first one tells the distance: memory of another communicator begins behind the whole of this one, so the nearest
 * context is its own. */
static uint32_t context_behind(uintptr_t comm) {
  uintptr_t nearest = distance ? distance : LARGEST_COMM;
  uint32_t found = 0;
  for (uint32_t i = 1, end = used; i < end; i++) {
    uintptr_t address = contexts[i].address, away = address - comm;
    if (contexts[i].comm || address <= comm) continue;
    if (distance ? away != distance : away > nearest) continue;
    nearest = away;
    found = i;
  }
  if (found) atomic_store(&distance, nearest);
  return found;
}

static struct context *bind(uintptr_t comm) {
  if (!atomic_load_explicit(&unbound, memory_order_relaxed) || !take(&table_lock)) return NULL;
  uint32_t i = context_behind(comm);
  if (i) {
    atomic_store(&contexts[i].comm, comm);
    atomic_fetch_sub(&unbound, 1);
  }
  give(&table_lock);
  return i ? &contexts[i] : NULL;
}

static struct context *context_of(uintptr_t comm) {
  if (!comm) return NULL;
  for (uint32_t i = 1, end = atomic_load_explicit(&used, memory_order_acquire); i < end; i++)
    if (atomic_load_explicit(&contexts[i].comm, memory_order_relaxed) == comm) return &contexts[i];
  return bind(comm);
}

/* What is expected. */

static void drop_oldest(struct context *c) {
  if (c->keys[c->oldest % SLOTS]) seg_gpu_count(SEG_GPU_UNTOLD);
  c->keys[c->oldest++ % SLOTS] = 0;
}

/* Its place is not taken from an operation that still has to begin: that it did not would be believed for ever. What
 * was queued before one that began has begun, too, or NCCL does not tell of its kind. */
static bool may_take(const struct context *c, const struct slot *s) {
  uint64_t state = s->state;
  return !s->queued || state & 1 || state >> 1 < c->begun;
}

static void expect(struct context *c, const struct seg_gpu_task *task, uint32_t hook, uint32_t n) {
  if (!take(&c->lock)) return;
  uint64_t ticket = c->head + 1;
  struct slot *s = &c->slots[ticket % SLOTS];
  if (!may_take(c, s)) {
    seg_gpu_count(SEG_GPU_EXHAUSTED);
    give(&c->lock);
    return;
  }
  while (c->oldest + SLOTS <= ticket) drop_oldest(c);
  atomic_store(&s->state, 0);
  atomic_store(&s->ended, 0);
  s->queued = false;
  s->batch = group_batch;
  s->task = *task;
  atomic_store(&s->comm, c->comm);
  atomic_store(&s->what, n | (uint64_t)hook << 32);
  atomic_store(&s->ended, ticket << 16);
  atomic_store(&s->state, ticket << 1);
  c->keys[ticket % SLOTS] = key_of(task);
  c->head = ticket;
  give(&c->lock);
}

/* Work of a stream that captures is queued when the graph is launched, by other calls, any number of times. */
static bool captures(uint64_t stream) {
  int status = 0;
  return is_capturing && (is_capturing((void *)(uintptr_t)stream, &status) || status);
}

void seg_gpu_entered(uint32_t hook, const uint64_t *a, uint32_t n) {
  if (hook == GROUP_START && group_depth++) return;
  if (LIKELY(atomic_load_explicit(&used, memory_order_relaxed) == 1)) return;
  if (hook == GROUP_START) {
    group_batch = atomic_fetch_add(&batches, 1);
    group_transfers = 0;
  }
  if (is_unbearable(hook)) {
    hushes++;
    seg_gpu_hush(1);
    return;
  }
  struct shape s = shape_of(hook);
  if (!s.function) return;
  if (!group_depth) group_batch = atomic_fetch_add(&batches, 1);
  struct context *c = context_of(a[s.comm]);
  bool is_transfer = s.peer != SEG_NO_WORD;
  if (!c || c->nranks == 1 || (!a[s.count] && !is_transfer) || captures(a[s.comm + 1])) return;
  struct seg_gpu_task task = task_of(s, a);
  expect(c, &task, hook, n);
}

/* NCCL did not accept them: one, or all of a group. */
static void forget(struct context *c, uint64_t batch, uint32_t hook, uint32_t n) {
  if (!take(&c->lock)) return;
  for (uint64_t t = c->head; t >= c->oldest && t; t--) {
    struct slot *s = &c->slots[t % SLOTS];
    if (s->batch != batch) break;
    if (!hook || s->what == (n | (uint64_t)hook << 32)) c->keys[t % SLOTS] = 0;
  }
  give(&c->lock);
}

uint32_t seg_gpu_depth(void) {
  return group_depth;
}

void seg_gpu_returned(uint32_t hook, const uint64_t *a, uint32_t n, int32_t status) {
  if (hook == GROUP_END && group_depth) group_depth--;
  uint32_t end = atomic_load_explicit(&used, memory_order_relaxed);
  if (UNLIKELY(hushes)) {
    hushes--;
    seg_gpu_hush(-1);
    return;
  }
  if (LIKELY(end == 1 || !status || status == IN_PROGRESS)) return;
  struct shape s = shape_of(hook);
  if (hook == GROUP_END && !group_depth) {
    for (uint32_t i = 1; i < end; i++)
      if (contexts[i].comm) forget(&contexts[i], group_batch, 0, 0);
  } else if (s.function) {
    struct context *c = context_of(a[s.comm]);
    if (c) forget(c, group_batch, hook, n);
  }
}

/* What NCCL tells. */

static struct told told_of(const struct slot *s) {
  return (struct told){s->what, s->comm};
}

static void tell(struct told told, uint8_t kind) {
  uint16_t hook = (uint16_t)(told.what >> 32);
  struct seg_vital v = {.ts = seg_ticks(), .hook = hook, .kind = kind, .flags = WIRE_BY_PLUGIN};
  v.n = (uint32_t)told.what;
  v.a[shape_of(hook).comm] = told.comm;
  seg_emit_vital(&v);
}

static uint64_t find(const struct context *c, const struct seg_gpu_task *task) {
  uint32_t key = key_of(task);
  for (uint64_t t = c->oldest; t <= c->head; t++)
    if (c->keys[t % SLOTS] == key && same(&c->slots[t % SLOTS].task, task)) return t;
  return 0;
}

static uint64_t accept(struct context *c, const struct seg_gpu_task *task) {
  uint64_t ticket = find(c, task);
  if (!ticket) return 0;
  struct slot *s = &c->slots[ticket % SLOTS];
  c->keys[ticket % SLOTS] = 0;
  s->what |= (uint64_t)task->channels << 48;
  s->queued = true;
  while (c->oldest <= c->head && (!c->keys[c->oldest % SLOTS] || c->slots[c->oldest % SLOTS].batch < s->batch))
    drop_oldest(c);
  return ticket;
}

uint64_t seg_gpu_queued(uint32_t context, const struct seg_gpu_task *task) {
  if (!context || context >= used) return 0;
  struct context *c = &contexts[context];
  struct told told = {0, 0};
  if (!take(&c->lock)) return 0;
  uint64_t ticket = c->comm ? accept(c, task) : 0;
  if (ticket) told = told_of(&c->slots[ticket % SLOTS]);
  give(&c->lock);
  if (!ticket) seg_gpu_count(SEG_GPU_UNMATCHED);
  else tell(told, WIRE_QUEUED);
  return ticket ? ticket << 16 | context << 2 | TASK : 0;
}

static struct context *context_in(uint64_t name, uint64_t kind) {
  uint32_t i = (uint32_t)(name & 0xffff) >> 2;
  return (name & 3) == kind && name >> 16 && i && i < used ? &contexts[i] : NULL;
}

uint64_t seg_gpu_begun(uint64_t name) {
  struct context *c = context_in(name, TASK);
  if (!c) return 0;
  uint64_t ticket = name >> 16, fresh = ticket << 1;
  struct slot *s = &c->slots[ticket % SLOTS];
  struct told told = told_of(s);
  if (atomic_compare_exchange_strong(&s->state, &fresh, fresh | 1)) {
    if (ticket > c->begun) atomic_store(&c->begun, ticket);
    tell(told, WIRE_STARTED);
  }
  return name ^ TASK ^ KERNEL;
}

void seg_gpu_ended(uint64_t name) {
  struct context *c = context_in(name, KERNEL);
  if (!c) return;
  uint64_t ticket = name >> 16;
  struct slot *s = &c->slots[ticket % SLOTS];
  struct told told = told_of(s);
  uint64_t seen = atomic_load(&s->ended);
  do {
    if (seen >> 16 != ticket) return;
  } while (!atomic_compare_exchange_weak(&s->ended, &seen, seen + 1));
  if ((seen & 0xffff) + 1 == told.what >> 48) tell(told, WIRE_FINISHED);
}
