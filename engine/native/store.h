/* Rotation of heads, and rows of K and V on their way into the pool. Included after lanes.h, once for each instruction
 * set. Quantised rows are those of kv_transfer/quantise.py, to the bit. */

#undef EVEN_LANE
#undef ODD_LANE
#define EVEN_LANE(l, h) ((l) & ~1)
#define ODD_LANE(l, h) ((l) | 1)

/* Turn `count` heads in place: pairs of neighbours by the angle whose cos and sin `rotation` has side by side. */
TARGET static void NAME(turn)(float *heads, int64_t count, int64_t width, const float *rotation) {
    for (long i = 0; i < count; i++, heads += width) {
        long at = 0;
        for (; at + LANES <= width; at += LANES) {
            const vf angle = NAME(load)(rotation + at), x = NAME(load)(heads + at);
            const vf across = SHUFFLE(x, x, SWAPPED_LANE, 1) * SHUFFLE(angle, angle, ODD_LANE, 0);
            const vi sign = SHUFFLE((vi){0}, ~(vi){0}, OWN_LANE, 1) & (int32_t)0x80000000; /* of odd lanes */
            const vf straight = x * SHUFFLE(angle, angle, EVEN_LANE, 0);
            NAME(store)(heads + at, straight - (vf)((vi)across ^ sign));
        }
        for (; at < width; at += 2) {
            const float x = heads[at], y = heads[at + 1], cosine = rotation[at], sine = rotation[at + 1];
            heads[at] = x * cosine - y * sine;
            heads[at + 1] = x * sine + y * cosine;
        }
    }
}

/* Up to LANES floats, zeros behind them. */
INLINE vf NAME(load_floats)(const float *at, long count) {
    if (count >= LANES) return NAME(load)(at);
    vf value = {0};
    memcpy(&value, at, (size_t)count * sizeof(float));
    return value;
}

/* fp32 to bf16 in the low half of each lane: nearest, ties to even; a NaN becomes 0x7fc0. */
INLINE vu NAME(to_bf16)(vf value) {
    const vu bits = (vu)value, rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    const vu missing = (vu)(value != value);
    return (rounded & ~missing) | (0x7FC0 & missing);
}

/* fp32 to fp16 likewise. */
INLINE vu NAME(to_fp16)(vf value) {
    const vu sign = (vu)value >> 16 & 0x8000, bits = (vu)value & 0x7FFFFFFF;
    /* Normal: rebias and round. Below 2^-14: adding 2^-1 leaves the multiple of 2^-24 in the last bits. */
    const vu normal = (bits + 0xFFF + (bits >> 13 & 1) - (112u << 23)) >> 13;
    const vu small = (vu)((vf)bits + 0.5f) - 0x3F000000;
    const vu is_small = (vu)(bits < 0x38800000), is_large = (vu)(bits >= 0x477FF000);
    const vu infinite = 0x7C00 + (vu)((vu)(bits > 0x7F800000) & 0x200);
    const vu finite = (small & is_small) | (normal & ~is_small);
    return sign | (finite & ~is_large) | (infinite & is_large);
}

/* Codes of values within -448..448, in the low byte of each lane. */
INLINE vu NAME(to_fp8)(vf value) {
    const vu sign = (vu)value >> 24 & 0x80, bits = (vu)value & 0x7FFFFFFF;
    const vu normal = (bits + 0x7FFFF + (bits >> 20 & 1) - (120u << 23)) >> 20;
    const vu small = (vu)((vf)bits + 0x1p14f) - 0x46800000; /* below 2^-6: multiples of 2^-9 */
    const vu is_small = (vu)(bits < 0x3C800000);
    return sign | (small & is_small) | (normal & ~is_small);
}

INLINE void NAME(put_halves)(uint8_t *to, vu halves, long count) {
    const vuh narrow = __builtin_convertvector(halves, vuh);
    memcpy(to, &narrow, (size_t)(count < LANES ? count : LANES) * 2);
}

INLINE void NAME(put_bytes)(uint8_t *to, vi codes, long count) {
    const vb narrow = __builtin_convertvector(codes, vb);
    memcpy(to, &narrow, (size_t)(count < LANES ? count : LANES));
}

INLINE void NAME(put_quantised)(uint8_t *to, uint8_t *scale_at, const float *row, long width, const float limit) {
    vi largest = {0};
    for (long i = 0; i < width; i += LANES) {
        const vi bits = (vi)NAME(load_floats)(row + i, width - i) & 0x7FFFFFFF, more = bits > largest;
        largest = (bits & more) | (largest & ~more);
    }
    int32_t bits = 0;
    for (int i = 0; i < LANES; i++) bits = largest[i] > bits ? largest[i] : bits;
    float amax;
    memcpy(&amax, &bits, sizeof amax);
    const int usable = bits < 0x7F800000;
    const float exact = amax / limit < 65504.0f ? amax / limit : 65504.0f;
    const vu narrow = NAME(to_fp16)(NAME(spread)(exact));
    const uint16_t scale = usable ? (uint16_t)narrow[0] : 0x7E00;
    const float wide = NAME(halves)(__builtin_convertvector(narrow, vuh))[0];
    const float inverse = wide > 0 ? 1.0f / wide : 0.0f;
    memcpy(scale_at, &scale, sizeof scale);
    if (!usable) {
        memset(to, 0, (size_t)width);
        return;
    }
    for (long i = 0; i < width; i += LANES) {
        vf value = NAME(load_floats)(row + i, width - i) * inverse;
        const vi above = value > limit, below = value < -limit;
        value = (vf)(((vi)value & ~above & ~below) | ((vi)NAME(spread)(limit) & above) |
                     ((vi)NAME(spread)(-limit) & below));
        if (limit == 127.0f)
            NAME(put_bytes)(to + i, (vi)(value + 0x1.8p23f) - 0x4B400000, width - i);
        else
            NAME(put_bytes)(to + i, (vi)NAME(to_fp8)(value), width - i);
    }
}

/* One head of one token: head_dim floats into a row of the pool, its scale (if any) into `scale_at`. */
TARGET static void NAME(put)(const struct pool *pool, uint8_t *to, uint8_t *scale_at, const float *row) {
    const long width = pool->head_dim;
    switch (pool->dtype) {
    case KV_INT8: NAME(put_quantised)(to, scale_at, row, width, 127.0f); break;
    case KV_FP8: NAME(put_quantised)(to, scale_at, row, width, 448.0f); break;
    case KV_BF16:
        for (long i = 0; i < width; i += LANES)
            NAME(put_halves)(to + 2 * i, NAME(to_bf16)(NAME(load_floats)(row + i, width - i)), width - i);
        break;
    case KV_FP16:
        for (long i = 0; i < width; i += LANES)
            NAME(put_halves)(to + 2 * i, NAME(to_fp16)(NAME(load_floats)(row + i, width - i)), width - i);
        break;
    default: memcpy(to, row, (size_t)width * sizeof(float));
    }
}
