/* Attention over the paged pool, for engine/attention/native.py. Plain C ABI, called by ctypes; linked with ops.c into
 * kernels.so. Nothing is checked here: the caller has. No state but the helpers of threads.c: any thread may call, with
 * memory of its own.
 *
 * pool: [num_blocks][num_layers][page], page = [K: kv_heads, block_size, head_dim][V][K scales][V scales][padding].
 */
#include <math.h>
#include <string.h>

#include "threads.h"
#include "vectors.h"

/* Keys that a tile meets at once; most query rows of a tile; most rows for which K is not turned first. */
enum { KEYS = 64, ROWS = 96, DIRECT_ROWS = 7 };

struct pool {
    uint8_t *bytes;
    /* Within a page, of the first of the kv_heads heads that are ours; the page may have others. */
    int64_t block_bytes, page_bytes, k_offset, v_offset, k_scale_offset, v_scale_offset;
    int64_t kv_heads, block_size, head_dim, dtype;
};

struct layer {
    int64_t index, window; /* window: at least 1 */
    double scale, soft_cap; /* soft_cap 0: none */
};

/* One batch: the tensors of engine/batch.py. */
struct step {
    const int64_t *slot_blocks, *slot_offsets, *opened_blocks;
    const int32_t *block_tables, *context_lens, *query_start;
    int64_t num_opened, table_width, num_rows, num_tokens;
};

/* Heads of tokens: of each, `count` rows of head_dim floats; tokens are `stride` floats apart. */
struct heads {
    float *at;
    int64_t stride, count;
};

struct range {
    long from, to;
};

/* Where up to KEYS keys of one sequence and head lie, in groups of 8. Groups beyond the last repeat the first. */
struct keys {
    long first, count;
    const uint8_t *k[KEYS / 8], *v[KEYS / 8], *k_scales[KEYS / 8], *v_scales[KEYS / 8];
};

/* A matrix product: see `multiply` in attention.h. Row k of b is at b[k / 8] + k % 8 * ldb (bytes). */
struct product {
    const float *a;
    const uint8_t *const *b;
    int dtype; /* of b */
    long lda, ldb, column, from, to;
    float *c;
    long ldc;
    const float *keep;
    /* Fetched into the cache on the way, or NULL: as many rows of `ahead_stride` bytes as b has; the first level's and
     * the second's. */
    const uint8_t *const *near, *const *far;
    long ahead_stride, ahead_from, ahead_to; /* which of each 8 rows (`multiply_all` says) */
};

/* Query rows on their way through the keys. `padded`: head_dim rounded up to 16. Everything float lies in the scratch
 * memory: q, out [ROWS][padded]; p [ROWS][KEYS]; k_room, v_room [KEYS][padded], k_room also [padded][KEYS]. */
struct tile {
    const struct pool *pool;
    const struct keys *near, *far; /* the keys that are met next and after that; at the end, the last again */
    long num_rows, padded, window, first_key, num_keys;
    long ahead_stride, ahead_share; /* bytes of a row of K or V; those of 8 rows that each query row fetches ahead */
    int direct;
    float soft_cap;
    float *q, *q_columns, *out, *p, *k_room, *v_room, *k_scales, *v_scales, *most, *keep, *sums;
    const uint8_t *k[KEYS / 8], *v[KEYS / 8], **turned; /* K and V by groups of 8 keys, and K turned by 8 columns */
    int k_dtype, v_dtype;
    long positions[ROWS];
};

static inline long item_bytes(int dtype) {
    static const int8_t bytes[] = {4, 2, 2, 1, 1};
    return bytes[dtype];
}

static inline int has_scales(const struct pool *pool) { return pool->dtype == KV_FP8 || pool->dtype == KV_INT8; }

/* Which of the keys that the tile is meeting row r sees. */
static inline struct range seen_by(const struct tile *tile, long r) {
    const long position = tile->positions[r] - tile->first_key, first = position + 1 - tile->window;
    const struct range seen = {first > 0 ? first : 0, position < tile->num_keys ? position + 1 : tile->num_keys};
    return seen;
}

/* The cache lines that begin within the bytes: of keys met next, and of keys met later, which wait in the second level
 * of the cache. */
