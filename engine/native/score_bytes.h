/* Scores of few query rows with int8 keys, 16 at a time. Included by attention.h where vectors have 16 floats.
 *
 * Four bytes of each of the 16 keys are one vector once K is turned by words, which costs a quarter of turning it by
 * elements. Each byte becomes a float where it lies in its word, exactly, as 2^24 times its value. So a key is widened
 * once for all rows, and no sums across lanes are needed.
 */

/* Byte `i` of each word, times 2^24. */
INLINE vf NAME(byte_of)(vf words, const int i) {
    const vi in_place = (vi)words << (24 - 8 * i);
    return __builtin_convertvector(i ? in_place & (int32_t)0xFF000000 : in_place, vf);
}

/* Keys `key` to `key` + 15 of the tile, for its `rows` rows; head_dim is a multiple of 64. */
INLINE void NAME(score_bytes)(const struct tile *tile, const long key, const int rows) {
    const long width = tile->padded;
    const uint8_t *const *from = tile->k + (key >> 3);
    const uint8_t *const *near = tile->near->k + (key >> 3), *const *far = tile->far->k + (key >> 3);
    /* Two sums of few rows: an addition waits for the one before in its sum. */
    const int parts = rows > 3 ? 1 : 2;
    vf sums[DIRECT_ROWS][2] = {0};
    for (long column = 0; column < width; column += 64) {
        vf x[LANES];
        _Pragma("GCC unroll 16") for (int i = 0; i < LANES; i++)
            x[i] = NAME(load)((const float *)(from[i >> 3] + (i & 7) * width + column));
        NAME(transpose)(x);
        const float *q = tile->q + column;
        _Pragma("GCC unroll 16") for (int i = 0; i < LANES; i++) {
            look_ahead(near[i >> 3] + (i & 7) * width + column, far[i >> 3] + (i & 7) * width + column, 64);
            _Pragma("GCC unroll 4") for (int j = 0; j < 4; j++) {
                const vf k = NAME(byte_of)(x[i], j);
                _Pragma("GCC unroll 7") for (int r = 0; r < rows; r++)
                    sums[r][j % parts] += NAME(spread)(q[r * width + 4 * i + j]) * k;
            }
        }
    }
    _Pragma("GCC unroll 7") for (int r = 0; r < rows; r++)
        NAME(store)(tile->p + r * KEYS + key, (sums[r][0] + sums[r][1]) * 0x1p-24f);
}

TARGET static void NAME(score_int8)(const struct tile *tile, long from, long to) {
#define OF_ROWS(n) \
    case n: for (long key = from; key < to; key += LANES) NAME(score_bytes)(tile, key, n); break;
    switch (tile->num_rows) {
    OF_ROWS(1) OF_ROWS(2) OF_ROWS(3) OF_ROWS(4) OF_ROWS(5) OF_ROWS(6) OF_ROWS(7)
    }
#undef OF_ROWS
}
