/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
 * Threads and processes: three raw tracepoints. A child is in the filter before it runs; what a thread was inside when
 * it ended becomes an event. */
/* A thread that ends, or an exec, inside calls: they become events, not open questions. */
INL void release(struct wire_row *r, u64 id) {
  u32 d = r->depth < WIRE_DEPTH ? r->depth : WIRE_DEPTH;
  u64 now = bpf_ktime_get_ns();
  r->seq++;
#pragma unroll
  for (u32 j = 0; j < WIRE_DEPTH; j++) {
    if (j >= d) continue;
    struct wire_frame *f = frame_at(r, j);
    struct hit h = {.cookie = f->cookie, .id = id, .n = f->n, .ts = f->ts_ns, .slot = r->slot, .flags = f->flags};
    struct wire_rec *v = vital.ringbuf_reserve(sizeof(*v));
    if (!v) {
      bump(WIRE_LOST_VITAL);
      if (!(f->flags & WIRE_ENTERED)) {
        struct wire_count *c = count_of(r->slot, HOOK_OF(f->cookie));
        if (c) __sync_fetch_and_add(&c->lost, 1);
      }
      continue;
    }
    fill(v, &h, WIRE_ABANDONED, j);
    v->dur_ns = now - f->ts_ns;
    vital.ringbuf_submit(v, BPF_RB_NO_WAKEUP);
  }
  r->depth = 0;
  r->seq++;
}

ON("raw_tracepoint/sched_process_fork") int on_fork(raw_ctx *ctx) {
  u64 id = current_id();
  u32 tgid = id >> 32, child = 0, *s = procs.lookup(&tgid), slot = 0, level = setting(WIRE_CONF_NS_LEVEL);
  if (!s || !(*s & PROC_FOLLOW)) return 0;
  if (level) child = id_in_namespace(ctx->args[1], level) >> 32;
  else bpf_probe_read_kernel(&child, 4, (void *)(ctx->args[1] + setting(WIRE_CONF_TGID)));
  if (child == tgid) return 0; /* a thread */
#pragma unroll
  for (u32 j = 0; j < WIRE_PROCS / 2; j++) {
    u32 k = (child + j) & (WIRE_PROCS - 1);
    if (slot || !k) continue;
    struct wire_slot *p = slots.lookup(&k);
    if (p && !p->tgid && !__sync_val_compare_and_swap(&p->tgid, 0, child)) slot = k;
  }
  if (slot) {
    u32 entry = slot | PROC_FOLLOW;
    procs.update(&child, &entry);
  } else bump(WIRE_SEEN_NO_SLOT);
  tell_life(WIRE_FORK, id, *s & PROC_SLOT, child, slot, 0);
  return 0;
}

ON("raw_tracepoint/sched_process_exec") int on_exec(raw_ctx *ctx) {
  u64 id = current_id(), old = (id >> 32 << 32) | (u32)ctx->args[1];
  u32 moved = (u32)bpf_get_current_pid_tgid() != (u32)ctx->args[1]; /* both as the host numbers them */
  u32 slot, tgid = id >> 32, *s = procs.lookup(&tgid);
  if (!s) return 0;
  struct wire_row *r = row_of(id, 0, &slot);
  if (r) release(r, id);
  if (moved) { /* exec in a thread that was not the leader: it takes over the leader's tid */
    r = row_of(old, 0, &slot);
    if (r) {
      release(r, old);
      r->owner = 0;
      hold_row(slot, -1);
    }
  }
  slot = *s & PROC_SLOT;
  struct wire_ranges *places = ranges.lookup(&slot);
  if (places) {
#pragma unroll
    for (int j = 0; j < WIRE_RANGES; j++) places->to[j] = 0;
  }
  u64 name[2] = {};
  bpf_get_current_comm(name, sizeof(name));
  tell_life(WIRE_EXEC, id, *s & PROC_SLOT, (old & 0xffffffff) | (u64)moved << 32, name[0], name[1]);
  return 0;
}

ON("raw_tracepoint/sched_process_exit") int on_exit(raw_ctx *ctx) {
  u64 id = current_id(), signal = 0;
  u32 slot, code = 0, live = 1, tgid = id >> 32, *s = procs.lookup(&tgid);
  if (!s) return 0;
  struct wire_row *r = row_of(id, 0, &slot);
  if (r) {
    release(r, id);
    r->owner = 0;
    hold_row(slot, -1);
  }
  bpf_probe_read_kernel(&signal, 8, (void *)(ctx->args[0] + setting(WIRE_CONF_SIGNAL)));
  bpf_probe_read_kernel(&live, 4, (void *)(signal + setting(WIRE_CONF_LIVE)));
  if (live) return 0;
  /* Threads that end together have all left `live` before the first of them comes here (until v6.15 by as long as
   * exit_mm() takes). Those with calls to tell of must find the process in the filter: the last of them ends it. */
  slot = *s & PROC_SLOT;
  struct wire_slot *p = slots.lookup(&slot);
  if (!p || p->rows || __sync_val_compare_and_swap(&p->dead, 0, 1)) return 0;
  bpf_probe_read_kernel(&code, 4, (void *)(ctx->args[0] + setting(WIRE_CONF_EXIT_CODE)));
  procs.delete(&tgid);
  tell_life(WIRE_EXIT, id, slot, code, 0, 0);
  return 0;
}

/* Run once by hand (BPF_PROG_TEST_RUN) in the tracer's own context: how deep its pid namespace is. From inside a
 * container no file tells. Never attached. */
ON("raw_tracepoint/sys_enter") int who_am_i(raw_ctx *ctx) {
  u64 pid = 0;
  u32 level = 0, place = WIRE_CONF_NS_LEVEL;
  bpf_probe_read_kernel(&pid, 8, (void *)(bpf_get_current_task() + setting(WIRE_CONF_THREAD_PID)));
  bpf_probe_read_kernel(&level, 4, (void *)(pid + setting(WIRE_CONF_PID_LEVEL)));
  u64 *p = ctl.lookup(&place);
  if (p) *p = level;
  return 0;
}
