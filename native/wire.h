/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
 *
 * What BPF programs, the C drain and Python (through cffi) share: records in the rings and rows in the maps.
 * Only fixed-width fields and explicit padding, so that three compilers lay it out alike;
 * tests/unit/test_wire_layout.py compares them. WIRE_CDEF is set when cffi reads the header.
 */
#ifndef STALLSCOPE_WIRE_H
#define STALLSCOPE_WIRE_H

#if !defined(WIRE_CDEF) && !defined(WIRE_BPF) /* probes/dialect.h names the types itself */
#include <stdint.h>
#endif

#define WIRE_PROCS 128 /* traced processes at once; slot 0 is never used */
#define WIRE_HOOKS 400 /* hook ids, see probes/hooks.def */
#define WIRE_TIMES 320 /* timed hooks, driver hooks twice: outermost and nested */
#define WIRE_ROWS 4096 /* threads at once, a power of two */
#define WIRE_ROW_BITS 12
#define WIRE_ROW_PROBES 8 /* open addressing: rows looked at for one thread */
#define WIRE_DEPTH 4      /* nested paired calls that are timed in one thread */
#define WIRE_BUCKETS 160  /* 4 an octave from 2^7 to 2^47 ns: a midpoint is within 12.5 % */
#define WIRE_BUCKET_SHIFT 7
#define WIRE_RANGES 4      /* address ranges of probed runtimes in one process */
#define WIRE_UID_BYTES 128 /* ncclUniqueId */
#define WIRE_COMMS 4096    /* communicators with a sequence number */
#define WIRE_COMM_BITS 14  /* rows of their table, as a power of 2: four times as many, then 8 looks find a free one */
#define WIRE_FILES 32      /* file numbers in cookies */
#define WIRE_NO_FILE 31    /* number of files beyond the 31st */
#define WIRE_SIGNALS 32    /* 1 to 31: those that end a process by themselves, the standard ones */
#define WIRE_COMM_BYTES 16 /* a task's name in the kernel */
#define WIRE_SITES 4096    /* call sites at once: stacks by process and hook */
#define WIRE_SITE_BITS 12
#define WIRE_SITE_PROBES 16 /* double hashing: rows looked at for one site */
#define WIRE_WALKS 128      /* stacks that are put together at once */
#define WIRE_WALK_PROBES 4
#define WIRE_STACKS 128
#define WIRE_STACK_PROBES 8       /* copies of machine stacks that user space has not looked at yet */
#define WIRE_STACK_PAGES 4        /* 12 to 16 KiB */
#define WIRE_PY_FRAMES 36         /* slots of a stack: 32 frames, and those that CPython 3.12 puts between */
#define WIRE_PINS 64              /* ranges of pinned host memory of one process */
#define WIRE_DEEDS 8              /* what a thread does, by enum wire_deed */
#define WIRE_PY_CODE_WORDS 11     /* words of a code object, and of its line table, that a signature is made of */
#define WIRE_PY_NUMBERED_WORDS 7  /* words of a code object that has a number, which do */
#define WIRE_PY_ENTRY 0x80000000u /* in wire_py_frame.instr */
#define WIRE_MEMO_BITS 13
#define WIRE_WALK_BYTES 4096 /* how much of a thread's frames is read at once */

enum wire_kind {
  WIRE_CALL = 0,      /* entry of a hook without return probe: dur_ns is unknown */
  WIRE_ENTER = 1,     /* entry of a hook whose entry is evidence by itself (NCCL) */
  WIRE_DONE = 2,      /* a paired call returned */
  WIRE_ABANDONED = 3, /* the thread ended, or its process execed, inside the call */
  WIRE_FORK = 4,      /* a[0] child tgid, a[1] its slot or 0 when no slot was free */
  WIRE_EXEC = 5,      /* a[0] tid before the exec, 1 << 32 = not in the main thread; a[1], a[2] its new name */
  WIRE_EXIT = 6,      /* a[0] exit code as wait(2) encodes it; the last thread of the process */
  WIRE_STARTED = 7,   /* the GPU began the operation; hook, n and a[] of its communicator as in its WIRE_ENTER */
  WIRE_FINISHED = 8,  /* likewise: this GPU has ended its part */
  WIRE_QUEUED = 9,    /* likewise: it stands in the GPU's queue, and the same witness will tell when it begins */
  WIRE_OOM = 10,      /* the kernel ends a process for want of memory: a[0] tgid, 0 = not known; a[1], a[2] its name */
};

