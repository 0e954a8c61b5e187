/* The kernels of gemm.c for one instruction set. Included after lanes.h, once for each, with these defined besides:
 *   TILE_ROWS     rows of W in a tile: LANES or a whole part of it
 *   TILE_VECTORS  vectors of tokens in a tile, and in a panel: TILE_ROWS x TILE_VECTORS sums, as many vectors of x and
 *                 one number of W fit the registers
 */

/* How a tile of sums is computed and where it goes. */
struct NAME(tile) {
    const float *w; /* TILE_ROWS rows, PADDED_COLUMNS apart */
    const float *x; /* of the panel, at the first of the columns */
    float *y;       /* of the first token and row of W */
    const uint8_t *next; /* what is read of W next */
    int64_t next_stride, next_item, num_next; /* bytes between its rows and numbers; rows of it that are fetched here */
    int64_t columns, y_stride, tokens, rows, add;
    vf scale, bias; /* of the rows, repeated */
};

/* Up to LANES floats, zeros behind them. */
INLINE vf NAME(load_some)(const float *at, int64_t count) {
    if (count >= LANES) return NAME(load)(at);
    vf value = {0};
    memcpy(&value, at, (size_t)count * sizeof(float));
    return value;
}

/* The tokens `from` to `to` into their panels. */
TARGET static void NAME(turn_tokens)(const struct gemm *gemm, int64_t from, int64_t to) {
    const int64_t columns = gemm->w->k, panel = LANES * TILE_VECTORS;
    for (int64_t token = from; token < to; token += LANES) {
        const int64_t start = token / panel * panel, width = least_of(panel, gemm->padded - start);
        float *at = gemm->turned + start * columns + (token - start);
        for (int64_t k = 0; k < columns; k += LANES) {
            vf x[LANES];
            _Pragma("GCC unroll 16") for (int i = 0; i < LANES; i++) {
                x[i] = (vf){0};
                if (token + i < gemm->tokens)
                    x[i] = NAME(load_some)(gemm->x + (token + i) * gemm->x_stride + k, columns - k);
            }
            NAME(transpose)(x);
            _Pragma("GCC unroll 16") for (int i = 0; i < LANES; i++)
                if (k + i < columns) NAME(store)(at + (k + i) * width, x[i]);
        }
    }
}

/* The sums of a tile: of each row and `vectors` vectors of tokens. Meanwhile y, the rows of W that come next, and x 8
 * columns ahead are fetched into the caches, a few lines at a time. */
INLINE void NAME(sum_up)(const struct NAME(tile) *tile, const int vectors, vf sums[TILE_ROWS][TILE_VECTORS]) {
    const float *x = tile->x, *w = tile->w;
    _Pragma("GCC unroll 8") for (int r = 0; r < TILE_ROWS; r++)
        _Pragma("GCC unroll 3") for (int v = 0; v < vectors; v++) sums[r][v] = (vf){0};
    const int64_t each = (16 * tile->tokens + tile->columns - 1) / tile->columns;
    for (int64_t k = 0, token = 0; k < tile->columns;) {
        for (const int64_t end = least_of(token + each, tile->tokens); token < end; token++)
            __builtin_prefetch(tile->y + token * tile->y_stride, 1, 3);
        for (int64_t r = 0; r < tile->num_next; r++)
            __builtin_prefetch(tile->next + r * tile->next_stride + k * tile->next_item, 0, 2);
        for (const int64_t end = least_of(k + 16, tile->columns); k < end; k++) {
            vf columns[TILE_VECTORS];
            _Pragma("GCC unroll 3") for (int v = 0; v < vectors; v++) {
                columns[v] = NAME(load)(x + v * LANES);
                __builtin_prefetch(x + v * LANES + 8 * vectors * LANES, 0, 3);
            }
            _Pragma("GCC unroll 8") for (int r = 0; r < TILE_ROWS; r++) {
                const vf one = NAME(spread)(w[r * PADDED_COLUMNS + k]);
                _Pragma("GCC unroll 3") for (int v = 0; v < vectors; v++) sums[r][v] += one * columns[v];
            }
            x += vectors * LANES;
        }
    }
}

/* `count` of the TILE_ROWS numbers at `from` go, or are added, to `to`. */
INLINE void NAME(put_rows)(float *to, const float *from, int64_t count, int64_t add) {
    typedef float some __attribute__((vector_size(4 * TILE_ROWS)));
    some value, before;
    memcpy(&value, from, sizeof value);
    if (count == TILE_ROWS) {
        if (add) {
            memcpy(&before, to, sizeof before);
            value += before;
        }
        memcpy(to, &value, sizeof value);
        return;
    }
    for (int64_t i = 0; i < count; i++) to[i] = add ? to[i] + from[i] : from[i];
}

