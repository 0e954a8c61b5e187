/* The kernels of ops.c for one instruction set. Included once for each, with these defined; they end with it:

   FN(name)   the name with the instruction set's suffix
   TARGET     function attribute that allows the instructions
   LANES      floats a vector
   MAX_ROWS   rows of x in a tile: MAX_ROWS x 4 sums and 4 weights must fit the registers, and leave one
   FEW_ROWS   rows of x in a smaller one
   FMA(a,b,c) a * b + c
   LOAD_F16   function: LANES fp16 at an address, as floats; LOAD_I8: the same for int8
   SUM4       function: the sums of the lanes of each of four vectors

   Every sum over K is formed in the same order whatever the number of rows, the tile or the weight's neighbours are:
   a token's result does not depend on what it is computed with. */

typedef float FN(vec) __attribute__((vector_size(4 * LANES)));
typedef float FN(loose) __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t FN(ints) __attribute__((vector_size(4 * LANES)));
typedef uint32_t FN(words) __attribute__((vector_size(4 * LANES)));
typedef uint16_t FN(halves) __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

#define INLINE static inline __attribute__((always_inline)) TARGET

INLINE FN(vec) FN(load)(enum dtype dtype, const void *at, int64_t i)
{
    if (dtype == F32)
        return *(const FN(loose) *)((const float *)at + i);
    if (dtype == BF16) {
        FN(halves) raw = *(const FN(halves) *)((const uint16_t *)at + i);
        return (FN(vec))(__builtin_convertvector(raw, FN(words)) << 16);
    }
    if (dtype == F16)
        return LOAD_F16((const uint16_t *)at + i);
    return LOAD_I8((const int8_t *)at + i);
}

/* The last `count` < LANES numbers of a row, and zeros: the bytes of zero are 0 in every dtype. */
INLINE FN(vec) FN(load_rest)(enum dtype dtype, const void *at, int64_t i, int64_t count)
{
    _Alignas(64) unsigned char rest[4 * LANES] = {0};
    memcpy(rest, (const char *)at + i * item_bytes(dtype), (size_t)(count * item_bytes(dtype)));
    return FN(load)(dtype, rest, 0);
}

INLINE void FN(store_rest)(float *to, FN(vec) value, int64_t count)
{
    memcpy(to, &value, (size_t)count * sizeof(float));
}

/* `rows` rows of x times four rows of W: y[r][n] (+)= scale[n] * sum_k x[r][k] w[n][k] + bias[n].
   `ahead` cache lines a step are fetched early, one from each of the rows at `next`, which is where W goes on. */
