/* Fingerprints of KV pages, and copies of pages that are fingerprinted on their way. Plain C ABI, called by ctypes.
 *
 * The fingerprint of a page is its 64-bit XXH3 hash under a seed of its own, as the public specification of XXH3
 * defines it for inputs longer than 240 bytes (https://github.com/Cyan4973/xxHash, doc/xxhash_spec.md); so pages have
 * at least 256 bytes. The seed is splitmix64 of the hand-off's seed and the page's place in the prompt: the values
 * are those of kv_transfer/fingerprint.py.
 *
 * Pages come as runs: at each of `num_runs` byte offsets into a memory begin the pages of `num_layers` consecutive
 * layers of one block, one behind the other. Nothing is checked here: the caller has (kv_transfer/fingerprinter.py).
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "fingerprints are of little-endian memory"
#endif

#if defined(__x86_64__)
#include <immintrin.h>
#define HAS_AVX2_PATH 1
#define AVX2 __attribute__((target("avx2")))
#else
#define HAS_AVX2_PATH 0
#endif

/* Raised with every change of what is below, so that a library built from older source is not used. */
#define VERSION 1

enum { STRIPE = 64, LANES = 8, SECRET = 192, STRIPES_A_BLOCK = (SECRET - STRIPE) / 8 };
enum { SCRAMBLE_AT = SECRET - STRIPE, LAST_STRIPE_AT = SECRET - STRIPE - 7, MERGE_AT = 11 };
enum { PREFETCH_BYTES = 1024, STREAM_BYTES = 128 };

static const uint64_t PRIME32_1 = 0x9E3779B1U, PRIME32_2 = 0x85EBCA77U, PRIME32_3 = 0xC2B2AE3DU;
static const uint64_t PRIME64_1 = 0x9E3779B185EBCA87U, PRIME64_2 = 0xC2B2AE3D27D4EB4FU;
static const uint64_t PRIME64_3 = 0x165667B19E3779F9U, PRIME64_4 = 0x85EBCA77C2B2AE63U;
static const uint64_t PRIME64_5 = 0x27D4EB2F165667C5U, PRIME_MX1 = 0x165667919E3779F9U;

/* The default secret of the specification. */
static const uint8_t DEFAULT_SECRET[SECRET] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

static inline uint64_t read64(const uint8_t *at) {
    uint64_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

/* ---- XXH3: a state of eight lanes that takes in stripes, and is scrambled after every block of them */

static inline void accumulate(uint64_t lanes[LANES], const uint8_t *stripe, const uint8_t *secret) {
    for (int i = 0; i < LANES; i++) {
        uint64_t data = read64(stripe + 8 * i), keyed = data ^ read64(secret + 8 * i);
        lanes[i ^ 1] += data;
        lanes[i] += (keyed & 0xFFFFFFFFU) * (keyed >> 32);
    }
}

static inline void scramble(uint64_t lanes[LANES], const uint8_t *secret) {
    for (int i = 0; i < LANES; i++)
        lanes[i] = (lanes[i] ^ (lanes[i] >> 47) ^ read64(secret + 8 * i)) * PRIME32_1;
}

static void absorb_plain(uint64_t lanes[LANES], const uint8_t *page, size_t size, const uint8_t *secret) {
    size_t num_stripes = (size - 1) / STRIPE, in_block = 0;
    for (size_t i = 0; i < num_stripes; i++) {
        accumulate(lanes, page + i * STRIPE, secret + 8 * in_block);
        if (++in_block == STRIPES_A_BLOCK) {
            scramble(lanes, secret + SCRAMBLE_AT);
            in_block = 0;
        }
    }
    accumulate(lanes, page + size - STRIPE, secret + LAST_STRIPE_AT);
}

static void copy_plain(uint8_t *to, const uint8_t *from, size_t size) { memcpy(to, from, size); }

#if HAS_AVX2_PATH
AVX2 static inline __m256i load(const uint8_t *at) { return _mm256_loadu_si256((const __m256i *)at); }

AVX2 static inline __m256i accumulate_half(__m256i lanes, const uint8_t *stripe, const uint8_t *secret) {
    __m256i data = load(stripe), keyed = _mm256_xor_si256(data, load(secret));
    __m256i product = _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32));
    __m256i swapped = _mm256_shuffle_epi32(data, _MM_SHUFFLE(1, 0, 3, 2)); /* lane i takes the data of lane i ^ 1 */
    return _mm256_add_epi64(lanes, _mm256_add_epi64(swapped, product));
}

AVX2 static inline __m256i scramble_half(__m256i lanes, const uint8_t *secret) {
    const __m256i prime = _mm256_set1_epi64x((long long)PRIME32_1);
    __m256i mixed = _mm256_xor_si256(_mm256_xor_si256(lanes, _mm256_srli_epi64(lanes, 47)), load(secret));
    __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(mixed, 32), prime);
    return _mm256_add_epi64(_mm256_mul_epu32(mixed, prime), _mm256_slli_epi64(high, 32));
}