static inline void look_ahead(const uint8_t *near, const uint8_t *far, long bytes) {
    const long first = -(long)(uintptr_t)near & 63, first_far = -(long)(uintptr_t)far & 63;
    for (long at = first; at < bytes; at += 64) __builtin_prefetch(near + at, 0, 3);
    for (long at = first_far; at < bytes; at += 64) __builtin_prefetch(far + at, 0, 2);
}

#define TARGET
#define HAS_F16C 0
#define LANES 4
#define NAME(x) x##_plain
#include "lanes.h"
#include "attention.h"
#include "store.h"
#if HAS_X86_PATHS
#undef TARGET
#undef HAS_F16C
#undef LANES
#undef NAME
#define TARGET TARGET_AVX2
#define HAS_F16C 1
#define LANES 8
#define NAME(x) x##_avx2
#include "lanes.h"
#include "attention.h"
#include "store.h"
#undef TARGET
#undef LANES
#undef NAME
#define TARGET TARGET_AVX512
#define LANES 16
#define NAME(x) x##_avx512
#include "lanes.h"
#include "attention.h"
#include "store.h"
#endif

struct code {
    void (*begin)(struct tile *, const float *const *, float);
    void (*meet_keys)(struct tile *, const struct keys *);
    void (*finish)(const struct tile *, float *const *);
    void (*turn)(float *, int64_t, int64_t, const float *);
    void (*put)(const struct pool *, uint8_t *, uint8_t *, const float *);
};

static const struct code CODE[] = {
    {begin_plain, meet_keys_plain, finish_plain, turn_plain, put_plain},
#if HAS_X86_PATHS
    {begin_avx2, meet_keys_avx2, finish_avx2, turn_avx2, put_avx2},
    {begin_avx512, meet_keys_avx512, finish_avx512, turn_avx512, put_avx512},
#endif
};

static long padded_width(long head_dim) { return (head_dim + 15) / 16 * 16; }

static void locate(struct keys *keys, const struct pool *pool, const uint8_t *layer, const int32_t *table, long head,
                   long first, long end) {
    const long size = pool->block_size, item = item_bytes((int)pool->dtype);
    const int shift = __builtin_ctzl((unsigned long)size);
    keys->first = first;
    keys->count = end - first < KEYS ? end - first : KEYS;
    for (long g = 0; g < KEYS / 8; g++) {
        const long key = 8 * g < keys->count ? first + 8 * g : first, in_block = key & (size - 1);
        const uint8_t *page = layer + table[key >> shift] * pool->block_bytes;
        const long row = (head * size + in_block) * pool->head_dim * item, scale = (head * size + in_block) * 2;
        keys->k[g] = page + pool->k_offset + row;
        keys->v[g] = page + pool->v_offset + row;
        keys->k_scales[g] = page + pool->k_scale_offset + scale;
        keys->v_scales[g] = page + pool->v_scale_offset + scale;
    }
}

/* ---- what Python calls */

EXPORT int64_t kvferry_kernels_version(void) { return KVFERRY_KERNELS_VERSION; }

/* The best level (`enum level`) of this CPU. */
EXPORT int64_t kvferry_kernels_level(void) { return cpu_level(); }

/* Bytes of scratch memory that each thread of `kvferry_attend` needs; it must begin at a multiple of 64. */
EXPORT int64_t kvferry_attend_scratch_bytes(int64_t head_dim) {
    const long padded = padded_width(head_dim);
    const long floats = 2 * ROWS * padded + ROWS * KEYS + 2 * KEYS * padded + 2 * KEYS + ROWS * (2 + 16);
    return (floats * (long)sizeof(float) + padded / 8 * (long)sizeof(float *) + 63) / 64 * 64;
}

static void set_out_room(struct tile *tile, float *scratch) {
    const long padded = tile->padded;
    tile->q = scratch;
    tile->q_columns = tile->q + 8 * padded; /* of a direct tile, which has fewer rows */
    tile->out = tile->q + ROWS * padded;
    tile->p = tile->out + ROWS * padded;
    tile->k_room = tile->p + ROWS * KEYS;
    tile->v_room = tile->k_room + KEYS * padded;
    float *scales = tile->v_room + KEYS * padded;
    const int quantised = has_scales(tile->pool);
    tile->k_scales = quantised ? scales : 0;
    tile->v_scales = quantised ? scales + KEYS : 0;
    tile->most = scales + 2 * KEYS;
    tile->keep = tile->most + ROWS;
    tile->sums = tile->keep + ROWS;
    tile->turned = (const uint8_t **)(tile->sums + ROWS * 16);
    for (long i = 0; i < padded / 8; i++) tile->turned[i] = (const uint8_t *)(tile->k_room + i * 8 * KEYS);
}

