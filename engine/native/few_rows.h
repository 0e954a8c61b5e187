/* A tile of at most DIRECT_ROWS query rows, as decoding has, by AVX-512. Included by attention.h.
 *
 * Reading a line of K or V costs as much as the arithmetic on it, so both go on at once: while keys are met, the lines
 * of those met next are brought near, and the lines of those after them into the second level of the cache.
 */

/* The line at `offset` of the row of keys that are met next and after. */
INLINE void NAME(look_ahead)(const uint8_t *near, const uint8_t *far, long offset) {
    __builtin_prefetch(near + offset, 0, 3);
    __builtin_prefetch(far + offset, 0, 2);
}

/* 16 rows of 64 bytes, 8 at `low` and 8 at `high`, turned by words: lane i of to[j] is word j of row i. Quarters of
 * rows are brought together by loads, which leaves the port for shuffles to the shuffles within them. */
INLINE void NAME(turn_words)(vi to[LANES], const uint8_t *low, const uint8_t *high, const long stride) {
    _Pragma("GCC unroll 4") for (int quarter = 0; quarter < 4; quarter++) {
        __m512i x[4];
        _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++) {
            const uint8_t *first = low + i * stride + 16 * quarter, *second = high + i * stride + 16 * quarter;
            x[i] = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)first));
            x[i] = _mm512_inserti32x4(x[i], _mm_loadu_si128((const __m128i *)(first + 4 * stride)), 1);
            x[i] = _mm512_inserti32x4(x[i], _mm_loadu_si128((const __m128i *)second), 2);
            x[i] = _mm512_inserti32x4(x[i], _mm_loadu_si128((const __m128i *)(second + 4 * stride)), 3);
        }
        const __m512i a = _mm512_unpacklo_epi32(x[0], x[1]), b = _mm512_unpackhi_epi32(x[0], x[1]);
        const __m512i c = _mm512_unpacklo_epi32(x[2], x[3]), d = _mm512_unpackhi_epi32(x[2], x[3]);
        to[4 * quarter] = (vi)_mm512_unpacklo_epi64(a, c);
        to[4 * quarter + 1] = (vi)_mm512_unpackhi_epi64(a, c);
        to[4 * quarter + 2] = (vi)_mm512_unpacklo_epi64(b, d);
        to[4 * quarter + 3] = (vi)_mm512_unpackhi_epi64(b, d);
    }
}

/* K of key vectors from..to into `room` [words of a row][KEYS], each word with the bits of `flip` changed. */
INLINE void NAME(turn_keys)(const struct tile *tile, const struct range keys, const long stride, const int32_t flip) {
    for (long key = keys.from; key < keys.to; key += LANES) {
        const long g = key >> 3;
        const uint8_t *low = tile->k[g], *high = tile->k[g + 1];
        const uint8_t *far = tile->far->k[g + 1];
        float *to = tile->k_room + key;
        for (long at = 0; at < stride; at += 64, to += 16 * KEYS) {
            vi x[LANES];
            NAME(turn_words)(x, low + at, high + at, stride);
            _Pragma("GCC unroll 16") for (int i = 0; i < LANES; i++) {
                if (i >> 3) __builtin_prefetch(far + (i & 7) * stride + at, 0, 2);
                NAME(store)(to + i * KEYS, (vf)(x[i] ^ flip));
            }
        }
    }
}

