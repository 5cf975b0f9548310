/* SPDX-License-Identifier: Apache-2.0
 *
 * The shared memory of one traced process: written by libstallscope.so inside it, read by native/drain/segment.c.
 *
 *   header page | counts of calls that no ring took | communicators | block 0 | block 1 | ... | call sites
 *   a block, one for each thread:  head page | counts | times | vital ring | bulk ring
 *
 * Nothing in it is trusted by the reader. Times are raw counter readings (x86 TSC, aarch64 CNTVCT).
 */
#ifndef STALLSCOPE_SEGMENT_H
#define STALLSCOPE_SEGMENT_H
#include "wire.h"

#define SEG_MAGIC 0x31676573706c7473ull /* "stlpseg1" */
/* 1: vital rings drop the newest, whether or not anybody reads. 2: no call sites, or by other numbers. Else the same. */
#define SEG_VERSION 3
#define SEG_WITH_SITES 3
#define SEG_NAME "stallscope-segment"
#define SEG_INJECTED_NAME "stallscope-injected" /* nothing comes into it after the detach */
#define SEG_PAGE 4096
#define SEG_BLOCKS 256 /* threads at once */
#ifndef SEG_BULK_BITS  /* tests make them small */
#define SEG_BULK_BITS 15
#define SEG_VITAL_BITS 12
#endif
#define SEG_SMALL_BULK_BITS 12 /* in a folder: a container's /dev/shm has 64 MiB */
#define SEG_SMALL_VITAL_BITS 9
#define SEG_COMM_BITS 10
#define SEG_COMM_PROBES 16
#define SEG_SITE_BITS 10 /* call sites: Python stacks by function */
#define SEG_NO_WORD 8
#define SEG_STATUS_NOT_READY 254 /* a bulk record's status byte for 600; 255 = another error */

enum seg_mode { SEG_FULL = 0, SEG_LITE = 1, SEG_MIN = 2 };

/* The settings word: mode | tap << 2 | sampling threshold << 32. The agent writes it, every call reads it. */
#define SEG_TAP 4ull

enum seg_loss {
  SEG_NO_RING = 0,     /* calls of threads that found no free block */
  SEG_NO_COMM = 1,     /* operations without a sequence number: communicator table full */
  SEG_UNWRAPPED = 2,   /* function pointers handed out unwrapped: no instance was left */
  SEG_HELLO = 3,       /* the segment could not be sent to the agent's socket */
  SEG_COMMS_MADE = 4,  /* communicators whose creation returned; no loss */
  SEG_COMMS_TAKEN = 5, /* rows of their table in use; no loss */
  SEG_SITES_TAKEN = 6, /* rows of the table of call sites in use; no loss */
  SEG_NO_SITE = 7,     /* long waits without a row there: it was full, or too many stacks were looked up at once */
  SEG_LOSSES = 8,
};

/* A bulk record expands to arguments a[p] = word 2, a[q] = word 3 (48 bits), a[r] = its high 16 bits; 8 = none. */
struct seg_words {
  uint8_t p, q, r;
  uint8_t is_call; /* WIRE_CALL: calls of this hook are not timed */
  uint16_t time_id, pad;
};

enum seg_gpu_figure {
  SEG_GPU_UNMATCHED = 0, /* NCCL queued it and no call explains it: a graph, a part of an all-to-all */
  SEG_GPU_UNTOLD = 1,    /* was called, and NCCL told nothing of it */
  SEG_GPU_EXHAUSTED = 2, /* no place: 4096 operations of its communicator were waiting for the GPU */
  SEG_GPU_BUSY = 3,      /* another thread held the lock */
  SEG_GPU_UNBOUND = 4,   /* communicators without a place */
  SEG_GPU_FIGURES = 5,
};

/* Of the process, for a reader that can't look at its /proc. */
#define SEG_RANKS 7 /* RANK WORLD_SIZE LOCAL_RANK SLURM_PROCID SLURM_NTASKS OMPI_COMM_WORLD_RANK PMI_RANK */
#define SEG_NAME_BYTES 16
#define SEG_CMDLINE_BYTES 1024
#define SEG_LOCKED 1u /* it holds a record lock on byte 0 of its file for as long as it runs this program */
struct seg_who {
  uint32_t flags, ppid;
  uint64_t pid_ns;          /* inode of its pid namespace, 0 = unknown */
  int32_t ranks[SEG_RANKS]; /* from the environment at its start; -1 = not there */
  uint32_t cmdline_bytes;   /* words, each with a null byte behind it */
  char name[SEG_NAME_BYTES];
  char cmdline[SEG_CMDLINE_BYTES];
};

struct seg_header {
  uint64_t magic; /* stored last */
  uint32_t version, header_bytes;
  uint64_t block_bytes, total_bytes;
  uint32_t n_blocks, bulk_bits, vital_bits, comm_bits;
  uint32_t pid, uid;
  uint64_t start_ticks;               /* /proc/self/stat, field 22 */
  uint64_t counter, mono_ns, real_ns; /* read together when the segment was made */
  uint64_t ticks_per_s;               /* estimate */
  uint64_t hooks[(WIRE_HOOKS + 63) / 64];
  uint64_t gpu; /* enum seg_gpu_state, gpu.h: whether NCCL tells what the GPU begins */
  uint64_t settings __attribute__((aligned(64)));
  uint64_t long_ticks;  /* waits from here on are always recorded */
  uint64_t ns_per_tick; /* fixed point, 32 fraction bits */
  uint64_t reader;      /* how many readers there have been */
  uint32_t used;        /* blocks ever taken; may exceed n_blocks */
  uint32_t pad1;
  uint64_t losses[SEG_LOSSES] __attribute__((aligned(64)));
  uint64_t gpu_untold[SEG_GPU_FIGURES]; /* operations without a witness of the GPU */
  struct seg_words words[WIRE_HOOKS];
  uint64_t lease;       /* counter: until then somebody reads, and no vital record is overwritten before it was taken */
  uint64_t sites_at;    /* where call sites are; 0 = nowhere */
  uint64_t sites_until; /* counter: as lease, of a forked child that its parent's reader will read */
  /* The reader's, who knows the interpreter: waits of these hooks from site_ns on are looked up by these numbers. Its
   * tgid is `pid` and stored last. */
  uint64_t site_ns;
  uint64_t site_hooks[(WIRE_HOOKS + 63) / 64];
  struct wire_python python;
};

