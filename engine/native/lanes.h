/* Vectors of LANES floats, for one instruction set. Included once for each by attention.c, which defines before:
 *   LANES      floats in a vector: 4, 8 or 16
 *   TARGET     the attribute every function here carries
 *   NAME(x)    the name of x in this copy
 *   HAS_F16C   whether the CPU turns fp16 into fp32
 * Written with the vector extensions of gcc and clang, so the copy of 4 lanes runs on any CPU.
 */

typedef float NAME(vf) __attribute__((vector_size(LANES * 4)));
typedef int32_t NAME(vi) __attribute__((vector_size(LANES * 4)));
typedef uint32_t NAME(vu) __attribute__((vector_size(LANES * 4)));
typedef int16_t NAME(vh) __attribute__((vector_size(LANES * 2)));
typedef uint16_t NAME(vuh) __attribute__((vector_size(LANES * 2)));
typedef int8_t NAME(vb) __attribute__((vector_size(LANES)));
#define vf NAME(vf)
#define vi NAME(vi)
#define vu NAME(vu)
#define vh NAME(vh)
#define vuh NAME(vuh)
#define vb NAME(vb)

#undef INLINE
#define INLINE TARGET static inline __attribute__((always_inline))

INLINE vf NAME(load)(const float *at) {
    vf value;
    memcpy(&value, at, sizeof value);
    return value;
}

INLINE void NAME(store)(float *at, vf value) { memcpy(at, &value, sizeof value); }

INLINE vf NAME(spread)(float value) { return value - (vf){0}; }

/* b where a or b is a NaN. */
INLINE vf NAME(larger)(vf a, vf b) {
#if LANES == 16
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif LANES == 8
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
    vi mask = a > b;
    return (vf)(((vi)a & mask) | ((vi)b & ~mask));
#endif
}

/* `value` with zeros where x < least. */
INLINE vf NAME(zero_below)(vf value, vf x, float least) {
#if LANES == 16
    return (vf)_mm512_maskz_mov_ps(_mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(least), _CMP_NLT_UQ), (__m512)value);
#else
    return (vf)((vi)value & ~(x < least));
#endif
}

/* ---- shuffles: `f(lane, h)` is an index into the lanes of a and then those of b */

#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(a, b, f, h) __builtin_shufflevector(a, b, EACH_LANE(f, h))
#else
#define SHUFFLE(a, b, f, h) __builtin_shuffle(a, b, (vi){EACH_LANE(f, h)})
#endif

#undef EACH_LANE
#if LANES == 4
#define EACH_LANE(f, h) f(0, h), f(1, h), f(2, h), f(3, h)
#elif LANES == 8
#define EACH_LANE(f, h) f(0, h), f(1, h), f(2, h), f(3, h), f(4, h), f(5, h), f(6, h), f(7, h)
#else
#define EACH_LANE(f, h)                                                                                      \
    f(0, h), f(1, h), f(2, h), f(3, h), f(4, h), f(5, h), f(6, h), f(7, h), f(8, h), f(9, h), f(10, h), f(11, h), \
        f(12, h), f(13, h), f(14, h), f(15, h)
#endif

#define LOW_LANE(l, h) ((l) & (h) ? LANES + (l) - (h) : (l))   /* in groups of 2h lanes: low half of a, low of b */
#define HIGH_LANE(l, h) ((l) & (h) ? LANES + (l) : (l) + (h))  /* high half of a, high half of b */
#define OWN_LANE(l, h) ((l) & (h) ? LANES + (l) : (l))       /* low half of a, high half of b */
#define OTHER_LANE(l, h) ((l) & (h) ? LANES + (l) - (h) : (l) + (h)) /* high half of a, low half of b */
#define SWAPPED_LANE(l, h) ((l) ^ (h))

/* OWN_LANE with the cheaper instruction, which gcc does not find by itself. */
#undef BLEND
#if LANES == 16
#define BLEND(a, b, h) (vf) _mm512_mask_blend_ps((__mmask16)(0xFFFF / ((1 << (h)) + 1) << (h)), (__m512)(a), (__m512)(b))
#else
#define BLEND(a, b, h) SHUFFLE(a, b, OWN_LANE, h)
#endif

/* One step of adding up `h * 2` vectors each within itself: sums of lanes h apart, of x[i] and x[i + h] side by side. */
#define ADD_STEP(h)                                                                            \
    _Pragma("GCC unroll 16") for (int i = 0; i < (h); i++) x[i] =                              \
        BLEND(x[i], x[i + (h)], h) + SHUFFLE(x[i], x[i + (h)], OTHER_LANE, h);

/* Lane i: the sum of all lanes of x[i]. Overwrites x. */
INLINE vf NAME(sums_of)(vf x[LANES]) {
#if LANES >= 16
    ADD_STEP(8)
#endif
#if LANES >= 8
    ADD_STEP(4)
#endif
    ADD_STEP(2)
    ADD_STEP(1)
    return x[0];
}

#define TURN_STEP(h)                                                                           \
    _Pragma("GCC unroll 16") for (int i = 0; i < LANES; i++) if (!(i & (h))) {                 \
        vf low = SHUFFLE(x[i], x[i + (h)], LOW_LANE, h);                                       \
        x[i + (h)] = SHUFFLE(x[i], x[i + (h)], HIGH_LANE, h);                                  \
        x[i] = low;                                                                            \
    }

/* Lane j of x[i] becomes lane i of x[j]. */
INLINE void NAME(transpose)(vf x[LANES]) {
#if LANES >= 16
    TURN_STEP(8)
#endif
#if LANES >= 8
    TURN_STEP(4)
#endif
    TURN_STEP(2)
    TURN_STEP(1)
}