enum wire_flag {
  WIRE_NESTED = 1,      /* inside a call of the same family: the outer one is the call */
  WIRE_ENTERED = 2,     /* WIRE_DONE, WIRE_ABANDONED: a WIRE_ENTER of the same call was submitted */
  WIRE_NO_STACK = 4,    /* stack arguments could not be read: a[6], a[7] are meaningless */
  WIRE_NO_OUT = 8,      /* the result behind a pointer could not be read */
  WIRE_ALWAYS = 16,     /* recorded by rule (long, error, never sampled), not by chance */
  WIRE_LEFT = 64,       /* in INFLIGHT frames: the thread has left the call without a return (longjmp) */
  WIRE_NO_SEQ = 32,     /* the communicator table was full: n is no sequence number */
  WIRE_BY_PLUGIN = 128, /* WIRE_STARTED to WIRE_QUEUED: told by NCCL's profiler plugin, else by a pair of CUDA events */
};

/* Places where something is turned away; index into the ctl map. */
enum wire_ctl {
  WIRE_LOST_BULK = 0,         /* bulk ring full */
  WIRE_LOST_VITAL = 1,        /* vital ring full */
  WIRE_LOST_NO_ROW = 2,       /* thread table full: call counted, not timed, not recorded */
  WIRE_LOST_DEEP = 3,         /* nested deeper than WIRE_DEPTH */
  WIRE_LOST_STALE = 4,        /* never returned in sight: longjmp, an exception, or too deep */
  WIRE_LOST_LIFE = 5,         /* life ring full: a fork, exec or exit record */
  WIRE_SEEN_ORPHAN = 8,       /* return without an entry: the call began before the link */
  WIRE_SEEN_NO_COMM = 9,      /* communicator table full: operation without sequence number */
  WIRE_SEEN_NO_SLOT = 10,     /* forked child found no free process slot */
  WIRE_COMM_TAKEN = 11,       /* rows of the communicator table that were taken so far; no loss */
  WIRE_COMM_MADE = 12,        /* communicators whose creation returned; no loss */
  WIRE_CONF_TGID = 16,        /* offset of task_struct.tgid */
  WIRE_CONF_SIGNAL = 17,      /* offset of task_struct.signal */
  WIRE_CONF_LIVE = 18,        /* offset of signal_struct.live */
  WIRE_CONF_EXIT_CODE = 19,   /* offset of task_struct.exit_code */
  WIRE_CONF_LONG_NS = 20,     /* waits from this duration on are always recorded */
  WIRE_CONF_SHARED = 21,      /* bit per file: its unfiltered link counts, not the links of single processes */
  WIRE_CONF_NS_LEVEL = 22,    /* depth of the tracer's pid namespace; 0 = the host's */
  WIRE_CONF_THREAD_PID = 23,  /* offset of task_struct.thread_pid */
  WIRE_CONF_LEADER = 24,      /* offset of task_struct.group_leader */
  WIRE_CONF_PID_LEVEL = 25,   /* offset of pid.level */
  WIRE_CONF_PID_NUMBERS = 26, /* offset of pid.numbers */
  WIRE_CONF_TASK_COMM = 27,   /* offset of task_struct.comm */
  WIRE_CONF_FSBASE = 40,      /* offset of task_struct.thread.fsbase; 0 = no Python stacks on this kernel */
  WIRE_SITE_TAKEN = 41,       /* rows of the table of sites taken so far; no loss */
  WIRE_SEEN_NO_SITE = 42,     /* table of sites full: a wait is counted without its site */
  WIRE_SEEN_NO_PIN = 43,      /* table of pinned ranges full: whether memory is pinned is not known any more */
  WIRE_SEEN_NO_STACK = 44,    /* table of stacks full: a site without its native frames */
  WIRE_CTL_SIZE = 64,
};

