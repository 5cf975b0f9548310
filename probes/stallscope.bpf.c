// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
/* One program a family; the link cookie (native/wire.h) is the hook's descriptor.
 *   launch      entry of a pure enqueue: count, maybe record
 *   enter       entry of a paired call: count, push an in-flight frame; of NCCL's with sequence number, unique id and a
 *               record at once
 *   pair_return return of any paired call: pop the frame, time, maybe record
 * and raw tracepoints for threads and processes, and why these end.
 * -DNO_COOKIES, for kernels before 5.15: instead of the families a program for each of few probes (per_hook.h). */
#include "dialect.h"
#include "wire.h"
#include "maps.h"
#include "record.h"
#include "causes.h"
#include "python.h"

INL void lose(struct wire_count *c, u32 place) {
  if (c) __sync_fetch_and_add(&c->lost, 1);
  bump(place);
}

INL void lose_frame(struct wire_row *r, struct wire_frame *f, u32 place) {
  if (f->flags & WIRE_ENTERED) return; /* its entry was recorded: the call is an event already */
  lose(count_of(r->slot, HOOK_OF(f->cookie)), place);
}

/* Whether a paired call of the family is under way above this stack pointer: ncclSend enters ncclGroupStart itself. */
INL int inside_live(struct wire_row *r, u64 sp, u32 family) {
  u32 depth = r->depth;
  int nested = 0;
#pragma unroll
  for (u32 j = 0; j < WIRE_DEPTH; j++)
    if (j < depth && frame_at(r, j)->sp > sp && FAMILY_OF(frame_at(r, j)->cookie) == family) nested = 1;
  return nested;
}

INL int do_launch(struct pt_regs *ctx, u64 cookie) {
  struct hit h = {.cookie = cookie, .id = current_id()};
  if (!h.id) return 0;
  struct wire_row *r = row_of(h.id, 1, &h.slot);
  if (!h.slot || !is_mine(r, cookie)) return 0;
  if (FLAGS_OF(cookie) & WIRE_HOOK_RUNTIME) learn_range(h.slot, cookie, ENTRY_IP(ctx));
  if (r) r->calls++;
  struct wire_count *c = count_of(h.slot, HOOK_OF(cookie));
  if (!c) return 0;
  h.n = __sync_fetch_and_add(&c->calls, 1);
  int is_vital = FLAGS_OF(cookie) & WIRE_HOOK_VITAL, is_driver = FLAGS_OF(cookie) & WIRE_HOOK_DRIVER;
  int pick = is_vital || sampled(HOOK_OF(cookie), h.n);
  if (pick || is_driver) take_arguments(&h, ctx);
  if (is_driver ? returns_into_runtime(h.slot, h.back) : is_vital && r && inside_live(r, ctx->sp, FAMILY_OF(cookie))) {
    h.flags |= WIRE_NESTED;
    __sync_fetch_and_add(&c->nested, 1);
  }
  u32 family = FAMILY_OF(cookie);
  if (r && !(h.flags & WIRE_NESTED)) did(r, what_is(HOOK_OF(cookie)), 0);
  if (family == FAMILY_LAUNCH || family == FAMILY_COPY || family == FAMILY_GRAPH) queued(h.slot);
  if (!pick) {
    __sync_fetch_and_add(&c->sampled_out, 1);
    return 0;
  }
  if (FLAGS_OF(cookie) & WIRE_HOOK_CONFIG) take_config(&h);
  h.ts = bpf_ktime_get_ns();
  if (emit(is_vital, &h, WIRE_CALL, 0)) __sync_fetch_and_add(&c->lost, 1);
  return 0;
}

/* Frames at or below this stack pointer never returned in sight: longjmp or an exception passed them. */
INL u32 drop_stale(struct wire_row *r, u64 sp) {
  u32 d = r->depth, top = d < WIRE_DEPTH ? d : WIRE_DEPTH;
#pragma unroll
  for (int j = 0; j < WIRE_DEPTH; j++) {
    if (!top || frame_at(r, top - 1)->sp > sp) continue;
    d = --top;
    lose_frame(r, frame_at(r, top), WIRE_LOST_STALE);
  }
  return d;
}

INL int inside_family(struct wire_row *r, u32 depth, u32 family) {
  int nested = 0;
#pragma unroll
  for (u32 j = 0; j < WIRE_DEPTH; j++)
    if (j < depth && FAMILY_OF(frame_at(r, j)->cookie) == family) nested = 1;
  return nested;
}

INL void push(struct wire_row *r, u32 d, struct hit *h, u64 sp, u32 pick, u32 site) {
  r->seq++; /* odd: readers try again; the empty asm keeps the compiler from merging the two increments */
  asm volatile("" ::: "memory");
  struct wire_frame *f = frame_at(r, d);
  f->ts_ns = h->ts;
  f->sp = sp;
  f->cookie = h->cookie;
  f->n = h->n;
  f->flags = h->flags;
  f->pick = pick;
  f->site = site;
#pragma unroll
  for (int i = 0; i < 8; i++) f->a[i] = h->a[i];
  r->depth = d + 1;
  asm volatile("" ::: "memory");
  r->seq++;
}

