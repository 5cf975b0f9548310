/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
 * The Python stack of the calling thread, and the row of `sites` that belongs to it.
 *
 * A thread's PyThreadState stands in its thread-specific storage, also while it has released the GIL (the variables
 * that name the current one are empty then). From there frames are a linked list. Nothing is resolved here: user space reads names from the code objects, if the signature is still theirs. */
#define MIX(h, v) ((h) = ((h) ^ (v)) * 0x9ddfea08eb382d69ull, (h) ^= (h) >> 29)
/* One after the other: left to itself the compiler loads all words at once, and 512 bytes of stack don't hold them. */
#define IN_TURN(x) asm volatile("" : "+r"(x) : : "memory")

#ifdef NO_COOKIES /* a dozen programs would each carry two copies of the walk */
INL u32 site_of(struct wire_row *r, struct hit *h, u32 hook) {
  return 0;
}
#else
/* A free place, taken; none is a reason to give up, not to wait. */
INL struct wire_walk *take_walk(void) {
  u32 first = bpf_get_smp_processor_id() * WIRE_WALK_PROBES;
#pragma unroll
  for (u32 j = 0; j < WIRE_WALK_PROBES; j++) {
    u32 i = (first + j) & (WIRE_WALKS - 1);
    struct wire_walk *w = walks.lookup(&i);
    if (w && !w->busy && !__sync_val_compare_and_swap(&w->busy, 0, 1)) return w;
  }
  return 0;
}

/* The frame that the thread executes; 0 with a flag where it is none of Python's. */
INL u64 first_frame(struct wire_python *p, struct wire_walk *walk) {
  u64 fs = 0, state = 0, owner = 0, frame = 0;
  u64 at = bpf_get_current_task() + setting(WIRE_CONF_FSBASE);
  bpf_probe_read_kernel(&fs, 8, (void *)at);
  bpf_probe_read_user(&state, 8, (void *)(fs + p->tss_at));
  /* A PyThreadState knows its thread by pthread_self(), which is the fs base. */
  if (state) bpf_probe_read_user(&owner, 8, (void *)(state + p->thread_id));
  if (!state || owner != fs) {
    walk->flags = WIRE_SITE_NO_THREAD;
    return 0;
  }
  if (bpf_probe_read_user(&frame, 8, (void *)(state + p->frame))) walk->flags = WIRE_SITE_UNREADABLE;
  if (p->cframe != WIRE_PY_NO_CFRAME && bpf_probe_read_user(&frame, 8, (void *)(frame + p->cframe)))
    walk->flags = WIRE_SITE_UNREADABLE;
  return frame;
}

/* What tells a code object from another one at the same address: words that never change while it lives, among them
 * the addresses of its names and its line table; before CPython 3.12 numbers them, the table's beginning too. Without a
 * branch, as walk_frames says; where no table is read, the same words go in again. `w` is room. */
INL u32 signature(struct wire_python *p, u64 code, u64 *w) {
  u64 x = code;
  bpf_probe_read_user(w, 8 * WIRE_PY_CODE_WORDS, (void *)(code + p->code_block));
#pragma unroll
  for (u32 j = 0; j < WIRE_PY_CODE_WORDS; j++) {
    MIX(x, w[j]);
    IN_TURN(x);
  }
  /* struct PyBytesObject from ob_size on: size, cached hash, then the bytes. What lies behind a short table is
   * somebody else's. */
  bpf_probe_read_user(w, p->table_bytes & 127, (void *)(w[WIRE_PY_CODE_WORDS - 1] + 16));
  MIX(x, w[0]);
#pragma unroll
  for (u32 j = 2; j < WIRE_PY_CODE_WORDS; j++) {
    u64 left = w[0] - 8 * (j - 2), whole = 7 - left, some = 0 - left;
    asm volatile("%0 s>>= 63\n\t%1 s>>= 63" : "+r"(whole), "+r"(some)); /* the compiler would make branches of it */
    MIX(x, w[j] & some & (whole | ~(~0ull << (left << 3 & 63))));
    IN_TURN(x);
  }
  return x;
}

/* Leaves frames, their number and flags in `walk`; their hash. Straight on but for the ends, and through memory what is
 * known only at an end: each branch and each number multiplies what the verifier has to follow. */