/* Scores of all rows with the bf16 keys of `vectors` vectors from `key` on, turned by words: a word has two. */
INLINE void NAME(score_halves)(struct tile *tile, const int rows, const long key, const int vectors) {
    vf sums[DIRECT_ROWS][4] = {0}, more[4] = {0};
    const float *q = tile->q_columns, *k = tile->k_room + key;
    const long words = tile->padded / 2 / (2 * vectors);
    for (int g = 0; g < 2 * vectors; g++) {
        const uint8_t *near = tile->near->k[(key >> 3) + g], *far = tile->far->k[(key >> 3) + g];
        for (long word = 0; word < words; word++, q += 2 * 8, k += KEYS) {
            _Pragma("GCC unroll 4") for (int i = 0; i < vectors; i++) {
                __builtin_prefetch(near + 64 * i, 0, 3);
                if (!(g & 1)) __builtin_prefetch(far + 64 * i, 0, 2);
            }
            near += 64 * vectors, far += 64 * vectors;
            vf even[4], odd[4];
            _Pragma("GCC unroll 4") for (int i = 0; i < vectors; i++) {
                const vi both = (vi)NAME(load)(k + i * LANES);
                even[i] = (vf)(both << 16);
                odd[i] = (vf)(both & (int32_t)0xFFFF0000);
            }
            _Pragma("GCC unroll 7") for (int r = 0; r < rows; r++) {
                const vf of_even = NAME(spread)(q[r]), of_odd = NAME(spread)(q[8 + r]);
                _Pragma("GCC unroll 4") for (int i = 0; i < vectors; i++) sums[r][i] += of_even * even[i];
                _Pragma("GCC unroll 4") for (int i = 0; i < vectors; i++) {
                    if (rows == 1)
                        more[i] += of_odd * odd[i];
                    else
                        sums[r][i] += of_odd * odd[i];
                }
            }
        }
    }
    _Pragma("GCC unroll 7") for (int r = 0; r < rows; r++) {
        _Pragma("GCC unroll 4") for (int i = 0; i < vectors; i++)
            NAME(store)(tile->p + r * KEYS + key + i * LANES, sums[r][i] + more[i]);
    }
}

#define LARGEST_STEP(op, rows, h)                                                                                 \
    if ((rows) > (h)) {                                                                                      \
        _Pragma("GCC unroll 4") for (int i = 0; i < 8; i += 2 * (h)) if (i < (rows)) x[i] =                  \
            op(BLEND(x[i], x[i + (h)], h), SHUFFLE(x[i], x[i + (h)], OTHER_LANE, h));              \
    } else {                                                                                                 \
        FOLD_STEP(x[0], op, h);                                                                    \
    }

/* Lane r: the largest lane of x[r]; beyond `rows`, what it may be. Overwrites x, which has 8. */
#define LARGEST_OF(op)                                                        \
    _Pragma("GCC unroll 8") for (int i = rows; i < 8; i++) x[i] = x[0];       \
    LARGEST_STEP(op, rows, 1)                                                 \
    LARGEST_STEP(op, rows, 2)                                                 \
    LARGEST_STEP(op, rows, 4)                                                 \
    FOLD_STEP(x[0], op, 8);                                                   \
    return x[0];
INLINE vf NAME(largest_of)(vf x[8], const int rows) { LARGEST_OF(NAME(larger)) }

/* Of numbers without sign, which have the same order as integers; a NaN is the largest then. */
INLINE vf NAME(larger_bits)(vf a, vf b) { return (vf)_mm512_max_epu32((__m512i)a, (__m512i)b); }
INLINE vf NAME(largest_bits_of)(vf x[8], const int rows) { LARGEST_OF(NAME(larger_bits)) }

/* A bit for each of the first `count` of 16 lanes. */
static inline uint32_t first_lanes(long count) { return count <= 0 ? 0 : count >= 16 ? 0xFFFF : (1u << count) - 1; }

/* `value` where a key is within `seen`, else `other`; `key` is the first of the vector. */
INLINE vf NAME(where_seen)(vf value, vf other, long key, struct range seen) {
    const uint32_t inside = first_lanes(seen.to - key) & ~first_lanes(seen.from - key);
    return (vf)_mm512_mask_mov_ps((__m512)other, (__mmask16)inside, (__m512)value);
}

/* As `weigh` in attention.h, for all of the tile's `rows` rows side by side: their largest scores are one vector.
 * With `whole`, all rows see all of the KEYS keys. Lane r of the result: the largest weight of row r, its key's scale
 * included, where there are scales. */
