/* What one core of this machine can do at best: bytes read from memory, and products with sums on registers. */
#include <stdint.h>

#if defined(__x86_64__)
#define X86 1
#define TARGET_AVX2 __attribute__((target("avx2,fma")))
#define TARGET_AVX512 __attribute__((target("avx512f,avx2,fma,prefer-vector-width=512")))
#else
#define X86 0
#endif

typedef float vec4 __attribute__((vector_size(16)));
typedef float vec8 __attribute__((vector_size(32)));
typedef float vec16 __attribute__((vector_size(64)));

#define ALL12(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7) DO(8) DO(9) DO(10) DO(11)
#define START(i) V a##i = {(float)i};
#define MULTIPLY_ADD(i) a##i = a##i * factor + term;
#define ADD_UP(i) total += a##i;

/* Twelve sums hide the latency of one multiply-add, whatever its width. */
#define FMA(NAME, TARGET, TYPE)                                                                  \
    TARGET static float NAME(int64_t rounds, float first) {                                      \
        typedef TYPE V;                                                                          \
        V factor = {0}, term = {0}, total = {0};                                                 \
        factor += first, term += 1.0f - first;                                                   \
        ALL12(START)                                                                             \
        for (int64_t i = 0; i < rounds; i++) {                                                   \
            ALL12(MULTIPLY_ADD)                                                                  \
        }                                                                                        \
        ALL12(ADD_UP)                                                                            \
        return total[0];                                                                         \
    }

/* Four cache lines a round; `ahead` bytes further on are asked for meanwhile. `size` is a multiple of 256. */
#define READ(NAME, TARGET, TYPE)                                                                 \
    TARGET static float NAME(const char *data, int64_t size, int64_t ahead) {                    \
        typedef TYPE V;                                                                          \
        V sums[4] = {{0}, {0}, {0}, {0}};                                                        \
        for (int64_t at = 0; at < size; at += 256) {                                             \
            for (int line = 0; line < 4; line++) {                                               \
                __builtin_prefetch(data + at + ahead + 64 * line);                               \
                const V *values = (const V *)(data + at + 64 * line);                            \
                for (int i = 0; i < (int)(64 / sizeof(V)); i++)                                  \
                    sums[line] += values[i];                                                     \
            }                                                                                    \
        }                                                                                        \
        V total = sums[0] + sums[1] + sums[2] + sums[3];                                         \
        return total[0];                                                                         \
    }

FMA(fma_plain, , vec4)
READ(read_plain, , vec4)
#if X86
FMA(fma_avx2, TARGET_AVX2, vec8)
READ(read_avx2, TARGET_AVX2, vec8)
FMA(fma_avx512, TARGET_AVX512, vec16)
READ(read_avx512, TARGET_AVX512, vec16)
#endif

/* Floats in a vector of the best instructions of this CPU. */
int64_t roofs_lanes(void) {
#if X86
    if (__builtin_cpu_supports("avx512f"))
        return 16;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        return 8;
#endif
    return 4;
}

/* 24 * lanes floating-point operations a round. */
float roofs_fma(int64_t rounds, float first) {
#if X86
    int64_t lanes = roofs_lanes();
    if (lanes > 4)
        return lanes == 16 ? fma_avx512(rounds, first) : fma_avx2(rounds, first);
#endif
    return fma_plain(rounds, first);
}

float roofs_read(const char *data, int64_t size, int64_t ahead) {
#if X86
    int64_t lanes = roofs_lanes();
    if (lanes > 4)
        return lanes == 16 ? read_avx512(data, size, ahead) : read_avx2(data, size, ahead);
#endif
    return read_plain(data, size, ahead);
}
