/* Stands in for the rest of the shim: keeps what the GPU's witness tells, and shows its functions to the tests. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <string.h>

#include "gpu.h"
#include "gpu_ops.h"
#include "gpu_symbols.h"
#include "shim.h"

#define SHOW __attribute__((visibility("default")))

enum { ROOM = 1 << 20 };

struct told {
  uint32_t kind, hook, n, flags;
  uint64_t comm;
};

static struct seg_header header;
static struct seg_process process = {.header = &header};
struct seg_process *seg_proc = &process;
bool seg_injected; /* of the rest of the shim */

static struct told told[ROOM];
static uint64_t count;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

void seg_emit_vital(const struct seg_vital *v) {
  uint64_t comm = 0;
  for (int i = 0; i < 8; i++) comm |= v->a[i]; /* the only word */
  pthread_mutex_lock(&lock);
  if (count < ROOM) told[count++] = (struct told){v->kind, v->hook, v->n, v->flags, comm};
  pthread_mutex_unlock(&lock);
}

SHOW uint64_t kit_take(struct told *out) {
  pthread_mutex_lock(&lock);
  uint64_t taken = count;
  memcpy(out, told, taken * sizeof(*told));
  count = 0;
  pthread_mutex_unlock(&lock);
  return taken;
}

SHOW void kit_entered(uint32_t hook, const uint64_t *a, uint32_t n) {
  seg_gpu_entered(hook, a, n);
}

SHOW void kit_returned(uint32_t hook, const uint64_t *a, uint32_t n, int32_t status) {
  seg_gpu_returned(hook, a, n, status);
}

SHOW void kit_before_creation(const void *real) {
  seg_gpu_before_creation(real);
}

SHOW uint32_t kit_state(void) {
  return seg_gpu_state();
}

SHOW void kit_figures(uint64_t *out) {
  memcpy(out, header.gpu_untold, sizeof(header.gpu_untold));
}