/* Where the keys of the sequence in row `row` of the batch begin that rows from `position` on need, in whole vectors. */
static long first_key(const struct layer *layer, long position) {
    const long first = position + 1 - layer->window;
    return first > 0 ? first / 16 * 16 : 0;
}

/* A call of `kvferry_attend`. A piece is one tile: of a batch row and a kv head, up to ROWS query rows. */
struct attention {
    struct work work;
    const struct pool *pool;
    const struct layer *layer;
    const struct step *step;
    const struct heads *q;
    const struct code *code;
    float *out, *scratch;
};

/* Query rows `first` and on, as many as go into the tile, of batch row `row` and a kv head. */
static void attend_tile(const struct attention *a, struct tile *tile, long row, long head, long first) {
    const struct pool *pool = a->pool;
    const struct step *step = a->step;
    const int32_t *table = step->block_tables + row * step->table_width;
    const uint8_t *base = pool->bytes + a->layer->index * pool->page_bytes;
    const long token = step->query_start[row], tokens = step->query_start[row + 1] - token;
    const long start = step->context_lens[row] - tokens, group = a->q->count / pool->kv_heads, width = pool->head_dim;
    const double log2e = 1.4426950408889634, scale = a->layer->scale, soft_cap = a->layer->soft_cap;
    const float *from[ROWS];
    float *to[ROWS];
    tile->num_rows = tokens * group - first < ROWS ? tokens * group - first : ROWS;
    tile->direct = tile->num_rows <= DIRECT_ROWS;
    tile->ahead_share = (8 * tile->ahead_stride / tile->num_rows / 64 + 1) * 64;
    for (long r = 0; r < tile->num_rows; r++) {
        const long of_token = (first + r) / group, q_head = head * group + (first + r) % group;
        tile->positions[r] = start + of_token;
        from[r] = a->q->at + (token + of_token) * a->q->stride + q_head * width;
        to[r] = a->out + ((token + of_token) * a->q->count + q_head) * width;
    }
    /* Scores are in powers of two; with a soft cap, first twice what tanh takes, in powers of two. */
    a->code->begin(tile, from, (float)(soft_cap != 0 ? 2 * log2e * scale / soft_cap : scale * log2e));
    const long end = tile->positions[tile->num_rows - 1] + 1;
    long key = first_key(a->layer, tile->positions[0]);
    struct keys keys[3];
    for (long i = 0; i < 2 && key + i * KEYS < end; i++)
        locate(&keys[i], pool, base, table, head, key + i * KEYS, end);
    for (long now = 0; key < end; key += KEYS, now = (now + 1) % 3) {
        const long next = (now + 1) % 3, after = (now + 2) % 3;
        if (key + 2 * KEYS < end) locate(&keys[after], pool, base, table, head, key + 2 * KEYS, end);
        tile->first_key = key;
        tile->num_keys = keys[now].count;
        tile->near = &keys[key + KEYS < end ? next : now];
        tile->far = key + 2 * KEYS < end ? &keys[after] : tile->near;
        a->code->meet_keys(tile, &keys[now]);
    }
    a->code->finish(tile, to);
}

static void attend_pieces(struct work *work, int64_t thread) {
    struct attention *a = (struct attention *)work;
    const struct pool *pool = a->pool;
    const struct step *step = a->step;
    struct tile tile = {.pool = pool, .padded = padded_width(pool->head_dim), .window = a->layer->window};
    tile.soft_cap = (float)(a->layer->soft_cap * 1.4426950408889634);
    tile.ahead_stride = pool->head_dim * item_bytes((int)pool->dtype);
    set_out_room(&tile, a->scratch + thread * (kvferry_attend_scratch_bytes(pool->head_dim) / (long)sizeof(float)));
    int64_t piece = 0, ours = next_piece(work);
    for (long row = 0; row < step->num_rows && ours >= 0; row++) {
        const long rows = (step->query_start[row + 1] - step->query_start[row]) * (a->q->count / pool->kv_heads);
        for (long head = 0; head < pool->kv_heads; head++) {
            for (long first = 0; first < rows; first += ROWS, piece++) {
                if (piece != ours) continue;
                attend_tile(a, &tile, row, head, first);
                ours = next_piece(work);
            }
        }
    }
}