INL u64 next_in_comm(struct hit *h) {
  u64 *s = sequence_of(h->id >> 32, argument(h->a, COMM_OF(h->cookie)));
  if (s) return __sync_fetch_and_add(s, 1);
  bump(WIRE_SEEN_NO_COMM);
  h->flags |= WIRE_NO_SEQ;
  return 0;
}

/* A new communicator may lie where a destroyed one lay. */
INL void number_from_zero(u64 id, u64 comm) {
  u64 *s = sequence_of(id >> 32, comm);
  if (s) *s = 0;
  bump(WIRE_COMM_MADE);
}

/* The entry of an NCCL call is evidence by itself ("rank 3 came"): recorded at once, before it can block. */
INL void record_entry(struct hit *h, struct pt_regs *ctx, u32 depth) {
  u32 flags = FLAGS_OF(h->cookie);
  int failed;
  if ((flags & WIRE_HOOK_SEQ) && !(h->flags & WIRE_NESTED)) h->n = next_in_comm(h);
  if (flags & WIRE_HOOK_UID_VALUE) failed = emit_uid(h, ctx->sp + 8, WIRE_ENTER, depth, 0, 0);
  else if (UID_OF(h->cookie) && !(flags & WIRE_HOOK_UID_RETURN))
    failed = emit_uid(h, argument(h->a, UID_OF(h->cookie)), WIRE_ENTER, depth, 0, 0);
  else failed = emit(1, h, WIRE_ENTER, depth);
  if (!failed) h->flags |= WIRE_ENTERED;
}

INL int do_enter(struct pt_regs *ctx, u64 cookie, int is_nccl) {
  struct hit h = {.cookie = cookie, .id = current_id()};
  if (!h.id) return 0;
  struct wire_row *r = row_of(h.id, 1, &h.slot);
  if (!h.slot || !is_mine(r, cookie)) return 0;
  if (FLAGS_OF(cookie) & WIRE_HOOK_RUNTIME) learn_range(h.slot, cookie, ENTRY_IP(ctx));
  struct wire_count *c = count_of(h.slot, HOOK_OF(cookie));
  if (!c) return 0;
  h.n = __sync_fetch_and_add(&c->calls, 1);
  before_call(h.slot, h.id, FAMILY_OF(cookie));
  u32 d = 0;
  if (r) {
    r->calls++;
    d = drop_stale(r, ctx->sp);
    if (d && inside_family(r, d, FAMILY_OF(cookie))) h.flags |= WIRE_NESTED;
  }
  take_arguments(&h, ctx);
  if ((FLAGS_OF(cookie) & WIRE_HOOK_DRIVER) && returns_into_runtime(h.slot, h.back)) h.flags |= WIRE_NESTED;
  if (h.flags & WIRE_NESTED) __sync_fetch_and_add(&c->nested, 1);
  u32 site = r && d < WIRE_DEPTH && !(h.flags & WIRE_NESTED) ? site_of(ctx, r, &h, HOOK_OF(cookie)) : 0;
  h.ts = bpf_ktime_get_ns(); /* after the stack: a wait is not longer for having been looked at */
  u32 pick = is_nccl || sampled(HOOK_OF(cookie), h.n); /* here: a branch before the walk has the verifier walk twice */
  if (is_nccl) record_entry(&h, ctx, d);
  if (r && d < WIRE_DEPTH) {
    push(r, d, &h, ctx->sp, pick, site);
    return 0;
  }
  if (r) r->depth = d + 1;
  if (!(h.flags & WIRE_ENTERED)) lose(c, r ? WIRE_LOST_DEEP : WIRE_LOST_NO_ROW);
  return 0;
}

INL void add_to(struct wire_time *t, u64 dur) {
  u64 m = t->max_ns;
  __sync_fetch_and_add(&t->n, 1);
  __sync_fetch_and_add(&t->sum_ns, dur);
#pragma unroll
  for (int k = 0; k < 3; k++)
    if (dur > m) {
      u64 seen = __sync_val_compare_and_swap(&t->max_ns, m, dur);
      m = seen == m ? dur : seen;
    }
  u32 b = bucket_of(dur);
  asm volatile("" : "+r"(b));
  if (b < WIRE_BUCKETS) __sync_fetch_and_add(&t->hist[b], 1);
}

INL void add_time(u32 slot, u64 cookie, u32 flags, u64 dur) {
  u32 i = slot * WIRE_TIMES + TIME_OF(cookie) + (flags & WIRE_NESTED);
  struct wire_time *t = times.lookup(&i);
  if (t) add_to(t, dur);
}