INLINE void FN(tile)(const int rows, const enum dtype dtype, const int ahead, const struct tile *t)
{
    FN(vec) sums[MAX_ROWS][4];
    const float *x[MAX_ROWS];
    UNROLL for (int r = 0; r < rows; r++) {
        x[r] = t->x + (r < t->rows ? r : 0) * t->x_stride;
        UNROLL for (int n = 0; n < 4; n++)
            sums[r][n] = (FN(vec)){0};
    }
    const int64_t whole = t->k - t->k % LANES;
    for (int64_t i = 0; i < whole; i += LANES) {
        FN(vec) w[4];
        UNROLL for (int n = 0; n < 4; n++)
            w[n] = FN(load)(dtype, t->w[n], i);
        UNROLL for (int r = 0; r < rows; r++) {
            const FN(vec) value = FN(load)(F32, x[r], i);
            UNROLL for (int n = 0; n < 4; n++)
                sums[r][n] = FMA(value, w[n], sums[r][n]);
        }
        UNROLL for (int n = 0; n < ahead; n++)
            __builtin_prefetch(t->next + n * t->next_stride + i * t->next_item_bytes);
    }
    if (whole < t->k) {
        FN(vec) w[4];
        UNROLL for (int n = 0; n < 4; n++)
            w[n] = FN(load_rest)(dtype, t->w[n], whole, t->k - whole);
        UNROLL for (int r = 0; r < rows; r++) {
            const FN(vec) value = FN(load_rest)(F32, x[r], whole, t->k - whole);
            UNROLL for (int n = 0; n < 4; n++)
                sums[r][n] = FMA(value, w[n], sums[r][n]);
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        finish(t, r, SUM4(sums[r][0], sums[r][1], sums[r][2], sums[r][3]));
}

/* All rows of x in one tile. W is read from memory, once: as many lines are fetched early as are read. */
TARGET static void FN(single_tile)(enum dtype dtype, const struct tile *t)
{
#define TILES(dtype)                                                                                                   \
    case dtype:                                                                                                        \
        if (t->rows == 1)                                                                                              \
            FN(tile)(1, dtype, 4, t);                                                                                  \
        else if (t->rows == 2)                                                                                         \
            FN(tile)(2, dtype, 4, t);                                                                                  \
        else if (t->rows <= FEW_ROWS)                                                                                  \
            FN(tile)(FEW_ROWS, dtype, 4, t);                                                                           \
        else                                                                                                           \
            FN(tile)(MAX_ROWS, dtype, 4, t);                                                                           \
        return;
    switch (dtype) {
    TILES(F32)
    TILES(BF16)
    TILES(F16)
    TILES(I8)
    }
#undef TILES
}

/* One of several tiles. W is in the cache already, as floats: they fetch the next piece of it together. */
TARGET static void FN(one_of_tiles)(const struct tile *t)
{
    if (t->rows <= FEW_ROWS)
        FN(tile)(FEW_ROWS, F32, 2, t);
    else
        FN(tile)(MAX_ROWS, F32, 2, t);
}

INLINE void FN(widen_row)(enum dtype dtype, const void *from, float *to, int64_t count)
{
    const int64_t whole = count - count % LANES;
    for (int64_t i = 0; i < whole; i += LANES)
        *(FN(loose) *)(to + i) = FN(load)(dtype, from, i);
    if (whole < count)
        FN(store_rest)(to + whole, FN(load_rest)(dtype, from, whole, count - whole), count - whole);
}

TARGET static void FN(widen)(enum dtype dtype, const void *from, float *to, int64_t count)
{
    switch (dtype) {
    case F32: memcpy(to, from, (size_t)count * sizeof(float)); return;
    case BF16: FN(widen_row)(BF16, from, to, count); return;
    case F16: FN(widen_row)(F16, from, to, count); return;
    case I8: FN(widen_row)(I8, from, to, count); return;
    }
}

/* The `t->width` rows of W from `n` on, numbers `k` to `k + t->k` of each, times all rows of x. */
INLINE void FN(piece)(const struct weight *w, const struct product *p, struct tile *t, int64_t n, int64_t k)
{
    float wide[4][K_BLOCK];
    const int64_t item = item_bytes(w->dtype), row_bytes = w->k * item;
    const char *at = (const char *)w->data + n * row_bytes + k * item;
    const int64_t tiles = (p->tokens + MAX_ROWS - 1) / MAX_ROWS;
    for (int64_t i = 0; i < 4; i++) {
        /* Beyond the last row of W the first of the four is taken again, and its result dropped. */
        t->w[i] = at + (i < t->width ? i : 0) * row_bytes;
        if (tiles > 1 && w->dtype != F32) {
            FN(widen)((enum dtype)w->dtype, t->w[i], wide[i], t->k);
            t->w[i] = wide[i];
        }
    }
    t->x = p->x + k;
    t->y = p->y + n;
    t->next = at + 4 * row_bytes;
    t->rows = p->tokens;
    if (tiles == 1) {
        FN(single_tile)((enum dtype)w->dtype, t);
        return;
    }
    /* As many small tiles as there are rows too few for large ones. */
    const int64_t small = (tiles * MAX_ROWS - p->tokens) / (MAX_ROWS - FEW_ROWS);
    int64_t left = p->tokens;
    for (int64_t i = 0; i < tiles; i++) {
        const int64_t size = i < small ? FEW_ROWS : MAX_ROWS;
        t->rows = left < size ? left : size;
        FN(one_of_tiles)(t);
        t->x += t->rows * p->x_stride;
        t->y += t->rows * p->y_stride;
        left -= t->rows;
        t->next += (i % 2 ? -2 : 2) * row_bytes;
    }
}

/* Rows `first` to `last` of W, and the columns of y that belong to them. */
TARGET static void FN(linear)(const struct weight *w, const struct product *p, int64_t first, int64_t last)
{
    struct tile t = {.x_stride = p->x_stride, .y_stride = p->y_stride, .next_stride = w->k * item_bytes(w->dtype),
                     .next_item_bytes = item_bytes(w->dtype)};
    for (int64_t n = first; n < last; n += 4) {
        t.width = last - n < 4 ? last - n : 4;
        t.scale = four_of(w->scales, n, t.width, 1.0f);
        for (int64_t k = 0; k < w->k; k += K_BLOCK) {
            t.k = w->k - k < K_BLOCK ? w->k - k : K_BLOCK;
            t.bias = four_of(k ? NULL : w->bias, n, t.width, 0.0f);
            t.add = p->add || k;
            FN(piece)(w, p, &t, n, k);
        }
    }
}

/* x / sqrt(mean(x^2) + eps) * weight for one vector of `size` numbers. */
INLINE void FN(normalise)(const float *x, const float *weight, float *out, int64_t size, float eps)
{
    const int64_t whole = size - size % LANES;
    FN(vec) sum = {0};
    for (int64_t i = 0; i < whole; i += LANES) {
        FN(vec) value = FN(load)(F32, x, i);
        sum = FMA(value, value, sum);
    }
    FN(vec) rest = {0};
    if (whole < size)
        rest = FN(load_rest)(F32, x, whole, size - whole);
    sum = FMA(rest, rest, sum);
    const FN(vec) none = {0};
    const float factor = 1.0f / sqrtf(SUM4(sum, none, none, none)[0] / (float)size + eps);
    for (int64_t i = 0; i < whole; i += LANES)
        *(FN(loose) *)(out + i) = FN(load)(F32, x, i) * factor * FN(load)(F32, weight, i);
    if (whole < size)
        FN(store_rest)(out + whole, rest * factor * FN(load_rest)(F32, weight, whole, size - whole), size - whole);
}

TARGET static void FN(rms_norm)(const struct norm *n)
{
    for (int64_t token = 0; token < n->tokens; token++)
        for (int64_t head = 0; head < n->heads; head++)
            FN(normalise)(n->x + token * n->x_stride + head * n->size,
                          n->weight + (n->weight_per_head ? head * n->size : 0),
                          n->out + (token * n->heads + head) * n->size, n->size, n->eps);
}

INLINE FN(vec) FN(select)(FN(ints) where, FN(vec) yes, FN(vec) no)
{
    return (FN(vec))((where & (FN(ints))yes) | (~where & (FN(ints))no));
}

/* e^x within 1e-7 of it (relative), for x from -87 to 88; beyond, what it is there. x = n ln 2 + r, |r| <= ln 2 / 2. */
INLINE FN(vec) FN(exp)(FN(vec) x)
{
    const FN(vec) low = (FN(vec)){0} - 87.0f, high = (FN(vec)){0} + 88.0f;
    x = FN(select)(x > high, high, x);
    x = FN(select)(x < low, low, x);
    /* Adding this pushes the fraction out of a float, and leaves n in its low bits. */
    const float push = 12582912.0f;
    FN(vec) n = x * 1.44269504f + push;
    FN(ints) exponent = (FN(ints))n << 23;
    n -= push;
    FN(vec) r = FMA(n, (FN(vec)){0} - 0.693359375f, x);
    r = FMA(n, (FN(vec)){0} + 2.12194440e-4f, r);
    /* Taylor's series to r^7; what is left out is below 6e-9. */
    FN(vec) y = (FN(vec)){0} + 1.98412698e-4f;
    y = FMA(y, r, (FN(vec)){0} + 1.38888889e-3f);
    y = FMA(y, r, (FN(vec)){0} + 8.33333333e-3f);
    y = FMA(y, r, (FN(vec)){0} + 4.16666667e-2f);
    y = FMA(y, r, (FN(vec)){0} + 1.66666667e-1f);
    y = FMA(y, r, (FN(vec)){0} + 0.5f);
    y = FMA(y * r, r, r) + 1.0f;
    return (FN(vec))((FN(ints))y + exponent);
}

/* silu(x) = x / (1 + e^-x); gelu_tanh(x) = x / (1 + e^-2u) with u = sqrt(2 / pi) (x + 0.044715 x^3). */
INLINE FN(vec) FN(gate)(const int gelu, FN(vec) x)
{
    FN(vec) z = x;
    if (gelu)
        z = x * FMA(x * x, (FN(vec)){0} + 0.0713548163f, (FN(vec)){0} + 1.59576912f);
    return x / (FN(exp)(-z) + 1.0f);
}

INLINE void FN(gate_row)(const int gelu, const float *first, const float *second, float *out, int64_t size)
{
    const int64_t whole = size - size % LANES;
    for (int64_t i = 0; i < whole; i += LANES)
        *(FN(loose) *)(out + i) = FN(gate)(gelu, FN(load)(F32, first, i)) * FN(load)(F32, second, i);
    if (whole < size) {
        FN(vec) x = FN(load_rest)(F32, first, whole, size - whole);
        FN(vec) y = FN(load_rest)(F32, second, whole, size - whole);
        FN(store_rest)(out + whole, FN(gate)(gelu, x) * y, size - whole);
    }
}

TARGET static void FN(gated)(const float *gate_up, int64_t stride, float *out, int64_t tokens, int64_t size, int gelu)
{
    for (int64_t token = 0; token < tokens; token++) {
        const float *row = gate_up + token * stride;
        if (gelu)
            FN(gate_row)(1, row, row + size, out + token * size, size);
        else
            FN(gate_row)(0, row, row + size, out + token * size, size);
    }
}

#undef INLINE
#undef FN
#undef TARGET
#undef LANES
#undef MAX_ROWS
#undef FEW_ROWS
#undef FMA
#undef LOAD_F16
#undef LOAD_I8
#undef SUM4
