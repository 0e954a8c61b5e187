/* Work that several threads share. See threads.c. */
#ifndef KVFERRY_THREADS_H
#define KVFERRY_THREADS_H

#include <stdatomic.h>
#include <stdint.h>

/* Begins the structure that has the work's own fields. `run` does pieces until there are none left; its last argument
 * is less than the number of threads, and another in each thread. */
struct work {
    void (*run)(struct work *, int64_t thread);
    int64_t pieces;
    atomic_llong begun;
};

/* Pieces of less than this many multiplications are not worth a thread: some 10 us. */
enum { PIECE_PRODUCTS = 1 << 17 };

/* The next piece, nobody else's, or -1. Pieces are given out in order. */
static inline int64_t next_piece(struct work *work) {
    const int64_t piece = atomic_fetch_add_explicit(&work->begun, 1, memory_order_relaxed);
    return piece < work->pieces ? piece : -1;
}

/* Do the work, by up to `threads` threads of which the caller is one, and return when it is done. */
void share(struct work *work, int64_t threads);

#endif