/* The link cookie: a hook's constant descriptor.
 *   60  56 55 52 51 48 47  44 43  40 39     32 31        20 19  12 11    0
 *  +------+-----+-----+------+------+---------+------------+------+-------+
 *  | file | uid | out | nstk | comm |  flags  |  time id   |family| hook  |
 *  +------+-----+-----+------+------+---------+------------+------+-------+
 * comm, out, uid: argument index + 1 (0 = none); 7 and 8 are the first and second stack word.
 * file: number of the probed file in this session, set at the link; WIRE_NO_FILE = never shared.
 * Example: ncclAllReduce, hook 300, family 8, time id 200, comm in argument 5, one stack word: 0x0000_1606_0c80_812c
 */
enum wire_cookie_flag {
  WIRE_HOOK_SEQ = 1,         /* numbers the operations of its communicator */
  WIRE_HOOK_VITAL = 2,       /* never sampled; entry recorded at once, both in the vital ring */
  WIRE_HOOK_CONFIG = 4,      /* argument 0 points to a launch config: grid, block, smem, stream come from it */
  WIRE_HOOK_DRIVER = 8,      /* nested when it returns into a probed runtime */
  WIRE_HOOK_UID_VALUE = 16,  /* a unique id passed by value stands in the first 128 bytes of stack arguments */
  WIRE_HOOK_RUNTIME = 128,   /* of the CUDA runtime: tells where the runtime lies */
  WIRE_HOOK_SHARED = 64,     /* the link is not filtered by process */
  WIRE_HOOK_UID_RETURN = 32, /* the unique id behind argument uid exists at the return, not at the entry */
};

/* One record, 104 bytes. `n` is the number of the call among the process's calls of that hook, low 32 bits;
 * for hooks with WIRE_HOOK_SEQ and not nested: the sequence number in the communicator. */
struct wire_rec {
  uint64_t ts_ns;  /* CLOCK_MONOTONIC at the entry */
  uint64_t dur_ns; /* WIRE_DONE, WIRE_ABANDONED; else 0 and meaningless */
  uint32_t tgid;
  uint32_t tid;
  uint16_t hook;
  uint8_t kind;
  uint8_t flags;
  uint16_t slot;
  uint8_t depth;
  uint8_t reserved;
  uint32_t n;
  int32_t status; /* WIRE_DONE: the function's return value */
  uint64_t a[8];  /* arguments 0..5; then stack words: 1: [w0], 2: [w0, w1], 3: [w0 | w1 << 32, w2] */
};

struct wire_uid_rec {
  struct wire_rec rec;
  uint8_t uid[WIRE_UID_BYTES];
};

/* Exact counters of one hook in one process; calls == recorded + in flight + lost + sampled_out + filtered. */
struct wire_count {
  uint64_t calls; /* at the entry */
  uint64_t nested;
  uint64_t errors; /* paired hooks only */
  uint64_t lost;
  uint64_t sampled_out;
  uint64_t filtered;
  uint64_t reserved[2];
};

struct wire_time {
  uint64_t n, sum_ns, max_ns;
  uint32_t hist[WIRE_BUCKETS];
};

/* A paired call that has not returned. */
struct wire_frame {
  uint64_t ts_ns;
  uint64_t sp; /* stack pointer at the entry: points to the return address */
  uint64_t cookie;
  uint32_t n;
  uint8_t flags; /* wire_flag */
  uint8_t pick;  /* chosen by sampling */
  uint16_t site; /* row of the table of sites + 1; 0 = none */
  uint64_t a[8];
};

