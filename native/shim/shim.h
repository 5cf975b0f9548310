/* SPDX-License-Identifier: Apache-2.0
 *
 * What the files of libstallscope.so share. Names begin with seg_ and are hidden; only interposed names are exported. */
#ifndef STALLSCOPE_SHIM_H
#define STALLSCOPE_SHIM_H
#include <stdbool.h>
#include <stddef.h>
#include <sys/uio.h>
#include "segment.h"

#define SEG_INSTANCES 4 /* wrappers of one function: 0 is exported, the others stand for one address each */
#define SEG_NAMES 4096  /* bytes of a path */
#define INLINE static inline __attribute__((always_inline))
#define LIKELY(x) __builtin_expect(!!(x), 1)
#define UNLIKELY(x) __builtin_expect(!!(x), 0)

/* Threads' own memory, in pages that a fork empties (MADV_WIPEONFORK): in the child slots is NULL. */
struct seg_thread {
  uint64_t *slots; /* of the bulk ring; NULL = not attached */
  uint64_t mask, head;
  struct seg_block *block;
  struct seg_header *header;
  struct wire_count *counts;
  struct wire_time *times;
  struct seg_vital *vital;
  uint64_t vital_mask, vital_head, vital_limit;
  uint32_t active; /* bit per family of calls under way, and SEG_IN_RUNTIME */
  uint32_t depth;
  uint32_t busy; /* a record is being written: a signal handler's calls must not write */
  uint32_t tid;
  uint64_t light_sp; /* of the newest call that was only counted */
  struct {
    uint64_t sp;
    uint32_t active; /* with it */
    uint16_t hook;
    uint16_t untold; /* no record has been made of it, and it is to have one */
  } outer[WIRE_DEPTH];
} __attribute__((aligned(64)));

/* Where a stack is put together: a thread's own stack may be small. */
#define SEG_WALKS 32
struct seg_walk {
  uint32_t busy, frames;
  uint64_t flags; /* enum wire_site_flag */
  uint64_t pid;
  uint64_t page; /* what `bytes` is a copy of; 0 = of nothing */
  uint8_t bytes[SEG_PAGE], across[128];
  struct wire_py_frame f[WIRE_PY_FRAMES];
  struct iovec from[WIRE_PY_FRAMES];
  uint64_t words[WIRE_PY_FRAMES][WIRE_PY_CODE_WORDS];
  uint64_t x[WIRE_PY_FRAMES]; /* signatures under way */
  uint64_t unread;            /* bit by frame: its code object could not be read */
};

enum seg_process_state { SEG_NONE = 0, SEG_MAKING = 1, SEG_READY = 2, SEG_FAILED = 3 };

struct seg_process {
  struct seg_header *header;
  uint8_t *blocks;
  int fd;
  uint32_t state;               /* seg_process_state */
  uint64_t device, inode;       /* of fd: the program may close it, and open something else under its number */
  uint8_t has_room[SEG_BLOCKS]; /* the block's memory is reserved */
  uint32_t early[WIRE_HOOKS];   /* calls made before the segment was ready */
  struct seg_thread threads[SEG_BLOCKS];
  struct seg_walk walks[SEG_WALKS];
};

/* One function's real address, by instance. */
struct seg_real {
  void *address; /* NULL: not known, or the caller decides */
};

struct seg_entry { /* generated, sorted by name */
  const char *name;
  uint16_t hook;
  uint8_t library;
  uint8_t is_getter;
};
enum seg_library { SEG_CUDART = 0, SEG_CUDA = 1, SEG_NCCL = 2, SEG_LIBRARIES = 3 };

/* One call on its way through a wrapper. */
struct seg_call {
  struct seg_thread *t; /* NULL: no ring, the call has been counted */
  uint64_t t0;          /* 0: only counted */
  uint32_t depth, active;
  uint32_t n, flags; /* wire_flag */
  uint32_t pick, hook;
};

extern __thread struct seg_thread *seg_self __attribute__((tls_model("initial-exec")));
extern __thread uint32_t seg_attaching __attribute__((tls_model("initial-exec")));
extern struct seg_process *seg_proc;
extern struct seg_real seg_reals[SEG_INSTANCES][WIRE_HOOKS];
extern const struct seg_entry seg_entries[];
extern const uint32_t seg_n_entries;
extern const char *const seg_name_of[WIRE_HOOKS];
extern const uint8_t seg_library_of[WIRE_HOOKS]; /* enum seg_library */
extern const struct seg_words seg_words_of[WIRE_HOOKS];
extern const uint64_t seg_hook_bits[(WIRE_HOOKS + 63) / 64];

