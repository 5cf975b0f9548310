// SPDX-License-Identifier: Apache-2.0
/* The wrappers, one for each line of probes/hooks.def (shim_hooks.h is generated from it), compiled once for each
 * INSTANCE. Instance 0 has the names that the libraries export; the others have none and are handed out by dlsym,
 * cuGetProcAddress and the like, each for one real address.
 *
 * Arguments are passed on as machine words: every argument of these functions is an integer or a pointer, a dim3 by
 * value (two words), or a unique id by value, which is declared. */
#include "hot.h"
#ifndef INSTANCE
#define INSTANCE 0
#endif

struct seg_id_by_value {
  uint8_t bytes[WIRE_UID_BYTES];
};
#define JOIN_(a, b, c) a##b##c
#define JOIN(a, b, c) JOIN_(a, b, c)
#if INSTANCE == 0
#define NAME(name) name
#define VISIBLE __attribute__((visibility("default")))
#define ENTER seg_in
#define LEAVE seg_out_timed
#else
#define NAME(name) JOIN(seg_, INSTANCE, _##name)
#define VISIBLE static
#define ENTER seg_timed_enter /* not inlined: 400 more copies would be half a megabyte, for 4 ns of 20 */
#define LEAVE seg_timed_leave
#endif
#define BACK __builtin_return_address(0)
#define UNPACK(...) __VA_ARGS__

/* cudaLaunchConfig_t and CUlaunchConfig agree in what is read: grid 0, block 12, shared memory 24, stream 32. The words
 * come out as those of a plain launch. */
static inline uint64_t seg_config(uint64_t config, int word) {
  const uint32_t *w = (const uint32_t *)config;
  if (!w) return 0;
  switch (word) {
  case 1:
    return w[0] | (uint64_t)w[1] << 32;
  case 2:
    return w[2];
  case 3:
    return w[3] | (uint64_t)w[4] << 32;
  case 4:
    return w[5];
  case 6:
    return w[6];
  case 7:
    return *(const uint64_t *)(config + 32);
  default:
    return 0;
  }
}

#define WORD_B(b, c) (((uint64_t)(b)&0xffffffffffffull) | (uint64_t)(c) << 48)

/* Three functions that jump into each other: what decides needs no registers saved, and what only counts needs few. */
#define SEG_CALL(name, id, slot, bits, nests, tap, params, types, args, a, b)                                          \
  static const struct seg_fixed NAME(fixed_##slot) = {id, slot, bits, nests, 0, true, tap, (uint64_t)(id) << 32};      \
  static __attribute__((noinline)) uint64_t NAME(name##_recorded) params {                                             \
    struct seg_call c;                                                                                                 \
    uint64_t(*real) types = seg_in(&c, &NAME(fixed_##slot), INSTANCE, BACK, a, b);                                     \
    uint64_t result = real args;                                                                                       \
    seg_out_call(&c, &NAME(fixed_##slot), (int32_t)result, a, b);                                                      \
    return result;                                                                                                     \
  }                                                                                                                    \
  static __attribute__((noinline)) uint64_t NAME(name##_counted) params {                                              \
    struct seg_thread *t = seg_self;                                                                                   \
    uint64_t(*real) types = __atomic_load_n(&seg_reals[INSTANCE][slot].address, __ATOMIC_RELAXED);                     \
    if (UNLIKELY(!real)) return NAME(name##_recorded) args; /* forgotten since */                                      \
    uint32_t active = seg_light(t, &NAME(fixed_##slot));                                                               \
    uint64_t result = real args;                                                                                       \
    t->active = active;                                                                                                \
    return result;                                                                                                     \
  }                                                                                                                    \
  VISIBLE uint64_t NAME(name) params;                                                                                  \
  VISIBLE uint64_t NAME(name) params {                                                                                 \
    struct seg_thread *t = seg_self;                                                                                   \
    if (LIKELY(t && t->slots && __atomic_load_n(&seg_reals[INSTANCE][slot].address, __ATOMIC_RELAXED)) &&              \
        !seg_picks(t, &NAME(fixed_##slot), t->counts[id].calls))                                                       \
      return NAME(name##_counted) args;                                                                                \
    return NAME(name##_recorded) args;                                                                                 \
  }

#define SEG_TIMED(name, id, slot, bits, nests, tap, time_id, params, types, args, a, b, all)                           \
  VISIBLE uint64_t NAME(name) params;                                                                                  \
  VISIBLE uint64_t NAME(name) params {                                                                                 \
    static const struct seg_fixed fixed = {id, slot, bits, nests, time_id, false, tap, (uint64_t)(id) << 32};          \
    struct seg_call c;                                                                                                 \
    uint64_t(*real) types = ENTER(&c, &fixed, INSTANCE, BACK, a, b);                                                   \
    uint64_t result = real args, told = LEAVE(&c, &fixed, (int32_t)result, a, b);                                      \
    if (UNLIKELY(told)) seg_told(c, told - 1, (int32_t)result, (uint64_t[8]){UNPACK all});                             \
    return result;                                                                                                     \
  }

#define SEG_NCCL(name, id, fixed, params, types, args, uid, all)                                                       \
  VISIBLE uint64_t NAME(name) params;                                                                                  \
  VISIBLE uint64_t NAME(name) params {                                                                                 \
    static const struct seg_nccl constants = {UNPACK fixed};                                                           \
    struct seg_call c;                                                                                                 \
    uint64_t words[8] = {UNPACK all};                                                                                  \
    uint64_t(*real) types = seg_nccl_enter(&c, &constants, INSTANCE, BACK, seg_sp(), words, uid);                      \
    uint64_t result = real args;                                                                                       \
    seg_nccl_leave(&c, &constants, (int32_t)result, words, uid);                                                       \
    return result;                                                                                                     \
  }

/* A second name of the same function. */
#if INSTANCE == 0
#define SEG_ALIAS(second, name) extern __typeof__(name) second __attribute__((alias(#name), visibility("default")));
#else
#define SEG_ALIAS(second, name)
#endif

#include "shim_hooks.h"

#include "getters.h"
#define SEG_ENTRY(name, target) (void *)NAME(target),
static void *const wrappers[] = {
#include "shim_entries.h"
};
void *const *const JOIN(seg_wrappers_, INSTANCE, ) = wrappers;
