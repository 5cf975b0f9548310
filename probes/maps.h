/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
 * All state, and the few primitives on it. Every table is fixed in size; what it turns away is counted in ctl. */
#ifndef BULK_BYTES
#define BULK_BYTES (1 << 24)
#endif
#ifndef VITAL_BYTES
#define VITAL_BYTES (1 << 22)
#endif
#define COMM_ROWS (1 << WIRE_COMM_BITS)
#define COMM_PROBES 8
MAP_ARRAY(rows, struct wire_row, WIRE_ROWS);
MAP_ARRAY(counts, struct wire_count, WIRE_PROCS *WIRE_HOOKS);
MAP_ARRAY(times, struct wire_time, WIRE_PROCS *WIRE_TIMES);
MAP_ARRAY(conf, struct wire_conf, WIRE_HOOKS);
MAP_ARRAY(slots, struct wire_slot, WIRE_PROCS);
MAP_ARRAY(ranges, struct wire_ranges, WIRE_PROCS);
MAP_ARRAY(endings, struct wire_ending, WIRE_PROCS);
MAP_ARRAY(spans, struct wire_span, WIRE_FILES *WIRE_HOOKS);
MAP_ARRAY(ctl, u64, WIRE_CTL_SIZE);
MAP_HASH(procs, u32, u32, 4096); /* tgid -> slot | PROC_FOLLOW: the filter */
MAP_ARRAY(comms, struct wire_comm, COMM_ROWS);
MAP_ARRAY(pythons, struct wire_python, WIRE_PROCS);
MAP_ARRAY(site_keys, u64, WIRE_SITES);
MAP_ARRAY(memos, struct wire_memos, 1);
MAP_ARRAY(walks, struct wire_walk, WIRE_WALKS);
MAP_ARRAY(stacks, struct wire_stack, WIRE_STACKS);
MAP_ARRAY(sites, struct wire_site, WIRE_SITES);
MAP_ARRAY(flows, struct wire_flow, WIRE_PROCS);
MAP_ARRAY(idles, struct wire_idle, WIRE_SITES);
MAP_RING(vital, VITAL_BYTES);
MAP_RING(bulk, BULK_BYTES);
MAP_RING(life, 1 << 18); /* process events: apart, so that no flood of errors pushes out a fork */
#define PROC_FOLLOW 0x10000u
#define PROC_SLOT 0xffffu

INL void bump(u32 place) {
  u64 *p = ctl.lookup(&place);
  if (p) __sync_fetch_and_add(p, 1);
}

INL u64 setting(u32 index) {
  u64 *p = ctl.lookup(&index);
  return p ? *p : 0;
}

/* tgid << 32 | tid as the tracer's pid namespace numbers them; 0 for a task it can't see. */
INL u64 id_in_namespace(u64 task, u32 level) {
  u64 leader = 0, pid = 0;
  u32 depth = 0, tid = 0, tgid = 0;
  bpf_probe_read_kernel(&pid, 8, (void *)(task + setting(WIRE_CONF_THREAD_PID)));
  bpf_probe_read_kernel(&depth, 4, (void *)(pid + setting(WIRE_CONF_PID_LEVEL)));
  if (depth < level) return 0;
  u64 number = setting(WIRE_CONF_PID_NUMBERS) + 16 * level; /* struct upid: nr, padding, namespace */
  bpf_probe_read_kernel(&tid, 4, (void *)(pid + number));
  bpf_probe_read_kernel(&leader, 8, (void *)(task + setting(WIRE_CONF_LEADER)));
  bpf_probe_read_kernel(&pid, 8, (void *)(leader + setting(WIRE_CONF_THREAD_PID)));
  bpf_probe_read_kernel(&tgid, 4, (void *)(pid + number));
  return (u64)tgid << 32 | tid;
}

INL u64 current_id(void) {
  u32 level = setting(WIRE_CONF_NS_LEVEL);
  return level ? id_in_namespace(bpf_get_current_task(), level) : bpf_get_current_pid_tgid();
}

INL struct wire_count *count_of(u32 slot, u32 hook) {
  u32 i = slot * WIRE_HOOKS + hook;
  return counts.lookup(&i);
}

INL void hold_row(u32 slot, u64 change) {
  struct wire_slot *p = slots.lookup(&slot);
  if (p) __sync_fetch_and_add(&p->rows, change);
}

/* Which row belongs to the calling thread. Linear probing over WIRE_ROW_PROBES rows; a row is claimed once by
 * compare-and-swap and then written by its owner alone.
 * create: claim one for a traced thread. *slot: 0 = not traced; > 0 with NULL = traced, but no row was free. */
