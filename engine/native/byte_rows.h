/* A tile of few query rows and int8 K and V by the products of bytes of AVX-512 VNNI. Included by attention.c once.
 *
 * The bytes of K and V take part as they are. Their partners, fp32 numbers of 24 bits, are written with three digits of
 * eight bits: those of a query row to the last of 23 bits of its largest element, the weights to the last of 24 bits of
 * the largest weight among the keys. The sums of products of digits are exact, so what is rounded off is about what a
 * sum in fp32 rounds off. An instruction has four products of a third of the precision, and bytes need no widening,
 * which costs about as much as multiplying.
 *
 * The instruction multiplies bytes without sign by bytes with one. Q has signed digits, and K 128 added to each byte,
 * which the sums have subtracted from the start. Weights have no sign.
 */

enum { DIGITS = 3 };
static const float LARGEST_SIGNED = 8355700.0f;   /* below 127 * (2^16 + 2^8 + 1) */
static const float LARGEST_UNSIGNED = 16777200.0f; /* below 2^24 */

/* Whether the tile is one for this file. */
static inline int uses_digits(const struct tile *tile) {
    const int64_t width = tile->pool->head_dim;
    return tile->direct && tile->pool->dtype == KV_INT8 && width % 64 == 0 && width <= 256;
}

typedef int32_t words __attribute__((vector_size(64)));

enum { MOST_COLUMNS = 256 };

/* Query rows as digits. Word w of digit d of row r, four bytes, is at [r][w][d]. */
struct digits {
    int32_t of[DIRECT_ROWS][MOST_COLUMNS / 4][4];
    int32_t sums[DIRECT_ROWS][4];  /* -128 times the sum of each digit */
    float unit[DIRECT_ROWS];       /* what 1 stands for */
};

#define INLINE_VNNI TARGET_VNNI static inline __attribute__((always_inline))

/* In the memory for rows of q that such a tile does not have. */
INLINE_VNNI struct digits *digits_of(const struct tile *tile) { return (struct digits *)tile->q_columns; }

/* For each four numbers the words of their digits, of numbers without sign. */
INLINE_VNNI __m512i split(__m512i numbers) {
    const __m128i order = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    return _mm512_shuffle_epi8(numbers, _mm512_broadcast_i32x4(order));
}

/* The factor that makes whole numbers up to `most` of numbers up to `largest`, given as its bits, and what 1 stands for
 * then. What is not finite stays so; what is too small to matter is 0. */
INLINE_VNNI float unit_of(uint32_t bits, float most, float *factor) {
    float largest;
    memcpy(&largest, &bits, sizeof largest);
    const int usable = bits < 0x7F800000 && largest > 1e-30f;
    *factor = usable ? most / largest : 0;
    return usable ? largest / most : bits < 0x7F800000 ? 0 : NAN;
}

TARGET_VNNI static void begin_vnni(struct tile *tile, const float *const *q, float factor) {
    begin_avx512(tile, q, factor);
    if (!uses_digits(tile)) return;
    struct digits *digits = digits_of(tile);
    const long width = tile->padded;
    const __m512i signs = _mm512_set1_epi8((char)0x80), ones = _mm512_set1_epi8(1);
    for (long r = 0; r < tile->num_rows; r++) {
        const float *row = tile->q + r * width;
        __m512i most = _mm512_setzero_si512(), sums = most;
        for (long i = 0; i < width; i += 16)
            most = _mm512_max_epu32(most, _mm512_and_si512(_mm512_loadu_si512(row + i), _mm512_set1_epi32(0x7FFFFFFF)));
        float scale;
        digits->unit[r] = unit_of(_mm512_reduce_max_epu32(most), LARGEST_SIGNED, &scale);
        for (long i = 0; i < width; i += 16) {
            const __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(row + i), _mm512_set1_ps(scale)));
            const __m512i each = _mm512_xor_si512(split(_mm512_add_epi32(whole, _mm512_set1_epi32(0x808080))), signs);
            _mm512_storeu_si512(digits->of[r][i / 4], each);
            sums = _mm512_dpbusd_epi32(sums, ones, each);
        }
        int32_t parts[16];
        _mm512_storeu_si512(parts, sums);
        for (int d = 0; d < DIGITS; d++)
            digits->sums[r][d] = -128 * (parts[d] + parts[4 + d] + parts[8 + d] + parts[12 + d]);
    }
}

