/* What the C files of this directory share: the instruction sets they may run on, chosen at run time. */
#ifndef KVFERRY_VECTORS_H
#define KVFERRY_VECTORS_H

#include <stdint.h>

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "pools and weights are little-endian memory"
#endif

/* Raised with every change of what Python calls in this directory, so that a library built from older source is not
 * used. The same number is in __init__.py. */
#define KVFERRY_KERNELS_VERSION 3

#define EXPORT __attribute__((visibility("default")))

#if defined(__x86_64__)
#define HAS_X86_PATHS 1
#include <immintrin.h>
/* Everything inlined into a function with one of these must carry the same one. */
#define TARGET_AVX2 __attribute__((target("avx2,fma,f16c")))
#define TARGET_AVX512 __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")))
#else
#define HAS_X86_PATHS 0
#endif

/* Of the numbers in a pool. */
enum kv_dtype { KV_FP32 = 0, KV_FP16 = 1, KV_BF16 = 2, KV_FP8 = 3, KV_INT8 = 4 };

enum level { PLAIN_C = 0, AVX2_LEVEL = 1, AVX512_LEVEL = 2 };

/* The best level of this CPU. Cheap, but not free: ask once a call, or keep it. */
static inline int cpu_level(void) {
#if HAS_X86_PATHS
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) {
        int wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                   __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
        return wide ? AVX512_LEVEL : AVX2_LEVEL;
    }
#endif
    return PLAIN_C;
}

#endif