INL struct wire_row *row_of(u64 id, int create, u32 *slot) {
  u32 i = ((u32)id * 2654435761u) >> (32 - WIRE_ROW_BITS);
  struct wire_row *r = rows.lookup(&i), *spare = 0;
  *slot = 0;
  if (r && r->owner == id) {
    *slot = r->slot;
    return r;
  }
#pragma unroll
  for (int j = 0; j < WIRE_ROW_PROBES; j++) {
    u32 k = (i + j) & (WIRE_ROWS - 1);
    struct wire_row *q = rows.lookup(&k);
    if (!q) return 0;
    if (q->owner == id) {
      *slot = q->slot;
      return q;
    }
    if (!spare && !q->owner) spare = q;
  }
  if (!create) return 0;
  u32 tgid = id >> 32, *s = procs.lookup(&tgid);
  if (!s) return 0;
  *slot = *s & PROC_SLOT;
  if (!spare || __sync_val_compare_and_swap(&spare->owner, 0, id)) return 0;
  spare->depth = 0;
  spare->shared = 0;
  spare->calls = 0;
  spare->copy_class = 0;
  spare->wait_ns = 0;
  spare->was = id;
#pragma unroll
  for (int j = 0; j < WIRE_DEEDS; j++) spare->deeds[j] = 0;
  spare->slot = *slot;
  hold_row(*slot, 1);
  return spare;
}

#define FILE_OF(k) ((u32)((k) >> 56 & 31))

/* While a file passes from links of single processes to one unfiltered link, both fire at every hit. Exactly one of
 * them counts: the kernel runs the newer link first, so the unfiltered one decides, once for each thread, and the other
 * follows. Were each to look at the switch by itself, a hit at the moment of switching would count twice or never. */
INL int is_mine(struct wire_row *r, u64 cookie) {
  u32 bit = 1u << FILE_OF(cookie), unfiltered = cookie >> 32 & WIRE_HOOK_SHARED, on;
  if (r && r->shared & bit) return unfiltered;
  if (r && !unfiltered) return 1;
  on = setting(WIRE_CONF_SHARED) & bit;
  if (!r) return !on == !unfiltered;
  if (on) r->shared |= bit;
  return on;
}

/* The counter of a communicator's operations: open addressing like the rows, because a hash map costs 50 ns more.
 * One key for both words, because only 8 bytes can be claimed at once: the multiple spreads tgids so far apart that two
 * communicators share a key by an accident of addresses only. 0 = free: rows of processes that have ended are given back, so
 * that a free row does not end the search for one that is there. */
INL u64 *sequence_of(u32 tgid, u64 comm) {
  u64 key = comm + (u64)tgid * 0x9e3779b97f4a7c15ull;
  u32 i = (u32)(key * 0x9e3779b97f4a7c15ull >> (64 - WIRE_COMM_BITS));
#pragma unroll
  for (int j = 0; j < COMM_PROBES; j++) {
    u32 k = (i + j) & (COMM_ROWS - 1);
    struct wire_comm *c = comms.lookup(&k);
    if (!c) return 0;
    if (c->key == key) return &c->next;
  }
#pragma unroll
  for (int j = 0; j < COMM_PROBES; j++) {
    u32 k = (i + j) & (COMM_ROWS - 1);
    struct wire_comm *c = comms.lookup(&k);
    if (!c) return 0;
    if (c->key) continue;
    u64 seen = __sync_val_compare_and_swap(&c->key, 0, key);
    if (!seen) bump(WIRE_COMM_TAKEN);
    if (!seen || seen == key) return &c->next;
  }
  return 0;
}

/* The empty asm hides what the compiler knows of i: it would drop the mask that the verifier needs. */
INL struct wire_frame *frame_at(struct wire_row *r, u32 i) {
  asm volatile("" : "+r"(i));
  return &r->f[i & (WIRE_DEPTH - 1)];
}

/* wire_conf.sites of a hook. */
INL u32 what_is(u32 hook) {
  struct wire_conf *c = conf.lookup(&hook);
  return c ? c->sites : 0;
}

/* Not n % N: a step that makes a multiple of N calls would always show the same ones. */
INL int sampled(u32 hook, u64 n) {
  struct wire_conf *c = conf.lookup(&hook);
  if (!c || !c->threshold) return 0;
  u32 x = (u32)n * 2654435761u;
  x ^= x >> 15;
  x *= 2246822519u;
  x ^= x >> 13;
  return x <= c->threshold;
}

INL u32 log2_of(u64 v) {
  u32 r = 0;
  if (v >> 32) {
    r += 32;
    v >>= 32;
  }
  if (v >> 16) {
    r += 16;
    v >>= 16;
  }
  if (v >> 8) {
    r += 8;
    v >>= 8;
  }
  if (v >> 4) {
    r += 4;
    v >>= 4;
  }
  if (v >> 2) {
    r += 2;
    v >>= 2;
  }
  if (v >> 1) r += 1;
  return r;
}

INL u32 bucket_of(u64 ns) {
  if (ns < (1 << WIRE_BUCKET_SHIFT)) return 0;
  u32 e = log2_of(ns), b = ((e - WIRE_BUCKET_SHIFT) << 2) + ((ns >> (e - 2)) & 3);
  return b < WIRE_BUCKETS ? b : WIRE_BUCKETS - 1;
}