/* acc + the four products of bytes of each word: a's without sign, b's with. */
INLINE_VNNI words add_products(words acc, words a, words b) {
    return (words)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)a, (__m512i)b);
}

INLINE_VNNI words spread_word(const int32_t *at) { return (words)_mm512_set1_epi32(*at); }

/* What sums of products with the three digits are worth. */
INLINE_VNNI __m512 worth(const words sums[DIGITS]) {
    const words high = (sums[2] << 8) + sums[1];
    const __m512 low = _mm512_cvtepi32_ps((__m512i)sums[0]);
    return _mm512_fmadd_ps(_mm512_cvtepi32_ps((__m512i)high), _mm512_set1_ps(256.0f), low);
}

/* Scores of `rows` rows from `first` on with `vectors` vectors of keys from `key` on. `with_ahead`: on the way the
 * lines of as many keys that are met next come near, and half of those after them; the rest came when K was turned. */
INLINE_VNNI void score_digits(struct tile *tile, const int first, const int rows, const long key, const int vectors,
                              const int with_ahead) {
    words sums[4][4][DIGITS];
    const struct digits *digits = digits_of(tile);
    _Pragma("GCC unroll 4") for (int r = 0; r < rows; r++) {
        _Pragma("GCC unroll 3") for (int d = 0; d < DIGITS; d++) {
            _Pragma("GCC unroll 4") for (int i = 0; i < vectors; i++)
                sums[r][i][d] = spread_word(&digits->sums[first + r][d]);
        }
    }
    const int32_t *q = digits->of[first][0];
    const float *k = tile->k_room + key;
    const int groups = 2 * vectors;
    const long words_each = tile->padded / 4 / groups;
    for (int g = 0; g < groups; g++) {
        const uint8_t *near = tile->near->k[(key >> 3) + g], *far = tile->far->k[(key >> 3) + g];
        for (long word = 0; word < words_each; word++, q += 4, k += KEYS) {
            if (with_ahead) {
                _Pragma("GCC unroll 4") for (int i = 0; i < vectors; i++) __builtin_prefetch(near + 64 * i, 0, 3);
                _Pragma("GCC unroll 4") for (int i = 0; i < vectors; i++)
                    if (!(g & 1)) __builtin_prefetch(far + 64 * i, 0, 2);
                near += 64 * vectors, far += 64 * vectors;
            }
            words now[4];
            _Pragma("GCC unroll 4") for (int i = 0; i < vectors; i++) now[i] = (words)load_avx512(k + i * 16);
            _Pragma("GCC unroll 4") for (int r = 0; r < rows; r++) {
                _Pragma("GCC unroll 3") for (int d = 0; d < DIGITS; d++) {
                    const words digit = spread_word(q + r * MOST_COLUMNS + d);
                    _Pragma("GCC unroll 4") for (int i = 0; i < vectors; i++)
                        sums[r][i][d] = add_products(sums[r][i][d], now[i], digit);
                }
            }
        }
    }
    _Pragma("GCC unroll 4") for (int r = 0; r < rows; r++) {
        const __m512 unit = _mm512_set1_ps(digits->unit[first + r]);
        _Pragma("GCC unroll 4") for (int i = 0; i < vectors; i++)
            _mm512_storeu_ps(tile->p + (first + r) * KEYS + key + i * 16, _mm512_mul_ps(worth(sums[r][i]), unit));
    }
}

INLINE_VNNI void score_part(struct tile *tile, const struct range vectors, const int first, const int rows) {
    long key = vectors.from;
    for (; rows <= 2 && key + 64 <= vectors.to; key += 64) score_digits(tile, first, rows, key, 4, first == 0);
    for (; key + 32 <= vectors.to; key += 32) score_digits(tile, first, rows, key, 2, first == 0);
    if (key < vectors.to) score_digits(tile, first, rows, key, 1, first == 0);
}

