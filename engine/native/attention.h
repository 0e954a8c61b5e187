/* Attention with vectors of LANES floats. Included after lanes.h, once for each instruction set.
 *
 * A tile is up to ROWS query rows (token by token, the query heads of one kv head side by side) of one sequence and kv
 * head. It meets the keys in blocks of KEYS, and keeps for each row the largest score so far, the weights' sum and the
 * weighted sum of V so far (flash attention's online softmax, https://arxiv.org/abs/2205.14135). Few rows are
 * multiplied with K as it lies; for many rows K is turned first, and both products are matrix products.
 */

#undef MAX_ROWS
#undef MAX_COLUMNS
#define MAX_ROWS 6                          /* of a product held in registers */
#define MAX_COLUMNS (LANES == 16 ? 4 : 2)   /* in vectors */

/* ---- c[rows][columns] = keep * c + a[rows][from..to) b[from..to)[columns] */

INLINE void NAME(multiply)(const int rows, const int columns, const int dtype, const struct product *product) {
    vf sum[DIRECT_ROWS][MAX_COLUMNS];
    const float *a = product->a;
    const long lda = product->lda, ldb = product->ldb, item = item_bytes(dtype);
    _Pragma("GCC unroll 7") for (int r = 0; r < rows; r++) {
        _Pragma("GCC unroll 4") for (int i = 0; i < columns; i++) {
            const float *c = product->c + r * product->ldc + i * LANES;
            sum[r][i] = product->keep ? NAME(load)(c) * product->keep[r] : (vf){0};
        }
    }
    for (long k = product->from; k < product->to;) {
        const long end = (k | 7) < product->to ? (k | 7) + 1 : product->to;
        const uint8_t *b = product->b[k >> 3] + (k & 7) * ldb + product->column * item;
        const uint8_t *near = product->near ? product->near[k >> 3] + (k & 7) * product->ahead_stride : 0;
        const uint8_t *far = product->near ? product->far[k >> 3] + (k & 7) * product->ahead_stride : 0;
        for (; k < end; k++, b += ldb) {
            if (near) {
                if ((k & 7) >= product->ahead_from && (k & 7) < product->ahead_to)
                    look_ahead(near, far, product->ahead_stride);
                near += product->ahead_stride;
                far += product->ahead_stride;
            }
            vf row[MAX_COLUMNS];
            _Pragma("GCC unroll 4") for (int i = 0; i < columns; i++)
                row[i] = NAME(load_as_fp32)(b + i * LANES * item, dtype);
            _Pragma("GCC unroll 7") for (int r = 0; r < rows; r++) {
                const vf factor = NAME(spread)(a[r * lda + k]);
                _Pragma("GCC unroll 4") for (int i = 0; i < columns; i++) sum[r][i] += factor * row[i];
            }
        }
    }
    _Pragma("GCC unroll 7") for (int r = 0; r < rows; r++) {
        _Pragma("GCC unroll 4") for (int i = 0; i < columns; i++)
            NAME(store)(product->c + r * product->ldc + i * LANES, sum[r][i]);
    }
}

/* A function for each number of rows, columns and each dtype, so that the sums stay in registers. */
#define PRODUCT(rows, columns, dtype)                                                                    \
    TARGET static void NAME(product_##rows##_##columns##dtype)(const struct product *product) {          \
        NAME(multiply)(rows, columns, dtype, product);                                                   \
    }
#define PRODUCTS(columns, dtype)                                                                         \
    PRODUCT(1, columns, dtype) PRODUCT(2, columns, dtype) PRODUCT(3, columns, dtype)                     \
    PRODUCT(4, columns, dtype) PRODUCT(5, columns, dtype) PRODUCT(6, columns, dtype)
