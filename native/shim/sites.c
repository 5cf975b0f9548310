// SPDX-License-Identifier: Apache-2.0
/* Which Python line waited: the frames of a thread whose wait has just returned, after the wait's time was taken. They are
 * those that it waited under, since it is still inside the call.
 *
 * The same walk as probes/python.h, by the numbers that the reader has written into the segment. Nothing is dereferenced:
 * the interpreter may be laid out otherwise, or be coming to its end in another thread, and a load would be a SIGSEGV. The
 * kernel copies instead (process_vm_readv of ourselves), which is 1 us a time: only long waits are looked up. */
#define _GNU_SOURCE
#include "system.h"
#include "hot.h"
#include <string.h>
#include <sys/uio.h>

#define MIX(h, v) ((h) = ((h) ^ (v)) * 0x9ddfea08eb382d69ull, (h) ^= (h) >> 29)
#define FRAME_BYTES 128

static uint64_t self_base(void) {
#if defined(__x86_64__)
  uint64_t fs;
  __asm__("movq %%fs:0, %0" : "=r"(fs));
  return fs;
#else
  return 0; /* no reader writes numbers for other machines */
#endif
}

/* How many bytes came. */
static size_t read_own(uint64_t pid, struct iovec *to, const struct iovec *from, uint32_t count) {
  long n = syscall(SYS_process_vm_readv, pid, to, 1ul, from, (unsigned long)count, 0ul);
  return n < 0 ? 0 : (size_t)n;
}

static bool copy_own(uint64_t pid, uint64_t at, void *out, size_t bytes) {
  struct iovec to = {out, bytes}, from = {(void *)(uintptr_t)at, bytes};
  return read_own(pid, &to, &from, 1) == bytes;
}

static struct seg_walk *take_walk(void) {
  struct seg_process *p = seg_proc;
  for (uint32_t i = 0; p && i < SEG_WALKS; i++) {
    uint32_t is_free = 0;
    if (__atomic_compare_exchange_n(&p->walks[i].busy, &is_free, 1, false, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED))
      return &p->walks[i];
  }
  return NULL;
}

/* The frame that the thread executes; 0, with a flag, where it is none of Python's. */
static uint64_t first_frame(const struct wire_python *p, struct seg_walk *w) {
  uint64_t base = self_base(), state = 0, frame = 0, both[2];
  if (!copy_own(w->pid, base + p->tss_at, &state, 8)) { /* a sandbox that has no such call */
    w->flags = WIRE_SITE_UNREADABLE;
    return 0;
  }
  struct iovec to = {both, 16},
               from[2] = {{(void *)(uintptr_t)(state + p->thread_id), 8}, {(void *)(uintptr_t)(state + p->frame), 8}};
  if (!state || read_own(w->pid, &to, from, 2) != 16 || both[0] != base) {
    w->flags = WIRE_SITE_NO_THREAD;
    return 0;
  }
  frame = both[1];
  if (frame && p->cframe != WIRE_PY_NO_CFRAME && !copy_own(w->pid, frame + p->cframe, &frame, 8)) {
    w->flags = WIRE_SITE_UNREADABLE;
    return 0;
  }
  return frame;
}

/* Frames lie beside each other from CPython 3.11 on: the rest of a page that can be read is read with them. */
static const uint8_t *frame_at(struct seg_walk *w, uint64_t at, size_t bytes) {
  uint64_t page = at & ~(uint64_t)(SEG_PAGE - 1);
  if (w->page == page && page && at + bytes <= page + SEG_PAGE) return w->bytes + (at - page);
  if (at + bytes <= page + SEG_PAGE) {
    w->page = 0;
    if (!copy_own(w->pid, page, w->bytes, SEG_PAGE)) return NULL;
    w->page = page;
    return w->bytes + (at - page);
  }
  return copy_own(w->pid, at, w->across, bytes) ? w->across : NULL;
}

static uint64_t word_at(const uint8_t *frame, uint32_t at) {
  uint64_t value;
  memcpy(&value, frame + (at & 0x78), 8);
  return value;
}

/* One slot of the stack; the next frame. */
static uint64_t take_frame(const struct wire_python *p, struct wire_py_frame *out, const uint8_t *bytes) {
  uint8_t frame[FRAME_BYTES + 8] = {0}; /* `owner` may name a byte behind what was read, which is 0 then */
  memcpy(frame, bytes, p->frame_bytes & 127);
  uint64_t instr = word_at(frame, p->instr), code = word_at(frame, p->code) & ~7ull; /* CPython 3.14 tags the pointer */
  *out = (struct wire_py_frame){0};
  if (frame[p->owner & 127] < p->shim_owner) {
    out->code = code;
    out->instr = (uint32_t)(p->is_address ? instr - (code + p->instr_base) : instr);
  }
  return word_at(frame, p->previous);
}

