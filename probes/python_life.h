/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
 * How to walk Python frames follows the processes: copied at a fork, gone with an exec, and so is pinned memory. */
#ifndef NO_COOKIES
/* A forked child has its parent's memory, so the same configuration, before it runs. Stands behind
 * on_fork, so that it is attached, and runs, after it: the child is in the filter then. */
ON("raw_tracepoint/sched_process_fork") int python_fork(raw_ctx *ctx) {
  u32 tgid = current_id() >> 32, child = 0, *s = procs.lookup(&tgid), level = setting(WIRE_CONF_NS_LEVEL);
  if (!s) return 0;
  if (level) child = id_in_namespace(ctx->args[1], level) >> 32;
  else bpf_probe_read_kernel(&child, 4, (void *)(ctx->args[1] + setting(WIRE_CONF_TGID)));
  u32 *theirs = child == tgid ? 0 : procs.lookup(&child), from = *s & PROC_SLOT;
  if (!theirs) return 0;
  u32 to = *theirs & PROC_SLOT;
  struct wire_python *mine = pythons.lookup(&from), *copy = pythons.lookup(&to);
  if (!mine || !copy || !to || from == to || mine->tgid != tgid) return 0;
  *copy = *mine;
  /* From here on the two number their functions each for itself. Bit 31: none of the numbers that user space gives. */
  copy->image = bpf_ktime_get_ns() >> 10 | 1u << 31;
  copy->tgid = child;
  return 0;
}

ON("raw_tracepoint/sched_process_exec") int python_exec(raw_ctx *ctx) {
  u32 tgid = current_id() >> 32, *s = procs.lookup(&tgid), slot;
  if (!s) return 0;
  slot = *s & PROC_SLOT;
  struct wire_python *p = pythons.lookup(&slot);
  if (p) p->tgid = 0;
  struct wire_flow *f = flows.lookup(&slot);
  if (!f) return 0;
  f->armed = f->full = 0;
#pragma unroll
  for (u32 i = 0; i < WIRE_PINS; i++) f->from[i] = f->bytes[i] = 0;
  return 0;
}
#endif