#define NAMES(columns, dtype)                                                                            \
    NAME(product_1_##columns##dtype), NAME(product_2_##columns##dtype), NAME(product_3_##columns##dtype), \
        NAME(product_4_##columns##dtype), NAME(product_5_##columns##dtype), NAME(product_6_##columns##dtype)
#if LANES == 16
#define PRODUCTS_OF(dtype)                                                                               \
    PRODUCTS(1, dtype) PRODUCTS(2, dtype) PRODUCTS(3, dtype) PRODUCTS(4, dtype)                          \
    PRODUCT(7, 1, dtype) PRODUCT(7, 2, dtype)
#define NAMES_OF(dtype)                                                                                  \
    {{NAMES(1, dtype), NAME(product_7_1##dtype)}, {NAMES(2, dtype), NAME(product_7_2##dtype)},           \
     {NAMES(3, dtype)}, {NAMES(4, dtype)}}
#else
#define PRODUCTS_OF(dtype) PRODUCTS(1, dtype) PRODUCTS(2, dtype) PRODUCT(7, 1, dtype)
#define NAMES_OF(dtype) {{NAMES(1, dtype), NAME(product_7_1##dtype)}, {NAMES(2, dtype)}}
#endif
PRODUCTS_OF(KV_FP32)
PRODUCTS_OF(KV_FP16)
PRODUCTS_OF(KV_BF16)
PRODUCTS_OF(KV_FP8)
PRODUCTS_OF(KV_INT8)
static void (*const NAME(products)[][MAX_COLUMNS][DIRECT_ROWS])(const struct product *) = {
    NAMES_OF(KV_FP32), NAMES_OF(KV_FP16), NAMES_OF(KV_BF16), NAMES_OF(KV_FP8), NAMES_OF(KV_INT8)};
#undef PRODUCT
#undef PRODUCTS
#undef NAMES
#undef PRODUCTS_OF
#undef NAMES_OF

/* The whole product, `columns` vectors wide from column 0 of b and c on. Each part of it fetches its share of what is
 * ahead: all of it on the way through the first would be a burst. */
TARGET static void NAME(multiply_all)(struct product product, long rows, long columns) {
    const long most = rows > MAX_ROWS ? MAX_COLUMNS / 2 : MAX_COLUMNS;
    const long all = (columns + most - 1) / most;
    for (long parts = all; parts > 0; parts--) {
        const long width = columns / parts;
        columns -= width;
        product.ahead_from = 8 * (all - parts) / all;
        product.ahead_to = 8 * (all - parts + 1) / all;
        NAME(products)[product.dtype][width - 1][rows - 1](&product);
        product.c += width * LANES;
        product.column += width * LANES;
    }
}

/* ---- keys and values as fp32 */

INLINE vf NAME(load_part)(const uint8_t *at, long count, int dtype) {
    uint8_t room[LANES * 4] = {0};
    memcpy(room, at, (size_t)(count * item_bytes(dtype)));
    return NAME(load_as_fp32)(room, dtype);
}

/* `count` elements from element `column` on (none if <= 0), zeros behind them. */
INLINE vf NAME(load_columns)(const uint8_t *row, long column, long width, int dtype) {
    const uint8_t *at = row + column * item_bytes(dtype);
    return width - column >= LANES ? NAME(load_as_fp32)(at, dtype) : NAME(load_part)(at, width - column, dtype);
}

/* Rows of `groups` groups of keys, `padded` floats apart. */
INLINE void NAME(widen_rows)(float *to, long padded, const uint8_t *const *from, long groups, long width, int dtype) {
    const long stride = width * item_bytes(dtype);
    for (long key = 0; key < 8 * groups; key++, to += padded) {
        const uint8_t *row = from[key >> 3] + (key & 7) * stride;
        for (long column = 0; column < padded; column += LANES)
            NAME(store)(to + column, column < width ? NAME(load_columns)(row, column, width, dtype) : (vf){0});
    }
}

/* `count` floats, a multiple of 8 * LANES, from elements that lie side by side. */
INLINE void NAME(widen)(float *to, const uint8_t *from, long count, int dtype) {
    for (long i = 0; i < count; i += 8 * LANES) {
        _Pragma("GCC unroll 8") for (long j = i; j < i + 8 * LANES; j += LANES)
            NAME(store)(to + j, NAME(load_as_fp32)(from + j * item_bytes(dtype), dtype));
    }
}

/* to [padded][KEYS]: the first `groups` groups of keys, turned. */
INLINE void NAME(turn_rows)(float *to, long padded, const uint8_t *const *from, long groups, long width, int dtype) {
    const long stride = width * item_bytes(dtype);
    for (long key = 0; key < 8 * groups; key += LANES) {
        const uint8_t *low = from[key >> 3] + (key & 7) * stride;
        const uint8_t *high = from[(key + LANES / 2) >> 3] + ((key + LANES / 2) & 7) * stride;
        for (long column = 0; column < padded; column += LANES) {
            vf x[LANES];
            if (column < width) {
                _Pragma("GCC unroll 16") for (int i = 0; i < LANES / 2; i++) {
                    x[i] = NAME(load_columns)(low + i * stride, column, width, dtype);
                    x[i + LANES / 2] = NAME(load_columns)(high + i * stride, column, width, dtype);
                }
                NAME(transpose)(x);
            } else {
                for (int i = 0; i < LANES; i++) x[i] = (vf){0};
            }
            _Pragma("GCC unroll 16") for (int i = 0; i < LANES; i++)
                NAME(store)(to + (column + i) * KEYS + key, x[i]);
        }
    }
}

#define FOR_DTYPE(function, dtype, ...)                          \
    switch (dtype) {                                             \
    case KV_FP16: NAME(function)(__VA_ARGS__, KV_FP16); break;   \
    case KV_BF16: NAME(function)(__VA_ARGS__, KV_BF16); break;   \
    case KV_INT8: NAME(function)(__VA_ARGS__, KV_INT8); break;   \
    case KV_FP8: NAME(function)(__VA_ARGS__, KV_FP8); break;     \
    default: NAME(function)(__VA_ARGS__, KV_FP32);               \
    }

/* Scales of KEYS keys as fp32. */
TARGET static void NAME(widen_scales)(float *to, const uint8_t *const *from, long groups, float factor) {
    for (long key = 0; key < 8 * groups; key += LANES > 8 ? 8 : LANES) {
        const uint8_t *at = from[key >> 3] + (key & 7) * 2;
#if LANES == 16
        _mm256_storeu_ps(to + key, _mm256_mul_ps(_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)at)),
                                                 _mm256_set1_ps(factor)));
#else
        NAME(store)(to + key, NAME(load_fp16)(at) * factor);
#endif
    }
}

/* ---- scores */

/* q . k for LANES keys: those of two half vectors of rows, `ld` floats apart. */
INLINE vf NAME(dots)(const float *q, const float *low, const float *high, const long ld, const long padded) {
    vf sum[LANES];
    _Pragma("GCC unroll 16") for (int i = 0; i < LANES; i++) sum[i] = (vf){0};
    for (long column = 0; column < padded; column += LANES) {
        const vf part = NAME(load)(q + column);
        _Pragma("GCC unroll 16") for (int i = 0; i < LANES / 2; i++) {
            sum[i] += part * NAME(load)(low + i * ld + column);
            sum[i + LANES / 2] += part * NAME(load)(high + i * ld + column);
        }
    }
    return NAME(sums_of)(sum);
}

INLINE void NAME(score_rows)(const struct tile *tile, long from, long to, const long ld) {
    for (long key = from; key < to; key += LANES) {
        const uint8_t *const *groups = tile->k + (key >> 3);
        const float *low = (const float *)groups[0] + (key & 7) * ld;
        const float *high = LANES == 16 ? (const float *)groups[1] : low + LANES / 2 * ld;
        if (tile->k_dtype != KV_FP32) {
            /* Few rows at a time, so that they are still in the first level of the cache. */
            low = tile->k_room + (key & 7) * ld;
            high = low + LANES / 2 * ld;
            for (long i = 0; !(key & 7) && i < (LANES + 7) / 8; i++) {
                FOR_DTYPE(widen, tile->k_dtype, tile->k_room + i * 8 * ld, groups[i], 8 * ld)
            }
        }
        for (long r = 0; r < tile->num_rows; r++) {
            const long begin = r * tile->ahead_share, rest = 8 * tile->ahead_stride - begin;
            const long bytes = rest < tile->ahead_share ? rest : tile->ahead_share;
            for (long i = key; i < key + LANES; i += 8)
                look_ahead(tile->near->k[i >> 3] + begin, tile->far->k[i >> 3] + begin, bytes);
            NAME(store)(tile->p + r * KEYS + key, NAME(dots)(tile->q + r * tile->padded, low, high, ld, ld));
        }
    }
}

#if LANES == 16
#include "score_bytes.h"
#include "few_rows.h"
#endif

/* All rows' scores with keys from..to, which are whole vectors. */
TARGET static void NAME(score_directly)(struct tile *tile, long from, long to) {
#if LANES == 16
    if (tile->k_dtype == KV_BF16 && tile->padded % 32 == 0) {
        NAME(score_bf16)(tile, (struct range){from, to});
        return;
    }
    if (tile->k_dtype == KV_INT8 && tile->padded % 64 == 0) {
        NAME(score_int8)(tile, from, to);
        return;
    }
#endif
    switch (tile->padded) {
    case 64: NAME(score_rows)(tile, from, to, 64); break;
    case 80: NAME(score_rows)(tile, from, to, 80); break;
    case 96: NAME(score_rows)(tile, from, to, 96); break;
    case 128: NAME(score_rows)(tile, from, to, 128); break;
    default: NAME(score_rows)(tile, from, to, tile->padded);
    }
}

/* Scores of one row become weights, of which those outside low..high are 0; vectors from..to are written. */
INLINE void NAME(weigh)(struct tile *tile, long r, struct range seen, struct range vectors) {
    float *p = tile->p + r * KEYS;
    vf most = NAME(spread)(tile->most[r]), sum = {0}, lanes;
    for (int i = 0; i < LANES; i++) lanes[i] = (float)i;
    for (long key = vectors.from; key < vectors.to; key += LANES) {
        vf score = NAME(load)(p + key);
        if (tile->k_scales) score *= NAME(load)(tile->k_scales + key);
        if (tile->soft_cap != 0) score = NAME(capped)(score, tile->soft_cap);
        if (key < seen.from || key + LANES > seen.to) {
            const vf index = lanes + (float)key;
            const vi outside = (index < (float)seen.from) | (index >= (float)seen.to);
            score = (vf)(((vi)score & ~outside) | ((vi)NAME(spread)(-INFINITY) & outside));
        }
        NAME(store)(p + key, score);
        most = NAME(larger)(score, most);
    }
    most = NAME(largest)(most);
    const float before = tile->most[r];
    tile->keep[r] = 1;
    if (most[0] > before) {
        const vf keep = NAME(exp2)(before - most);
        tile->keep[r] = keep[0];
        tile->most[r] = most[0];
    }
    for (long key = vectors.from; key < vectors.to; key += LANES) {
        vf weight = NAME(exp2)(NAME(load)(p + key) - most);
        sum += weight;
        if (tile->v_scales) weight *= NAME(load)(tile->v_scales + key);
        NAME(store)(p + key, weight);
    }
    float *sums = tile->sums + r * 16;
    NAME(store)(sums, NAME(load)(sums) * tile->keep[r] + sum);
}

/* ---- a tile and a block of keys */

TARGET static void NAME(prepare)(struct tile *tile, const struct keys *keys) {
    const struct pool *pool = tile->pool;
    const int dtype = (int)pool->dtype, narrow = pool->head_dim != tile->padded;
    const long width = pool->head_dim, groups = (keys->count + 7) / 8;
    /* As many as fill whole vectors. The groups behind the last repeat the first. */
    const long whole = LANES == 16 ? (groups + 1) / 2 * 2 : groups;
    if (!tile->direct) {
        FOR_DTYPE(turn_rows, dtype, tile->k_room, tile->padded, keys->k, whole, width)
    } else if (narrow) {
        FOR_DTYPE(widen_rows, dtype, tile->k_room, tile->padded, keys->k, whole, width)
    }
    const int widen_v = narrow || (dtype != KV_FP32 && !tile->direct);
    if (widen_v) {
        FOR_DTYPE(widen_rows, dtype, tile->v_room, tile->padded, keys->v, groups, width)
    }
    for (long g = 0; g < KEYS / 8; g++) {
        tile->k[g] = narrow ? (const uint8_t *)(tile->k_room + g * 8 * tile->padded) : keys->k[g];
        tile->v[g] = widen_v ? (const uint8_t *)(tile->v_room + g * 8 * tile->padded) : keys->v[g];
    }
    tile->k_dtype = narrow ? KV_FP32 : dtype;
    tile->v_dtype = widen_v ? KV_FP32 : dtype;
    if (has_scales(pool)) {
        for (long g = 0; g < KEYS / 8; g++) {
            __builtin_prefetch(tile->near->k_scales[g], 0, 3);
            __builtin_prefetch(tile->near->v_scales[g], 0, 3);
            __builtin_prefetch(tile->far->k_scales[g], 0, 2);
            __builtin_prefetch(tile->far->v_scales[g], 0, 2);
        }
        const float factor = pool->dtype == KV_FP8 ? 256.0f : 1.0f;
        NAME(widen_scales)(tile->k_scales, keys->k_scales, KEYS / 8, factor);
        NAME(widen_scales)(tile->v_scales, keys->v_scales, KEYS / 8, factor);
    }
}

/* Rows first..first+rows of the tile with the prepared keys. */
TARGET static void NAME(meet)(struct tile *tile, long first, long rows) {
    const struct range seen = {seen_by(tile, first).from, seen_by(tile, first + rows - 1).to};
    if (seen.from >= seen.to) return;
    const struct range vectors = {seen.from / LANES * LANES, (seen.to + LANES - 1) / LANES * LANES};
    float *p = tile->p + first * KEYS;
    if (!tile->direct) {
        const struct product scores = {
            .a = tile->q + first * tile->padded, .lda = tile->padded, .b = tile->turned, .dtype = KV_FP32, .ldb = KEYS * 4,
            .column = vectors.from, .from = 0, .to = tile->padded, .c = p + vectors.from, .ldc = KEYS};
        NAME(multiply_all)(scores, rows, (vectors.to - vectors.from) / LANES);
    }
    const int few = LANES == 16 && tile->direct;
#if LANES == 16
    if (few) NAME(weigh_tile)(tile, vectors);
#endif
    for (long r = first; r < first + rows && !few; r++) {
        const struct range own = seen_by(tile, r);
        if (own.from < own.to) {
            NAME(weigh)(tile, r, own, vectors);
            continue;
        }
        tile->keep[r] = 1;
        memset(tile->p + r * KEYS + vectors.from, 0, (size_t)(vectors.to - vectors.from) * sizeof(float));
    }
#if LANES == 16
    if (few && tile->pool->head_dim == tile->padded && tile->padded % (2 * LANES) == 0) {
        NAME(add_values_few)(tile, seen);
        return;
    }
#endif
    const struct product values = {
        .a = p, .lda = KEYS, .b = tile->v, .dtype = tile->v_dtype,
        .ldb = tile->padded * item_bytes(tile->v_dtype), .column = 0, .from = seen.from, .to = seen.to,
        .c = tile->out + first * tile->padded, .ldc = tile->padded, .keep = tile->keep + first,
        .near = tile->direct ? tile->near->v : 0, .far = tile->far->v, .ahead_stride = tile->ahead_stride};
    NAME(multiply_all)(values, rows, tile->padded / LANES);
}

TARGET static void NAME(meet_keys)(struct tile *tile, const struct keys *keys) {
    NAME(prepare)(tile, keys);
    if (tile->direct) {
        const long from = seen_by(tile, 0).from, to = seen_by(tile, tile->num_rows - 1).to;
        const long step = LANES > 8 ? LANES : 8; /* whole groups, too */
        if (from < to) NAME(score_directly)(tile, from / step * step, (to + step - 1) / step * step);
    }
    long first = 0;
    const long most = tile->direct ? DIRECT_ROWS : MAX_ROWS;
    for (long parts = (tile->num_rows + most - 1) / most; parts > 0; parts--) {
        const long rows = (tile->num_rows - first) / parts;
        NAME(meet)(tile, first, rows);
        first += rows;
    }
}

/* ---- rows in and out */

TARGET static void NAME(begin)(struct tile *tile, const float *const *q, float factor) {
    const long width = tile->pool->head_dim, padded = tile->padded;
    for (long r = 0; r < tile->num_rows; r++) {
        float *to = tile->q + r * padded;
        for (long i = 0; i < width; i++) to[i] = q[r][i] * factor;
        for (long i = width; i < padded; i++) to[i] = 0;
        memset(tile->out + r * padded, 0, (size_t)padded * sizeof(float));
        memset(tile->sums + r * 16, 0, 16 * sizeof(float));
        tile->most[r] = -INFINITY;
    }
    for (long r = 0; tile->direct && r < tile->num_rows; r++) {
        for (long i = 0; i < padded; i++) tile->q_columns[i * 8 + r] = tile->q[r * padded + i];
    }
}

TARGET static void NAME(finish)(const struct tile *tile, float *const *out) {
    const long width = tile->pool->head_dim;
    for (long r = 0; r < tile->num_rows; r++) {
        const float *from = tile->out + r * tile->padded;
        const float factor = 1.0f / NAME(total)(NAME(load)(tile->sums + r * 16))[0];
        for (long i = 0; i < width; i++) out[r][i] = from[i] * factor;
    }
}
