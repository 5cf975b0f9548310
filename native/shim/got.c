// SPDX-License-Identifier: Apache-2.0
/* A library opened with RTLD_DEEPBIND finds its own dependencies before us, and so do all where the library was injected:
 * their slots are set by hand. */
#define _GNU_SOURCE
#include "objects.h"
#include "system.h"
#include <dlfcn.h>
#include <string.h>

#if defined(__x86_64__)
#define IS_SLOT(type) ((type) == R_X86_64_JUMP_SLOT || (type) == R_X86_64_GLOB_DAT)
#else
#define IS_SLOT(type) ((type) == R_AARCH64_JUMP_SLOT || (type) == R_AARCH64_GLOB_DAT)
#endif
#define PAGE 4096ul

static uintptr_t hex_at(const char **at) {
  uintptr_t value = 0;
  for (;; (*at)++) {
    char c = **at;
    if (c >= '0' && c <= '9') value = value << 4 | (uintptr_t)(c - '0');
    else if (c >= 'a' && c <= 'f') value = value << 4 | (uintptr_t)(c - 'a' + 10);
    else return value;
  }
}

/* 1 yes, 0 no, -1 unknown, by /proc/self/maps: "from-to rw.. ". Lines longer than the buffer are read in pieces. */
static int is_writable(uintptr_t address) {
  char text[4096];
  size_t kept = 0;
  int fd = sys_open("/proc/self/maps", O_RDONLY | O_CLOEXEC, 0), found = -1;
  for (long n = 1; fd >= 0 && found < 0 && n > 0;) {
    n = sys_read(fd, text + kept, sizeof(text) - 1 - kept);
    if (n < 0) break;
    text[kept + (size_t)n] = 0;
    const char *line = text;
    for (const char *end; found < 0 && (end = strchr(line, '\n')); line = end + 1) {
      const char *at = line;
      uintptr_t from = hex_at(&at), to = *at == '-' ? (at++, hex_at(&at)) : 0;
      if (address >= from && address < to) found = at[0] == ' ' && at[2] == 'w';
    }
    kept = strlen(line);
    if (kept == sizeof(text) - 1) kept = 0;
    memmove(text, line, kept);
  }
  if (fd >= 0) sys_close(fd);
  return found;
}

/* The page asked for last, and whether it can be written: slots stand side by side. */
static struct {
  uintptr_t page;
  int writable;
} last;

void seg_next_object(void) {
  last.page = 0;
}

static int is_page_writable(uintptr_t page) {
  if (last.page != page) last.page = page, last.writable = is_writable(page);
  return last.writable;
}

/* What the loader protects, it protects when it is done with the library: a page that can be written may still be
 * needed so. */
bool seg_store(const struct seg_object *o, void **slot, void *value) {
  uintptr_t page = (uintptr_t)slot & ~(PAGE - 1);
  bool is_relro = (uintptr_t)slot >= o->relro && (uintptr_t)slot < o->relro_end;
  int writable = is_relro ? is_page_writable(page) : 1;
  if (writable < 0 || (!writable && mprotect((void *)page, PAGE, PROT_READ | PROT_WRITE))) return false;
  __atomic_store_n(slot, value, __ATOMIC_RELEASE);
  if (!writable) mprotect((void *)page, PAGE, PROT_READ);
  return true;
}

/* Which function a slot of ours is for; `is_asking`: dlsym or dlvsym, which an injected library stands before here only. */
struct wanted {
  const struct seg_entry *entry;
  void *asking, *real;
};

static struct wanted wanted(const char *name) {
  struct wanted w = {NULL, NULL, NULL};
  if (seg_may_be_ours(name)) w.entry = seg_entry_of(name);
  if (!seg_injected || name[0] != 'd') return w;
  if (!seg_order(name, "dlsym")) w.asking = (void *)dlsym, w.real = seg_real_dlsym;
  if (!seg_order(name, "dlvsym")) w.asking = (void *)dlvsym, w.real = seg_real_dlvsym;
  return w;
}

static void *instead(const struct wanted *w, void *now, bool is_lazy) {
  if (w->entry) return is_lazy ? seg_exported(w->entry) : seg_wrapper_for(w->entry, now);
  return is_lazy || now == w->real ? w->asking : now; /* somebody else stands before it: he goes on to do so */
}

/* false: the loader has not come to this slot yet; it would add to what we store. */
static bool patch(const struct seg_object *o, const struct wanted *w, const char *name, void **slot) {
  void *now = __atomic_load_n(slot, __ATOMIC_ACQUIRE);
  uintptr_t value = (uintptr_t)now;
  if (seg_is_ours(now) || seg_is_before_us(value)) return true;
  if (value < PAGE || (o->base && value < o->to - o->base)) return false;
  bool is_inside = value >= o->from && value < o->to;
  bool is_lazy = is_inside && seg_symbol(o, name) != now; /* points to its own PLT: not bound yet */
  void *ours = instead(w, now, is_lazy);
  if (ours != now && (!seg_injected || seg_keep_slot(slot, now, ours))) seg_store(o, slot, ours);
  return true;
}

static bool patch_all(const struct seg_object *o, const ElfW(Rela) * table, size_t bytes) {
  bool whole = true;
  for (size_t i = 0; i < bytes / sizeof(*table); i++) {
    if (!IS_SLOT(ELF64_R_TYPE(table[i].r_info))) continue;
    const ElfW(Sym) *s = &o->symbols[ELF64_R_SYM(table[i].r_info)];
    const char *name = o->strings + s->st_name;
    struct wanted w = wanted(name);
    if (w.entry || w.asking) whole &= patch(o, &w, name, (void **)(o->base + table[i].r_offset));
  }
  return whole;
}

/* false: look at it again. */
bool seg_patch(const struct seg_object *o) {
  seg_next_object();
  bool rela = patch_all(o, o->rela, o->rela_bytes), jump = patch_all(o, o->jump, o->jump_bytes);
  return rela && jump;
}
