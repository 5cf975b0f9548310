// SPDX-License-Identifier: Apache-2.0
/* Calls of NCCL: the entry is evidence by itself and recorded at once; operations are numbered in their communicator.
 * They take microseconds, so that nothing here is inlined. */
#define _GNU_SOURCE
#include "hot.h"
#include <string.h>
#include "gpu.h"

#define FLAGS_OF(k) ((uint32_t)((k) >> 32 & 0xff))
#define COMM_OF(k) ((uint32_t)((k) >> 40 & 15))
#define OUT_OF(k) ((uint32_t)((k) >> 48 & 15))
#define UID_OF(k) ((uint32_t)((k) >> 52 & 15))
#define FAMILY (1u << 8)
#define IN_PROGRESS 7
#define MOST_ASKED 64      /* operations of a communicator before its rank is given up */
#define FIRST_CREATION 350 /* ncclGetUniqueId to ncclCommGrow */
#define LAST_CREATION 357
#define GROUP_END 341
#define DESTROY 359 /* ncclCommDestroy, ncclCommAbort */
#define ABORT 360

static struct seg_comm *rows_of(struct seg_header *h) {
  return (struct seg_comm *)(void *)((uint8_t *)h + SEG_COMMS_AT);
}

/* Open addressing; a row is taken once and never freed. NULL: the table is full. */
static struct seg_comm *comm_at(struct seg_header *h, uint64_t comm) {
  uint32_t i = (uint32_t)(comm * 0x9e3779b97f4a7c15ull >> (64 - SEG_COMM_BITS));
  if (!comm) return NULL;
  for (uint32_t j = 0; j < SEG_COMM_PROBES; j++) {
    struct seg_comm *row = &rows_of(h)[(i + j) & ((1u << SEG_COMM_BITS) - 1)];
    uint64_t key = __atomic_load_n(&row->comm, __ATOMIC_ACQUIRE);
    if (key == comm) return row;
    if (key) continue;
    if (__atomic_compare_exchange_n(&row->comm, &key, comm, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
      __atomic_fetch_add(&h->losses[SEG_COMMS_TAKEN], 1, __ATOMIC_RELAXED);
      return row;
    }
    if (key == comm) return row;
  }
  return NULL;
}

void seg_forget_comms(void) {
  struct seg_header *h = seg_proc->header;
  memset(rows_of(h), 0, sizeof(struct seg_comm) << SEG_COMM_BITS);
  __atomic_store_n(&h->losses[SEG_COMMS_TAKEN], 0, __ATOMIC_RELAXED);
}

static uint64_t argument(const uint64_t *a, uint32_t index_plus_one) {
  return index_plus_one && index_plus_one <= 8 ? a[index_plus_one - 1] : 0;
}

static void number(struct seg_call *c, const struct seg_nccl *k, const uint64_t *a, const void *real) {
  struct seg_comm *row = comm_at(c->t->header, argument(a, COMM_OF(k->cookie)));
  if (!row) {
    __atomic_fetch_add(&c->t->header->losses[SEG_NO_COMM], 1, __ATOMIC_RELAXED);
    c->flags |= WIRE_NO_SEQ;
    c->n = 0;
    return;
  }
  c->n = (uint32_t)__atomic_fetch_add(&row->next, 1, __ATOMIC_RELAXED);
  __atomic_store_n(&row->last_hook, k->hook, __ATOMIC_RELAXED);
  __atomic_store_n(&row->last_count, argument(a, k->count), __ATOMIC_RELAXED);
  if (UNLIKELY(row->nranks <= 0 && c->n < MOST_ASKED)) seg_find_rank(row, argument(a, COMM_OF(k->cookie)), real);
  uint64_t type = (uint32_t)argument(a, k->dtype) | argument(a, k->redop) << 32;
  __atomic_store_n(&row->last_type, type, __ATOMIC_RELAXED);
}

static struct seg_vital record_of(const struct seg_call *c, uint8_t kind, const uint64_t *a) {
  struct seg_vital v = {.ts = c->t0,
                        .hook = (uint16_t)c->hook,
                        .kind = kind,
                        .flags = (uint8_t)c->flags,
                        .depth = (uint8_t)c->depth,
                        .n = c->n,
                        .tid = c->t->tid};
  memcpy(v.a, a, sizeof(v.a));
  return v;
}

static void show(struct seg_call *c, const uint64_t *a) {
  if (c->depth >= WIRE_DEPTH) return;
  struct seg_frame *f = &c->t->block->frames[c->depth];
  uint64_t what = c->hook | (uint64_t)c->flags << 16 | 1ull << 24 | (uint64_t)c->n << 32;
  seg_show(c->t, c->depth, c->t0, what, a[0], a[1]);
  for (int i = 2; i < 8; i++) __atomic_store_n(&f->a[i], a[i], __ATOMIC_RELAXED);
}

/* An entry, or a call whose return is not timed: both are submitted before it can block. */
static void tell_entry(struct seg_call *c, const struct seg_nccl *k, const uint64_t *a, const void *uid) {
  struct seg_vital v = record_of(c, k->is_call ? WIRE_CALL : WIRE_ENTER, a);
  bool has_uid = uid && !(FLAGS_OF(k->cookie) & WIRE_HOOK_UID_RETURN);
  v.has_uid = has_uid;
  int failed = seg_put(c->t, &v, has_uid ? uid : NULL);
  if (!failed) c->flags |= WIRE_ENTERED;
  else if (k->is_call) seg_bump(&c->t->counts[c->hook].lost);
}

static bool is_creation(uint32_t hook) {
  return hook >= FIRST_CREATION && hook <= LAST_CREATION;
}

static void tell_witness(const struct seg_call *c, const struct seg_nccl *k, const uint64_t *a, const void *real) {
  if (is_creation(c->hook)) seg_gpu_before_creation(real);
  if (is_creation(c->hook) || c->flags & (WIRE_NESTED | WIRE_NO_SEQ)) return;
  seg_gpu_entered(c->hook, a, c->n);
  seg_pairs_entered(k, a, c->n, real);
}

void *seg_nccl_enter(struct seg_call *c, const struct seg_nccl *k, uint32_t instance, void *back, uint64_t sp,
                     const uint64_t *a, const void *uid) {
  struct seg_thread *t = seg_self;
  void *real = __atomic_load_n(&seg_reals[instance][k->hook].address, __ATOMIC_RELAXED);
  c->t = NULL;
  if (UNLIKELY(!t || !t->slots || !real)) {
    struct seg_way way = seg_cold(k->hook, k->hook, instance, back);
    real = way.real;
    if (!(t = way.t)) return real;
  }
  c->t = t;
  c->active = seg_active(t, sp);
  struct wire_count *row = &t->counts[k->hook];
  c->n = (uint32_t)seg_bump(&row->calls);
  c->hook = k->hook;
  c->depth = t->depth;
  c->flags = c->active & FAMILY ? WIRE_NESTED : 0;
  if (c->flags) seg_bump(&row->nested);
  if (FLAGS_OF(k->cookie) & WIRE_HOOK_SEQ && !c->flags) number(c, k, a, real);
  c->t0 = seg_ticks();
  tell_entry(c, k, a, uid);
  seg_push(t, FAMILY, c, sp, !(c->flags & WIRE_ENTERED) && !k->is_call);
  show(c, a);
  __atomic_store_n(&t->block->depth, c->depth + 1, __ATOMIC_RELEASE);
  tell_witness(c, k, a, real);
  return real;
}

/* A new communicator may lie where a destroyed one lay: its operations are numbered from zero. */
static void made(struct seg_call *c, const struct seg_nccl *k, const uint64_t *a, uint64_t comm) {
  struct seg_comm *row = comm_at(c->t->header, comm);
  __atomic_fetch_add(&c->t->header->losses[SEG_COMMS_MADE], 1, __ATOMIC_RELAXED);
  if (!row) return;
  __atomic_store_n(&row->next, 0, __ATOMIC_RELAXED);
  row->rank = k->rank ? (int32_t)argument(a, k->rank) : -1;
  row->nranks = k->nranks ? (int32_t)argument(a, k->nranks) : -1;
  row->errors = 0;
  row->made_by = k->hook;
}

/* Another one may lie there next, made inside a group: then its creation does not tell where. */
static void forget_rank(struct seg_call *c, const struct seg_nccl *k, const uint64_t *a) {
  struct seg_comm *row = comm_at(c->t->header, argument(a, COMM_OF(k->cookie)));
  if (row) row->nranks = -1;
}

static void keep_uid(struct seg_call *c, uint64_t comm, const void *uid) {
  struct seg_comm *row = uid ? comm_at(c->t->header, comm) : NULL;
  if (!row) return;
  memcpy(row->uid, uid, WIRE_UID_BYTES);
  row->has_uid = 1;
}

static void tell_return(struct seg_call *c, const struct seg_nccl *k, uint64_t dur, int32_t status, const uint64_t *a,
                        const void *uid) {
  struct seg_vital v = record_of(c, WIRE_DONE, a);
  bool failed = status && status != IN_PROGRESS;
  v.dur = dur;
  v.status = status;
  if (failed || dur >= c->t->header->long_ticks) v.flags |= WIRE_ALWAYS;
  if (failed) seg_bump(&c->t->counts[c->hook].errors);
  bool has_uid = uid && FLAGS_OF(k->cookie) & WIRE_HOOK_UID_RETURN;
  v.has_uid = has_uid;
  if (seg_put(c->t, &v, has_uid ? uid : NULL) && !(c->flags & WIRE_ENTERED)) seg_bump(&c->t->counts[c->hook].lost);
  struct seg_comm *row = failed ? comm_at(c->t->header, argument(a, COMM_OF(k->cookie))) : NULL;
  if (row) __atomic_fetch_add(&row->errors, 1, __ATOMIC_RELAXED);
}

void seg_nccl_leave(struct seg_call *c, const struct seg_nccl *k, int32_t status, uint64_t *a, const void *uid) {
  struct seg_thread *t = c->t;
  if (!t || !t->slots) return;
  uint64_t dur = seg_ticks() - c->t0, out = argument(a, OUT_OF(k->cookie));
  seg_pop(t, c);
  if (!(c->flags & (WIRE_NESTED | WIRE_NO_SEQ))) {
    seg_gpu_returned(c->hook, a, c->n, status);
    seg_pairs_returned(k, status);
  }
  if (k->is_call) return;
  if (is_creation(c->hook) || c->hook == GROUP_END)
    __atomic_store_n(&t->header->gpu, seg_gpu_state(), __ATOMIC_RELAXED);
  if ((c->hook == DESTROY || c->hook == ABORT) && !status) forget_rank(c, k, a);
  seg_time(t, (uint32_t)(k->cookie >> 20 & 0xfff) + (c->flags & WIRE_NESTED), dur);
  if (out) a[7] = *(uint64_t *)out;
  if (out && (!status || status == IN_PROGRESS)) {
    made(c, k, a, a[7]);
    if (!(FLAGS_OF(k->cookie) & WIRE_HOOK_UID_RETURN)) keep_uid(c, a[7], uid);
  }
  seg_waited(c, dur);
  tell_return(c, k, dur, status, a, uid);
}
