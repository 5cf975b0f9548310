// SPDX-License-Identifier: Apache-2.0
#define _GNU_SOURCE
#include "objects.h"
#include <string.h>

/* glibc has relocated these addresses in most dynamic sections; read-only ones hold offsets. */
static const void *at(const struct seg_object *o, ElfW(Addr) value) {
  return (const void *)(value < o->base ? o->base + value : value);
}

void seg_read_dynamic(struct seg_object *o) {
  const ElfW(Dyn) *soname = NULL;
  for (const ElfW(Dyn) *d = o->dynamic; d->d_tag != DT_NULL; d++) {
    if (d->d_tag == DT_SONAME) soname = d;
    else if (d->d_tag == DT_STRTAB) o->strings = at(o, d->d_un.d_ptr);
    else if (d->d_tag == DT_SYMTAB) o->symbols = at(o, d->d_un.d_ptr);
    else if (d->d_tag == DT_GNU_HASH) o->gnu_hash = at(o, d->d_un.d_ptr);
    else if (d->d_tag == DT_HASH) o->hash = at(o, d->d_un.d_ptr);
    else if (d->d_tag == DT_JMPREL) o->jump = at(o, d->d_un.d_ptr);
    else if (d->d_tag == DT_PLTRELSZ) o->jump_bytes = d->d_un.d_val;
    else if (d->d_tag == DT_RELA) o->rela = at(o, d->d_un.d_ptr);
    else if (d->d_tag == DT_RELASZ) o->rela_bytes = d->d_un.d_val;
  }
  const char *name = o->path ? o->path : "";
  for (const char *c = name; *c; c++)
    if (*c == '/') name = c + 1;
  o->soname = soname && o->strings ? o->strings + soname->d_un.d_val : name;
}

bool seg_object_of(const struct dl_phdr_info *info, struct seg_object *o) {
  memset(o, 0, sizeof(*o));
  o->base = info->dlpi_addr;
  o->path = info->dlpi_name;
  o->from = UINTPTR_MAX;
  for (int i = 0; i < info->dlpi_phnum; i++) {
    const ElfW(Phdr) *h = &info->dlpi_phdr[i];
    uintptr_t start = o->base + h->p_vaddr, end = start + h->p_memsz;
    if (h->p_type == PT_DYNAMIC) o->dynamic = (const ElfW(Dyn) *)start;
    if (h->p_type == PT_GNU_RELRO) o->relro = start, o->relro_end = end;
    if (h->p_type != PT_LOAD) continue;
    if (start < o->from) o->from = start;
    if (end > o->to) o->to = end;
  }
  if (!o->dynamic) return false;
  seg_read_dynamic(o);
  return o->strings && o->symbols && (o->gnu_hash || o->hash);
}

static void *function_at(const struct seg_object *o, uint32_t index, const char *name) {
  const ElfW(Sym) *s = &o->symbols[index];
  if (!s->st_shndx || !s->st_value || ELF64_ST_TYPE(s->st_info) != STT_FUNC) return NULL;
  return seg_order(o->strings + s->st_name, name) ? NULL : (void *)(o->base + s->st_value);
}

static uint32_t gnu_hash_of(const char *name) {
  uint32_t h = 5381;
  for (; *name; name++) h = h * 33 + (uint8_t)*name;
  return h;
}

/* header: buckets, first symbol, words of the Bloom filter, shift; then filter, buckets, chains. */
static void *in_gnu_hash(const struct seg_object *o, const char *name) {
  const uint32_t *t = o->gnu_hash, h = gnu_hash_of(name);
  uint32_t n_buckets = t[0], first = t[1], n_words = t[2];
  const ElfW(Addr) *bloom = (const ElfW(Addr) *)(const void *)(t + 4);
  const uint32_t *buckets = (const uint32_t *)(const void *)(bloom + n_words), *chain = buckets + n_buckets;
  if (!n_buckets || !n_words) return NULL;
  ElfW(Addr) word = bloom[h / 64 % n_words], bits = 1ull << h % 64 | 1ull << (h >> t[3]) % 64;
  if ((word & bits) != bits) return NULL;
  for (uint32_t i = buckets[h % n_buckets]; i >= first; i++) {
    uint32_t other = chain[i - first];
    void *found = (other | 1) == (h | 1) ? function_at(o, i, name) : NULL;
    if (found) return found;
    if (other & 1) break;
  }
  return NULL;
}

static void *in_hash(const struct seg_object *o, const char *name) {
  for (uint32_t i = 0; i < o->hash[1]; i++) {
    void *found = function_at(o, i, name);
    if (found) return found;
  }
  return NULL;
}

void *seg_symbol(const struct seg_object *o, const char *name) {
  return o->gnu_hash ? in_gnu_hash(o, name) : in_hash(o, name);
}

bool seg_needs(const struct seg_object *o, const char *soname) {
  for (const ElfW(Dyn) *d = o->dynamic; d->d_tag != DT_NULL; d++)
    if (d->d_tag == DT_NEEDED && !seg_order(o->strings + d->d_un.d_val, soname)) return true;
  return false;
}
