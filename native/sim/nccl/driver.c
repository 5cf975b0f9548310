/* The way to the simulated driver: the one that the program's runtime uses. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "comm.h"

typedef const struct driver_table *(*table_fn)(void);
typedef CUresult (*launch_fn)(const CUlaunchConfig *config, CUfunction func, void **params, void **extra);

static const struct driver_table *inner; /* past the exported symbols */
static launch_fn visible;                /* by the way the runtime's own launches take */
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void *loaded_runtime(void) {
  void *runtime = dlopen("libcudart.so.12", RTLD_NOW | RTLD_NOLOAD);
  return runtime ? runtime : dlopen("libcudart.so.13", RTLD_NOW | RTLD_NOLOAD);
}

static void *beside(const char *where) {
  Dl_info self;
  char path[4096];
  const char *slash = dladdr((void *)beside, &self) && self.dli_fname ? strrchr(self.dli_fname, '/') : NULL;
  if (!slash) return NULL;
  snprintf(path, sizeof(path), "%.*s/%slibcuda.so.1", (int)(slash - self.dli_fname), self.dli_fname, where);
  return dlopen(path, RTLD_NOW | RTLD_GLOBAL);
}

/* The one in use, else the one beside this library or above it, else whatever the loader finds. */
static void *libcuda(void) {
  void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  if (!library) library = beside("");
  if (!library) library = beside("../");
  return library ? library : dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
}

static void *symbol(void *library, const char *name) {
  return library ? dlsym(library, name) : NULL;
}

static void find_driver(void) {
  const char *way = getenv("STALLSCOPE_SIM_DRIVER");
  table_fn table = NULL;
  void *inside = way && strcmp(way, "inside") == 0 ? symbol(loaded_runtime(), "stallscope_sim_inside_table") : NULL;
  void *library = inside ? NULL : libcuda();
  void *address = inside ? inside : symbol(library, "stallscope_sim_private_table");
  memcpy(&table, &address, sizeof(address));
  if (!table) return;
  inner = table();
  visible = inner->cuLaunchKernelEx;
  address = symbol(library, "cuLaunchKernelEx");
  if (address && !(way && strcmp(way, "private") == 0)) memcpy(&visible, &address, sizeof(address));
  if (inner->cuInit(0)) inner = NULL;
}

/* NULL: no driver or no device. */
const struct driver_table *sim_driver(void) {
  pthread_once(&once, find_driver);
  return inner;
}

static CUfunction function_named(const char *name) {
  static struct known {
    struct known *next;
    CUfunction function;
    char name[];
  } * first;
  static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
  pthread_mutex_lock(&lock);
  struct known *known = first;
  while (known && strcmp(known->name, name)) known = known->next;
  if (!known) {
    known = sim_new(sizeof(*known) + strlen(name) + 1);
    strcpy(known->name, name);
    inner->stallscope_sim_function(&known->function, name);
    known->next = first;
    first = known;
  }
  pthread_mutex_unlock(&lock);
  return known->function;
}

CUresult sim_launch_visible(CUstream stream, const char *name) {
  CUlaunchConfig config = {1, 1, 1, 512, 1, 1, 0, stream, NULL, 0};
  CUfunction function = function_named(name);
  return function ? visible(&config, function, NULL, NULL) : CUDA_ERROR_OUT_OF_MEMORY;
}
