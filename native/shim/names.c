// SPDX-License-Identifier: Apache-2.0
/* Addresses that a program asks for by name. dlsym and dlvsym are entered in assembly: for names that are not ours they
 * jump on, so that the real one sees its real caller (RTLD_NEXT, RTLD_DEFAULT depend on it). */
#define _GNU_SOURCE
#include "objects.h"
#include "system.h"
#include <dlfcn.h>
#include <string.h>
#include <sys/auxv.h>

/* The loader's list of libraries, by way of the program's own headers. */
static const struct link_map *first_library(void) {
  const ElfW(Phdr) *headers = (const ElfW(Phdr) *)getauxval(AT_PHDR);
  size_t n = getauxval(AT_PHNUM);
  uintptr_t base = 0;
  const ElfW(Dyn) *dynamic = NULL;
  for (size_t i = 0; headers && i < n; i++) {
    if (headers[i].p_type == PT_PHDR) base = (uintptr_t)headers - headers[i].p_vaddr;
    if (headers[i].p_type == PT_DYNAMIC) dynamic = (const ElfW(Dyn) *)(base + headers[i].p_vaddr);
  }
  for (; dynamic && dynamic->d_tag != DT_NULL; dynamic++)
    if (dynamic->d_tag == DT_DEBUG && dynamic->d_un.d_ptr) return ((const struct r_debug *)dynamic->d_un.d_ptr)->r_map;
  return NULL;
}

/* A function of libc. Not by dl_iterate_phdr: a sanitizer in the program has a function of that name, and calls our dlsym
 * before it can be called itself. At the start of a program only: nothing else is loaded meanwhile. */
void *seg_libc(const char *name) {
  for (const struct link_map *m = first_library(); m; m = m->l_next) {
    struct seg_object o = {.base = m->l_addr, .path = m->l_name, .dynamic = m->l_ld};
    seg_read_dynamic(&o);
    if (!o.strings || !o.symbols || (!o.gnu_hash && !o.hash)) continue;
    if (seg_order(o.soname, "libc.so.6") && seg_order(o.soname, "libdl.so.2")) continue;
    void *found = seg_symbol(&o, name);
    if (found) return found;
  }
  return NULL;
}

void *seg_real_dlsym, *seg_real_dlvsym;

/* Called by the assembly before the first jump. */
__attribute__((used)) void seg_find_dlsym(void) {
  int saved = errno;
  __atomic_store_n(&seg_real_dlvsym, seg_libc("dlvsym"), __ATOMIC_RELEASE);
  __atomic_store_n(&seg_real_dlsym, seg_libc("dlsym"), __ATOMIC_RELEASE);
  errno = saved;
}

bool seg_may_be_ours(const char *name) {
  return name && (seg_begins(name, "cu") || seg_begins(name, "nccl") || seg_begins(name, "pnccl") ||
                  seg_begins(name, "__cuda"));
}

/* A wrapper, or NULL: the real function answers. With RTLD_NEXT another preloaded library asks for what comes after
 * it: its caller has been through our wrapper. */
__attribute__((used)) void *seg_dlsym(void *handle, const char *name, const char *version) {
  int saved = errno;
  if (__atomic_load_n(&seg_released, __ATOMIC_ACQUIRE)) return NULL;
  if (seg_proc) seg_look_around(); /* not before we have begun ourselves */
  const struct seg_entry *e = seg_may_be_ours(name) ? seg_entry_of(name) : NULL;
  void *real = NULL, *found = NULL;
  if (e && handle != RTLD_NEXT && handle != RTLD_DEFAULT) {
    void *(*plain)(void *, const char *) = seg_real_dlsym;
    void *(*versioned)(void *, const char *, const char *) = seg_real_dlvsym;
    real = version ? versioned(handle, name, version) : plain(handle, name);
  }
  if (real) found = seg_wrapper_for(e, real);
  errno = saved;
  return found;
}

