/* SPDX-License-Identifier: Apache-2.0
 *
 * The loaded libraries and their symbols, read from memory: the loader's own look-ups take its lock, which another
 * thread may hold while it waits for the caller. */
#ifndef STALLSCOPE_OBJECTS_H
#define STALLSCOPE_OBJECTS_H
#include "shim.h"
#include <link.h>

/* Instead of strcmp and strncmp: a sanitizer in the program has functions of these names, and calls our dlsym before they
 * can be called. */
INLINE int seg_order(const char *a, const char *b) {
  while (*a && *a == *b) a++, b++;
  return (uint8_t)*a - (uint8_t)*b;
}
INLINE bool seg_begins(const char *text, const char *with) {
  while (*with && *text == *with) text++, with++;
  return !*with;
}

struct seg_object {
  uintptr_t base, from, to; /* from, to: what its segments span */
  const ElfW(Dyn) * dynamic;
  const char *soname, *strings;
  const ElfW(Sym) * symbols;
  const uint32_t *gnu_hash, *hash;
  const ElfW(Rela) * jump, *rela;
  size_t jump_bytes, rela_bytes;
  uintptr_t relro, relro_end;
  const char *path;
};
void seg_read_dynamic(struct seg_object *o); /* from base, dynamic and path */
bool seg_object_of(const struct dl_phdr_info *info, struct seg_object *o);
void *seg_symbol(const struct seg_object *o, const char *name); /* a function it defines, else NULL */
bool seg_needs(const struct seg_object *o, const char *soname);
/* objects.c */
bool seg_is_before_us(uintptr_t address);
bool seg_was_at_start(size_t index);
bool seg_is_family(const char *soname);
void seg_forget_reals(void);
void *seg_exported(const struct seg_entry *e);
bool seg_may_be_ours(const char *name); /* names.c: a quick look */
extern void *seg_real_dlsym, *seg_real_dlvsym;
void seg_forget_start(void); /* the library came late: nothing stands before it, and all has to be looked at */
/* got.c */
bool seg_patch(const struct seg_object *o);
bool seg_store(const struct seg_object *o, void **slot, void *value); /* false: the page can't be written */
void seg_next_object(void);
/* look.c */
void seg_look_again(void); /* the next look is at all libraries */
void seg_unpatch(uint32_t *restored, uint32_t *foreign);
/* slots.c: under inject.c only */
bool seg_keep_slot(void **slot, void *before, void *now); /* false: there is no room */
uint32_t seg_slots_set(uint32_t *turned_away);
void seg_put_back_slots(uint32_t *restored, uint32_t *foreign);
/* inject.c */
extern bool seg_injected, seg_released;
#endif