struct seg_comm {
  uint64_t comm;                             /* its address; 0 = free */
  uint64_t next;                             /* operations numbered so far */
  uint64_t last_hook, last_count, last_type; /* the newest operation; type: dtype | redop << 32 */
  int32_t rank, nranks;                      /* valid where nranks > 0 */
  uint32_t errors, made_by;                  /* hook whose return gave it, 0 = not seen */
  uint64_t has_uid;
  uint8_t uid[WIRE_UID_BYTES];
};

/* A call under way. Written t0 first and shown by the block's depth; t0 0 = a call that is only counted. */
struct seg_frame {
  uint64_t t0;
  uint64_t what; /* hook | flags << 16 | is_full << 24 | n << 32 */
  uint64_t a[8]; /* is_full: all; else a[0], a[1] as in a bulk record */
  uint64_t pad[6];
};

enum seg_state { SEG_FREE = 0, SEG_ACTIVE = 1, SEG_EXITED = 2 };

struct seg_block {
  uint64_t head;       /* of the bulk ring, ever growing */
  uint64_t vital_head; /* of the vital ring, in slots */
  uint32_t depth, state;
  uint32_t tid, generation;
  uint64_t since;       /* head when this thread took the block: older records are another thread's */
  uint64_t vital_floor; /* slots before it have been, or are being, overwritten; a record begins there */
  uint64_t pad0[2];
  uint64_t busy, deep, stale, vital_lost; /* second line: what was turned away */
  uint64_t pad1[4];
  uint64_t tail, vital_tail; /* third line: the reader's */
  uint64_t pad2[6];
  struct seg_frame frames[WIRE_DEPTH];
};

/* 32 bytes: t0 | dur 32, hook 16, flags 8, status 8 | a | b.  Hook SEG_MARK: a = tid of the thread from here on. */
#define SEG_MARK 0xffff
#define SEG_SCALE 3 /* flags: duration in units of 1, 2^10, 2^20 ticks */
#define SEG_NESTED 4
#define SEG_ALWAYS 8
#define SEG_ENTERED 16
#define SEG_NO_DUR 32
#define SEG_WORDS 4

struct seg_vital {
  uint64_t ts, dur;
  uint16_t hook;
  uint8_t kind, flags;    /* as in wire_rec */
  uint8_t depth, has_uid; /* has_uid: the next slot is the 128 bytes */
  uint16_t zero;
  uint32_t n;
  int32_t status;
  uint32_t tid, zero2;
  uint64_t a[8];
  uint64_t pad[3];
};

struct seg_hello {
  uint64_t magic;
  uint32_t version, pid;
  uint64_t start_ticks;
};

#define SEG_UP(bytes) (((bytes) + SEG_PAGE - 1) / SEG_PAGE * SEG_PAGE)
#define SEG_HOMELESS_AT SEG_PAGE
#define SEG_WHO_AT (SEG_HOMELESS_AT + WIRE_HOOKS * sizeof(struct wire_count)) /* before a page's end */
#define SEG_COMMS_AT (SEG_HOMELESS_AT + SEG_UP(WIRE_HOOKS * sizeof(struct wire_count)))
#define SEG_HEADER_BYTES (SEG_COMMS_AT + SEG_UP((1ull << SEG_COMM_BITS) * sizeof(struct seg_comm)))
#define SEG_COUNTS_AT SEG_PAGE
#define SEG_TIMES_AT (SEG_COUNTS_AT + SEG_UP(WIRE_HOOKS * sizeof(struct wire_count)))
#define SEG_VITAL_AT (SEG_TIMES_AT + SEG_UP(WIRE_TIMES * sizeof(struct wire_time)))
#define SEG_BULK_AT(vital_bits) (SEG_VITAL_AT + (sizeof(struct seg_vital) << (vital_bits)))
/* Keys (0 = free), then a struct wire_site each; max_at_ns is a reading of the counter, `slot` and `image` are 0. */
#define SEG_SITE_KEYS SEG_UP(sizeof(uint64_t) << SEG_SITE_BITS)
#define SEG_SITE_BYTES (SEG_SITE_KEYS + SEG_UP(sizeof(struct wire_site) << SEG_SITE_BITS))
#define SEG_BLOCK_BYTES(vital_bits, bulk_bits) (SEG_UP(SEG_BULK_AT(vital_bits) + (32ull << (bulk_bits))))

_Static_assert(sizeof(struct seg_header) <= SEG_PAGE, "seg_header");
_Static_assert(SEG_WHO_AT + sizeof(struct seg_who) <= SEG_COMMS_AT, "seg_who");
_Static_assert(sizeof(struct seg_frame) == 128, "seg_frame");
_Static_assert(sizeof(struct seg_block) == 192 + 4 * 128, "seg_block");
_Static_assert(sizeof(struct seg_vital) == 128, "seg_vital");
_Static_assert(sizeof(struct seg_comm) == 192, "seg_comm");
#endif
