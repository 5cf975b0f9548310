// SPDX-License-Identifier: Apache-2.0
/* Small array maps (ctl, conf, ranges, slots), which programs read and write at the same time: whole words only. */
#define _GNU_SOURCE
#include "drain.h"
#include <errno.h>
#include <stdlib.h>
#include <sys/mman.h>

struct table {
  uint64_t *at;
  uint32_t row_words, rows;
};

static size_t bytes_of(uint32_t row_words, uint32_t rows) {
  return (size_t)row_words * rows * sizeof(uint64_t);
}

int table__open(int fd, uint32_t row_words, uint32_t rows, struct table **out) {
  *out = NULL;
  uint64_t *at = mmap(NULL, bytes_of(row_words, rows), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (at == MAP_FAILED) return -errno;
  struct table *t = calloc(1, sizeof(*t));
  if (!t) {
    munmap(at, bytes_of(row_words, rows));
    return -ENOMEM;
  }
  *t = (struct table){.at = at, .row_words = row_words, .rows = rows};
  *out = t;
  return 0;
}

void table__close(struct table *t) {
  if (!t) return;
  munmap(t->at, bytes_of(t->row_words, t->rows));
  free(t);
}

static uint64_t *word_at(const struct table *t, uint32_t row, uint32_t word) {
  return row < t->rows && word < t->row_words ? &t->at[(size_t)row * t->row_words + word] : NULL;
}

int table__get(const struct table *t, uint32_t row, uint32_t word, uint64_t *value) {
  const uint64_t *p = word_at(t, row, word);
  if (!p) return -EINVAL;
  *value = __atomic_load_n(p, __ATOMIC_ACQUIRE);
  return 0;
}

int table__set(struct table *t, uint32_t row, uint32_t word, uint64_t value) {
  uint64_t *p = word_at(t, row, word);
  if (!p) return -EINVAL;
  __atomic_store_n(p, value, __ATOMIC_SEQ_CST);
  return 0;
}

/* Begins where on_fork in probes/stallscope.bpf.c begins, and claims as it does. */
int table__claim(struct table *t, uint64_t owner) {
  for (uint32_t i = 0; i < t->rows; i++) {
    uint32_t row = (uint32_t)((owner + i) % t->rows);
    uint64_t none = 0;
    if (!row || !owner) continue;
    if (__atomic_compare_exchange_n(word_at(t, row, 0), &none, owner, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
      return (int)row;
  }
  return -ENOSPC;
}
