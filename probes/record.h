/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
 * From a probe hit to a record: the call, its arguments, the reservation. */
#define HOOK_OF(k) ((u32)((k)&0xfff))
#define FAMILY_OF(k) ((u32)((k) >> 12 & 0xff))
#define TIME_OF(k) ((u32)((k) >> 20 & 0xfff))
#define FLAGS_OF(k) ((u32)((k) >> 32 & 0xff))
#define COMM_OF(k) ((u32)((k) >> 40 & 15))
#define STACK_WORDS(k) ((u32)((k) >> 44 & 15))
#define OUT_OF(k) ((u32)((k) >> 48 & 15))
#define UID_OF(k) ((u32)((k) >> 52 & 15))

/* One probe hit while it is looked at; lives on the BPF stack. */
struct hit {
  u64 cookie, id, n, ts;
  u32 slot, flags;
  u64 back; /* return address, 0 where it was not read */
  u64 a[8];
};

/* Arguments into h->a. One read fetches the return address and up to three stack words. */
INL void take_arguments(struct hit *h, struct pt_regs *c) {
  u64 w[4] = {};
  u32 words = STACK_WORDS(h->cookie);
  h->a[0] = REG0(c);
  h->a[1] = REG1(c);
  h->a[2] = REG2(c);
  h->a[3] = REG3(c);
  h->a[4] = REG4(c);
  h->a[5] = REG5(c);
  h->a[6] = h->a[7] = h->back = 0;
  if (!words && !(FLAGS_OF(h->cookie) & WIRE_HOOK_DRIVER)) return;
  if (bpf_probe_read_user(w, sizeof(w), (void *)c->sp)) {
    if (words) h->flags |= WIRE_NO_STACK;
    return;
  }
  h->back = w[0];
  h->a[6] = words == 3 ? (u32)w[1] | w[2] << 32 : w[1];
  h->a[7] = words == 3 ? w[3] : w[2];
}

/* cudaLaunchConfig_t and CUlaunchConfig agree in what is read: grid 0, block 12, dynamic shared memory 24, stream 32
 * (CUDA headers 11.8 to 13). Leaves func in a[0], then grid.xy, grid.z, block.xy, block.z, smem in a[6], stream in a[7]. */
INL void take_config(struct hit *h) {
  u64 w[5] = {};
  if (bpf_probe_read_user(w, sizeof(w), (void *)h->a[0])) {
    h->flags |= WIRE_NO_STACK;
    return;
  }
  h->a[0] = h->a[1];
  h->a[1] = w[0];
  h->a[2] = (u32)w[1];
  h->a[3] = w[1] >> 32 | w[2] << 32;
  h->a[4] = w[2] >> 32;
  h->a[5] = 0;
  h->a[6] = (u32)w[3];
  h->a[7] = w[4];
}

/* The runtime's place in a process is known from its first call on: user space learns of a new image only later, and
 * until then the driver's part of each call would count as a call of its own. */
INL void learn_range(u32 slot, u64 cookie, u64 ip) {
  struct wire_ranges *r = ranges.lookup(&slot);
  if (!r || r->to[0]) return;
  u32 i = FILE_OF(cookie) * WIRE_HOOKS + HOOK_OF(cookie);
  struct wire_span *s = spans.lookup(&i);
  if (!s || !s->after) return;
  r->from[0] = ip - s->before;
  r->to[0] = ip + s->after;
}

/* A driver call that returns into a probed runtime belongs to the runtime's call. */
INL int returns_into_runtime(u32 slot, u64 back) {
  struct wire_ranges *r = ranges.lookup(&slot);
  if (!r || !back) return 0;
#pragma unroll
  for (int i = 0; i < WIRE_RANGES; i++)
    if (back >= r->from[i] && back < r->to[i]) return 1;
  return 0;
}

INL u64 argument(u64 *a, u32 index_plus_one) {
  u64 v = 0;
#pragma unroll
  for (u32 i = 0; i < 8; i++)
    if (index_plus_one == i + 1) v = a[i];
  return v;
}

INL void fill(struct wire_rec *v, struct hit *h, u32 kind, u32 depth) {
  v->ts_ns = h->ts;
  v->dur_ns = 0;
  v->tgid = h->id >> 32;
  v->tid = h->id;
  v->hook = HOOK_OF(h->cookie);
  v->kind = kind;
  v->flags = h->flags;
  v->slot = h->slot;
  v->depth = depth;
  v->reserved = 0;
  v->n = h->n;
  v->status = 0;
#pragma unroll
  for (int i = 0; i < 8; i++) v->a[i] = h->a[i];
}

/* 0 = submitted. The two rings are apart so that a flood of launches can't push out what must not be lost. */
INL int emit(int is_vital, struct hit *h, u32 kind, u32 depth) {
  struct wire_rec *v = is_vital ? vital.ringbuf_reserve(sizeof(*v)) : bulk.ringbuf_reserve(sizeof(*v));
  if (!v) {
    bump(is_vital ? WIRE_LOST_VITAL : WIRE_LOST_BULK);
    return -1;
  }
  fill(v, h, kind, depth);
  if (is_vital) vital.ringbuf_submit(v, BPF_RB_NO_WAKEUP);
  else bulk.ringbuf_submit(v, BPF_RB_NO_WAKEUP);
  return 0;
}

INL int emit_uid(struct hit *h, u64 uid, u32 kind, u32 depth, u64 dur, int status) {
  struct wire_uid_rec *v = vital.ringbuf_reserve(sizeof(*v));
  if (!v) {
    bump(WIRE_LOST_VITAL);
    return -1;
  }
  if (bpf_probe_read_user(v->uid, WIRE_UID_BYTES, (void *)uid)) {
    __builtin_memset(v->uid, 0, WIRE_UID_BYTES);
    h->flags |= WIRE_NO_OUT;
  }
  fill(&v->rec, h, kind, depth);
  v->rec.dur_ns = dur;
  v->rec.status = status;
  vital.ringbuf_submit(v, BPF_RB_NO_WAKEUP);
  return 0;
}

INL void tell_life(u32 kind, u64 id, u32 slot, u64 a0, u64 a1, u64 a2) {
  struct wire_rec *v = life.ringbuf_reserve(sizeof(*v));
  if (!v) {
    bump(WIRE_LOST_LIFE);
    return;
  }
  struct hit h = {.id = id, .ts = bpf_ktime_get_ns(), .slot = slot, .a = {a0, a1, a2}};
  fill(v, &h, kind, 0);
  life.ringbuf_submit(v, BPF_RB_FORCE_WAKEUP);
}