TARGET_VNNI static void score_vnni(struct tile *tile, const struct range vectors) {
    if (tile->padded == 64)
        turn_keys_avx512(tile, vectors, 64, (int32_t)0x80808080);
    else
        turn_keys_avx512(tile, vectors, tile->padded, (int32_t)0x80808080);
    switch (tile->num_rows) {
    case 1: score_part(tile, vectors, 0, 1); break;
    case 2: score_part(tile, vectors, 0, 2); break;
    case 3: score_part(tile, vectors, 0, 3); break;
    case 4: score_part(tile, vectors, 0, 4); break;
    case 5: score_part(tile, vectors, 0, 3), score_part(tile, vectors, 3, 2); break;
    case 6: score_part(tile, vectors, 0, 3), score_part(tile, vectors, 3, 3); break;
    default: score_part(tile, vectors, 0, 4), score_part(tile, vectors, 4, 3);
    }
}

/* Weights as digits: of each four keys, their digit d is the word [key / 4][d] of the row. Lane r of `heaviest` and of
 * `units` are row r's. */
INLINE_VNNI void split_weights(struct tile *tile, const struct range vectors, __m512 heaviest, float units[16]) {
    int32_t *to = (int32_t *)(tile->p + 8 * KEYS);
    float scales[16];
    const __m512i bits = _mm512_castps_si512(heaviest);
    const __mmask16 usable = _mm512_cmp_ps_mask(heaviest, _mm512_set1_ps(1e-30f), _CMP_GT_OQ) &
                             _mm512_cmplt_epu32_mask(bits, _mm512_set1_epi32(0x7F800000));
    const __mmask16 wrong = _mm512_cmpge_epu32_mask(bits, _mm512_set1_epi32(0x7F800000));
    _mm512_storeu_ps(scales, _mm512_maskz_div_ps(usable, _mm512_set1_ps(LARGEST_UNSIGNED), heaviest));
    const __m512 unit = _mm512_maskz_mul_ps(usable, heaviest, _mm512_set1_ps(1.0f / LARGEST_UNSIGNED));
    _mm512_storeu_ps(units, _mm512_mask_mov_ps(unit, wrong, _mm512_set1_ps(NAN)));
    for (long r = 0; r < tile->num_rows; r++) {
        const __m512 scale = _mm512_set1_ps(scales[r]);
        const float *p = tile->p + r * KEYS;
        for (long key = vectors.from; key < vectors.to; key += 16) {
            const __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(p + key), scale));
            _mm512_storeu_si512(to + r * KEYS + key, split(whole));
        }
    }
}

/* V of each four keys side by side: byte i of a word is that of key i. Within 64 columns word w of part m (64 bytes) is
 * column 16 * (w / 4) + 4 * m + w % 4. */
INLINE_VNNI void mix_values(struct tile *tile, const struct range vectors, const long width) {
    for (long key = vectors.from; key < vectors.to; key += 4) {
        const long g = key >> 3, first = (key & 7) * width;
        const uint8_t *v = tile->v[g] + first, *near = tile->near->v[g] + first;
        uint8_t *to = (uint8_t *)tile->v_room + key * width;
        for (long at = 0; at < width; at += 64, to += 256) {
            __m512i x[4];
            _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++) {
                x[i] = _mm512_loadu_si512(v + i * width + at);
                __builtin_prefetch(near + i * width + at, 0, 3);
            }
            const __m512i a = _mm512_unpacklo_epi8(x[0], x[1]), b = _mm512_unpackhi_epi8(x[0], x[1]);
            const __m512i c = _mm512_unpacklo_epi8(x[2], x[3]), d = _mm512_unpackhi_epi8(x[2], x[3]);
            _mm512_storeu_si512(to, _mm512_unpacklo_epi16(a, c));
            _mm512_storeu_si512(to + 64, _mm512_unpackhi_epi16(a, c));
            _mm512_storeu_si512(to + 128, _mm512_unpacklo_epi16(b, d));
            _mm512_storeu_si512(to + 192, _mm512_unpackhi_epi16(b, d));
        }
    }
}

/* out = keep * out + p V for `rows` rows from `first` on and 64 columns from `column` on. Of each four rows of V that
 * are met later `lines` are brought into the second level of the cache, from `first_line` on. */
