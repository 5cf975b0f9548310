/* Arithmetic on every type, as far as the numbers go: sums of halves are kept in float and rounded once. */
#pragma GCC optimize("O3") /* the loops are worth it, also in a build for debugging */
#include <string.h>

#include "comm.h"

enum { BLOCK = 512 };

size_t sim_type_bytes(ncclDataType_t type) {
  static const unsigned char bytes[ncclNumTypes] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return type < 0 || type >= ncclNumTypes ? 0 : bytes[type];
}

bool sim_can_reduce(ncclDataType_t type) {
  return type <= ncclBfloat16;
}

#define EACH(type, wide, expression)                                                                                   \
  for (size_t i = 0; i < count; i++) {                                                                                 \
    type a = out[i], b = in[i];                                                                                        \
    out[i] = (type)(expression);                                                                                       \
  }                                                                                                                    \
  break

/* `wide` is unsigned for integers, so that an overflow wraps. */
#define FOLD(name, type, wide)                                                                                         \
  static void fold_##name(type *restrict out, const type *restrict in, size_t count, ncclRedOp_t op) {                 \
    switch (op) {                                                                                                      \
    case ncclProd:                                                                                                     \
      EACH(type, wide, (wide)a *(wide)b);                                                                              \
    case ncclMax:                                                                                                      \
      EACH(type, wide, a > b ? a : b);                                                                                 \
    case ncclMin:                                                                                                      \
      EACH(type, wide, a < b ? a : b);                                                                                 \
    default:                                                                                                           \
      EACH(type, wide, (wide)a + (wide)b);                                                                             \
    }                                                                                                                  \
  }
#define REDUCE(name, type, wide)                                                                                       \
  FOLD(name, type, wide)                                                                                               \
  static void reduce_##name(type *out, const char *first, size_t stride, unsigned ranks, size_t count,                 \
                            ncclRedOp_t op) {                                                                          \
    memcpy(out, first, count * sizeof(type));                                                                          \
    for (unsigned rank = 1; rank < ranks; rank++) fold_##name(out, (const type *)(first + rank * stride), count, op);  \
  }
#define SCALE(name, type, wide)                                                                                        \
  static void scale_##name(type *out, const type *in, size_t count, const union scalar *factor) {                      \
    type by;                                                                                                           \
    memcpy(&by, factor, sizeof(by));                                                                                   \
    for (size_t i = 0; i < count; i++) out[i] = (type)((wide)in[i] * (wide)by);                                        \
  }
/* Of integers the average is the sum, divided at the end. */
#define INTEGER(name, type, wide)                                                                                      \
  REDUCE(name, type, wide)                                                                                             \
  SCALE(name, type, wide)                                                                                              \
  static void divide_##name(type *out, size_t count, unsigned ranks) {                                                 \
    for (size_t i = 0; i < count; i++) out[i] = (type)(out[i] / (int)ranks);                                           \
  }
#define REAL(name, type)                                                                                               \
  REDUCE(name, type, type)                                                                                             \
  SCALE(name, type, type)

INTEGER(int8, int8_t, unsigned)
INTEGER(uint8, uint8_t, unsigned)
INTEGER(int32, int32_t, uint32_t)
INTEGER(uint32, uint32_t, uint32_t)
INTEGER(int64, int64_t, uint64_t)
INTEGER(uint64, uint64_t, uint64_t)
REAL(float, float)
REAL(double, double)

static float from_half(uint16_t bits) {
  _Float16 half;
  memcpy(&half, &bits, sizeof(half));
  return (float)half;
}

static uint16_t to_half(float value) {
  _Float16 half = (_Float16)value;
  uint16_t bits;
  memcpy(&bits, &half, sizeof(bits));
  return bits;
}

static float from_bfloat(uint16_t bits) {
  uint32_t wide = (uint32_t)bits << 16;
  float value;
  memcpy(&value, &wide, sizeof(value));
  return value;
}

