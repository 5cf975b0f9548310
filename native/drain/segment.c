// SPDX-License-Identifier: Apache-2.0
/* Reading a segment: opening, records, calls under way. */
#define _GNU_SOURCE
#include "seg.h"
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#ifndef F_GET_SEALS
#define F_GET_SEALS 1034
#endif
#define SEAL_SHRINK 2
#define CHUNK 1024 /* bulk records at a time */
#define LOOKS 256  /* at one ring in one drain: a writer that is faster than we are must not hold us */
#define TRIES 8
#define ARRIVAL 32 /* drains that find more than they may take, until a reader has come all the same */

bool seg_copy(const struct segment *s, uint64_t at, void *out, size_t bytes) {
  if (s->map) {
    memcpy(out, s->map + at, bytes);
    return true;
  }
  ssize_t n = pread(s->fd, out, bytes, (off_t)at);
  if (n < 0) n = 0;
  memset((uint8_t *)out + n, 0, bytes - (size_t)n); /* a file that was cut reads as if nothing were there */
  return (size_t)n == bytes;
}

uint64_t seg_word(const struct segment *s, uint64_t at) {
  uint64_t value;
  if (s->map) return __atomic_load_n((const uint64_t *)(const void *)(s->map + at), __ATOMIC_ACQUIRE);
  seg_copy(s, at, &value, sizeof(value));
  return value;
}

void seg_store(struct segment *s, uint64_t at, uint64_t value) {
  if (s->map) __atomic_store_n((uint64_t *)(void *)(s->map + at), value, __ATOMIC_RELEASE);
  else if (pwrite(s->fd, &value, sizeof(value), (off_t)at) < 0) s->corrupt++;
}

uint32_t seg_used(const struct segment *s) {
  uint32_t used = (uint32_t)seg_word(s, offsetof(struct seg_header, used));
  return used < s->header.n_blocks ? used : s->header.n_blocks;
}

uint64_t seg_block_at(const struct segment *s, uint32_t block) {
  return SEG_HEADER_BYTES + block * s->header.block_bytes;
}

struct seg_reader *seg_reader_of(struct segment *s, uint32_t block) {
  if (s->readers[block]) return s->readers[block];
  struct seg_reader *r = calloc(1, sizeof(*r));
  if (!r) return NULL;
  r->tail = seg_word(s, SEG_FIELD(s, block, tail));
  r->vital_tail = seg_word(s, SEG_FIELD(s, block, vital_tail));
  return s->readers[block] = r;
}

static const char *wrong_with(const struct seg_header *h, uint64_t bytes) {
  if (h->magic != SEG_MAGIC) return "it is no segment, or not finished yet";
  if (!h->version || h->version > SEG_VERSION) return "another version of libstallscope.so wrote it";
  if (h->header_bytes != SEG_HEADER_BYTES || h->comm_bits != SEG_COMM_BITS) return "its header has another size";
  if (!h->n_blocks || h->n_blocks > SEG_BLOCKS) return "its number of blocks is impossible";
  if (h->bulk_bits < 4 || h->bulk_bits > 24 || h->vital_bits < 4 || h->vital_bits > 24)
    return "its rings are impossible";
  if (h->block_bytes != SEG_BLOCK_BYTES(h->vital_bits, h->bulk_bits)) return "its blocks have another size";
  if (h->total_bytes != SEG_HEADER_BYTES + h->n_blocks * h->block_bytes) return "its sizes contradict each other";
  if (h->total_bytes > bytes) return "it is shorter than it says";
  return NULL;
}

/* A memfd that can't shrink is mapped; in anything else a page may go away, and then a load would be a SIGBUS. */
static int map(struct segment *s) {
  int seals = fcntl(s->fd, F_GET_SEALS);
  if (seals < 0 || !(seals & SEAL_SHRINK)) return 0;
  s->mapped = s->header.total_bytes + (s->sites_at ? SEG_SITE_BYTES : 0);
  void *at = mmap(NULL, s->mapped, PROT_READ | PROT_WRITE, MAP_SHARED, s->fd, 0);
  if (at == MAP_FAILED) return -errno;
  s->map = at;
  return 0;
}