INLINE void NAME(tile_of)(const struct NAME(tile) *tile, const int vectors) {
    vf sums[TILE_ROWS][TILE_VECTORS];
    NAME(sum_up)(tile, vectors, sums);
    /* As many vectors at once as fill a square with their rows: lanes are tokens before, and rows after. */
    enum { SIDE = LANES / TILE_ROWS };
    _Pragma("GCC unroll 3") for (int v = 0; v < vectors; v += SIDE) {
        vf x[LANES];
        float turned[LANES][LANES];
        _Pragma("GCC unroll 16") for (int i = 0; i < LANES; i++)
            x[i] = v + i / TILE_ROWS < vectors ? sums[i % TILE_ROWS][v + i / TILE_ROWS] : (vf){0};
        NAME(transpose)(x);
        _Pragma("GCC unroll 16") for (int i = 0; i < LANES; i++)
            NAME(store)(turned[i], x[i] * tile->scale + tile->bias);
        for (int64_t part = 0; part < SIDE; part++) {
            const int64_t token = (v + part) * LANES, count = least_of(tile->tokens - token, LANES);
            if (v + part >= vectors) break;
            float *y = tile->y + token * tile->y_stride;
            for (int64_t i = 0; i < count; i++, y += tile->y_stride)
                NAME(put_rows)(y, &turned[i][part * TILE_ROWS], tile->rows, tile->add);
        }
    }
}

TARGET static void NAME(run_tile)(const struct NAME(tile) *tile, int64_t vectors) {
    switch (vectors) {
    case 1: NAME(tile_of)(tile, 1); return;
    case 2: NAME(tile_of)(tile, 2); return;
    case 3: NAME(tile_of)(tile, TILE_VECTORS);
    }
}

INLINE vf NAME(load_weight)(const uint8_t *at, const int64_t dtype) {
    if (dtype == BF16) return NAME(load_bf16)(at);
    if (dtype == F16) return NAME(load_fp16)(at);
    if (dtype == I8) return NAME(load_int8)(at);
    return NAME(load)((const float *)at);
}

INLINE void NAME(widen_as)(float *to, const uint8_t *from, int64_t count, const int64_t dtype) {
    const int64_t item = item_bytes(dtype);
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) NAME(store)(to + i, NAME(load_weight)(from + i * item, dtype));
    if (i < count) {
        uint8_t rest[4 * LANES] = {0}; /* zero is zero in every dtype */
        memcpy(rest, from + i * item, (size_t)((count - i) * item));
        NAME(store)(to + i, NAME(load_weight)(rest, dtype));
    }
}

TARGET static void NAME(widen_row)(float *to, const uint8_t *from, int64_t count, int64_t dtype) {
    switch (dtype) {
    case BF16: NAME(widen_as)(to, from, count, BF16); return;
    case F16: NAME(widen_as)(to, from, count, F16); return;
    case I8: NAME(widen_as)(to, from, count, I8); return;
    default: NAME(widen_as)(to, from, count, F32);
    }
}

/* `count` numbers from `from`, then `otherwise`, over and over. */
INLINE vf NAME(repeated)(const float *from, int64_t count, float otherwise) {
    float values[LANES];
    for (int i = 0; i < LANES; i++) values[i] = from && i % TILE_ROWS < count ? from[i % TILE_ROWS] : otherwise;
    return NAME(load)(values);
}

/* The rows `first` to `last` of W times all tokens. */
TARGET static void NAME(multiply)(const struct gemm *gemm, int64_t first, int64_t last) {
    const struct weight *weight = gemm->w;
    const int64_t item = item_bytes(weight->dtype), row_bytes = weight->k * item, panel = LANES * TILE_VECTORS;
    const int64_t panels = (gemm->padded + panel - 1) / panel;
    /* Equal blocks of columns, in whole cache lines. */
    const int64_t blocks = (weight->k + COLUMNS - 1) / COLUMNS, block = ((weight->k + blocks - 1) / blocks + 15) & ~15L;
    _Alignas(64) float wide[TILE_ROWS][PADDED_COLUMNS];
    struct NAME(tile) tile = {.w = wide[0], .next_stride = row_bytes, .next_item = item, .y_stride = gemm->y_stride};
    tile.num_next = (TILE_ROWS + panels - 1) / panels;
    for (int64_t k = 0; k < weight->k; k += block) {
        tile.columns = least_of(block, weight->k - k);
        tile.add = gemm->add || k;
        for (int64_t n = first; n < last; n += TILE_ROWS) {
            const uint8_t *at = (const uint8_t *)weight->data + n * row_bytes + k * item;
            tile.rows = least_of(TILE_ROWS, last - n);
            for (int64_t r = 0; r < TILE_ROWS; r++)
                NAME(widen_row)(wide[r], at + (r < tile.rows ? r : 0) * row_bytes, tile.columns, weight->dtype);
            tile.scale = NAME(repeated)(weight->scales ? weight->scales + n : 0, tile.rows, 1.0f);
            tile.bias = NAME(repeated)(weight->bias && !k ? weight->bias + n : 0, tile.rows, 0.0f);
            tile.next = at + TILE_ROWS * row_bytes;
            for (int64_t token = 0; token < gemm->padded; token += panel) {
                const int64_t width = least_of(panel, gemm->padded - token);
                tile.x = gemm->turned + token * weight->k + k * width;
                tile.y = gemm->y + token * gemm->y_stride + n;
                tile.tokens = least_of(width, gemm->tokens - token);
                NAME(run_tile)(&tile, width / LANES);
                tile.next += tile.num_next * row_bytes;
            }
        }
    }
}