static void walk_frames(const struct wire_python *p, struct seg_walk *w) {
  uint64_t frame = first_frame(p, w);
  for (; frame && w->frames < WIRE_PY_FRAMES; w->frames++) {
    const uint8_t *bytes = frame_at(w, frame, p->frame_bytes & 127);
    if (!bytes) {
      w->flags |= WIRE_SITE_UNREADABLE;
      return;
    }
    frame = take_frame(p, &w->f[w->frames], bytes);
  }
  if (frame) w->flags |= WIRE_SITE_DEEP;
}

/* From each frame's address, WIRE_PY_CODE_WORDS words; zeros, and a bit of `unread`, where that failed. */
static void copy_words(struct seg_walk *w) {
  const uint32_t bytes = sizeof(w->words[0]);
  for (uint32_t i = 0; i < w->frames;) {
    struct iovec to = {w->words[i], (w->frames - i) * bytes};
    uint32_t whole = (uint32_t)(read_own(w->pid, &to, w->from + i, w->frames - i) / bytes);
    if ((i += whole) >= w->frames) return;
    w->unread |= 1ull << i;
    memset(w->words[i++], 0, bytes);
  }
}

static void point(struct iovec *from, uint64_t at) {
  from->iov_base = (void *)(uintptr_t)at;
  from->iov_len = 8 * WIRE_PY_CODE_WORDS;
}

/* All-ones for the bytes of a word that lie inside a table of which so many are left. */
static uint64_t inside(uint64_t left) {
  if ((int64_t)left <= 0) return 0;
  return left >= 8 ? ~0ull : ~(~0ull << (left << 3));
}

/* The factors of probes/python.h: splitmix64, made odd. */
#define FACTOR_A(z) (((z) ^ (z) >> 30) * 0xbf58476d1ce4e5b9ull)
#define FACTOR_B(z) (((z) ^ (z) >> 27) * 0x94d049bb133111ebull)
#define FACTOR_C(z) (((z) ^ (z) >> 31) | 1)
#define FACTOR(j) FACTOR_C(FACTOR_B(FACTOR_A(((j) + 1ull) * 0x9e3779b97f4a7c15ull)))
static const uint64_t of_block[WIRE_PY_CODE_WORDS] = {FACTOR(1),  FACTOR(2),  FACTOR(3), FACTOR(4),
                                                      FACTOR(5),  FACTOR(6),  FACTOR(7), FACTOR(27),
                                                      FACTOR(28), FACTOR(29), FACTOR(30)};
static const uint64_t of_table[] = {FACTOR(11), FACTOR(12), FACTOR(13), FACTOR(14), FACTOR(15),
                                    FACTOR(16), FACTOR(17), FACTOR(18), FACTOR(19), FACTOR(20)};

/* As in probes/python.h: what tells a code object from another one at the same address, 0 where it can't be read. Behind
 * the words of a numbered code object lie more of its own: they are read with them and left out. */
static void sign(const struct wire_python *p, struct seg_walk *w) {
  const uint32_t words = p->has_table ? WIRE_PY_CODE_WORDS : WIRE_PY_NUMBERED_WORDS;
  w->unread = 0;
  for (uint32_t i = 0; i < w->frames; i++) point(&w->from[i], w->f[i].code + p->code_block);
  copy_words(w);
  for (uint32_t i = 0; i < w->frames; i++) {
    w->x[i] = w->f[i].code * FACTOR(0);
    for (uint32_t j = 0; j < words; j++) w->x[i] += w->words[i][j] * of_block[j];
    point(&w->from[i], w->words[i][WIRE_PY_CODE_WORDS - 1] + 16); /* struct PyBytesObject from ob_size on */
  }
  if (p->has_table) copy_words(w);
  for (uint32_t i = 0; i < w->frames; i++) {
    const uint64_t *t = w->words[i];
    if (p->has_table) w->x[i] += t[0] * of_table[0];
    for (int j = 2; p->has_table && j < WIRE_PY_CODE_WORDS; j++)
      w->x[i] += (t[j] & inside(t[0] - 8 * (uint64_t)(j - 2))) * of_table[j - 1];
    w->f[i].sig = w->f[i].code && !(w->unread >> i & 1) ? (uint32_t)(w->x[i] >> 32) : 0;
  }
}

static uint64_t key_of(uint32_t hook, const struct seg_walk *w) {
  uint64_t key = hook;
  for (uint32_t i = 0; i < w->frames; i++) {
    MIX(key, w->f[i].code);
    MIX(key, (uint64_t)w->f[i].instr << 32 | w->f[i].sig);
  }
  MIX(key, w->flags);
  return key | 1;
}

