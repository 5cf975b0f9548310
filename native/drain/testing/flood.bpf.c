// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
/* For tests and the bench: fills a real ring and real arrays, driven by BPF_PROG_TEST_RUN. */
#include "dialect.h"
#include "wire.h"

#define BURST 512 /* the verifier follows every round */
#define RING_BYTES (1 << 22)

struct other {
  u64 word[2];
};

MAP_ARRAY(next, u64, 1);
MAP_ARRAY(counts, struct wire_count, WIRE_PROCS *WIRE_HOOKS);
MAP_ARRAY(times, struct wire_time, WIRE_PROCS *WIRE_TIMES);
MAP_RING(ring, RING_BYTES);

/* n counts on over all kinds of records: each 64th carries an id, each 64th is of another size, each 64th discarded. */
INL void emit(u32 n) {
  if (n % 64 == 5) {
    struct wire_uid_rec *u = ring.ringbuf_reserve(sizeof(*u));
    if (!u) return;
    u->rec.n = n;
    u->uid[127] = n;
    ring.ringbuf_submit(u, BPF_RB_NO_WAKEUP);
  } else if (n % 64 == 6) {
    struct other *o = ring.ringbuf_reserve(sizeof(*o));
    if (o) ring.ringbuf_submit(o, BPF_RB_NO_WAKEUP);
  } else {
    struct wire_rec *v = ring.ringbuf_reserve(sizeof(*v));
    if (!v) return;
    v->n = n;
    v->a[7] = ~(u64)n;
    if (n % 64 == 7) bpf_ringbuf_discard(v, BPF_RB_NO_WAKEUP);
    else ring.ringbuf_submit(v, BPF_RB_NO_WAKEUP);
  }
}

ON("raw_tracepoint/flood") int flood(raw_ctx *ctx) {
  u32 zero = 0;
  u64 *n = next.lookup(&zero);
  if (!n) return 0;
  for (int i = 0; i < BURST; i++) emit((u32)(*n)++);
  return 0;
}

/* Only plain records: what drain speed is measured with. */
ON("raw_tracepoint/plain") int plain(raw_ctx *ctx) {
  for (int i = 0; i < BURST; i++) {
    struct wire_rec *v = ring.ringbuf_reserve(sizeof(*v));
    if (!v) return 0;
    v->n = i;
    ring.ringbuf_submit(v, BPF_RB_NO_WAKEUP);
  }
  return 0;
}
