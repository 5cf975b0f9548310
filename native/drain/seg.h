/* SPDX-License-Identifier: Apache-2.0
 *
 * What segment.c and segcounts.c share. A segment is written by a program that nobody trusts: sizes are checked once on
 * a copy, everything later is masked or compared with them. */
#ifndef STALLSCOPE_SEG_H
#define STALLSCOPE_SEG_H
#include <stdbool.h>
#include "drain.h"
#include "../shim/segment.h"

struct seg_reader { /* of one block */
  uint64_t tail, vital_tail;
  uint32_t tid;
  bool behind; /* records were overwritten that are not told apart by hook yet */
  bool is_old; /* the reader is just coming: what was overwritten before is history, and no loss */
  bool dates;  /* all that is behind was overwritten before that */
  uint64_t overwritten;
  uint64_t since;                                  /* counter: from then on all vital records are there; 0 = always */
  uint64_t history[WIRE_HOOKS];                    /* calls whose record was */
  uint64_t events[WIRE_HOOKS], missed[WIRE_HOOKS]; /* calls whose record was given out; that will never be */
  struct seg_frame frames[WIRE_DEPTH];             /* calls under way when the counters were read last */
  uint32_t n_frames;
};

struct segment {
  int fd;
  uint8_t *map;             /* NULL: a file, read piece by piece */
  uint64_t mapped;          /* bytes */
  uint64_t sites_at;        /* 0: it has no call sites */
  struct seg_header header; /* as it was when opened */
  struct seg_reader *readers[SEG_BLOCKS];
  uint32_t next;  /* the block to begin with */
  uint64_t lease; /* as it was written last; 0 = never */
  uint64_t corrupt;
  bool has_arrived; /* it has taken all that was there when it came */
  uint64_t drains;
  uint64_t told[WIRE_HOOKS]; /* bulk records given out */
  struct wire_count last[WIRE_HOOKS];
  struct wire_count base[WIRE_HOOKS]; /* what readers before this one were told; lost: what the program counted */
  struct wire_time *base_times;       /* NULL: there were none */
  struct {
    uint64_t n, sum_ns, max_ns, in_hist;
  } marks[WIRE_TIMES];
};

bool seg_copy(const struct segment *s, uint64_t at, void *out, size_t bytes);
uint64_t seg_word(const struct segment *s, uint64_t at);        /* acquire */
void seg_store(struct segment *s, uint64_t at, uint64_t value); /* release */
uint32_t seg_used(const struct segment *s);
uint64_t seg_block_at(const struct segment *s, uint32_t block);
struct seg_reader *seg_reader_of(struct segment *s, uint32_t block); /* NULL: no memory */
void seg_gone(struct seg_reader *r, uint64_t records);               /* overwritten before they were taken */
uint32_t seg_frames(const struct segment *s, uint32_t block, struct seg_frame *out); /* whole ones, outermost first */

uint64_t seg_ticks_now(void);

/* segcounts.c */
void seg_add(struct wire_count *sum, const struct wire_count *row);
void seg_sum_time(const struct segment *s, uint32_t time_id, struct wire_time *sum);
/* segbase.c */
/* Adds, by hook, the calls whose records wait in the rings, up to these heads. */
void seg_count_waiting(const struct segment *s, uint32_t block, struct seg_reader *r, uint64_t head,
                       uint64_t vital_head, uint64_t *waiting);
int seg_start_from_here(struct segment *s);
void seg_let_go(struct segment *s);
void seg_subtract(struct wire_count *sum, const struct wire_count *base);
void seg_subtract_time(struct wire_time *sum, const struct wire_time *base);

#define SEG_FIELD(s, block, field) (seg_block_at(s, block) + offsetof(struct seg_block, field))
#endif