#ifdef SEG_NO_DLSYM
#elif defined(__x86_64__)
#define ENTER(name, third)                                                                                             \
  __asm__(".text\n.p2align 4\n.globl " #name "\n.type " #name ", @function\n" #name ":\n"                              \
          ".cfi_startproc\n"                                                                                           \
          "  push %rdi\n  .cfi_adjust_cfa_offset 8\n  push %rsi\n  .cfi_adjust_cfa_offset 8\n"                         \
          "  push %rdx\n  .cfi_adjust_cfa_offset 8\n"                                                                  \
          "  cmpq $0, seg_real_dlsym(%rip)\n  jne 1f\n  call seg_find_dlsym\n"                                         \
          "1: mov 16(%rsp), %rdi\n  mov 8(%rsp), %rsi\n  " third "\n  call seg_dlsym\n"                                \
          "  pop %rdx\n  .cfi_adjust_cfa_offset -8\n  pop %rsi\n  .cfi_adjust_cfa_offset -8\n"                         \
          "  pop %rdi\n  .cfi_adjust_cfa_offset -8\n"                                                                  \
          "  test %rax, %rax\n  jne 2f\n  jmp *seg_real_" #name "(%rip)\n2: ret\n"                                     \
          ".cfi_endproc\n.size " #name ", . - " #name "\n")
ENTER(dlsym, "xor %edx, %edx");
ENTER(dlvsym, "mov (%rsp), %rdx");
#elif defined(__aarch64__)
#define ENTER(name, third)                                                                                             \
  __asm__(".text\n.p2align 4\n.globl " #name "\n.type " #name ", %function\n" #name ":\n"                              \
          "  stp x29, x30, [sp, #-48]!\n  stp x0, x1, [sp, #16]\n  str x2, [sp, #32]\n"                                \
          "  adrp x9, seg_real_dlsym\n  ldr x9, [x9, :lo12:seg_real_dlsym]\n  cbnz x9, 1f\n  bl seg_find_dlsym\n"      \
          "1: ldp x0, x1, [sp, #16]\n  " third "\n  bl seg_dlsym\n  mov x10, x0\n"                                     \
          "  ldp x0, x1, [sp, #16]\n  ldr x2, [sp, #32]\n  ldp x29, x30, [sp], #48\n  cbnz x10, 2f\n"                  \
          "  adrp x9, seg_real_" #name "\n  ldr x9, [x9, :lo12:seg_real_" #name "]\n  br x9\n"                         \
          "2: mov x0, x10\n  ret\n.size " #name ", . - " #name "\n")
ENTER(dlsym, "mov x2, #0");
ENTER(dlvsym, "ldr x2, [sp, #32]");
#endif

/* The hook of what a getter found under `symbol`: the name may stand for a newer version or a per-thread twin. */
static const struct seg_entry *variant(const char *symbol, const char *version, const char *twin) {
  char name[96];
  size_t n = strlen(symbol), v = strlen(version), t = strlen(twin);
  if (n + v + t >= sizeof(name)) return NULL;
  memcpy(name, symbol, n);
  memcpy(name + n, version, v);
  memcpy(name + n + v, twin, t + 1);
  return seg_entry_of(name);
}

struct exported {
  const char *name;
  const void *address;
  bool same;
};

static int is_exported(struct dl_phdr_info *info, size_t size, void *argument) {
  struct exported *want = argument;
  struct seg_object o;
  (void)size;
  if (!seg_object_of(info, &o) || (uintptr_t)want->address < o.from || (uintptr_t)want->address >= o.to) return 0;
  want->same = seg_symbol(&o, want->name) == want->address;
  return 1;
}

/* The variant whose exported address it is; where none is, the only one that can be meant, else NULL: a wrapper of
 * another signature would lose arguments. */
static const struct seg_entry *meant(const char *symbol, const void *address, uint64_t flags) {
  static const char *const versions[] = {"", "_v2", "_v3"}, *const twins[] = {"", "_ptsz", "_ptds"};
  const struct seg_entry *only[2] = {NULL, NULL};
  int n[2] = {0, 0};
  for (int v = 0; v < 3; v++)
    for (int t = 0; t < 3; t++) {
      const struct seg_entry *e = variant(symbol, versions[v], twins[t]);
      struct exported want = {e ? e->name : "", address, false};
      if (!e) continue;
      dl_iterate_phdr(is_exported, &want);
      if (want.same) return e;
      only[t > 0] = e;
      n[t > 0]++;
    }
  int wants_twin = flags & 2 && n[1];
  return n[wants_twin] == 1 ? only[wants_twin] : NULL;
}

void seg_found(const char *symbol, void **address, uint64_t flags) {
  int saved = errno;
  const struct seg_entry *e = seg_may_be_ours(symbol) && *address ? meant(symbol, *address, flags) : NULL;
  if (e) *address = seg_wrapper_for(e, *address);
  errno = saved;
}
