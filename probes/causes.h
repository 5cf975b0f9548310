/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
 * Why a call waits, as far as calls tell: copies and the waits behind them, pinned memory, what each thread does, and
 * how long nothing was queued after a wait. All of it counted here, so that sampling takes nothing away. */
#define IS_WANTED(c) ((c)&1)
#define ROLE_OF(c) ((c) >> 1 & 7)
#define DIRECT_OF(c) ((c) >> 4 & 3)
#define STREAM_AT(c) ((c) >> 8 & 15)
#define KIND_AT(c) ((c) >> 12 & 15)
#define HOST_AT(c, way) ((c) >> (12 + 4 * (way)) & 15)
#define DEED_OF(c) ((c) >> 28 & 7)
#define IS_NOT_0(x) (((x) + 15) >> 4) /* of a place: 1 or 0, without a branch */
#define ARMED_BY(id) ((id) << 32 | WIRE_ARMED)
enum { FAMILY_LAUNCH = 1, FAMILY_WAIT = 2, FAMILY_COPY = 3, FAMILY_GRAPH = 6, FAMILY_NCCL = 8 };

/* enum wire_class without the memory; 0 = no copy. By cudaMemcpyKind, 2 bits each: host to device is 1, device to host 2,
 * all else any way. Without a branch, as all here that is done behind the walk: each doubles what the verifier follows. */
INL u32 way_of(u32 what, u64 kind) {
  return DIRECT_OF(what) + IS_NOT_0(KIND_AT(what)) * (0xffe7 >> 2 * (kind & 7) & 3);
}

INL void did(struct wire_row *r, u32 what, u32 way) {
  u32 deed = DEED_OF(what) + way;
  asm volatile("" : "+r"(deed));
  r->deeds[deed & (WIRE_DEEDS - 1)]++;
}

#ifdef NO_COOKIES /* no sites there, so nothing to put it to; a dozen programs would each carry it */
INL void queued(u32 slot) {}
INL void before_call(u32 slot, u64 id, u32 family) {}
INL void after_wait(struct wire_flow *flow, struct wire_frame *f, u64 id, u32 what, u32 way, u64 end) {}
INL void after_alloc(struct wire_flow *flow, struct wire_frame *f, u32 role, u64 end) {}
#else
/* Straight through all ranges: a user address has its highest bit clear. */
INL u32 memory_of(u32 slot, u64 address) {
  struct wire_flow *f = flows.lookup(&slot);
  u64 inside = 0;
  if (!f) return 0;
#pragma clang loop unroll(disable)
  for (u32 i = 0; i < WIRE_PINS; i++) {
    u64 from = address - f->from[i], behind = from - f->bytes[i];
    asm volatile("" : "+r"(f));
    inside |= ~from & behind;
  }
  inside >>= 63;
  return WIRE_PINNED * inside + WIRE_NOT_PINNED * ((1 - inside) & (f->full - 1) >> 63);
}

/* Part of the site's key (enum wire_class), into walk->flags: what lies in memory the verifier does not tell apart.
 * `stack` is the hash of the Python stack, whatever the function: only a wait that the same instruction of the program
 * asks for belongs to the copy. A program that copies on one line and waits on the next has asked for the wait. */
INL void classify(struct wire_row *r, struct hit *h, u32 what, u64 stack, struct wire_walk *walk) {
  u64 *a = walk->w; /* by place; 0 stands for none */
  a[0] = 0;
#pragma unroll
  for (u32 i = 0; i < 8; i++) a[i + 1] = h->a[i];
  u64 stream = a[STREAM_AT(what)];
  if (ROLE_OF(what) == WIRE_ROLE_COPY) {
    u32 way = way_of(what, a[KIND_AT(what)]), at = HOST_AT(what, way);
    u32 class = way + IS_NOT_0(at) * memory_of(h->slot, a[at]);
    walk->flags |= class << WIRE_SITE_CLASS_SHIFT;
    r->copy_stack = stack;
    r->copy_stream = stream;
    r->copy_class = class * IS_NOT_0(STREAM_AT(what));
  } else {
    u64 other = (r->copy_stack ^ stack) | (r->copy_stream ^ stream);
    u32 is_its = ((other | -other) >> 63 ^ 1) & (ROLE_OF(what) == WIRE_ROLE_WAIT_STREAM);
    walk->flags |= (u64)(is_its * r->copy_class) << WIRE_SITE_CLASS_SHIFT;
    r->copy_class *= 1 - is_its;
  }
}

