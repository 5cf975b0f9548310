/* hammer SEGMENT COUNT [nccl]: reads the calls of flood.c until it has had COUNT records; each must be whole, and none older
 * than the one before. Prints how many there were and how many were overwritten. */
#define _GNU_SOURCE
#include "drain.h"
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX 65536
#define ALL_REDUCE 300
static struct wire_rec recs[MAX];
static struct wire_uid_rec uids[MAX];
static uint64_t last[2];

static uint64_t mixed(uint64_t i) {
  return (i * 2654435761u ^ 0x5a5a5a) & 0xffffffffffff;
}

/* of: 0 records, 1 records with an id; numbers of both only grow. */
static int is_newer(int of, uint64_t number, int same_again) {
  int good = same_again ? number >= last[of] : number > last[of];
  last[of] = number;
  return good;
}

static int is_whole(const struct wire_rec *r, int nccl) {
  if (!nccl) return r->hook == 1 && r->a[7] == mixed(r->a[0]) && is_newer(0, r->a[0] + 1, 0);
  if (r->hook != ALL_REDUCE) return r->kind == WIRE_DONE; /* of a creation: its id came with the entry */
  uint64_t want = mixed(r->a[0]);
  return r->a[1] == want && r->a[2] == want && r->a[6] == want && r->a[3] == 7 && is_newer(0, r->a[0] + 1, 1);
}

static int is_whole_id(const struct wire_uid_rec *u) {
  uint64_t words[16];
  memcpy(words, u->uid, sizeof(words));
  for (int k = 1; k < 16; k++)
    if (words[k] != words[0]) return 0;
  return (u->rec.a[2] & 0xffff) == (words[0] & 0xffff) && is_newer(1, u->rec.ts_ns, 1);
}

int main(int argc, char **argv) {
  static struct seg_clock clock = {.count = 1, .line = {{0, 0, 1ull << 32}}};
  struct ring_batch batch = {.recs = (uint8_t *)recs, .uids = (uint8_t *)uids, .max_recs = MAX, .max_uids = MAX};
  uint64_t losses[SEGMENT_LOSSES], seen = 0, ids = 0, stood = 0;
  const char *why = NULL;
  struct segment *s;
  if (argc < 3) return 2;
  int fd = open(argv[1], O_RDWR), nccl = argc > 3;
  if (fd < 0 || segment__open(fd, &s, &why)) return fprintf(stderr, "%s\n", why ? why : "can't open"), 1;
  for (uint64_t want = strtoull(argv[2], NULL, 10); seen < want && stood < 10000000;
       stood = batch.n_recs ? 0 : stood + 1) {
    if (stood) sched_yield();
    if (segment__drain(s, &clock, 1, 1, &batch)) return 1;
    for (uint32_t i = 0; i < batch.n_recs; i++)
      if (!is_whole(&recs[i], nccl))
        return fprintf(stderr, "torn: hook %u, %lu\n", recs[i].hook, (unsigned long)recs[i].a[0]), 1;
    for (uint32_t i = 0; i < batch.n_uids; i++)
      if (!is_whole_id(&uids[i])) return fprintf(stderr, "torn id\n"), 1;
    seen += batch.n_recs;
    ids += batch.n_uids;
  }
  segment__losses(s, losses);
  printf("{\"seen\": %lu, \"ids\": %lu, \"overwritten\": %lu, \"full\": %lu, \"corrupt\": %lu}\n", (unsigned long)seen,
         (unsigned long)ids, (unsigned long)losses[SEGMENT_OVERWRITTEN], (unsigned long)losses[SEGMENT_VITAL_FULL],
         (unsigned long)losses[SEGMENT_CORRUPT]);
  return 0;
}