/* Attention of q over each batch row's context, into out [num_tokens][q heads][head_dim]. `scratch` has room for each
 * of the threads. */
EXPORT void kvferry_attend(const struct pool *pool, const struct layer *layer, const struct step *step,
                           const struct heads *q, float *out, float *scratch, int level, int threads) {
    struct attention a = {.work = {.run = attend_pieces}, .pool = pool, .layer = layer, .step = step, .q = q,
                          .code = &CODE[level], .out = out, .scratch = scratch};
    int64_t scores = 0;
    for (long row = 0; row < step->num_rows; row++) {
        const long tokens = step->query_start[row + 1] - step->query_start[row];
        a.work.pieces += (tokens * (q->count / pool->kv_heads) + ROWS - 1) / ROWS * pool->kv_heads;
        scores += tokens * step->context_lens[row];
    }
    share(&a.work, scores * q->count * pool->head_dim < 2 * PIECE_PRODUCTS ? 1 : threads);
}

static void wipe(const struct pool *pool, uint8_t *page) {
    const long rows = pool->kv_heads * pool->block_size;
    const size_t bytes = (size_t)(rows * pool->head_dim * item_bytes((int)pool->dtype));
    memset(page + pool->k_offset, 0, bytes);
    memset(page + pool->v_offset, 0, bytes);
    if (!has_scales(pool)) return;
    memset(page + pool->k_scale_offset, 0, (size_t)rows * 2);
    memset(page + pool->v_scale_offset, 0, (size_t)rows * 2);
}

/* A call of `kvferry_store`. A piece is some tokens. */
struct storing {
    struct work work;
    const struct pool *pool;
    const struct step *step;
    const struct heads *qk, *v;
    const struct code *code;
    const float *rotation;
    uint8_t *base;
};

enum { STORED_TOKENS = 16 }; /* of a piece */

static void store_token(const struct storing *s, long token) {
    const struct pool *pool = s->pool;
    const long width = pool->head_dim, row_bytes = width * item_bytes((int)pool->dtype);
    float *heads = s->qk->at + token * s->qk->stride;
    if (s->rotation) s->code->turn(heads, s->qk->count, width, s->rotation + token * width);
    uint8_t *page = s->base + s->step->slot_blocks[token] * pool->block_bytes;
    for (long head = 0; head < pool->kv_heads; head++) {
        const long row = head * pool->block_size + s->step->slot_offsets[token];
        const float *k = heads + (s->qk->count - pool->kv_heads + head) * width;
        const float *values = s->v->at + token * s->v->stride + head * width;
        s->code->put(pool, page + pool->k_offset + row * row_bytes, page + pool->k_scale_offset + row * 2, k);
        s->code->put(pool, page + pool->v_offset + row * row_bytes, page + pool->v_scale_offset + row * 2, values);
    }
}

static void store_pieces(struct work *work, int64_t thread) {
    (void)thread;
    struct storing *s = (struct storing *)work;
    for (int64_t piece; (piece = next_piece(work)) >= 0;) {
        const long first = piece * STORED_TOKENS, rest = s->step->num_tokens - first;
        for (long i = 0; i < (rest < STORED_TOKENS ? rest : STORED_TOKENS); i++) store_token(s, first + i);
    }
}

/* Turn all heads of qk by `rotation` [num_tokens][head_dim] (unless it is NULL), wipe the opened blocks, and write the
 * last kv_heads heads of qk, and v, into their slots. */
EXPORT void kvferry_store(const struct pool *pool, const struct layer *layer, const struct step *step,
                          const struct heads *qk, const struct heads *v, const float *rotation, int level,
                          int threads) {
    struct storing s = {.work = {.run = store_pieces}, .pool = pool, .step = step, .qk = qk, .v = v,
                        .code = &CODE[level], .rotation = rotation};
    s.base = pool->bytes + layer->index * pool->page_bytes;
    s.work.pieces = (step->num_tokens + STORED_TOKENS - 1) / STORED_TOKENS;
    for (long i = 0; i < step->num_opened; i++) wipe(pool, s.base + step->opened_blocks[i] * pool->block_bytes);
    share(&s.work, step->num_tokens * (qk->count + v->count) * pool->head_dim < PIECE_PRODUCTS / 2 ? 1 : threads);
}