/* After the hook's own time: user space reads sites first, so that those of a hook never add up to more than it has. */
INL void add_site(u32 site, u64 ts, u64 dur) {
  u32 i = site - 1;
  struct wire_site *s = site ? sites.lookup(&i) : 0;
  if (!s) return;
  add_to(&s->time, dur);
  if (s->time.max_ns == dur) s->max_at_ns = ts;
}

/* Two results are no errors: ncclInProgress, and cudaErrorNotReady, which the driver's CUresult numbers alike. */
INL int is_error(u64 cookie, int status) {
  return status && status != (FLAGS_OF(cookie) & WIRE_HOOK_VITAL ? 7 : 600);
}

INL void record_done(struct wire_row *r, struct wire_frame *f, u64 id, u64 dur, int status, struct wire_count *c) {
  struct hit h = {.cookie = f->cookie, .id = id, .n = f->n, .ts = f->ts_ns, .slot = r->slot, .flags = f->flags};
  u32 flags = FLAGS_OF(h.cookie), out = OUT_OF(h.cookie), depth = r->depth;
  int always = is_error(h.cookie, status) || dur >= setting(WIRE_CONF_LONG_NS), failed;
  if (always) h.flags |= WIRE_ALWAYS;
  if (!always && !f->pick) {
    __sync_fetch_and_add(&c->sampled_out, 1);
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; i++) h.a[i] = f->a[i];
  if (out && bpf_probe_read_user(&h.a[7], 8, (void *)argument(h.a, out))) h.flags |= WIRE_NO_OUT;
  else if (out && (!status || status == 7)) number_from_zero(id, h.a[7]); /* 7: ncclInProgress */
  if (flags & WIRE_HOOK_UID_RETURN) {
    failed = emit_uid(&h, argument(h.a, UID_OF(h.cookie)), WIRE_DONE, depth, dur, status);
  } else {
    int is_vital = always || (flags & WIRE_HOOK_VITAL);
    struct wire_rec *v = is_vital ? vital.ringbuf_reserve(sizeof(*v)) : bulk.ringbuf_reserve(sizeof(*v));
    failed = !v;
    if (v) {
      fill(v, &h, WIRE_DONE, depth);
      v->dur_ns = dur;
      v->status = status;
      if (is_vital) vital.ringbuf_submit(v, BPF_RB_NO_WAKEUP);
      else bulk.ringbuf_submit(v, BPF_RB_NO_WAKEUP);
    } else bump(is_vital ? WIRE_LOST_VITAL : WIRE_LOST_BULK);
  }
  if (failed && !(h.flags & WIRE_ENTERED)) __sync_fetch_and_add(&c->lost, 1);
}

INL int do_return(struct pt_regs *ctx, u64 cookie) {
  u64 id = current_id(), sp = ENTRY_SP(ctx);
  u32 slot;
  struct wire_row *r = id ? row_of(id, 0, &slot) : 0;
  if (!r || !is_mine(r, cookie)) return 0;
  u32 d = r->depth;
  if (!d) {
    bump(WIRE_SEEN_ORPHAN);
    return 0;
  }
  d--;
  if (d >= WIRE_DEPTH) {
    r->depth = d;
    return 0;
  }
  struct wire_frame *f = frame_at(r, d);
  if (f->sp < sp && d && frame_at(r, d - 1)->sp == sp) {
    lose_frame(r, f, WIRE_LOST_STALE);
    f = frame_at(r, --d);
  }
  if (f->sp != sp || HOOK_OF(f->cookie) != HOOK_OF(cookie)) {
    bump(WIRE_SEEN_ORPHAN);
    return 0;
  }
  u64 end = bpf_ktime_get_ns(), dur = end - f->ts_ns;
  int status = (int)RETURN_VALUE(ctx);
  r->seq++;
  r->depth = d;
  r->seq++;
  struct wire_count *c = count_of(r->slot, HOOK_OF(cookie));
  if (!c) return 0;
  add_time(r->slot, f->cookie, f->flags, dur);
  add_site(f->site, f->ts_ns, dur);
  if (!(f->flags & WIRE_NESTED)) after_call(r, f, id, end, status);
  if (is_error(cookie, status)) __sync_fetch_and_add(&c->errors, 1);
  record_done(r, f, id, dur, status, c);
  return 0;
}

#ifdef NO_COOKIES
#include "per_hook.h"
#else
ON("uprobe") int launch(struct pt_regs *ctx) {
  return do_launch(ctx, bpf_get_attach_cookie(ctx));
}
ON("uprobe") int enter(struct pt_regs *ctx) {
  u64 cookie = bpf_get_attach_cookie(ctx);
  return do_enter(ctx, cookie, FLAGS_OF(cookie) & WIRE_HOOK_VITAL); /* one program: the walk is long to load */
}
ON("uprobe") int pair_return(struct pt_regs *ctx) {
  return do_return(ctx, bpf_get_attach_cookie(ctx));
}
#endif

#include "life.h"
#include "endings.h"
#include "python_life.h"