/* settings.c: what the environment said when the program began. */
struct seg_settings {
  uint64_t word;
  char folder[256];         /* dir:, else "" */
  char socket[108];         /* socket:, else "" */
  char preload[512];        /* our own LD_PRELOAD entry, else "" */
  char shim[320], mode[64]; /* STALLSCOPE_SHIM=..., STALLSCOPE_SHIM_MODE=..., else "" */
  int32_t ranks[SEG_RANKS];
  bool off;
  uint64_t counter, mono_ns; /* at the start, for the counter's rate */
};
extern struct seg_settings seg_set;

/* make.c */
bool seg_make(struct seg_process *p);                    /* the segment; errno may change */
bool seg_reserve(struct seg_process *p, uint8_t *block); /* its memory, in a folder; false: the file system is full */
/* thread.c */
struct seg_thread *seg_attach(void);
void seg_homeless(uint32_t hook);
void seg_move_early(struct seg_process *p);
uint32_t seg_tid(void);
bool seg_make_now(void); /* the segment, without a call; false: there is none */
/* cold.c */
struct seg_way {
  void *real;
  struct seg_thread *t; /* NULL: the call has been counted as lost */
};
struct seg_way seg_cold(uint32_t hook, uint32_t slot, uint32_t instance, void *back);
uint32_t seg_settle(struct seg_thread *t, uint64_t sp); /* what is really active */
void seg_not_stale(struct seg_thread *t, uint32_t depth, uint32_t hook);
/* rank.c */
void seg_find_rank(struct seg_comm *row, uint64_t comm, const void *real);
/* vital.c */
void seg_told(struct seg_call c, uint64_t dur, int32_t status, const uint64_t *a);
int seg_put(struct seg_thread *t, const struct seg_vital *v, const void *uid);
void seg_emit_vital(const struct seg_vital *v);
/* sites.c */
void seg_waited(const struct seg_call *c, uint64_t dur); /* a timed call has returned: where from, if it took long */
void seg_inherit_sites(struct seg_header *h, const struct seg_header *parents);
/* nccl.c */
struct seg_nccl {
  uint64_t cookie;
  uint8_t is_call; /* an entry-only hook */
  uint16_t hook;
  uint8_t count, dtype, redop, nranks, rank; /* argument index + 1 */
};
void *seg_nccl_enter(struct seg_call *c, const struct seg_nccl *k, uint32_t instance, void *back, uint64_t sp,
                     const uint64_t *a, const void *uid);
void seg_forget_comms(void); /* operations that nobody saw have been made since they were numbered */
void seg_nccl_leave(struct seg_call *c, const struct seg_nccl *k, int32_t status, uint64_t *a, const void *uid);
/* elf.c, objects.c */
void *seg_resolve(uint32_t slot, uint32_t instance, void *back);
void *seg_real_of(uint32_t slot, uint32_t instance, void *back);    /* cached; NULL: no library has it */
void seg_found(const char *symbol, void **address, uint64_t flags); /* wraps what a getter found */
const struct seg_entry *seg_entry_of(const char *name);
void *seg_wrapper_for(const struct seg_entry *e, void *real);
bool seg_is_ours(const void *address);
void *seg_libc(const char *name);
/* look.c: new libraries */
bool seg_look_around(void); /* whether there were any */

INLINE uint64_t seg_ticks(void) {
#if defined(SEG_FAKE_COUNTER)
  extern uint64_t seg_fake_ticks(void);
  return seg_fake_ticks();
#elif defined(__x86_64__)
  uint32_t low, high;
  __asm__ volatile("rdtsc" : "=a"(low), "=d"(high));
  return (uint64_t)high << 32 | low;
#else
  uint64_t now;
  __asm__ volatile("mrs %0, cntvct_el0" : "=r"(now));
  return now;
#endif
}

/* One instruction, so that a signal handler's increment is not lost between a load and a store. */
INLINE uint64_t seg_bump(uint64_t *p) {
  uint64_t old = *(volatile uint64_t *)p;
#if defined(__x86_64__)
  __asm__ volatile("addq $1, %0" : "+m"(*p) : : "cc");
#else
  __atomic_fetch_add(p, 1, __ATOMIC_RELAXED);
#endif
  return old;
}

INLINE uint64_t seg_sp(void) {
#if defined(__x86_64__)
  uint64_t sp;
  __asm__ volatile("movq %%rsp, %0" : "=r"(sp));
  return sp;
#else
  return (uint64_t)__builtin_frame_address(0);
#endif
}
#endif