/* What a thread does, outermost calls only; index into wire_row.deeds. */
enum wire_deed {
  WIRE_DID_LAUNCH = 0,
  WIRE_DID_WAIT = 1,
  WIRE_DID_TO_DEVICE = 2, /* copies, as the next two */
  WIRE_DID_TO_HOST = 3,
  WIRE_DID_COPY = 4, /* of another or an unknown direction, and memsets */
  WIRE_DID_ALLOC = 5,
  WIRE_DID_NCCL = 6,
  WIRE_DID_OTHER = 7,
};

/* One thread. Only the thread itself writes, in its own context; seq is odd meanwhile. */
struct wire_row {
  uint64_t owner; /* tgid << 32 | tid; 0 = free */
  uint32_t seq;
  uint32_t depth; /* may exceed WIRE_DEPTH */
  uint32_t slot;
  uint32_t shared;      /* bit per file: this thread's hits are counted by the unfiltered link */
  uint64_t calls;       /* entries into hooks, launches too: tells a live thread from a silent one */
  uint64_t copy_stack;  /* hash of the Python stack of its newest asynchronous copy */
  uint64_t copy_stream; /* of that copy */
  uint32_t copy_class;  /* enum wire_class; 0 = its wait has come, or there was none */
  uint32_t deeds[WIRE_DEEDS];
  uint32_t reserved;
  uint64_t wait_ns; /* in its waits that have returned */
  uint64_t was;     /* as owner; stays when the thread has ended, until another takes the row */
  struct wire_frame f[WIRE_DEPTH];
};

struct wire_slot {
  uint64_t tgid; /* 0 = free */
  uint64_t dead; /* 1: ended; user space harvests, zeroes and frees */
  uint64_t rows; /* threads of it that hold a row */
};

/* The newest signal of one number that a process was sent and did not ignore. */
struct wire_signal {
  uint64_t ts_ns;                /* 0 = none */
  uint32_t tgid;                 /* who sent it; 0 = not visible from the tracer's pid namespace, or the kernel */
  int32_t code;                  /* si_code: positive = the kernel by itself (a fault, the terminal, the OOM killer) */
  uint8_t comm[WIRE_COMM_BYTES]; /* of the sending thread */
};

/* How a process came to its end; written while it lives, read after. */
struct wire_ending {
  uint64_t exiting_ns; /* first entry into exit() or the interpreter's end; 0 = none was seen */
  struct wire_signal signals[WIRE_SIGNALS];
};

/* The operations of one communicator: key = its address + tgid * 0x9e3779b97f4a7c15, 0 = free. */
struct wire_comm {
  uint64_t key, next;
};

/* How far the runtime's text reaches around a probe point: with the address of a hit, its range in that process. */
struct wire_span {
  uint64_t before, after; /* bytes; after 0 = not known */
};

struct wire_ranges {
  uint64_t from[WIRE_RANGES], to[WIRE_RANGES];
};

/* Sampling of one hook: record call n when mix(n) <= threshold; 0 = never by chance. */
struct wire_conf {
  uint32_t threshold;
  uint32_t sites; /* whether call sites are looked up, and what the call is: see below */
};

/* wire_conf.sites. Places are argument index + 1, 0 = there is none (capture/causes.py makes it of the hook table).
 *   30  28 27  24 23  20 19  16 15  12 11   8 7  6 5    4 3     1  0
 *  +------+------+------+------+------+------+----+------+-------+------+
 *  | deed |      | dst  | src  | kind |stream|    |direct| role  |wanted|
 *  +------+------+------+------+------+------+----+------+-------+------+
 * direct: WIRE_TO_DEVICE and its like where the function has one direction; kind: where it is an argument. deed: enum
 * wire_deed, of copies 1 less than WIRE_DID_TO_DEVICE, for the way of the copy to be added.
 * Example: cudaMemcpyAsync(dst src bytes copy_kind stream), role 3, wanted: 0x1012_4507 */
