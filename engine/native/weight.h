/* Weights as Python describes them. */
#ifndef KVFERRY_WEIGHT_H
#define KVFERRY_WEIGHT_H

#include <stdint.h>

enum dtype { F32, BF16, F16, I8 };

/* A projection: data [n, k] contiguous, bias [n] or NULL, scales [n] or NULL. */
struct weight {
    const void *data;
    const float *bias;
    const float *scales;
    int64_t n, k;
    int64_t dtype;
};

static inline int64_t item_bytes(int64_t dtype)
{
    return dtype == F32 ? 4 : dtype == I8 ? 1 : 2;
}

#endif
