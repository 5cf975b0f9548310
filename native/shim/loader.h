/* SPDX-License-Identifier: Apache-2.0
 *
 * The loader's functions, looked up when they are used: as references they would be newer than glibc 2.17. */
#ifndef STALLSCOPE_LOADER_H
#define STALLSCOPE_LOADER_H
#include <dlfcn.h>
#include <stddef.h>

void *seg_libc(const char *name);

static inline void *loader_open(const char *file, int mode) {
  void *(*function)(const char *, int);
  *(void **)&function = seg_libc("dlopen");
  return function ? function(file, mode) : NULL;
}

static inline void loader_close(void *library) {
  int (*function)(void *);
  *(void **)&function = seg_libc("dlclose");
  if (function) (void)function(library);
}

static inline void *loader_symbol(void *library, const char *name) {
  void *(*function)(void *, const char *);
  *(void **)&function = seg_libc("dlsym");
  return function ? function(library, name) : NULL;
}

/* The file that an address is of; NULL = unknown. */
static inline const char *loader_file_of(const void *address) {
  int (*function)(const void *, Dl_info *);
  Dl_info info;
  *(void **)&function = seg_libc("dladdr");
  return function && address && function(address, &info) && info.dli_fname && info.dli_fname[0] ? info.dli_fname : NULL;
}
#endif
