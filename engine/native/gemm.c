/* Products with many rows of x, for engine/ops/native_ops.py: y = x W^T + bias. Few rows are the business of ops.c.
 *
 * x is turned first, so that a vector has the same column of some tokens; times a number of W it goes to as many sums.
 * W is read where it lies, a few rows at a time, which become floats in the first-level cache; x, turned, stays in the
 * second. Each sum is formed in the order of K, so a token's result does not depend on what it is computed with. The
 * memory for the turned x comes from the caller, and nothing is kept but the helpers of threads.c: any thread may call.
 */
#include "threads.h"
#include "vectors.h"
#include "weight.h"

#include <string.h>

/* Numbers of a row of W that are worked on at once: COLUMNS x the rows of a tile fit the first-level cache. */
enum { COLUMNS = 768, PADDED_COLUMNS = COLUMNS + 16 };
/* Tokens that are turned at once, at most. engine/ops/native_ops.py has the number too. */
enum { MOST_TOKENS = 288 };

/* Tokens that all of W is multiplied with. `turned` has them in panels of up to TILE_VECTORS vectors: of each panel
 * first the tokens' numbers for k = 0, then those for k = 1. `padded`: their number rounded up to whole vectors. */
struct gemm {
    const struct weight *w;
    const float *x;
    float *y, *turned;
    int64_t x_stride, y_stride, tokens, padded, add;
};

static inline int64_t least_of(int64_t a, int64_t b) { return a < b ? a : b; }

#define TARGET
#define HAS_F16C 0
#define LANES 4
#define TILE_ROWS 4
#define TILE_VECTORS 2
#define NAME(x) x##_plain
#include "lanes.h"
#include "gemm.h"
#if HAS_X86_PATHS
#undef TARGET
#undef HAS_F16C
#undef LANES
#undef TILE_ROWS
#undef TILE_VECTORS
#undef NAME
#define TARGET TARGET_AVX2
#define HAS_F16C 1
#define LANES 8
#define TILE_ROWS 4
#define TILE_VECTORS 3
#define NAME(x) x##_avx2
#include "lanes.h"
#include "gemm.h"
#undef TARGET
#undef LANES
#undef TILE_ROWS
#undef NAME
#define TARGET TARGET_AVX512
#define LANES 16
#define TILE_ROWS 8
#define NAME(x) x##_avx512
#include "lanes.h"
#include "gemm.h"
#endif

struct kernels {
    void (*turn)(const struct gemm *, int64_t, int64_t);
    void (*multiply)(const struct gemm *, int64_t, int64_t);
    int64_t lanes, panel; /* tokens of a vector, of a panel */
    int64_t block;        /* most tokens whose COLUMNS stay in the second-level cache: panels, at most MOST_TOKENS */
};

/* By level (`enum level`). */
static const struct kernels kernel_sets[] = {
    {turn_tokens_plain, multiply_plain, 4, 8, 96},
#if HAS_X86_PATHS
    {turn_tokens_avx2, multiply_avx2, 8, 24, 120},
    {turn_tokens_avx512, multiply_avx512, 16, 48, MOST_TOKENS},
#endif
};

/* A piece is some tokens of x to turn, and then some rows of W. */
struct gemm_call {
    struct work work;
    struct gemm gemm;
    const struct kernels *kernels;
    int64_t rows;
};

static void turn_pieces(struct work *work, int64_t thread)
{
    struct gemm_call *call = (struct gemm_call *)work;
    const int64_t panel = call->kernels->panel;
    (void)thread;
    for (int64_t piece; (piece = next_piece(work)) >= 0;)
        call->kernels->turn(&call->gemm, piece * panel, least_of((piece + 1) * panel, call->gemm.padded));
}

static void multiply_pieces(struct work *work, int64_t thread)
{
    struct gemm_call *call = (struct gemm_call *)work;
    const int64_t rows = call->rows;
    (void)thread;
    for (int64_t piece; (piece = next_piece(work)) >= 0;)
        call->kernels->multiply(&call->gemm, piece * rows, least_of((piece + 1) * rows, call->gemm.w->n));
}

static int64_t pieces_of(int64_t all, int64_t piece) { return (all + piece - 1) / piece; }

/* All rows of W times the tokens of `gemm`. */
static void multiply_block(const struct gemm *gemm, const struct kernels *kernels, int64_t threads)
{
    const int64_t columns = gemm->w->k, products = columns * gemm->tokens;
    struct gemm_call call = {.gemm = *gemm, .kernels = kernels};
    call.gemm.padded = pieces_of(gemm->tokens, kernels->lanes) * kernels->lanes;
    call.work = (struct work){.run = turn_pieces, .pieces = pieces_of(call.gemm.padded, kernels->panel)};
    /* To turn a number takes as long as some products. */
    share(&call.work, products < PIECE_PRODUCTS / 4 ? 1 : threads);
    /* Whole cache lines of y. When not all of K is worked on at once, x comes from afar again for each piece. */
    const int64_t least = columns > COLUMNS ? 48 : 16;
    call.rows = pieces_of(PIECE_PRODUCTS / (products + 1) + 1, least) * least;
    call.work = (struct work){.run = multiply_pieces, .pieces = pieces_of(gemm->w->n, call.rows)};
    share(&call.work, threads);
}

/* y = x W^T + bias, or y += that; strides in floats. `turned`: room for w->k floats of each token, whose number is
 * rounded up to a multiple of 16 and is at most MOST_TOKENS; aligned to 64 bytes. */
EXPORT void kvferry_gemm(const struct weight *w, const float *x, int64_t x_stride, float *y, int64_t y_stride,
                         int64_t tokens, int64_t add, float *turned, int64_t level, int64_t threads)
{
    const struct kernels *kernels = &kernel_sets[level];
    /* Blocks as equal as whole panels allow. */
    const int64_t blocks = pieces_of(tokens, kernels->block);
    const int64_t block = pieces_of(pieces_of(tokens, blocks), kernels->panel) * kernels->panel;
    for (int64_t token = 0; token < tokens; token += block) {
        const struct gemm gemm = {w, x + token * x_stride, y + token * y_stride, turned, x_stride, y_stride,
                                  least_of(block, tokens - token), 0, add};
        multiply_block(&gemm, kernels, threads);
    }
}
