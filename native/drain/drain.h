/* SPDX-License-Identifier: Apache-2.0
 *
 * What Python calls: the reading side of the rings and maps that probes/ fills. cffi reads this header too (WIRE_CDEF).
 *
 * Descriptors stay the caller's: every open maps, none keeps or closes the descriptor, except perf__open, which says so.
 * Results: 0 or a count, or a negative errno. Nothing here is safe to call from two threads on one object.
 */
#ifndef STALLSCOPE_DRAIN_H
#define STALLSCOPE_DRAIN_H

#ifndef WIRE_CDEF
#include <stddef.h>
#include <stdint.h>
#include "wire.h"
#endif

/* ring.c: a BPF ring buffer of `size` bytes, a power of two and at least a page. */
struct ring;
struct ring_batch {
  uint8_t *recs, *uids; /* where wire_rec and wire_uid_rec go, back to back */
  uint32_t max_recs, max_uids;
  uint32_t n_recs, n_uids; /* set by ring__drain */
};
int ring__open(int fd, uint64_t size, struct ring **out);
void ring__close(struct ring *r);
int ring__drain(struct ring *r, struct ring_batch *batch);
uint64_t ring__consumed(const struct ring *r);
uint64_t ring__pending(const struct ring *r);
uint64_t ring__skipped(const struct ring *r); /* records of no known size */
uint64_t ring__corrupt(const struct ring *r); /* times the ring made no sense and all that was pending was dropped */

/* rows.c: the thread table. */
struct rows;
struct rows_thread {
  uint32_t tid, slot;
  uint64_t calls;
};
struct rows_deeds { /* of a thread that lives, or has ended and whose row nobody has taken since */
  uint32_t tid, lives;
  uint64_t wait_ns;
  uint32_t deeds[WIRE_DEEDS];
};
int rows__open(int fd, struct rows **out);
void rows__close(struct rows *r);
int rows__inflight(struct rows *r, struct wire_row *out, uint32_t max);
int rows__of_tgid(struct rows *r, uint32_t tgid, struct rows_thread *out, uint32_t max);
int rows__calls(struct rows *r, uint32_t tgid, uint32_t tid, uint64_t *calls); /* 1 found, 0 not */
int rows__deeds(struct rows *r, uint32_t tgid, int last, struct rows_deeds *out, uint32_t max);
int rows__release(struct rows *r, uint32_t tgid);
uint64_t rows__torn(const struct rows *r); /* rows left out because their owner kept writing */

/* counters.c: counts and times of one process slot at a time. */
struct counters;
struct counters_delta {
  uint32_t n_counts, n_times;
  uint16_t hooks[WIRE_HOOKS], timed[WIRE_TIMES];
  struct wire_count counts[WIRE_HOOKS];
  struct wire_time times[WIRE_TIMES];
};
int counters__open(int counts_fd, int times_fd, struct counters **out);
void counters__close(struct counters *c);
int counters__changed(struct counters *c, uint32_t slot, struct counters_delta *out);
int counters__zero(struct counters *c, uint32_t slot);

/* tally.c: adds the call events among `n` records, `stride` bytes apart, to table[slot * WIRE_HOOKS + hook]. */
void tally__add(const uint8_t *recs, uint32_t n, uint32_t stride, uint64_t *table);

/* table.c: a small array map as rows of 64-bit words. */
struct table;
int table__open(int fd, uint32_t row_words, uint32_t rows, struct table **out);
void table__close(struct table *t);
int table__get(const struct table *t, uint32_t row, uint32_t word, uint64_t *value);
int table__set(struct table *t, uint32_t row, uint32_t word, uint64_t value);
int table__claim(struct table *t, uint64_t owner); /* row whose word 0 went from 0 to owner; row 0 is never used */

/* perf.c: one perf_event ring; raw records. */
struct perf;
int perf__open(int fd, uint32_t pages, struct perf **out); /* takes fd over, on success only */
void perf__close(struct perf *p);
int perf__drain(struct perf *p, uint8_t *out, uint32_t max);

/* btf.c: offsets of struct members, in bytes. */
struct btf;
int btf__open(const char *path, struct btf **out);
void btf__close(struct btf *b);
int64_t btf__offset(const struct btf *b, const char *type, const char *member);

/* segment.c, segcounts.c: the shared memory of a process with libstallscope.so in it (native/shim/segment.h). */
struct segment;
/* From the counter to CLOCK_MONOTONIC. What was converted once always gives the same: records of one call are paired by
 * its instant. So a line that is off is not mended, but goes on from where it is, back to the truth. */