INLINE vf NAME(weigh_few)(struct tile *tile, const int rows, const struct range vectors, const int whole) {
    vf most[8], heaviest[8] = {0};
    struct range seen[DIRECT_ROWS];
    const long from = whole ? 0 : vectors.from, to = whole ? KEYS : vectors.to;
    const vf lowest = NAME(spread)(-0x1.fffffep127f), none = NAME(spread)(-INFINITY);
    _Pragma("GCC unroll 7") for (int r = 0; r < rows; r++) {
        float *p = tile->p + r * KEYS;
        if (!whole) seen[r] = seen_by(tile, r);
        most[r] = none;
        _Pragma("GCC unroll 4") for (long key = from; key < to; key += LANES) {
            vf score = NAME(load)(p + key);
            if (tile->k_scales) score *= NAME(load)(tile->k_scales + key);
            if (tile->soft_cap != 0) score = NAME(capped)(score, tile->soft_cap);
            if (!whole) score = NAME(where_seen)(score, none, key, seen[r]);
            NAME(store)(p + key, score);
            most[r] = NAME(larger)(score, most[r]);
        }
    }
    /* Rows that have seen nothing yet get a number here, so that no difference is that of infinities. */
    const vf before = NAME(load)(tile->most), largest = NAME(larger)(NAME(largest_of)(most, rows), lowest);
    const vf now = NAME(larger)(largest, before);
    NAME(store)(tile->most, now);
    NAME(store)(tile->keep, NAME(exp2)(before - now));
    _Pragma("GCC unroll 7") for (int r = 0; r < rows; r++) {
        float *p = tile->p + r * KEYS, *sums = tile->sums + r * 16;
        const vf reference = NAME(spread)(tile->most[r]);
        vf sum = NAME(load)(sums) * tile->keep[r];
        _Pragma("GCC unroll 4") for (long key = from; key < to; key += LANES) {
            vf weight = NAME(exp2)(NAME(load)(p + key) - reference);
            sum += weight;
            if (tile->v_scales) {
                weight *= NAME(load)(tile->v_scales + key);
                if (!whole) weight = NAME(where_seen)(weight, (vf){0}, key, seen[r]);
                heaviest[r] = NAME(larger_bits)(weight, heaviest[r]);
            }
            NAME(store)(p + key, weight);
        }
        NAME(store)(sums, sum);
    }
    return tile->v_scales ? NAME(largest_bits_of)(heaviest, rows) : (vf){0};
}

#define EACH_NUMBER_OF_ROWS(DO) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7)

TARGET static vf NAME(weigh_tile)(struct tile *tile, const struct range vectors) {
    const int whole = vectors.from == 0 && seen_by(tile, 0).to == KEYS && seen_by(tile, tile->num_rows - 1).from == 0;
#define OF_ROWS(n) \
    case n: return whole ? NAME(weigh_few)(tile, n, vectors, 1) : NAME(weigh_few)(tile, n, vectors, 0);
    switch (tile->num_rows) { EACH_NUMBER_OF_ROWS(OF_ROWS) default: return (vf){0}; }
#undef OF_ROWS
}

/* Scores with the bf16 keys of `vectors`; head_dim is a multiple of 32. As many keys at once as sums have registers. */
TARGET static void NAME(score_bf16)(struct tile *tile, const struct range vectors) {
    switch (tile->ahead_stride) {
    case 128: NAME(turn_keys)(tile, vectors, 128, 0); break;
    case 256: NAME(turn_keys)(tile, vectors, 256, 0); break;
    default: NAME(turn_keys)(tile, vectors, tile->ahead_stride, 0);
    }
    long key = vectors.from;
#define OF_ROWS(n)                                                                              \
    case n:                                                                                     \
        for (; (n) <= 3 && key + 4 * LANES <= vectors.to; key += 4 * LANES)                     \
            NAME(score_halves)(tile, n, key, 4);                                                \
        for (; key + 2 * LANES <= vectors.to; key += 2 * LANES)                                 \
            NAME(score_halves)(tile, n, key, 2);                                                \
        if (key < vectors.to) NAME(score_halves)(tile, n, key, 1);                              \
        break;
    switch (tile->num_rows) { EACH_NUMBER_OF_ROWS(OF_ROWS) }
#undef OF_ROWS
}

/* ---- values */

