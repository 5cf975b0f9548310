/* SPDX-License-Identifier: Apache-2.0
 *
 * The loader's functions, looked up when they are used: as references they would be newer than glibc 2.17. Only where a
 * communicator is made: they allocate and lock. */
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

/* The file that an address is of; NULL = unknown. */
static inline const char *loader_file_of(const void *address) {
  int (*function)(const void *, Dl_info *);
  Dl_info info;
  *(void **)&function = seg_libc("dladdr");
  return function && address && function(address, &info) && info.dli_fname && info.dli_fname[0] ? info.dli_fname : NULL;
}
#endif