#define FOLD_STEP(value, op, h) value = op(value, SHUFFLE(value, value, SWAPPED_LANE, h))
INLINE vf NAME(plus)(vf a, vf b) { return a + b; }

/* The largest lane, in every lane. */
INLINE vf NAME(largest)(vf value) {
#if LANES >= 16
    FOLD_STEP(value, NAME(larger), 8);
#endif
#if LANES >= 8
    FOLD_STEP(value, NAME(larger), 4);
#endif
    FOLD_STEP(value, NAME(larger), 2);
    FOLD_STEP(value, NAME(larger), 1);
    return value;
}

/* The sum of the lanes, in every lane. */
INLINE vf NAME(total)(vf value) {
#if LANES >= 16
    FOLD_STEP(value, NAME(plus), 8);
#endif
#if LANES >= 8
    FOLD_STEP(value, NAME(plus), 4);
#endif
    FOLD_STEP(value, NAME(plus), 2);
    FOLD_STEP(value, NAME(plus), 1);
    return value;
}

/* ---- elements of a pool as fp32; int8 and fp8 without their scale */

/* Each lane of 16 or 8 bits in one of 32 or 16. Spelt out because gcc 12 goes through memory for the general form. */
INLINE vu NAME(wide_halves)(vuh half) {
#if LANES == 16
    return (vu)_mm512_cvtepu16_epi32((__m256i)half);
#elif LANES == 8
    return (vu)_mm256_cvtepu16_epi32((__m128i)half);
#else
    return __builtin_convertvector(half, vu);
#endif
}

INLINE vi NAME(wide_bytes)(vb bytes) {
#if LANES == 16
    return (vi)_mm512_cvtepi8_epi32((__m128i)bytes);
#elif LANES == 8
    return (vi)_mm256_cvtepi8_epi32(_mm_cvtsi64_si128((long long)bytes));
#else
    return __builtin_convertvector(bytes, vi);
#endif
}

INLINE vh NAME(halves_of_bytes)(vb bytes) {
#if LANES == 16
    return (vh)_mm256_cvtepi8_epi16((__m128i)bytes);
#elif LANES == 8
    return (vh)_mm_cvtepi8_epi16(_mm_cvtsi64_si128((long long)bytes));
#else
    return __builtin_convertvector(bytes, vh);
#endif
}

INLINE vf NAME(load_bf16)(const uint8_t *at) {
    vuh half;
    memcpy(&half, at, sizeof half);
    return (vf)(NAME(wide_halves)(half) << 16);
}

INLINE vf NAME(halves)(vuh half) {
#if HAS_F16C && LANES == 16
    return (vf)_mm512_cvtph_ps((__m256i)half);
#elif HAS_F16C && LANES == 8
    return (vf)_mm256_cvtph_ps((__m128i)half);
#else
    vu bits = __builtin_convertvector(half, vu);
    vf magnitude = (vf)((bits & 0x7FFF) << 13) * 0x1p112f; /* exact, subnormals too */
    vu special = (vu)((bits & 0x7C00) == 0x7C00) & 0x7F800000;
    return (vf)((vu)magnitude | special | (bits & 0x8000) << 16);
#endif
}

INLINE vf NAME(load_fp16)(const uint8_t *at) {
    vuh half;
    memcpy(&half, at, sizeof half);
    return NAME(halves)(half);
}

INLINE vf NAME(load_int8)(const uint8_t *at) {
    vb bytes;
    memcpy(&bytes, at, sizeof bytes);
    return __builtin_convertvector(NAME(wide_bytes)(bytes), vf);
}

/* An fp8 e4m3 is an fp16 without its three last bits, but for a bias of 7 where fp16 has 15: so this is value / 256,
 * and the caller's scale makes up for it. Its only NaN, 0x7f, is not provided for: no store here writes it. */
INLINE vf NAME(load_fp8)(const uint8_t *at) {
    vb bytes;
    memcpy(&bytes, at, sizeof bytes);
    const vh wide = NAME(halves_of_bytes)(bytes);
    return NAME(halves)((vuh)(wide << 7) & (uint16_t)0xBFFF);
}

INLINE vf NAME(load_as_fp32)(const uint8_t *at, int dtype) {
    vf value;
    switch (dtype) {
    case KV_FP16: return NAME(load_fp16)(at);
    case KV_BF16: return NAME(load_bf16)(at);
    case KV_INT8: return NAME(load_int8)(at);
    case KV_FP8: return NAME(load_fp8)(at);
    default: memcpy(&value, at, sizeof value); return value;
    }
}

/* 2^x for x <= 0, relative error 1e-7 (a minimax polynomial that is exact at 0); 0 below the smallest normal number,
 * -infinity included; a NaN stays. */
INLINE vf NAME(exp2)(vf x) {
    const float to_integer = 0x1.8p23f;
    vf shifted = x + to_integer, rest = x - (shifted - to_integer);
    vf power = (vf)(((vi)shifted << 23) + 0x3F800000);
    vf sum = rest * 0.0013264727f + 0.0096715127f;
    sum = sum * rest + 0.0555073374f;
    sum = sum * rest + 0.2402224208f;
    sum = sum * rest + 0.6931469776f;
    sum = sum * rest + 1.0f;
    return NAME(zero_below)(sum * power, x, -126.0f);
}

/* cap * tanh(score / cap), of twice score / cap in powers of two. */
INLINE vf NAME(capped)(vf score, float cap) {
    const vi sign = (vi)score & (int32_t)0x80000000;
    const vf gone = NAME(exp2)((vf)((vi)score | (int32_t)0x80000000));
    return (vf)((vi)(cap * ((1.0f - gone) / (1.0f + gone))) | sign);
}