/* Work goes to the device: what was counted as dry ends, whoever sends it. */
INL void queued(u32 slot) {
  struct wire_flow *f = flows.lookup(&slot);
  u64 armed = f ? f->armed : 0;
  if (!armed) return;
  u64 since = f->since_ns;
  if (__sync_val_compare_and_swap(&f->armed, armed, 0) != armed || !(armed & WIRE_DRY)) return;
  u32 i = (u32)(armed & 0xffff) - 1;
  struct wire_idle *idle = idles.lookup(&i);
  if (!idle) return;
  __sync_fetch_and_add(&idle->n, 1);
  __sync_fetch_and_add(&idle->sum_ns, bpf_ktime_get_ns() - since);
}

/* Only what was pinned before the call that gives it back began: at its return the memory may be another's. */
INL void unpin(struct wire_flow *f, u64 address, u64 before_ns) {
#pragma clang loop unroll(disable)
  for (u32 i = 0; i < WIRE_PINS; i++)
    if (f->from[i] == address && f->at_ns[i] < before_ns) {
      f->bytes[i] = 0;
      f->from[i] = 0;
    }
}

INL void pin(struct wire_flow *f, u64 address, u64 bytes, u64 now) {
  f->used = 1;
#pragma clang loop unroll(disable)
  for (u32 i = 0; i < WIRE_PINS; i++)
    if (!f->from[i] && !__sync_val_compare_and_swap(&f->from[i], 0, address)) {
      f->at_ns[i] = now;
      f->bytes[i] = bytes;
      return;
    }
  __sync_fetch_and_add(&f->full, 1);
  bump(WIRE_SEEN_NO_PIN);
}

/* At the entry of a paired call, nested or not. Before the walk: behind it every branch costs the verifier a thousand
 * times. So which site it is, and whether the call is one that leaves an empty stream, only the return knows. */
INL void before_call(u32 slot, u64 id, u32 family) {
  if (family == FAMILY_COPY || family == FAMILY_NCCL) queued(slot);
  if (family != FAMILY_COPY && family != FAMILY_WAIT) return;
  struct wire_flow *f = flows.lookup(&slot);
  if (f && !(f->armed & WIRE_DRY)) f->armed = ARMED_BY(id);
}

/* A synchronous copy to the host waits for what its stream holds. */
INL void after_wait(struct wire_flow *flow, struct wire_frame *f, u64 id, u32 what, u32 way, u64 end) {
  u32 role = ROLE_OF(what);
  int drains =
      role == WIRE_ROLE_WAIT_STREAM || role == WIRE_ROLE_WAIT_DEVICE || (way == WIRE_TO_HOST && !STREAM_AT(what));
  if (flow->armed != ARMED_BY(id)) return; /* somebody queued work meanwhile, or it has been dry before */
  flow->since_ns = end;
  __sync_val_compare_and_swap(&flow->armed, ARMED_BY(id), drains && f->site ? ARMED_BY(id) | WIRE_DRY | f->site : 0);
}

INL void after_alloc(struct wire_flow *flow, struct wire_frame *f, u32 role, u64 end) {
  u64 address = f->a[0];
  if (role == WIRE_ROLE_UNPIN) unpin(flow, address, f->ts_ns);
  if (role == WIRE_ROLE_PIN && bpf_probe_read_user(&address, 8, (void *)f->a[0])) return;
  if (address && role != WIRE_ROLE_UNPIN) pin(flow, address, f->a[1], end);
}
#endif

/* At the return of an outermost call. */
INL void after_call(struct wire_row *r, struct wire_frame *f, u64 id, u64 end, int status) {
  u32 slot = r->slot, what = what_is(HOOK_OF(f->cookie)), family = FAMILY_OF(f->cookie), role = ROLE_OF(what),
      way = way_of(what, f->a[(KIND_AT(what) - 1) & 7]);
  did(r, what, way);
  if (family == FAMILY_WAIT) r->wait_ns += end - f->ts_ns;
  struct wire_flow *flow = flows.lookup(&slot);
  if (!flow) return;
  if (family == FAMILY_WAIT || family == FAMILY_COPY) after_wait(flow, f, id, what, way, end);
  else if (!status && role >= WIRE_ROLE_PIN) after_alloc(flow, f, role, end);
}
