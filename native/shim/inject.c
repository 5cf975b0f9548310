// SPDX-License-Identifier: Apache-2.0
/* The library in a process that runs already: a thread of its own sets the slots of all libraries, looks for new ones,
 * and sets them back when the injector says so, or has been silent for long. */
#define _GNU_SOURCE
#include "control.h"
#include "objects.h"
#include "system.h"
#include <string.h>
#include <sys/prctl.h>

#define LOOK_NS 20000000
#define MOST_LOOKS 250 /* 5 s; the injector beats every second */

bool seg_injected, seg_released;
static uint32_t owner; /* pid: a forked child has no thread of ours */

static void rest(void) {
  struct timespec t = {0, LOOK_NS};
  syscall(SYS_nanosleep, &t, NULL);
}

static uint32_t load(const uint32_t *word) {
  return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}

static void become(struct seg_control *c, uint32_t state) {
  __atomic_store_n(&c->state, state, __ATOMIC_RELEASE);
}

/* NULL: it has begun. */
static const char *begin(struct seg_control *c) {
  uint32_t own = (uint32_t)syscall(SYS_getpid), before = __atomic_load_n(&owner, __ATOMIC_ACQUIRE);
  if (c->magic != SEG_CONTROL_MAGIC) return "the library is of another version than the injector";
  if (load(&c->cancelled)) return "it came too late";
  if (seg_set.off) return "STALLSCOPE_SHIM=off stands in the environment of the process";
  if (before == own || !__atomic_compare_exchange_n(&owner, &before, own, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
    return "another capture has injected the library and uses it";
  if (!seg_injected) seg_forget_start();
  seg_injected = true;
  if (!seg_make_now()) {
    __atomic_store_n(&owner, 0, __ATOMIC_RELEASE);
    return "the memory for what is recorded can't be made";
  }
  seg_forget_comms();
  __atomic_store_n(&seg_proc->header->settings, seg_set.word, __ATOMIC_RELAXED);
  __atomic_store_n(&seg_released, false, __ATOMIC_RELEASE);
  return NULL;
}

/* A slot that the loader was about to bind when it was set has been overwritten: each library is looked at twice. */
static void serve(struct seg_control *c) {
  uint32_t beat = load(&c->beat), silent = 0;
  bool again = true;
  while (!load(&c->release) && silent < MOST_LOOKS) {
    rest();
    if (again) seg_look_again();
    again = seg_look_around() && !again;
    c->slots = seg_slots_set(&c->turned_away);
    silent = load(&c->beat) == beat ? silent + 1 : 0;
    beat = load(&c->beat);
  }
}

static void release(struct seg_control *c) {
  __atomic_store_n(&seg_released, true, __ATOMIC_RELEASE);
  seg_unpatch(&c->restored, &c->foreign);
  /* Pointers that were handed out meanwhile stay: their calls are counted, and no more. */
  __atomic_store_n(&seg_proc->header->settings, SEG_MIN, __ATOMIC_RELAXED);
  __atomic_store_n(&owner, 0, __ATOMIC_RELEASE);
}

/* What became of it stays until the injector has seen it, if there is one. The borrowed thread has its stack here until it
 * has left. */
static void leave(struct seg_control *c) {
  bool is_asked = load(&c->release) || load(&c->state) == SEG_CONTROL_FAILED;
  for (int i = 0; is_asked && i < MOST_LOOKS && !load(&c->seen); i++) rest();
  if (load(&c->left)) syscall(SYS_munmap, c, (size_t)SEG_CONTROL_BYTES);
}

__attribute__((visibility("default"))) void *stallscope_inject(struct seg_control *c) {
  prctl(PR_SET_NAME, "stallscope");
  madvise(c, SEG_CONTROL_BYTES, MADV_DONTFORK);
  const char *why = begin(c);
  if (why) {
    strncpy(c->text, why, sizeof(c->text) - 1);
    become(c, SEG_CONTROL_FAILED);
  } else {
    seg_look_again();
    seg_look_around();
    c->slots = seg_slots_set(&c->turned_away);
    become(c, SEG_CONTROL_READY);
    serve(c);
    release(c);
    become(c, SEG_CONTROL_RELEASED);
  }
  leave(c);
  return NULL;
}