static void fill(struct wire_site *s, const struct seg_thread *t, uint32_t hook, const struct seg_walk *w) {
  s->tgid = t->header->pid;
  s->hook = hook;
  s->frames = w->frames;
  s->tid = t->tid;
  memcpy(s->f, w->f, w->frames * sizeof(w->f[0]));
  __atomic_store_n(&s->flags, w->flags | WIRE_SITE_READY, __ATOMIC_RELEASE);
  __atomic_fetch_add(&t->header->losses[SEG_SITES_TAKEN], 1, __ATOMIC_RELEASE);
}

/* Open addressing; a row is taken once and never freed. NULL: no row is free. */
static struct wire_site *row_of(const struct seg_thread *t, uint64_t key, uint32_t hook, const struct seg_walk *w) {
  uint8_t *area = (uint8_t *)t->header + t->header->sites_at;
  uint64_t *keys = (uint64_t *)(void *)area;
  struct wire_site *rows = (struct wire_site *)(void *)(area + SEG_SITE_KEYS);
  uint32_t at = (uint32_t)(key >> (64 - SEG_SITE_BITS)), step = (uint32_t)key | 1;
  for (uint32_t j = 0; j < WIRE_SITE_PROBES; j++, at += step) {
    uint32_t i = at & ((1u << SEG_SITE_BITS) - 1);
    uint64_t there = __atomic_load_n(&keys[i], __ATOMIC_ACQUIRE);
    if (!there && __atomic_compare_exchange_n(&keys[i], &there, key, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
      fill(&rows[i], t, hook, w);
      return &rows[i];
    }
    if (there == key) return &rows[i];
  }
  return NULL;
}

/* `n` last: who reads it first never has more calls than the rest accounts for. */
static void add(struct wire_site *s, uint64_t t0, uint64_t ns) {
  uint64_t longest = __atomic_load_n(&s->time.max_ns, __ATOMIC_RELAXED);
  __atomic_fetch_add(&s->time.sum_ns, ns, __ATOMIC_RELAXED);
  __atomic_fetch_add(&s->time.hist[seg_bucket(ns)], 1, __ATOMIC_RELAXED);
  while (ns > longest &&
         !__atomic_compare_exchange_n(&s->time.max_ns, &longest, ns, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
  if (ns > longest) __atomic_store_n(&s->max_at_ns, t0, __ATOMIC_RELAXED);
  __atomic_fetch_add(&s->time.n, 1, __ATOMIC_RELEASE);
}

static bool look_up(const struct seg_thread *t, uint32_t hook, uint64_t t0, uint64_t ns) {
  struct seg_walk *w = take_walk();
  if (!w) return false;
  const struct wire_python p = t->header->python;
  w->pid = t->header->pid;
  w->flags = w->page = 0;
  w->frames = 0;
  walk_frames(&p, w);
  sign(&p, w);
  struct wire_site *s = row_of(t, key_of(hook, w), hook, w);
  if (s) add(s, t0, ns);
  __atomic_store_n(&w->busy, 0, __ATOMIC_RELEASE);
  return s;
}

/* What nobody will see a program need not pay for. */
static bool is_read(const struct seg_header *h) {
  uint64_t now = seg_ticks();
  return now < __atomic_load_n(&h->lease, __ATOMIC_RELAXED) || now < h->sites_until;
}

static bool is_wanted(const struct seg_header *h, uint32_t hook) {
  return h->sites_at && __atomic_load_n(&h->python.tgid, __ATOMIC_ACQUIRE) == h->pid && hook < WIRE_HOOKS &&
         h->site_hooks[hook / 64] >> hook % 64 & 1 && is_read(h);
}

void seg_waited(const struct seg_call *c, uint64_t dur) {
  struct seg_thread *t = c->t;
  uint64_t ns = seg_ns(t, dur);
  if (LIKELY(ns < __atomic_load_n(&t->header->site_ns, __ATOMIC_RELAXED) || c->flags & WIRE_NESTED)) return;
  if (!is_wanted(t->header, c->hook)) return;
  int saved = errno;
  if (!look_up(t, c->hook, c->t0, ns)) __atomic_fetch_add(&t->header->losses[SEG_NO_SITE], 1, __ATOMIC_RELAXED);
  errno = saved;
}

/* A forked child has its parent's memory, so its interpreter stands where the parent's did; and who reads the parent's
 * segment will read this one soon. */
void seg_inherit_sites(struct seg_header *h, const struct seg_header *parents) {
  if (!parents->python.tgid || parents->python.tgid != parents->pid) return;
  memcpy(h->site_hooks, parents->site_hooks, sizeof(h->site_hooks));
  h->python = parents->python;
  h->site_ns = parents->site_ns;
  h->sites_until = parents->lease;
  h->python.tgid = h->pid;
}