static int open_checked(struct segment *s, const char **why) {
  struct stat st;
  if (fstat(s->fd, &st)) return -errno;
  if (!S_ISREG(st.st_mode)) *why = "it is no regular file";
  else if (pread(s->fd, &s->header, sizeof(s->header), 0) != sizeof(s->header)) *why = "it is shorter than a header";
  else *why = wrong_with(&s->header, (uint64_t)st.st_size);
  if (*why) return -EPROTO;
  bool has_sites = s->header.version >= SEG_WITH_SITES && s->header.sites_at == s->header.total_bytes &&
                   (uint64_t)st.st_size >= s->header.total_bytes + SEG_SITE_BYTES;
  s->sites_at = has_sites ? s->header.sites_at : 0;
  int ret = map(s);
  if (!ret && s->header.reader) ret = seg_start_from_here(s);
  return ret;
}

int segment__open(int fd, struct segment **out, const char **why) {
  struct segment *s = calloc(1, sizeof(*s));
  *out = NULL;
  *why = NULL;
  if (!s) return -ENOMEM;
  s->fd = fcntl(fd, F_DUPFD_CLOEXEC, 0);
  int ret = s->fd < 0 ? -errno : open_checked(s, why);
  if (ret) segment__close(s);
  else *out = s;
  return ret;
}

void segment__close(struct segment *s) {
  if (!s) return;
  seg_let_go(s);
  for (int i = 0; i < SEG_BLOCKS; i++) free(s->readers[i]);
  free(s->base_times);
  if (s->map) munmap(s->map, s->mapped);
  if (s->fd >= 0) close(s->fd);
  free(s);
}

static void introduce(const struct segment *s, struct segment_facts *out) {
  struct seg_who who;
  seg_copy(s, SEG_WHO_AT, &who, sizeof(who));
  out->who_flags = who.flags;
  out->ppid = who.ppid;
  out->pid_ns = who.pid_ns;
  out->cmdline_bytes = who.cmdline_bytes < SEG_CMDLINE_BYTES ? who.cmdline_bytes : SEG_CMDLINE_BYTES;
  memcpy(out->ranks, who.ranks, sizeof(out->ranks));
  memcpy(out->name, who.name, sizeof(out->name));
  memcpy(out->cmdline, who.cmdline, sizeof(out->cmdline));
}

void segment__facts(const struct segment *s, struct segment_facts *out) {
  const struct seg_header *h = &s->header;
  *out = (struct segment_facts){.version = h->version,
                                .pid = h->pid,
                                .uid = h->uid,
                                .n_blocks = h->n_blocks,
                                .start_ticks = h->start_ticks,
                                .counter = h->counter,
                                .mono_ns = h->mono_ns,
                                .real_ns = h->real_ns,
                                .ticks_per_s = h->ticks_per_s,
                                .readers = h->reader,
                                .is_mapped = s->map != NULL};
  out->settings = seg_word(s, offsetof(struct seg_header, settings));
  memcpy(out->hooks, h->hooks, sizeof(out->hooks));
  introduce(s, out);
}

static uint64_t on_line(const struct seg_line *line, uint64_t ticks) {
  if (ticks < line->counter)
    return line->mono_ns - (uint64_t)((unsigned __int128)(line->counter - ticks) * line->ns_per_tick >> 32);
  return line->mono_ns + (uint64_t)((unsigned __int128)(ticks - line->counter) * line->ns_per_tick >> 32);
}

/* By the newest line that begins before it; nearly all are of the last one. */
uint64_t segment__clock_ns(const struct seg_clock *c, uint64_t ticks) {
  uint32_t i = c->count ? c->count - 1 : 0;
  while (i && ticks < c->line[i].counter) i--;
  return on_line(&c->line[i], ticks);
}

/* What is older than the first line lies between it and the reading that the program took itself. */
uint64_t segment__to_ns(const struct segment *s, const struct seg_clock *c, uint64_t ticks) {
  const struct seg_header *h = &s->header;
  const struct seg_line *first = &c->line[0];
  if (ticks >= first->counter || h->counter >= first->counter || h->mono_ns >= first->mono_ns)
    return segment__clock_ns(c, ticks);
  __int128 run = (__int128)first->counter - h->counter, rise = (__int128)first->mono_ns - h->mono_ns;
  return (uint64_t)((__int128)h->mono_ns + ((__int128)ticks - h->counter) * rise / run);
}