/* Rounded to the nearest, ties to even; a NaN stays one. */
static uint16_t to_bfloat(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  if (value != value) return (uint16_t)(bits >> 16 | 0x40);
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

#define SMALL(name)                                                                                                    \
  static void block_##name(uint16_t *out, const char *first, size_t stride, unsigned ranks, size_t count,              \
                           ncclRedOp_t op) {                                                                           \
    float sum[BLOCK], next[BLOCK];                                                                                     \
    for (unsigned rank = 0; rank < ranks; rank++) {                                                                    \
      const uint16_t *in = (const uint16_t *)(first + rank * stride);                                                  \
      for (size_t i = 0; i < count; i++) (rank ? next : sum)[i] = from_##name(in[i]);                                  \
      if (rank) fold_float(sum, next, count, op);                                                                      \
    }                                                                                                                  \
    for (size_t i = 0; i < count; i++) out[i] = to_##name(sum[i]);                                                     \
  }                                                                                                                    \
  static void reduce_##name(uint16_t *out, const char *first, size_t stride, unsigned ranks, size_t count,             \
                            ncclRedOp_t op) {                                                                          \
    for (size_t at = 0; at < count; at += BLOCK)                                                                       \
      block_##name(out + at, first + 2 * at, stride, ranks, count - at < BLOCK ? count - at : BLOCK, op);              \
  }                                                                                                                    \
  static void scale_##name(uint16_t *out, const uint16_t *in, size_t count, const union scalar *factor) {              \
    uint16_t by;                                                                                                       \
    memcpy(&by, factor, sizeof(by));                                                                                   \
    for (size_t i = 0; i < count; i++) out[i] = to_##name(from_##name(in[i]) * from_##name(by));                       \
  }
SMALL(half)
SMALL(bfloat)

#define FOR_INTEGER(name)                                                                                              \
  reduce_##name(out, first, stride, ranks, count, op);                                                                 \
  if (op == ncclAvg) divide_##name(out, count, ranks);                                                                 \
  return

void sim_reduce(void *out, const char *first, size_t stride, unsigned ranks, size_t count, ncclDataType_t type,
                ncclRedOp_t op) {
  switch (type) {
  case ncclInt8:
    FOR_INTEGER(int8);
  case ncclUint8:
    FOR_INTEGER(uint8);
  case ncclInt32:
    FOR_INTEGER(int32);
  case ncclUint32:
    FOR_INTEGER(uint32);
  case ncclInt64:
    FOR_INTEGER(int64);
  case ncclUint64:
    FOR_INTEGER(uint64);
  case ncclFloat16:
    return reduce_half(out, first, stride, ranks, count, op);
  case ncclFloat32:
    return reduce_float(out, first, stride, ranks, count, op);
  case ncclFloat64:
    return reduce_double(out, first, stride, ranks, count, op);
  case ncclBfloat16:
    return reduce_bfloat(out, first, stride, ranks, count, op);
  }
}

void sim_scale(void *out, const void *in, size_t count, ncclDataType_t type, const union scalar *factor) {
  switch (type) {
  case ncclInt8:
    return scale_int8(out, in, count, factor);
  case ncclUint8:
    return scale_uint8(out, in, count, factor);
  case ncclInt32:
    return scale_int32(out, in, count, factor);
  case ncclUint32:
    return scale_uint32(out, in, count, factor);
  case ncclInt64:
    return scale_int64(out, in, count, factor);
  case ncclUint64:
    return scale_uint64(out, in, count, factor);
  case ncclFloat16:
    return scale_half(out, in, count, factor);
  case ncclFloat32:
    return scale_float(out, in, count, factor);
  case ncclFloat64:
    return scale_double(out, in, count, factor);
  case ncclBfloat16:
    return scale_bfloat(out, in, count, factor);
  }
}

/* 1/ranks in that type: the average of real numbers is a sum of parts. */
union scalar sim_reciprocal(ncclDataType_t type, int ranks) {
  union scalar scalar = {0};
  float single = 1.0F / (float)ranks;
  double full = 1.0 / ranks;
  uint16_t small = type == ncclFloat16 ? to_half(single) : to_bfloat(single);
  if (type == ncclFloat64) memcpy(&scalar, &full, sizeof(full));
  else if (type == ncclFloat32) memcpy(&scalar, &single, sizeof(single));
  else memcpy(&scalar, &small, sizeof(small));
  return scalar;
}
