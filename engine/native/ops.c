/* The operations of a layer beside its attention, for CPUs: see engine/ops/interface.py for what they mean.

   Everything is computed in fp32. Weights stay in the dtype and in the place they have, which is a file that processes
   share: they are widened in registers, or four rows at a time into the cache. No function keeps or allocates anything
   but the helpers of threads.c, so any thread may call. ops_lanes.h has the kernels, once for each instruction set. */

#include "threads.h"
#include "vectors.h"
#include "weight.h"

#include <math.h>
#include <string.h>

#define UNROLL _Pragma("GCC unroll 8")

/* Numbers of W in a row that are worked on at once: four rows of them as floats, and what is read of x beside them,
   stay in the first-level cache. */
enum { K_BLOCK = 768 };

typedef float four __attribute__((vector_size(16)));
typedef float loose_four __attribute__((vector_size(16), aligned(4), may_alias));

/* y [tokens, n] = or += x [tokens, k] W^T; strides in floats. */
struct product {
    const float *x;
    float *y;
    int64_t x_stride, y_stride, tokens, add;
};

struct tile {
    four scale, bias;
    const float *x;
    const void *w[4];
    float *y;
    const char *next;
    int64_t x_stride, y_stride, next_stride, next_item_bytes;
    int64_t rows, k;
    int64_t width; /* how many of the four rows of W there are */
    int64_t add;
};

struct norm {
    const float *x, *weight;
    float *out;
    int64_t x_stride, tokens, heads, size, weight_per_head;
    float eps;
};

struct gates {
    const float *gate_up;
    float *out;
    int64_t stride, size;
    int gelu;
};

/* Four numbers from `from` (`otherwise` where there is none): the first `width` of them are there. */
static inline four four_of(const float *from, int64_t at, int64_t width, float otherwise)
{
    four values = {otherwise, otherwise, otherwise, otherwise};
    for (int64_t i = 0; from && i < width; i++)
        values[i] = from[at + i];
    return values;
}

/* The sums of row `r` of a tile, where they belong; nothing for a row that is there to fill the tile. */
static inline __attribute__((always_inline)) void finish(const struct tile *t, int64_t r, four sum)
{
    float *y = t->y + r * t->y_stride;
    if (r >= t->rows)
        return;
    sum = sum * t->scale + t->bias;
    if (t->width == 4) {
        *(loose_four *)y = t->add ? sum + *(const loose_four *)y : sum;
        return;
    }
    for (int64_t n = 0; n < t->width; n++)
        y[n] = t->add ? sum[n] + y[n] : sum[n];
}

#if HAS_X86_PATHS
TARGET_AVX512 static inline __m512 load_f16_avx512(const uint16_t *at)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)at));
}

TARGET_AVX2 static inline __m256 load_f16_avx2(const uint16_t *at)
{
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)at));
}

TARGET_AVX2 static inline __m256 load_i8_avx2(const int8_t *at)
{
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)at)));
}

TARGET_AVX512 static inline __m512 load_i8_avx512(const int8_t *at)
{
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)at)));
}

TARGET_AVX2 static inline four sum4_avx2(__m256 a, __m256 b, __m256 c, __m256 d)
{
    __m256 ab = _mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
    __m256 cd = _mm256_add_ps(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
    __m256 abcd = _mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee));
    return (four)_mm_add_ps(_mm256_castps256_ps128(abcd), _mm256_extractf128_ps(abcd, 1));
}

