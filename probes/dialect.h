/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
 *
 * One source, two compilers: bcc at run time, `clang -target bpf` at build time.
 * The source uses bcc's method syntax m.lookup(&k), because bcc refuses map methods inside macros. For clang every
 * map macro defines inline functions and a constant table of pointers to them with the map's name; -O2 folds the
 * table away, so that the object needs map relocations only.
 */
#ifdef DIALECT_BCC
#include <uapi/linux/ptrace.h>
#define ON(section) /* bcc names its own sections */
#define MAP_ARRAY(m, V, N) BPF_F_TABLE("array", u32, V, m, N, BPF_F_MMAPABLE)
#define MAP_HASH(m, K, V, N) BPF_TABLE("hash", K, V, m, N)
#define MAP_RING(m, BYTES) BPF_RINGBUF_OUTPUT(m, (BYTES) / PAGE_SIZE)
#else
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>
typedef __u8 uint8_t;
typedef __u16 uint16_t;
typedef __u32 uint32_t, u32;
typedef __s32 int32_t;
typedef __u64 uint64_t, u64;
#if defined(__TARGET_ARCH_x86)
struct pt_regs {
  u64 r15, r14, r13, r12, bp, bx, r11, r10, r9, r8, ax, cx, dx, si, di, orig_ax, ip, cs, flags, sp, ss;
};
#elif defined(__TARGET_ARCH_arm64)
struct pt_regs {
  u64 regs[31], sp, pc, pstate;
};
#endif
#define ON(section) SEC(section)
#define INLINE_ static inline __attribute__((always_inline))
#define MAP_KV_(m, T, K, V, N, FLAGS)                                                                                  \
  struct {                                                                                                             \
    __uint(type, T);                                                                                                   \
    __uint(max_entries, N);                                                                                            \
    __uint(map_flags, FLAGS);                                                                                          \
    __type(key, K);                                                                                                    \
    __type(value, V);                                                                                                  \
  } m##_ SEC(".maps");                                                                                                 \
  INLINE_ V *m##_lookup(K *k) {                                                                                        \
    return bpf_map_lookup_elem(&m##_, k);                                                                              \
  }                                                                                                                    \
  INLINE_ int m##_update(K *k, V *v) {                                                                                 \
    return bpf_map_update_elem(&m##_, k, v, BPF_ANY);                                                                  \
  }                                                                                                                    \
  INLINE_ int m##_insert(K *k, V *v) {                                                                                 \
    return bpf_map_update_elem(&m##_, k, v, BPF_NOEXIST);                                                              \
  }                                                                                                                    \
  INLINE_ int m##_delete(K *k) {                                                                                       \
    return bpf_map_delete_elem(&m##_, k);                                                                              \
  }                                                                                                                    \
  static const struct {                                                                                                \
    V *(*lookup)(K *);                                                                                                 \
    int (*update)(K *, V *), (*insert)(K *, V *), (*delete)(K *);                                                      \
  } m = {m##_lookup, m##_update, m##_insert, m##_delete}
#define MAP_ARRAY(m, V, N) MAP_KV_(m, BPF_MAP_TYPE_ARRAY, u32, V, N, BPF_F_MMAPABLE)
#define MAP_HASH(m, K, V, N) MAP_KV_(m, BPF_MAP_TYPE_HASH, K, V, N, 0)
#define MAP_RING(m, BYTES)                                                                                             \
  struct {                                                                                                             \
    __uint(type, BPF_MAP_TYPE_RINGBUF);                                                                                \
    __uint(max_entries, BYTES);                                                                                        \
  } m##_ SEC(".maps");                                                                                                 \
  INLINE_ void *m##_reserve(u64 n) {                                                                                   \
    return bpf_ringbuf_reserve(&m##_, n, 0);                                                                           \
  }                                                                                                                    \
  INLINE_ void m##_submit(void *p, u64 flags) {                                                                        \
    bpf_ringbuf_submit(p, flags);                                                                                      \
  }                                                                                                                    \
  static const struct {                                                                                                \
    void *(*ringbuf_reserve)(u64);                                                                                     \
    void (*ringbuf_submit)(void *, u64);                                                                               \
  } m = {m##_reserve, m##_submit}
char LICENSE[] SEC("license") = "Dual BSD/GPL";
#endif
typedef struct bpf_raw_tracepoint_args raw_ctx;
#define INL static inline __attribute__((always_inline))
#if defined(__x86_64__) || defined(__TARGET_ARCH_x86)
#define REG0(c) ((c)->di)
#define REG1(c) ((c)->si)
#define REG2(c) ((c)->dx)
#define REG3(c) ((c)->cx)
#define REG4(c) ((c)->r8)
#define REG5(c) ((c)->r9)
#define FRAME_POINTER(c) ((c)->bp)
#define RETURN_VALUE(c) ((c)->ax)
#define ENTRY_IP(c) ((c)->ip)
#define ENTRY_SP(c) ((c)->sp - 8) /* at the return the return address has been popped */
#else
#define REG0(c) ((c)->regs[0])
#define REG1(c) ((c)->regs[1])
#define REG2(c) ((c)->regs[2])
#define REG3(c) ((c)->regs[3])
#define REG4(c) ((c)->regs[4])
#define REG5(c) ((c)->regs[5])
#define FRAME_POINTER(c) ((c)->regs[29])
#define RETURN_VALUE(c) ((c)->regs[0])
#define ENTRY_IP(c) ((c)->pc)
#define ENTRY_SP(c) ((c)->sp)
#endif
