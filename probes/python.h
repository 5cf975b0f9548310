/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
 * The Python stack of the calling thread, and the row of `sites` that belongs to it.
 *
 * A thread's PyThreadState stands in its thread-specific storage, also while it has released the GIL (the variables
 * that name the current one are empty then). From there frames are a linked list. Nothing is resolved here: user space reads names from the code objects, if the signature is still theirs. */
#define MIX(h, v) ((h) = ((h) ^ (v)) * 0x9ddfea08eb382d69ull, (h) ^= (h) >> 29)
/* One after the other: left to itself the compiler loads all words at once, and 512 bytes of stack don't hold them. */
#define IN_TURN(x) asm volatile("" : "+r"(x) : : "memory")
/* The output of splitmix64 for j, made odd so that no bit of what it multiplies is lost: factors without a pattern, folded
 * by the compiler. */
#define FACTOR_A(z) (((z) ^ (z) >> 30) * 0xbf58476d1ce4e5b9ull)
#define FACTOR_B(z) (((z) ^ (z) >> 27) * 0x94d049bb133111ebull)
#define FACTOR_C(z) (((z) ^ (z) >> 31) | 1)
#define FACTOR(j) FACTOR_C(FACTOR_B(FACTOR_A(((j) + 1) * 0x9e3779b97f4a7c15ull)))