TARGET_AVX512 static inline four sum4_avx512(__m512 a, __m512 b, __m512 c, __m512 d)
{
    __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    __m512 abcd = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
    __m256 half = _mm256_add_ps(_mm512_castps512_ps256(abcd), _mm512_extractf32x8_ps(abcd, 1));
    return (four)_mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

#define FN(name) name##_avx512
#define TARGET TARGET_AVX512
#define LANES 16
#define MAX_ROWS 6
#define FEW_ROWS 4
#define FMA(a, b, c) ((vec_avx512)_mm512_fmadd_ps(a, b, c))
#define LOAD_F16 (vec_avx512) load_f16_avx512
#define LOAD_I8 (vec_avx512) load_i8_avx512
#define SUM4 sum4_avx512
#include "ops_lanes.h"

#define FN(name) name##_avx2
#define TARGET TARGET_AVX2
#define LANES 8
#define MAX_ROWS 3
#define FEW_ROWS 2
#define FMA(a, b, c) ((vec_avx2)_mm256_fmadd_ps(a, b, c))
#define LOAD_F16 (vec_avx2) load_f16_avx2
#define LOAD_I8 (vec_avx2) load_i8_avx2
#define SUM4 sum4_avx2
#include "ops_lanes.h"
#endif

static inline four load_f16_plain(const uint16_t *at)
{
    four values;
    for (int i = 0; i < 4; i++) {
        /* The exponent is 112 too small, also for numbers too small to have one; infinity and NaN keep their own. */
        union { uint32_t bits; float value; } number = {.bits = (uint32_t)(at[i] & 0x7fff) << 13};
        number.value *= 0x1p112f;
        if ((at[i] & 0x7c00) == 0x7c00)
            number.bits |= 0x7f800000;
        number.bits |= (uint32_t)(at[i] & 0x8000) << 16;
        values[i] = number.value;
    }
    return values;
}

static inline four load_i8_plain(const int8_t *at)
{
    return (four){at[0], at[1], at[2], at[3]};
}

static inline four sum4_plain(four a, four b, four c, four d)
{
    return (four){(a[0] + a[2]) + (a[1] + a[3]), (b[0] + b[2]) + (b[1] + b[3]), (c[0] + c[2]) + (c[1] + c[3]),
                  (d[0] + d[2]) + (d[1] + d[3])};
}

#define FN(name) name##_plain
#define TARGET
#define LANES 4
#define MAX_ROWS 2
#define FEW_ROWS 1
#define FMA(a, b, c) ((a) * (b) + (c))
#define LOAD_F16 (vec_plain) load_f16_plain
#define LOAD_I8 load_i8_plain
#define SUM4 sum4_plain
#include "ops_lanes.h"

struct kernels {
    void (*linear)(const struct weight *, const struct product *, int64_t, int64_t);
    void (*widen)(enum dtype, const void *, float *, int64_t);
    void (*rms_norm)(const struct norm *);
    void (*gated)(const float *, int64_t, float *, int64_t, int64_t, int);
};

/* By level (`enum level`); the caller knows which the CPU has. */
static const struct kernels kernel_sets[] = {
    {linear_plain, widen_plain, rms_norm_plain, gated_plain},
#if HAS_X86_PATHS
    {linear_avx2, widen_avx2, rms_norm_avx2, gated_avx2},
    {linear_avx512, widen_avx512, rms_norm_avx512, gated_avx512},
#endif
};

static inline int64_t smaller(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* A call of `kvferry_linear`. A piece is some rows of W, and the columns of y that belong to them. */
struct linear_call {
    struct work work;
    const struct weight *w;
    struct product product;
    int64_t rows, level;
};

static void linear_pieces(struct work *work, int64_t thread)
{
    struct linear_call *call = (struct linear_call *)work;
    (void)thread;
    for (int64_t piece; (piece = next_piece(work)) >= 0;) {
        const int64_t first = piece * call->rows;
        kernel_sets[call->level].linear(call->w, &call->product, first, smaller(first + call->rows, call->w->n));
    }
}

/* y = x W^T + bias, or y += that; strides in floats. For few tokens: x is to stay in the second-level cache. */
EXPORT void kvferry_linear(const struct weight *w, const float *x, int64_t x_stride, float *y, int64_t y_stride,
                           int64_t tokens, int64_t add, int64_t level, int64_t threads)
{
    struct linear_call call = {{linear_pieces, 1, 0}, w, {x, y, x_stride, y_stride, tokens, add}, w->n, level};
    if (threads > 1) {
        const int64_t least = 16; /* whole cache lines of y */
        call.rows = (PIECE_PRODUCTS / (w->k * tokens + 1) + least) / least * least;
        call.work.pieces = (w->n + call.rows - 1) / call.rows;
    }
    share(&call.work, threads);
}

/* A call of which a piece is some tokens. */
struct token_call {
    struct work work;
    struct norm norm;
    struct gates gates;
    int64_t tokens, piece_tokens, level;
};

/* Divide the tokens, of `products` multiplications each, among the threads. */
static void share_tokens(struct token_call *call, int64_t products, int64_t threads)
{
    call->piece_tokens = PIECE_PRODUCTS / 4 / (products + 1) + 1;
    call->work.pieces = (call->tokens + call->piece_tokens - 1) / call->piece_tokens;
    share(&call->work, threads);
}

static void norm_pieces(struct work *work, int64_t thread)
{
    struct token_call *call = (struct token_call *)work;
    (void)thread;
    for (int64_t piece; (piece = next_piece(work)) >= 0;) {
        const int64_t first = piece * call->piece_tokens;
        struct norm norm = call->norm;
        norm.x += first * norm.x_stride;
        norm.out += first * norm.heads * norm.size;
        norm.tokens = smaller(call->piece_tokens, call->tokens - first);
        kernel_sets[call->level].rms_norm(&norm);
    }
}

/* x and out: [tokens, heads, size], tokens of x `x_stride` floats apart; weight: [size], or [heads, size]. */
EXPORT void kvferry_rms_norm(const float *x, int64_t x_stride, const float *weight, int64_t weight_per_head, float *out,
                             int64_t tokens, int64_t heads, int64_t size, float eps, int64_t level, int64_t threads)
{
    struct token_call call = {.work = {.run = norm_pieces}, .tokens = tokens, .level = level};
    call.norm = (struct norm){x, weight, out, x_stride, tokens, heads, size, weight_per_head, eps};
    share_tokens(&call, heads * size, threads);
}

static void gate_pieces(struct work *work, int64_t thread)
{
    struct token_call *call = (struct token_call *)work;
    const struct gates *gates = &call->gates;
    (void)thread;
    for (int64_t piece; (piece = next_piece(work)) >= 0;) {
        const int64_t first = piece * call->piece_tokens;
        kernel_sets[call->level].gated(gates->gate_up + first * gates->stride, gates->stride,
                                       gates->out + first * gates->size,
                                       smaller(call->piece_tokens, call->tokens - first), gates->size, gates->gelu);
    }
}

/* gate(first half) * second half of rows of 2 * size floats, `stride` apart; out: [tokens, size]. */
EXPORT void kvferry_gated(const float *gate_up, int64_t stride, float *out, int64_t tokens, int64_t size, int64_t gelu,
                          int64_t level, int64_t threads)
{
    struct token_call call = {.work = {.run = gate_pieces}, .tokens = tokens, .level = level};
    call.gates = (struct gates){gate_up, out, stride, size, (int)gelu};
    share_tokens(&call, 8 * size, threads);
}

/* Rows of `table` by id. Returns 0, or 1 for an id that the table does not have: then `out` is not whole. */
EXPORT int64_t kvferry_embed(const struct weight *table, const int64_t *ids, int64_t tokens, float *out,
                              int64_t level)
{
    for (int64_t token = 0; token < tokens; token++) {
        if (ids[token] < 0 || ids[token] >= table->n)
            return 1;
        const char *row = (const char *)table->data + ids[token] * table->k * item_bytes(table->dtype);
        kernel_sets[level].widen((enum dtype)table->dtype, row, out + token * table->k, table->k);
    }
    return 0;
}