AVX2 static void absorb_avx2(uint64_t lanes[LANES], const uint8_t *page, size_t size, const uint8_t *secret) {
    __m256i low = load((const uint8_t *)lanes), high = load((const uint8_t *)(lanes + 4));
    size_t num_stripes = (size - 1) / STRIPE;
    for (size_t done = 0; done < num_stripes; done += STRIPES_A_BLOCK) {
        size_t left = num_stripes - done, count = left < STRIPES_A_BLOCK ? left : STRIPES_A_BLOCK;
        for (size_t i = 0; i < count; i++) {
            const uint8_t *stripe = page + (done + i) * STRIPE;
            _mm_prefetch((const char *)stripe + PREFETCH_BYTES, _MM_HINT_T0);
            low = accumulate_half(low, stripe, secret + 8 * i);
            high = accumulate_half(high, stripe + 32, secret + 8 * i + 32);
        }
        if (count == STRIPES_A_BLOCK) {
            low = scramble_half(low, secret + SCRAMBLE_AT);
            high = scramble_half(high, secret + SCRAMBLE_AT + 32);
        }
    }
    low = accumulate_half(low, page + size - STRIPE, secret + LAST_STRIPE_AT);
    high = accumulate_half(high, page + size - STRIPE + 32, secret + LAST_STRIPE_AT + 32);
    _mm256_storeu_si256((__m256i *)lanes, low);
    _mm256_storeu_si256((__m256i *)(lanes + 4), high);
}

/* Stores past the cache: the lines of the target need not be read first. They are not ordered with later stores, as
 * all others are: `kvferry_pages` ends with a barrier. */
AVX2 static void copy_avx2(uint8_t *to, const uint8_t *from, size_t size) {
    if ((uintptr_t)to % 32 || size % STREAM_BYTES) {
        memcpy(to, from, size);
        return;
    }
    for (size_t i = 0; i < size; i += STREAM_BYTES) {
        __m256i a = load(from + i), b = load(from + i + 32), c = load(from + i + 64), d = load(from + i + 96);
        _mm256_stream_si256((__m256i *)(to + i), a);
        _mm256_stream_si256((__m256i *)(to + i + 32), b);
        _mm256_stream_si256((__m256i *)(to + i + 64), c);
        _mm256_stream_si256((__m256i *)(to + i + 96), d);
    }
}
#endif

/* ---- pages */

static uint64_t fold(uint64_t a, uint64_t b) {
    unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static uint64_t fingerprint(const uint8_t *page, size_t size, uint64_t seed,
                            void (*absorb)(uint64_t *, const uint8_t *, size_t, const uint8_t *)) {
    uint8_t secret[SECRET];
    for (int i = 0; i < SECRET; i += 16) {
        uint64_t low = read64(DEFAULT_SECRET + i) + seed, high = read64(DEFAULT_SECRET + i + 8) - seed;
        memcpy(secret + i, &low, sizeof low);
        memcpy(secret + i + 8, &high, sizeof high);
    }
    uint64_t lanes[LANES] = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};
    absorb(lanes, page, size, secret);
    uint64_t hash = (uint64_t)size * PRIME64_1;
    for (int i = 0; i < LANES; i += 2)
        hash += fold(lanes[i] ^ read64(secret + MERGE_AT + 8 * i), lanes[i + 1] ^ read64(secret + MERGE_AT + 8 * i + 8));
    hash = (hash ^ (hash >> 37)) * PRIME_MX1;
    return hash ^ (hash >> 32);
}

static uint64_t page_seed(uint64_t base_seed, uint64_t block, uint64_t layer) {
    uint64_t mixed = (block << 16 | layer) * 0x9E3779B97F4A7C15U + base_seed;
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9U;
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EBU;
    return mixed ^ (mixed >> 31);
}

/* ---- what Python calls */

#define EXPORT __attribute__((visibility("default")))

struct place {
    uint64_t base_seed, first_block, first_layer, num_runs, num_layers, page_bytes;
};

EXPORT int64_t kvferry_pages_version(void) { return VERSION; }

/* Whether this CPU takes the fast way. */
EXPORT int kvferry_pages_has_avx2(void) {
#if HAS_AVX2_PATH
    return __builtin_cpu_supports("avx2") != 0;
#else
    return 0;
#endif
}

/* `found`: one value a page, run by run. With `to`, each page is copied there right after it was looked at, while it is
 * in the cache. `plain`: without vector instructions. */
EXPORT void kvferry_pages(const struct place *place, const uint8_t *from, const int64_t *from_at, uint8_t *to,
                          const int64_t *to_at, uint64_t *found, int plain) {
    void (*absorb)(uint64_t *, const uint8_t *, size_t, const uint8_t *) = absorb_plain;
    void (*copy)(uint8_t *, const uint8_t *, size_t) = copy_plain;
#if HAS_AVX2_PATH
    if (!plain && kvferry_pages_has_avx2()) {
        absorb = absorb_avx2;
        copy = copy_avx2;
    }
#endif
    size_t size = place->page_bytes;
    for (uint64_t run = 0; run < place->num_runs; run++) {
        for (uint64_t layer = 0; layer < place->num_layers; layer++) {
            const uint8_t *page = from + from_at[run] + layer * size;
            uint64_t seed = page_seed(place->base_seed, place->first_block + run, place->first_layer + layer);
            *found++ = fingerprint(page, size, seed, absorb);
            if (to) copy(to + to_at[run] + layer * size, page, size);
        }
    }
    __atomic_thread_fence(__ATOMIC_SEQ_CST); /* for the stores past the cache */
}
