/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
 * Why processes end: who sent the signal, whom the kernel chose for want of memory, since when it tidies up. */
/* Signals whose default is not to end the process: CHLD, CONT, STOP, TSTP, TTIN, TTOU, URG, WINCH. */
#define HARMLESS (1u << 17 | 1u << 18 | 1u << 19 | 1u << 20 | 1u << 21 | 1u << 22 | 1u << 23 | 1u << 28)
/* include/trace/events/signal.h, TRACE_SIGNAL_*: of two that came before the first was handled, the first one counts. */
#define SIGNAL_IGNORED 1
#define SIGNAL_ALREADY_PENDING 2
#define FROM_KERNEL 0x80 /* SI_KERNEL */
#define INFO_CODE 8      /* siginfo_t: si_signo, si_errno, si_code */

INL u32 tgid_of(u64 task) {
  u32 tgid = 0, level = setting(WIRE_CONF_NS_LEVEL);
  if (level) return id_in_namespace(task, level) >> 32;
  bpf_probe_read_kernel(&tgid, 4, (void *)(task + setting(WIRE_CONF_TGID)));
  return tgid;
}

/* `info` is a pointer, or 0: as kill(2) would, or 1: from the kernel (include/linux/signal.h, SEND_SIG_NOINFO, _PRIV). */
INL int code_of(u64 info) {
  int code = 0;
  if (info <= 1) return info ? FROM_KERNEL : 0;
  bpf_probe_read_kernel(&code, 4, (void *)(info + INFO_CODE));
  return code;
}

/* The newest of each number is kept, no record is made: a profiler's timer may send a thousand a second. */
ON("raw_tracepoint/signal_generate") int on_signal(raw_ctx *ctx) {
  u32 number = ctx->args[0], result = ctx->args[4], tgid, slot, *s;
  if (!number || number >= WIRE_SIGNALS || HARMLESS >> number & 1) return 0;
  if (result == SIGNAL_IGNORED || result == SIGNAL_ALREADY_PENDING) return 0;
  tgid = tgid_of(ctx->args[2]);
  s = procs.lookup(&tgid);
  if (!s) return 0;
  slot = *s & PROC_SLOT;
  struct wire_ending *e = endings.lookup(&slot);
  if (!e) return 0;
  struct wire_signal *w = &e->signals[number & (WIRE_SIGNALS - 1)];
  w->code = code_of(ctx->args[1]);
  w->tgid = 0;
  if (w->code <= 0) w->tgid = current_id() >> 32;
  bpf_get_current_comm(w->comm, sizeof(w->comm));
  w->ts_ns = bpf_ktime_get_ns();
  return 0;
}

/* Of any process: one that is not traced may belong to the job all the same. The first argument is the task from v6.8 on,
 * before it is the pid as the host numbers it. */
ON("raw_tracepoint/mark_victim") int on_oom(raw_ctx *ctx) {
  u64 task = ctx->args[0], name[2] = {};
  u32 tgid = task, *s;
  if (task >> 32) {
    tgid = tgid_of(task);
    bpf_probe_read_kernel(name, sizeof(name), (void *)(task + setting(WIRE_CONF_TASK_COMM)));
  } else if (setting(WIRE_CONF_NS_LEVEL)) tgid = 0;
  s = procs.lookup(&tgid);
  tell_life(WIRE_OOM, current_id(), s ? *s & PROC_SLOT : 0, tgid, name[0], name[1]);
  return 0;
}

/* Entry of exit(3), or of the function that ends an interpreter and runs its handlers: the first one counts. */
ON("uprobe") int on_exiting(struct pt_regs *ctx) {
  u32 tgid = current_id() >> 32, slot, *s = procs.lookup(&tgid);
  if (!s) return 0;
  slot = *s & PROC_SLOT;
  struct wire_ending *e = endings.lookup(&slot);
  if (e && !e->exiting_ns) e->exiting_ns = bpf_ktime_get_ns();
  return 0;
}