INLINE_VNNI void add_bytes(struct tile *tile, const struct range vectors, const int first, const int rows,
                           const long column, const float *units, const int first_line, const int lines) {
    words sums[2][4][DIGITS] = {0};
    const int32_t *p = (const int32_t *)(tile->p + 8 * KEYS) + first * KEYS + vectors.from;
    const uint8_t *v = (const uint8_t *)tile->v_room + vectors.from * tile->padded + column * 4;
    for (long key = vectors.from; key < vectors.to; key += 4, p += 4, v += 4 * tile->padded) {
        const uint8_t *far = tile->far->v[key >> 3] + (key & 7) * tile->padded + column;
        _Pragma("GCC unroll 4") for (int i = 0; i < lines; i++)
            __builtin_prefetch(far + (first_line + i) * tile->padded, 0, 2);
        words now[4];
        _Pragma("GCC unroll 4") for (int m = 0; m < 4; m++) now[m] = (words)_mm512_loadu_si512(v + 64 * m);
        _Pragma("GCC unroll 2") for (int r = 0; r < rows; r++) {
            _Pragma("GCC unroll 3") for (int d = 0; d < DIGITS; d++) {
                const words digit = spread_word(p + r * KEYS + d);
                _Pragma("GCC unroll 4") for (int m = 0; m < 4; m++)
                    sums[r][m][d] = add_products(sums[r][m][d], digit, now[m]);
            }
        }
    }
    _Pragma("GCC unroll 2") for (int r = 0; r < rows; r++) {
        __m512 x[4];
        _Pragma("GCC unroll 4") for (int m = 0; m < 4; m++) x[m] = worth(sums[r][m]);
        /* Quarters: of part m, quarter n belongs into vector n as its quarter m. */
        const __m512 a = _mm512_shuffle_f32x4(x[0], x[1], 0x44), b = _mm512_shuffle_f32x4(x[0], x[1], 0xEE);
        const __m512 c = _mm512_shuffle_f32x4(x[2], x[3], 0x44), d = _mm512_shuffle_f32x4(x[2], x[3], 0xEE);
        const __m512 in_order[4] = {_mm512_shuffle_f32x4(a, c, 0x88), _mm512_shuffle_f32x4(a, c, 0xDD),
                                    _mm512_shuffle_f32x4(b, d, 0x88), _mm512_shuffle_f32x4(b, d, 0xDD)};
        float *out = tile->out + (first + r) * tile->padded + column;
        const __m512 keep = _mm512_set1_ps(tile->keep[first + r]), unit = _mm512_set1_ps(units[first + r]);
        _Pragma("GCC unroll 4") for (int n = 0; n < 4; n++)
            _mm512_storeu_ps(out + 16 * n, _mm512_fmadd_ps(_mm512_loadu_ps(out + 16 * n), keep,
                                                           _mm512_mul_ps(in_order[n], unit)));
    }
}

TARGET_VNNI static void add_values_vnni(struct tile *tile, const struct range vectors, __m512 heaviest) {
    float units[16];
    split_weights(tile, vectors, heaviest, units);
    if (tile->padded == 64)
        mix_values(tile, vectors, 64);
    else
        mix_values(tile, vectors, tile->padded);
    for (long column = 0; column < tile->padded; column += 64) {
        /* The first rows take the lines of V that are met later along. */
        const int rows = (int)tile->num_rows;
        int row = 0;
        if (rows >= 4) {
            add_bytes(tile, vectors, 0, 2, column, units, 0, 2);
            add_bytes(tile, vectors, 2, 2, column, units, 2, 2);
            row = 4;
        } else if (rows >= 2) {
            add_bytes(tile, vectors, 0, 2, column, units, 0, 4);
            row = 2;
        } else {
            add_bytes(tile, vectors, 0, 1, column, units, 0, 4);
            row = 1;
        }
        for (; row + 2 <= rows; row += 2) add_bytes(tile, vectors, row, 2, column, units, 0, 0);
        if (row < rows) add_bytes(tile, vectors, row, 1, column, units, 0, 0);
    }
}

TARGET_VNNI static void meet_keys_vnni(struct tile *tile, const struct keys *keys) {
    if (!uses_digits(tile)) {
        meet_keys_avx512(tile, keys);
        return;
    }
    prepare_avx512(tile, keys);
    const long from = seen_by(tile, 0).from, to = seen_by(tile, tile->num_rows - 1).to;
    if (from >= to) return;
    const struct range vectors = {from / 16 * 16, (to + 15) / 16 * 16};
    score_vnni(tile, vectors);
    const vf_avx512 heaviest = weigh_tile_avx512(tile, vectors);
    add_values_vnni(tile, vectors, (__m512)heaviest);
}
