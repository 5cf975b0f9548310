// SPDX-License-Identifier: Apache-2.0
/* Reading a segment: call sites. */
#define _GNU_SOURCE
#include "seg.h"
#include <string.h>

#define ROWS (1u << SEG_SITE_BITS)

void segment__sites(const struct segment *s, struct segment_sites *out) {
  uint64_t losses = offsetof(struct seg_header, losses), tgid = 0;
  seg_copy(s, offsetof(struct seg_header, python.tgid), &tgid, sizeof(s->header.python.tgid));
  *out = (struct segment_sites){.taken = seg_word(s, losses + 8 * SEG_SITES_TAKEN),
                                .turned_away = seg_word(s, losses + 8 * SEG_NO_SITE),
                                .has_table = s->sites_at != 0,
                                .is_walked = tgid == s->header.pid};
}

uint32_t segment__site_rows(const struct segment *s, uint16_t *out, uint32_t max) {
  uint32_t n = 0;
  for (uint32_t row = 0; s->sites_at && row < ROWS && n < max; row++)
    if (seg_word(s, s->sites_at + 8 * row)) out[n++] = (uint16_t)row;
  return n;
}

int segment__site(const struct segment *s, const struct seg_clock *c, uint32_t row, struct wire_site *out) {
  if (!s->sites_at || row >= ROWS) return 0;
  uint64_t at = s->sites_at + SEG_SITE_KEYS + row * sizeof(*out);
  if (!(seg_word(s, at) & WIRE_SITE_READY)) return 0;
  /* The number first: what is added meanwhile is told the next time. */
  uint64_t calls = seg_word(s, at + offsetof(struct wire_site, time.n));
  seg_copy(s, at, out, sizeof(*out));
  out->time.n = calls;
  out->max_at_ns = out->max_at_ns ? segment__to_ns(s, c, out->max_at_ns) : 0;
  return 1;
}

/* Whose numbers they are is stored last, and taken away first: nobody goes by half of them. */
void segment__walk(struct segment *s, const struct wire_python *p, const uint64_t *hooks, uint64_t least_ns) {
  const uint64_t at = offsetof(struct seg_header, python);
  uint64_t words[sizeof(*p) / 8];
  _Static_assert(offsetof(struct wire_python, tgid) == 0 && offsetof(struct seg_header, python) % 8 == 0, "python");
  seg_store(s, at, 0);
  if (!p || !s->sites_at) return;
  memcpy(words, p, sizeof(words));
  for (uint32_t i = 0; i < sizeof(s->header.site_hooks) / 8; i++)
    seg_store(s, offsetof(struct seg_header, site_hooks) + 8 * i, hooks[i]);
  seg_store(s, offsetof(struct seg_header, site_ns), least_ns);
  for (uint32_t i = sizeof(words) / 8; i-- > 0;) seg_store(s, at + 8 * i, words[i]);
}
