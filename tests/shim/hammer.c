/* hammer SEGMENT COUNT: reads the launches of flood.c until it has had COUNT of them; each must be whole, and newer than
 * the one before. Prints how many there were and how many were overwritten. */
#define _GNU_SOURCE
#include "drain.h"
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>

#define MAX 65536
static struct wire_rec recs[MAX];
static struct wire_uid_rec uids[1];

int main(int argc, char **argv) {
  struct seg_clock clock = {{0, 1000000000}, {0, 1000000000}};
  struct ring_batch batch = {.recs = (uint8_t *)recs, .uids = (uint8_t *)uids, .max_recs = MAX, .max_uids = 1};
  uint64_t losses[SEGMENT_LOSSES], seen = 0, last = 0, stood = 0;
  const char *why = NULL;
  struct segment *s;
  if (argc < 3) return 2;
  int fd = open(argv[1], O_RDWR);
  if (fd < 0 || segment__open(fd, &s, &why)) return fprintf(stderr, "%s\n", why ? why : "can't open"), 1;
  for (uint64_t want = strtoull(argv[2], NULL, 10); seen < want && stood < 10000000;
       stood = batch.n_recs ? 0 : stood + 1) {
    if (stood) sched_yield();
    if (segment__drain(s, &clock, 1, 1, &batch)) return 1;
    for (uint32_t i = 0; i < batch.n_recs; i++) {
      uint64_t number = recs[i].a[0];
      if (recs[i].a[7] != ((number * 2654435761u ^ 0x5a5a5a) & 0xffffffffffff) || recs[i].hook != 1 ||
          (seen && number <= last))
        return fprintf(stderr, "torn: %lu after %lu\n", (unsigned long)number, (unsigned long)last), 1;
      last = number;
      seen++;
    }
  }
  segment__losses(s, losses);
  printf("{\"seen\": %lu, \"overwritten\": %lu, \"corrupt\": %lu}\n", (unsigned long)seen,
         (unsigned long)losses[SEGMENT_OVERWRITTEN], (unsigned long)losses[SEGMENT_CORRUPT]);
  return 0;
}