/* Two vectors of V side by side; of bf16, the even elements and the odd ones. */
INLINE void NAME(load_two)(vf to[2], const uint8_t *at, const int dtype) {
    if (dtype == KV_BF16) {
        const vi both = (vi)NAME(load)((const float *)at);
        to[0] = (vf)(both << 16);
        to[1] = (vf)(both & (int32_t)0xFFFF0000);
    } else {
        to[0] = NAME(load_as_fp32)(at, dtype);
        to[1] = NAME(load_as_fp32)(at + LANES * item_bytes(dtype), dtype);
    }
}

#define ZIP_LOW(l, h) ((l) & 1 ? LANES + ((l) >> 1) : ((l) >> 1))
#define ZIP_HIGH(l, h) (LANES / 2 + ((l) & 1 ? LANES + ((l) >> 1) : ((l) >> 1)))

/* out = keep * out + p V for all rows and `pairs` pairs of vectors from `column` on. */
INLINE void NAME(add_values)(struct tile *tile, const struct range seen, const int rows, const int pairs,
                             const long column, const int dtype) {
    vf sums[DIRECT_ROWS][2 * 2] = {0};
    const long item = item_bytes(dtype), stride = tile->padded * item, from_byte = column * item;
    for (long key = seen.from; key < seen.to;) {
        const long end = (key | 7) < seen.to ? (key | 7) + 1 : seen.to, g = key >> 3;
        const long first = (key & 7) * stride + from_byte;
        const uint8_t *v = tile->v[g] + first, *near = tile->near->v[g] + first, *far = tile->far->v[g] + first;
        const float *p = tile->p + key;
        for (; key < end; key++, p++, v += stride, near += stride, far += stride) {
            vf row[2 * 2];
            _Pragma("GCC unroll 2") for (int i = 0; i < pairs; i++)
                NAME(load_two)(row + 2 * i, v + 2 * i * LANES * item, dtype);
            _Pragma("GCC unroll 4") for (long at = 0; at < 2 * pairs * LANES * item; at += 64)
                NAME(look_ahead)(near, far, at);
            _Pragma("GCC unroll 7") for (int r = 0; r < rows; r++) {
                const vf weight = NAME(spread)(p[r * KEYS]);
                _Pragma("GCC unroll 4") for (int i = 0; i < 2 * pairs; i++) sums[r][i] += weight * row[i];
            }
        }
    }
    _Pragma("GCC unroll 7") for (int r = 0; r < rows; r++) {
        float *out = tile->out + r * tile->padded + column;
        _Pragma("GCC unroll 2") for (int i = 0; i < 2 * pairs; i += 2) {
            vf low = sums[r][i], high = sums[r][i + 1];
            if (dtype == KV_BF16) {
                low = SHUFFLE(sums[r][i], sums[r][i + 1], ZIP_LOW, 0);
                high = SHUFFLE(sums[r][i], sums[r][i + 1], ZIP_HIGH, 0);
            }
            NAME(store)(out + i * LANES, NAME(load)(out + i * LANES) * tile->keep[r] + low);
            NAME(store)(out + (i + 1) * LANES, NAME(load)(out + (i + 1) * LANES) * tile->keep[r] + high);
        }
    }
}

INLINE void NAME(add_all_values)(struct tile *tile, const struct range seen, const int rows, const int dtype) {
    long column = 0;
    for (; rows <= 3 && column + 4 * LANES <= tile->padded; column += 4 * LANES)
        NAME(add_values)(tile, seen, rows, 2, column, dtype);
    for (; column < tile->padded; column += 2 * LANES) NAME(add_values)(tile, seen, rows, 1, column, dtype);
}

/* The weights times V; head_dim is a multiple of 32. */
TARGET static void NAME(add_values_few)(struct tile *tile, const struct range seen) {
#define OF_ROWS(n) case n: FOR_DTYPE(add_all_values, tile->v_dtype, tile, seen, n) break;
    switch (tile->num_rows) { EACH_NUMBER_OF_ROWS(OF_ROWS) }
#undef OF_ROWS
}