#define SEG_LINES 4096
struct seg_line {
  uint64_t counter, mono_ns, ns_per_tick; /* from where; fixed point, 32 fraction bits */
};
struct seg_clock {
  uint32_t count; /* lines in order; never 0 when something is converted */
  uint32_t reserved;
  struct seg_line line[SEG_LINES];
};
struct segment_facts {
  uint32_t version, pid, uid, n_blocks;
  uint64_t start_ticks, counter, mono_ns, real_ns, ticks_per_s, settings, readers;
  uint64_t hooks[7];  /* bit per hook id */
  uint32_t is_mapped; /* a sealed memfd; else every look is a read */
  uint32_t who_flags, ppid, cmdline_bytes;
  uint64_t pid_ns;
  int32_t ranks[7]; /* as in struct seg_who of native/shim/segment.h */
  char name[16], cmdline[1024];
};
struct segment_thread {
  uint32_t tid, state; /* state: 1 alive, 2 ended */
  uint64_t calls;      /* all threads that had this block */
};
struct segment_comm {
  uint64_t comm, next, last_hook, last_count, last_type;
  int32_t rank, nranks; /* -1 = not seen */
  uint32_t errors, made_by;
  uint64_t has_uid;
  uint8_t uid[128];
};
enum segment_loss {
  SEGMENT_OVERWRITTEN = 0,
  SEGMENT_VITAL_FULL = 1,
  SEGMENT_NO_RING = 2,
  SEGMENT_BUSY = 3,
  SEGMENT_STALE = 4,
  SEGMENT_NO_COMM = 5,
  SEGMENT_UNWRAPPED = 6,
  SEGMENT_HELLO = 7,
  SEGMENT_CORRUPT = 8,
  SEGMENT_COMMS_MADE = 9,
  SEGMENT_HISTORY = 10, /* calls whose records were overwritten before the first look; no loss */
  SEGMENT_LOSSES = 11,
};
int segment__open(int fd, struct segment **out, const char **why); /* -EPROTO: *why says what is wrong */
void segment__close(struct segment *s);
void segment__facts(const struct segment *s, struct segment_facts *out);
int segment__drain(struct segment *s, const struct seg_clock *c, uint32_t slot, uint32_t tgid, struct ring_batch *b);
void segment__hold(struct segment *s); /* go on as its reader for some seconds; a drain does it, too */
/* Before the first drain: of what waits in the bulk rings, only the newest `most` of each are wanted; the others are
 * history. */
void segment__come_late(struct segment *s, uint64_t most);
/* From when on no vital record is missing, as far as that was known at the first look; 0: from the beginning on. */
uint64_t segment__whole_since(struct segment *s, const struct seg_clock *c);
uint64_t segment__pending(struct segment *s); /* records that a drain has not taken yet */
int segment__counts(struct segment *s, uint32_t is_over,
                    struct counters_delta *out); /* is_over: the process has ended */
/* as_counted: those that were under way when segment__counts looked. */
int segment__inflight(struct segment *s, const struct seg_clock *c, uint32_t slot, uint32_t tgid, uint32_t as_counted,
                      struct wire_row *out, uint32_t max);
void segment__losses(struct segment *s, uint64_t *out);
int segment__set(struct segment *s, uint64_t settings, uint64_t long_ns);
int segment__threads(struct segment *s, struct segment_thread *out, uint32_t max);
int segment__comms(struct segment *s, struct segment_comm *out, uint32_t max);
uint64_t segment__pair(uint64_t *counter, uint64_t *mono_ns); /* half the width of the reading, ns */
uint64_t segment__to_ns(const struct segment *s, const struct seg_clock *c, uint64_t ticks);
void segment__gpu_untold(const struct segment *s, uint64_t *out);      /* SEG_GPU_FIGURES of native/shim/segment.h */
uint32_t segment__gpu(const struct segment *s);                        /* enum seg_gpu_state of native/shim/gpu.h */
uint64_t segment__clock_ns(const struct seg_clock *c, uint64_t ticks); /* without a segment */

/* segsites.c: Python stacks under which threads of the process waited long. */
struct segment_sites {
  uint64_t taken, turned_away; /* rows ever taken; waits that got none */
  uint32_t has_table;          /* 0: an older library, or a folder, where there is none */
  uint32_t is_walked;          /* somebody has told it how to walk the frames */
};
void segment__sites(const struct segment *s, struct segment_sites *out);
uint32_t segment__site_rows(const struct segment *s, uint16_t *out, uint32_t max);
/* 1: *out is the row, its instant in ns; 0: it is being written. */
int segment__site(const struct segment *s, const struct seg_clock *c, uint32_t row, struct wire_site *out);
/* From now on outermost calls of these hooks that took so long are looked up. NULL: none are. */
void segment__walk(struct segment *s, const struct wire_python *p, const uint64_t *hooks, uint64_t least_ns);

/* syscalls.c */
int sys__bpf(int command, void *attr, uint32_t size);
int sys__perf_event_open(void *attr, int pid, int cpu, int group, uint64_t flags);
#endif