static uint64_t span_ns(const struct seg_clock *c, uint64_t ticks) {
  return (uint64_t)((unsigned __int128)ticks * c->line[c->count ? c->count - 1 : 0].ns_per_tick >> 32);
}

uint64_t seg_ticks_now(void) {
#if defined(__x86_64__)
  return __builtin_ia32_rdtsc();
#else
  uint64_t now;
  __asm__ volatile("mrs %0, cntvct_el0" : "=r"(now));
  return now;
#endif
}

uint64_t segment__pair(uint64_t *counter, uint64_t *mono_ns) {
  uint64_t best = UINT64_MAX;
  for (int i = 0; i < 16; i++) {
    struct timespec t;
    uint64_t before = seg_ticks_now();
    clock_gettime(CLOCK_MONOTONIC, &t);
    uint64_t after = seg_ticks_now();
    if (after - before >= best) continue;
    best = after - before;
    *counter = before + best / 2;
    *mono_ns = (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
  }
  return best / 2;
}

/* Where records go, and whose they are. */
struct sink {
  struct segment *s;
  const struct seg_clock *clock;
  uint32_t slot, tgid;
  struct ring_batch *batch;
};

static struct wire_rec *next_rec(const struct sink *k) {
  struct ring_batch *b = k->batch;
  if (b->n_recs == b->max_recs) return NULL;
  return (struct wire_rec *)(void *)(b->recs + (size_t)b->n_recs++ * sizeof(struct wire_rec));
}

static struct wire_rec vital_rec(const struct sink *k, const struct seg_vital *v) {
  struct wire_rec r = {.ts_ns = segment__to_ns(k->s, k->clock, v->ts),
                       .dur_ns = span_ns(k->clock, v->dur),
                       .tgid = k->tgid,
                       .tid = v->tid,
                       .hook = v->hook,
                       .kind = v->kind,
                       .flags = v->flags,
                       .slot = (uint16_t)k->slot,
                       .depth = v->depth,
                       .n = v->n,
                       .status = v->status};
  memcpy(r.a, v->a, sizeof(r.a));
  return r;
}

static bool take_uid(const struct sink *k, const struct seg_vital *v, const uint8_t *uid) {
  struct ring_batch *b = k->batch;
  struct wire_uid_rec u = {.rec = vital_rec(k, v)};
  if (b->n_uids == b->max_uids) return false;
  memcpy(u.uid, uid, sizeof(u.uid));
  memcpy(b->uids + (size_t)b->n_uids++ * sizeof(u), &u, sizeof(u));
  return true;
}

/* A DONE or ABANDONED whose ENTER was sent is the second record of one call; later kinds are no calls. */
static void count_event(struct seg_reader *r, const struct seg_vital *v) {
  bool is_second = v->kind >= WIRE_DONE && v->flags & WIRE_ENTERED;
  if (v->kind <= WIRE_ABANDONED && !is_second) r->events[v->hook]++;
}

static uint64_t vital_at(const struct segment *s, uint32_t block, uint64_t index) {
  uint64_t mask = (1ull << s->header.vital_bits) - 1;
  return seg_block_at(s, block) + SEG_VITAL_AT + (index & mask) * sizeof(struct seg_vital);
}

/* Where to go on when the slot at the tail may have been written since it was ours; 0: it was not. Another reader may
 * read along: what it has taken is free, too. Called after the copy. */
static uint64_t moved_on(const struct segment *s, uint32_t block, uint64_t tail) {
  struct seg_block b;
  __atomic_thread_fence(__ATOMIC_ACQUIRE);
  seg_copy(s, seg_block_at(s, block), &b, offsetof(struct seg_block, frames));
  if (b.vital_floor > tail) return b.vital_floor;
  return b.vital_tail > tail && b.vital_head + 2 > tail + (1ull << s->header.vital_bits) ? b.vital_tail : 0;
}

static void skip_vital(const struct segment *s, uint32_t block, struct seg_reader *r, uint64_t oldest) {
  struct seg_vital v;
  seg_gone(r, oldest - r->vital_tail);
  r->vital_tail = oldest;
  if (!r->is_old) return;
  seg_copy(s, vital_at(s, block, oldest), &v, sizeof(v));
  if (v.ts + v.dur > r->since) r->since = v.ts + v.dur; /* its writing: what was written later is there */
}

/* One record of a vital ring, or, where it was overwritten, none; false: no room in the batch. */
static bool take_vital(const struct sink *k, uint32_t block, struct seg_reader *r, uint64_t head) {
  struct segment *s = k->s;
  struct seg_vital v;
  uint8_t uid[WIRE_UID_BYTES];
  seg_copy(s, vital_at(s, block, r->vital_tail), &v, sizeof(v));
  if (v.has_uid) seg_copy(s, vital_at(s, block, r->vital_tail + 1), uid, sizeof(uid));
  uint64_t next = moved_on(s, block, r->vital_tail);
  if (next) {
    skip_vital(s, block, r, next);
    return true;
  }
  if (v.hook >= WIRE_HOOKS || (v.has_uid && r->vital_tail + 1 >= head)) {
    s->corrupt++;
    r->vital_tail++;
    return true;
  }
  if (v.has_uid) {
    if (!take_uid(k, &v, uid)) return false;
  } else {
    struct wire_rec *out = next_rec(k);
    if (!out) return false;
    *out = vital_rec(k, &v);
  }
  count_event(r, &v);
  r->vital_tail += v.has_uid ? 2 : 1;
  return true;
}

static void drain_vital(const struct sink *k, uint32_t block, struct seg_reader *r) {
  struct segment *s = k->s;
  uint64_t head = 0, next;
  for (int i = 0; i < TRIES; i++) { /* the thread may write a whole ring between two loads */
    head = seg_word(s, SEG_FIELD(s, block, vital_head));
    if ((next = moved_on(s, block, r->vital_tail))) skip_vital(s, block, r, next);
    if (head >= r->vital_tail) break;
  }
  if (head - r->vital_tail > 1ull << s->header.vital_bits) {
    s->corrupt++;
    r->vital_tail = head;
  }
  while (r->vital_tail < head && take_vital(k, block, r, head)) {}
  /* Never back: the thread believed the other reader's, and may have written up to there. */
  if (r->vital_tail > seg_word(s, SEG_FIELD(s, block, vital_tail)))
    seg_store(s, SEG_FIELD(s, block, vital_tail), r->vital_tail);
}

static int32_t status_of(uint8_t byte) {
  if (byte == SEG_STATUS_NOT_READY) return 600;
  return byte == 255 ? 999 : byte;
}

static void expand(const struct seg_words *w, const uint64_t *p, uint64_t *a) {
  if (w->r < 8) a[w->r] = p[1] >> 48;
  if (w->q < 8) a[w->q] = p[1] & 0xffffffffffffull;
  if (w->p < 8) a[w->p] = p[0];
}

/* false: no room. */
static bool take_bulk(const struct sink *k, struct seg_reader *r, const uint64_t *p) {
  struct segment *s = k->s;
  uint32_t hook = p[1] >> 32 & 0xffff, flags = p[1] >> 48 & 0xff, scale = flags & SEG_SCALE;
  if (hook == SEG_MARK) {
    r->tid = (uint32_t)p[2];
    return true;
  }
  if (hook >= WIRE_HOOKS) {
    s->corrupt++;
    return true;
  }
  struct wire_rec *out = next_rec(k);
  if (!out) return false;
  const struct seg_words *w = &s->header.words[hook];
  *out = (struct wire_rec){.ts_ns = segment__to_ns(s, k->clock, p[0]),
                           .tgid = k->tgid,
                           .tid = r->tid,
                           .hook = (uint16_t)hook,
                           .kind = w->is_call ? WIRE_CALL : WIRE_DONE,
                           .slot = (uint16_t)k->slot,
                           .n = (uint32_t)s->told[hook]++,
                           .status = status_of((uint8_t)(p[1] >> 56))};
  if (!(flags & SEG_NO_DUR)) out->dur_ns = span_ns(k->clock, (p[1] & 0xffffffff) << 10 * scale);
  out->flags = (uint8_t)((flags & SEG_NESTED ? WIRE_NESTED : 0) | (flags & SEG_ALWAYS ? WIRE_ALWAYS : 0));
  out->depth = out->flags & WIRE_NESTED;
  expand(w, p + 2, out->a);
  r->events[hook]++;
  return true;
}

/* Records from r->tail on, at most CHUNK, without a wrap. Those that were overwritten meanwhile are left out. */
static uint64_t copy_chunk(struct segment *s, uint32_t block, struct seg_reader *r, uint64_t head, uint64_t *out) {
  uint64_t slots = 1ull << s->header.bulk_bits, at = r->tail & (slots - 1), n = head - r->tail;
  if (n > CHUNK) n = CHUNK;
  if (n > slots - at) n = slots - at;
  seg_copy(s, seg_block_at(s, block) + SEG_BULK_AT(s->header.vital_bits) + at * 32, out, n * 32);
  __atomic_thread_fence(__ATOMIC_ACQUIRE);
  return n;
}

static void skip_to(struct segment *s, uint32_t block, struct seg_reader *r, uint64_t oldest) {
  seg_gone(r, oldest - r->tail);
  r->tail = oldest;
  if (oldest < seg_word(s, SEG_FIELD(s, block, since))) return;
  r->tid = (uint32_t)seg_word(s, SEG_FIELD(s, block, tid)); /* the mark of this thread may be among them */
}

void segment__come_late(struct segment *s, uint64_t most) {
  for (uint32_t block = 0; block < seg_used(s) && !s->has_arrived; block++) {
    struct seg_reader *r = seg_reader_of(s, block);
    uint64_t head = seg_word(s, SEG_FIELD(s, block, head));
    if (!r || head < r->tail || head - r->tail <= most) continue;
    r->is_old = true;
    skip_to(s, block, r, head - most);
  }
}

static void drain_bulk(const struct sink *k, uint32_t block, struct seg_reader *r) {
  struct segment *s = k->s;
  uint64_t slots = 1ull << s->header.bulk_bits, copy[CHUNK * SEG_WORDS], head;
  for (int look = 0; look < LOOKS && k->batch->n_recs < k->batch->max_recs; look++) {
    head = seg_word(s, SEG_FIELD(s, block, head));
    if (head == r->tail) break;
    if (head < r->tail) {
      s->corrupt++;
      r->tail = head;
      break;
    }
    if (head - r->tail > slots - 1) skip_to(s, block, r, head - (slots - 1));
    uint64_t n = copy_chunk(s, block, r, head, copy), first = r->tail;
    head = seg_word(s, SEG_FIELD(s, block, head));
    if (head - first > slots - 1 && head > first) skip_to(s, block, r, head - (slots - 1));
    while (r->tail < first + n && take_bulk(k, r, copy + SEG_WORDS * (r->tail - first))) r->tail++;
  }
  seg_store(s, SEG_FIELD(s, block, tail), r->tail);
}

int segment__drain(struct segment *s, const struct seg_clock *c, uint32_t slot, uint32_t tgid, struct ring_batch *b) {
  struct sink k = {s, c, slot, tgid, b};
  /* Who only looks (doctor, or at whose segment it is) is no reader: it leaves all to the next one. */
  bool is_old = !s->has_arrived;
  if (!s->drains++) seg_store(s, offsetof(struct seg_header, reader), s->header.reader + 1);
  uint32_t used = seg_used(s), first = used ? s->next++ % used : 0;
  b->n_recs = b->n_uids = 0;
  for (uint32_t i = 0; i < used; i++) {
    struct seg_reader *r = seg_reader_of(s, i);
    if (!r) return -ENOMEM;
    r->is_old = is_old;
    drain_vital(&k, i, r);
  }
  for (uint32_t i = 0; i < used; i++) {
    struct seg_reader *r = s->readers[(first + i) % used];
    drain_bulk(&k, (first + i) % used, r);
    r->is_old = false;
  }
  /* Not before: the rings of a program that nobody read are full, and what it writes now would have no place. */
  s->has_arrived |= (b->n_recs < b->max_recs && b->n_uids < b->max_uids) || s->drains >= ARRIVAL;
  segment__hold(s);
  return 0;
}

uint64_t segment__pending(struct segment *s) {
  uint64_t sum = 0;
  for (uint32_t i = 0; i < seg_used(s); i++) {
    struct seg_reader *r = seg_reader_of(s, i);
    if (!r) continue;
    sum += seg_word(s, SEG_FIELD(s, i, head)) - r->tail + seg_word(s, SEG_FIELD(s, i, vital_head)) - r->vital_tail;
  }
  return sum;
}