enum wire_role {
  WIRE_ROLE_NONE = 0,
  WIRE_ROLE_WAIT_STREAM = 1, /* for one stream */
  WIRE_ROLE_WAIT_DEVICE = 2,
  WIRE_ROLE_COPY = 3,
  WIRE_ROLE_PIN = 4,   /* arguments: where the address is put, bytes */
  WIRE_ROLE_LOCK = 5,  /* arguments: address, bytes: memory that is there already */
  WIRE_ROLE_UNPIN = 6, /* argument: address */
};

/* What a copy moves, as part of the site's key: bits 8 to 11 of wire_site.flags. Of a wait for a stream: what the copy
 * moved that the same Python stack put into the same stream just before. */
enum wire_class {
  WIRE_TO_DEVICE = 1,
  WIRE_TO_HOST = 2,
  WIRE_ANY_WAY = 3, /* of another direction, or an unknown one */
  WIRE_WAY = 3,
  WIRE_PINNED = 4,     /* its host memory was seen to be pinned, */
  WIRE_NOT_PINNED = 8, /* or was not; neither: not known */
};

/* One process: its pinned host memory, and whether its device has run dry after a wait. */
struct wire_flow {
  uint64_t armed;    /* 0, or tid << 32 | WIRE_ARMED; once its wait has returned also WIRE_DRY | row of the site + 1 */
  uint64_t since_ns; /* when it returned */
  uint64_t full;     /* ranges that found no place */
  uint64_t used;     /* 1: there has been a range */
  uint64_t from[WIRE_PINS], bytes[WIRE_PINS]; /* bytes 0: not in use */
  uint64_t at_ns[WIRE_PINS];                  /* since when */
};
#define WIRE_ARMED 0x40000000u
#define WIRE_DRY 0x80000000u

/* Of one call site: waits after which nothing was queued, until the process's next launch or copy. */
struct wire_idle {
  uint64_t n, sum_ns;
};

/* How to walk the Python frames of one process (capture/pylayout.py has the numbers of each version); byte offsets. */
struct wire_python {
  uint32_t tgid;        /* whose it is; another one's is not used */
  uint32_t image;       /* grows with every configuration: stacks of an earlier program are others */
  uint32_t tss_at;      /* from the thread's fs base: the word that holds its PyThreadState */
  uint32_t thread_id;   /* of the PyThreadState, as are the next two */
  uint32_t frame;       /* word that points to the frame, or to a _PyCFrame */
  uint32_t cframe;      /* of the _PyCFrame: the frame; WIRE_PY_NO_CFRAME = there is none in between */
  uint32_t frame_bytes; /* bytes of a frame that are read, below 128 */
  uint32_t previous;    /* of a frame, as are the next three */
  uint32_t code;
  uint32_t instr;      /* last instruction */
  uint32_t owner;      /* a byte; of versions without one, of a byte behind the frame that is 0 */
  uint32_t shim_owner; /* owners from here on are no Python frames */
  uint32_t instr_base; /* of a code object: where its instructions begin, for an address */
  uint32_t is_address; /* 1: instr is an address, 0: a number */
  uint32_t code_block; /* of a code object: immutable words, the last one its line table */
  uint32_t code_bytes; /* how many bytes: 8 * WIRE_PY_NUMBERED_WORDS, or 8 * WIRE_PY_CODE_WORDS */
  uint32_t has_table;  /* 1: the line table belongs to the signature */
  uint32_t chunk; /* of the PyThreadState: where the memory of its frames begins and, a word on, ends; 0 = not known */
  uint32_t state_bytes; /* bytes of a PyThreadState that hold all of that, below 512 */
  uint32_t entry;       /* of a frame: a byte of which a bit says that C code called it */
  uint32_t entry_bit;   /* that bit; 0 = there is none */
  uint32_t number;      /* of the function that a frame's first word points to: a number of its own, if has_number */
  uint32_t has_number;
  uint32_t reserved;
};
#define WIRE_PY_NO_CFRAME 65535

