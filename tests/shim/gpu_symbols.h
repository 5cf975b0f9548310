/* Stands in for the shim's own way to symbols, and for pairs of events, which these tests are not about. */
#ifndef GPU_SYMBOLS_H
#define GPU_SYMBOLS_H
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>

#include "gpu.h"

void seg_pairs_open(void) {}

uint32_t seg_pairs_state(void) {
  return SEG_GPU_EVENTS;
}

void *seg_libc(const char *name) {
  return dlsym(RTLD_DEFAULT, name);
}

void *seg_symbol_near(const void *address, const char *name) {
  Dl_info info;
  void *library = address && dladdr(address, &info) ? dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD) : NULL;
  return library ? dlsym(library, name) : NULL;
}

void *seg_symbol_of(const char *soname, const char *name) {
  void *library = dlopen(soname, RTLD_LAZY | RTLD_NOLOAD);
  return library ? dlsym(library, name) : NULL;
}
#endif