#ifdef NO_COOKIES /* a dozen programs would each carry two copies of the walk */
INL u32 site_of(struct pt_regs *ctx, struct wire_row *r, struct hit *h, u32 hook) {
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

/* A copy of the frames in one read: from CPython 3.11 on nearly all lie one behind the other, the innermost last, in a
 * chunk of memory. What is read here may be anything: a frame that does not lie in the copy is read by itself. */
INL void copy_frames(struct wire_walk *walk, u64 begin, u64 top) {
  u64 bytes = top - begin;
  if (bytes > WIRE_WALK_BYTES) bytes = WIRE_WALK_BYTES;
  walk->from = top - bytes;
  asm volatile("" : "+r"(bytes)); /* the compiler knows too much: the verifier wants to see the bound */
  if (bytes <= WIRE_WALK_BYTES && !bpf_probe_read_user(walk->copy, bytes, (void *)walk->from)) walk->copied = bytes;
}

#define STATE_WORD(walk, at) (*(u64 *)((char *)(walk)->copy + ((at)&0x1f8)))

/* The frame that the thread executes; 0 with a flag where it is none of Python's. Each read costs 80 ns, whatever its
 * length: so it is few of them, and long ones. */
INL u64 first_frame(struct wire_python *p, struct wire_walk *walk) {
  u64 fs = 0, state = 0, at = bpf_get_current_task() + setting(WIRE_CONF_FSBASE);
  bpf_probe_read_kernel(&fs, 8, (void *)at);
  bpf_probe_read_user(&state, 8, (void *)(fs + p->tss_at));
  walk->copied = 0;
  /* A PyThreadState knows its thread by pthread_self(), which is the fs base. */
  if (!state || bpf_probe_read_user(walk->copy, p->state_bytes & 511, (void *)state) ||
      STATE_WORD(walk, p->thread_id) != fs) {
    walk->flags = WIRE_SITE_NO_THREAD;
    return 0;
  }
  u64 frame = STATE_WORD(walk, p->frame), begin = STATE_WORD(walk, p->chunk), top = STATE_WORD(walk, p->chunk + 8);
  if (p->cframe != WIRE_PY_NO_CFRAME && bpf_probe_read_user(&frame, 8, (void *)(frame + p->cframe)))
    walk->flags = WIRE_SITE_UNREADABLE;
  if (p->chunk) copy_frames(walk, begin, top);
  return frame;
}

/* All ones, or 0 where a read failed: without a branch, of which each multiplies what the verifier has to follow. */
#define IF_READ(result) (((u64)(result) >> 63) - 1)

/* Before CPython 3.12 numbers code objects, the line table's beginning tells them apart, too. From struct PyBytesObject's
 * ob_size on: size, cached hash, then the bytes. What lies behind a short table is somebody else's: it counts as 0. */
INL u64 table_signature(u64 x, u64 *w) {
  u64 if_read = IF_READ(bpf_probe_read_user(w, 8 * WIRE_PY_CODE_WORDS, (void *)(w[WIRE_PY_CODE_WORDS - 1] + 16)));
  u64 left = w[0];
  x += w[0] * FACTOR(11ull);
#pragma unroll
  for (u32 j = 2; j < WIRE_PY_CODE_WORDS; j++) {
    u64 whole = 7 - left, some = 0 - left;
    asm volatile("%0 s>>= 63\n\t%1 s>>= 63" : "+r"(whole), "+r"(some)); /* the compiler would make branches of it */
    x += (w[j] & some & (whole | ~(~0ull << (left << 3 & 63)))) * FACTOR(j + 10ull);
    left -= 8;
    IN_TURN(x);
  }
  return x & if_read;
}

/* What tells a code object from another one at the same address: words that never change while it lives, among them
 * its number or its line table. A sum of products with factors of no pattern, of which the upper half counts. 0 where it
 * can't be read. */
INL u32 signature(struct wire_python *p, u64 code, u64 *w) {
  u64 x = code * FACTOR(0ull);
  u64 if_read = IF_READ(bpf_probe_read_user(w, p->code_bytes & 127, (void *)(code + p->code_block)));
#pragma unroll
  for (u32 j = 0; j < WIRE_PY_NUMBERED_WORDS; j++) {
    x += w[j] * FACTOR(j + 1ull);
    IN_TURN(x);
  }
  if (p->has_table) {
#pragma unroll
    for (u32 j = WIRE_PY_NUMBERED_WORDS; j < WIRE_PY_CODE_WORDS; j++) {
      x += w[j] * FACTOR(j + 20ull);
      IN_TURN(x);
    }
    x = table_signature(x, w);
  }
  return (x & if_read) >> 32;
}

/* Signatures without a read of the code object, where they are proven to be those of an earlier walk: a function of
 * CPython 3.11 has a number, once its calls are specialised, that no other one ever gets, and that it loses when it gets
 * another code object. Where a function has none, that is asked again at every 16th walk. */
#define MEMO(p, code) ((code)*FACTOR(30ull) + ((u64)(p)->tgid << 32 | (p)->image) * FACTOR(31ull))
#define PROOF(key, number) (((key) ^ (number)*FACTOR(32ull)) << 32)
#define SLOT(key) ((key) >> (64 - WIRE_MEMO_BITS) & ((1 << WIRE_MEMO_BITS) - 1))

INL void recall(struct wire_python *p, struct wire_walk *walk, struct wire_memos *memos) {
  walk->left = walk->frames * p->has_number; /* a branch instead would have the verifier follow all that comes twice */
#pragma clang loop unroll(disable)
  for (u32 i = 0; i < WIRE_PY_FRAMES; i++) {
    asm volatile("" : "+r"(walk), "+r"(memos));
    if (i >= walk->left) break;
    u64 key = MEMO(p, walk->f[i].code), seen = memos->slot[SLOT(key)], number = 0;
    walk->number = 0;
    walk->proof[i] = seen - 1;
    if (seen - PROOF(key, 0) - 1 >= 15) {
      bpf_probe_read_user(&walk->number, 4, (void *)(walk->function[i] + p->number));
      number = walk->number;
      u64 wrong = (seen ^ PROOF(key, number)) >> 32;
      walk->f[i].sig = seen * (((0 - number) & (wrong - 1)) >> 63); /* if there is a number, and nothing is wrong */
      walk->proof[i] = PROOF(key, number) | 15 * ((number - 1) >> 63);
    }
    asm volatile("" : "+r"(walk), "+r"(memos) : : "memory");
  }
}

INL void remember(struct wire_python *p, struct wire_walk *walk, struct wire_memos *memos, u32 i) {
  u64 key = MEMO(p, walk->f[i].code), proof = walk->proof[i];
  memos->slot[SLOT(key) | (1 - (u64)(p->has_number & 1)) << WIRE_MEMO_BITS] =
      proof | (((proof & 15) - 1) >> 63) * walk->f[i].sig;
}

/* The words of a frame that matter, into `walk`. */
INL int take_frame(struct wire_python *p, struct wire_walk *walk, u64 frame) {
  u64 off = frame - walk->from, room = walk->copied - 128;
  if (off < WIRE_WALK_BYTES - 128 && off <= room && room < WIRE_WALK_BYTES) {
    char *at = (char *)walk->copy + off;
    u64 owner = *(uint8_t *)(at + (p->owner & 127)), entry = *(uint8_t *)(at + (p->entry & 127));
    u64 code = *(u64 *)(at + (p->code & 0x78)), instr = *(u64 *)(at + (p->instr & 0x78));
    walk->previous = *(u64 *)(at + (p->previous & 0x78));
    walk->code = code;
    walk->instr = instr;
    walk->owner = owner;
    walk->entry = entry;
    walk->first = *(u64 *)at;
    return 0;
  }
  if (bpf_probe_read_user(walk->frame, p->frame_bytes & 127, (void *)frame)) return -1;
  char *at = (char *)walk->frame;
  walk->previous = *(u64 *)(at + (p->previous & 0x78));
  walk->code = *(u64 *)(at + (p->code & 0x78));
  walk->instr = *(u64 *)(at + (p->instr & 0x78));
  walk->owner = *(uint8_t *)(at + (p->owner & 127));
  walk->entry = *(uint8_t *)(at + (p->entry & 127));
  walk->first = *(u64 *)at;
  return 0;
}

/* Leaves frames, their number and flags in `walk`. Straight on but for the ends, and through memory what is known only at
 * an end: each branch and each number multiplies what the verifier has to follow. */
INL void walk_frames(struct wire_python *p, struct wire_walk *walk) {
  u64 frame = first_frame(p, walk);
#pragma clang loop unroll(disable)
  for (u32 i = 0; i < WIRE_PY_FRAMES; i++) {
    asm volatile("" : "+r"(walk)); /* the compiler would keep two dozen addresses in it, and has no room */
    walk->frames = i;
    if (!frame) break;
    if (take_frame(p, walk, frame)) {
      walk->flags |= WIRE_SITE_UNREADABLE;
      break;
    }
    asm volatile("" : "+r"(walk) : : "memory");
    u64 is_python = (walk->owner - p->shim_owner) >> 63; /* 1 or 0 without a branch */
    u64 code = (walk->code & ~7ull) * is_python;         /* CPython 3.14 tags the pointer */
    u32 at = (walk->instr - (code + p->instr_base) * p->is_address) * is_python;
    frame = walk->previous;
    walk->f[i].code = code;
    walk->f[i].instr = (at & ~WIRE_PY_ENTRY) | (walk->entry & p->entry_bit) << 31;
    walk->f[i].sig = 0;
    walk->function[i] = walk->first;
    walk->frames = i + 1;
  }
  walk->flags |= frame ? WIRE_SITE_DEEP : 0;
}

/* Signatures, and the hash of all. */
INL u64 sign_frames(struct wire_python *p, struct wire_walk *walk, u64 hash) {
  u32 only = 0;
  struct wire_memos *known = memos.lookup(&only);
  if (!known) return 0;
  recall(p, walk, known);
#pragma clang loop unroll(disable)
  for (u32 i = 0; i < WIRE_PY_FRAMES; i++) {
    asm volatile("" : "+r"(walk));
    if (i >= walk->frames) break;
    u64 code = walk->f[i].code * (((u64)walk->f[i].sig - 1) >> 63); /* where it is not known yet */
    if (code) {                                                     /* 0 is not there: to try costs an exception */
      walk->f[i].sig = signature(p, code, walk->w);
      remember(p, walk, known, i);
    }
    asm volatile("" : "+r"(walk) : : "memory");
    MIX(hash, walk->f[i].code);
    MIX(hash, (u64)walk->f[i].instr << 32 | walk->f[i].sig);
  }
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

/* A copy of the thread's stack, for user space to unwind by the files' tables: frame pointers are rare in what lies
 * between a Python line and CUDA. Row + 1; 0 when none is free. Pages, since a whole range is read or nothing of it. */
INL u32 take_stack(struct pt_regs *ctx, u32 first) {
  u64 sp = ctx->sp;
  u32 row = 0;
  struct wire_stack *s = 0;
#pragma unroll
  for (u32 j = 0; j < WIRE_STACK_PROBES; j++) {
    u32 i = (first + j) & (WIRE_STACKS - 1);
    struct wire_stack *one = stacks.lookup(&i);
    if (!row && one && !one->busy && !__sync_val_compare_and_swap(&one->busy, 0, 1)) {
      row = i + 1;
      s = one;
    }
  }
  if (!s) {
    bump(WIRE_SEEN_NO_STACK);
    return 0;
  }
  s->sp = sp;
  s->bp = FRAME_POINTER(ctx);
  s->from = sp & ~4095ull;
  s->pages = 0;
#pragma unroll
  for (u32 j = 0; j < WIRE_STACK_PAGES; j++) {
    if (bpf_probe_read_user(s->page[j], 4096, (void *)((sp & ~4095ull) + 4096 * j))) break;
    s->pages = j + 1;
  }
  return row;
}

INL void fill_site(struct pt_regs *ctx, u32 row, u64 id, u32 slot, u32 hook, struct wire_walk *walk, u32 image) {
  u32 i = row - 1;
  struct wire_site *s = sites.lookup(&i);
  if (!s) return;
  s->tgid = id >> 32;
  s->slot = slot;
  s->hook = hook;
  s->stack = walk->frames ? take_stack(ctx, row) : 0;
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
INL u32 site_of(struct pt_regs *ctx, struct wire_row *r, struct hit *h, u32 hook) {
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
    /* Kept in memory: it picks what is read behind the loops, and in a register each of their passes were followed for itself. */
    walk->what = what;
    walk_frames(p, walk);
    key = sign_frames(p, walk, key);
    classify(r, h, walk->what, key, walk);
    MIX(key, (u64)hook << 32 | walk->flags);
    row = site_row(key | 1, &is_new);
    if (is_new) fill_site(ctx, row, id, slot, hook, walk, p->image);
    walk->busy = 0;
  }
  if (!row) bump(WIRE_SEEN_NO_SITE);
  return row;
}
#endif