/* One Python frame. `sig` tells whether an address still holds the code object that was seen there. */
struct wire_py_frame {
  uint64_t code;  /* 0: not a Python frame */
  uint32_t instr; /* bytes, or in CPython 3.10 units of 2 bytes, from the code's first instruction on; WIRE_PY_ENTRY */
  uint32_t sig;
};

enum wire_site_flag {
  WIRE_SITE_READY = 1,      /* all other fields but the times are written */
  WIRE_SITE_NO_THREAD = 2,  /* the thread is none of Python's */
  WIRE_SITE_UNREADABLE = 4, /* a frame could not be read: what is outside of it is missing */
  WIRE_SITE_DEEP = 8,       /* more than WIRE_PY_FRAMES slots */
};
#define WIRE_SITE_CLASS_SHIFT 8 /* from this bit on: enum wire_class */

/* Signatures of code objects, 32 bits, with 32 bits of what proves them. */
struct wire_memos {
  uint64_t slot[2 << WIRE_MEMO_BITS]; /* what is written to the upper half is not read */
};

/* Where a stack is put together. Not per CPU: a probe's program can be preempted by another thread's. */
struct wire_walk {
  uint64_t busy;
  uint64_t frames;
  uint64_t flags;
  uint64_t previous, code, instr, owner, entry, first; /* of the frame that is looked at */
  uint64_t left, number;
  uint64_t what;         /* of the hook, as in its conf */
  uint64_t from, copied; /* address and bytes of `copy` */
  uint64_t frame[16];    /* a frame that does not lie there; the last word stays 0 */
  uint64_t w[16];
  struct wire_py_frame f[WIRE_PY_FRAMES];
  uint64_t function[WIRE_PY_FRAMES]; /* first word of each frame */
  uint64_t proof[WIRE_PY_FRAMES];    /* what to remember with its signature */
  uint64_t copy[WIRE_WALK_BYTES / 8];
};

/* The machine's stack at a new call site, from the entry of the hooked function; given back by user space. */
struct wire_stack {
  uint64_t busy;
  uint64_t sp, bp; /* sp points to the return address */
  uint64_t from;   /* where the first page lies, at or below sp */
  uint64_t pages;  /* that could be read */
  uint64_t page[WIRE_STACK_PAGES][512];
  uint64_t reserved[507]; /* whole pages, so that user space can map one row */
};

/* One call site: outermost calls of one hook and class with one Python stack in one process. `time` counts those that returned. */
struct wire_site {
  uint64_t flags; /* enum wire_site_flag and the class; written last */
  uint32_t tgid;
  uint32_t slot;
  uint16_t hook;
  uint16_t stack; /* row of the table of stacks + 1; 0 = none was free */
  uint32_t frames;
  uint32_t image;
  uint32_t tid; /* the thread that came first */
  uint64_t max_at_ns;
  struct wire_py_frame f[WIRE_PY_FRAMES]; /* innermost first */
  struct wire_time time;
};

#ifndef WIRE_CDEF
_Static_assert(sizeof(struct wire_rec) == 104, "wire_rec");
_Static_assert(sizeof(struct wire_uid_rec) == 232, "wire_uid_rec");
_Static_assert(sizeof(struct wire_count) == 64, "wire_count");
_Static_assert(sizeof(struct wire_time) == 664, "wire_time");
_Static_assert(sizeof(struct wire_frame) == 96, "wire_frame");
_Static_assert(sizeof(struct wire_row) == 488, "wire_row");
_Static_assert(sizeof(struct wire_flow) == 1568, "wire_flow");
_Static_assert(sizeof(struct wire_comm) == 16, "wire_comm");
_Static_assert(sizeof(struct wire_ending) == 1032, "wire_ending");
_Static_assert(sizeof(struct wire_python) == 96, "wire_python");
_Static_assert(sizeof(struct wire_site) == 1280, "wire_site");
_Static_assert(sizeof(struct wire_stack) == 20480, "wire_stack");
#endif
#endif