INL u64 walk_frames(struct wire_python *p, struct wire_walk *walk, u64 hash) {
  u64 frame = first_frame(p, walk);
#pragma clang loop unroll(disable)
  for (u32 i = 0; i < WIRE_PY_FRAMES; i++) {
    asm volatile("" : "+r"(walk)); /* the compiler would keep two dozen addresses in it, and has no room */
    walk->frames = i;
    if (!frame) break;
    if (bpf_probe_read_user(walk->frame, p->frame_bytes & 127, (void *)frame)) {
      walk->flags |= WIRE_SITE_UNREADABLE;
      break;
    }
    u64 owner = *(uint8_t *)((char *)walk->frame + (p->owner & 127)),
        instr = *(u64 *)((char *)walk->frame + (p->instr & 0x78));
    u64 is_python = (owner - p->shim_owner) >> 63; /* 1 or 0 without a branch */
    u64 code =
        (*(u64 *)((char *)walk->frame + (p->code & 0x78)) & ~7ull) * is_python; /* CPython 3.14 tags the pointer */
    u32 at = (instr - (code + p->instr_base) * p->is_address) * is_python;
    frame = *(u64 *)((char *)walk->frame + (p->previous & 0x78));
    u32 sig = signature(p, code, walk->w) * is_python;
    walk->f[i].code = code;
    walk->f[i].instr = at;
    walk->f[i].sig = sig;
    MIX(hash, code);
    MIX(hash, (u64)at << 32 | sig);
    walk->frames = i + 1;
  }
  walk->flags |= frame ? WIRE_SITE_DEEP : 0;
  return hash;
}

/* Row + 1 of a key; 0 when no row is free. *is_new: the caller has to fill it. */
INL u32 site_row(u64 key, int *is_new) {
  u32 first = (u32)(key >> (64 - WIRE_SITE_BITS)), step = (u32)key | 1, spare = 0;
#pragma unroll
  for (int j = 0; j < WIRE_SITE_PROBES; j++) {
    u32 i = (first + j * step) & (WIRE_SITES - 1);
    u64 *k = site_keys.lookup(&i);
    if (!k) return 0;
    if (*k == key) return i + 1;
    if (!spare && !*k) spare = i + 1;
  }
  u32 i = spare - 1;
  u64 *k = spare ? site_keys.lookup(&i) : 0, seen;
  if (!k) return 0;
  seen = __sync_val_compare_and_swap(k, 0, key);
  *is_new = !seen;
  return !seen || seen == key ? spare : 0;
}

INL void fill_site(u32 row, u64 id, u32 slot, u32 hook, struct wire_walk *walk, u32 image) {
  u32 i = row - 1;
  struct wire_site *s = sites.lookup(&i);
  if (!s) return;
  s->tgid = id >> 32;
  s->slot = slot;
  s->hook = hook;
  s->frames = walk->frames;
  s->image = image;
  s->tid = id;
#pragma clang loop unroll(disable)
  for (u32 j = 0; j < WIRE_PY_FRAMES; j++) {
    asm volatile("" : "+r"(s), "+r"(walk));
    s->f[j] = walk->f[j];
  }
  s->flags = walk->flags | WIRE_SITE_READY;
  bump(WIRE_SITE_TAKEN);
}

/* Row + 1 of the call that begins, 0 for none. */
INL u32 site_of(struct wire_row *r, struct hit *h, u32 hook) {
  u64 id = h->id;
  u32 slot = h->slot, what = what_is(hook);
  struct wire_python *p = pythons.lookup(&slot);
  if (!p || p->tgid != (u32)(id >> 32) || !IS_WANTED(what)) return 0;
  struct wire_walk *walk = take_walk();
  u32 row = 0;
  if (walk) {
    int is_new = 0;
    u64 key = id >> 32 << 32;
    MIX(key, p->image);
    walk->flags = 0;
    key = walk_frames(p, walk, key);
    classify(r, h, what, key, walk);
    MIX(key, (u64)hook << 32 | walk->flags);
    row = site_row(key | 1, &is_new);
    if (is_new) fill_site(row, id, slot, hook, walk, p->image);
    walk->busy = 0;
  }
  if (!row) bump(WIRE_SEEN_NO_SITE);
  return row;
}
#endif
