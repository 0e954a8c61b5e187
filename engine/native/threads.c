/* Threads that help a call with its work: see docs/decisions/0016.
 *
 * What the pieces of a work are does not depend on the threads, and neither does the result. Whoever is free takes the
 * next piece, the caller too, which in the end waits only for helpers that are within a piece: one that the system
 * does not let run holds up nobody. Helpers sleep while there is nothing to do; they are started when they are first
 * wanted, and never end. One work is shared at a time: a caller that finds the helpers taken goes without.
 */
#define _GNU_SOURCE
#include "threads.h"

#include <pthread.h>
#include <signal.h>

static struct {
    pthread_mutex_t taken, lock; /* `taken`: by the caller whose work is shared; `lock` is for all below */
    pthread_cond_t begin, end;
    struct work *work;
    int64_t seats, inside, helpers; /* helpers that may still join, are at work, exist */
} pool = {.taken = PTHREAD_MUTEX_INITIALIZER,
          .lock = PTHREAD_MUTEX_INITIALIZER,
          .begin = PTHREAD_COND_INITIALIZER,
          .end = PTHREAD_COND_INITIALIZER};

static void *help(void *nothing) {
    pthread_mutex_lock(&pool.lock);
    for (;;) {
        while (!pool.seats) pthread_cond_wait(&pool.begin, &pool.lock);
        const int64_t thread = pool.seats--;
        struct work *work = pool.work;
        pool.inside++;
        pthread_mutex_unlock(&pool.lock);
        work->run(work, thread);
        pthread_mutex_lock(&pool.lock);
        if (!--pool.inside) pthread_cond_signal(&pool.end);
    }
    return nothing;
}

/* A forked process has the thread that forked, and no other. */
static void forget_helpers(void) {
    pthread_mutex_init(&pool.taken, 0);
    pthread_mutex_init(&pool.lock, 0);
    pthread_cond_init(&pool.begin, 0);
    pthread_cond_init(&pool.end, 0);
    pool.seats = pool.inside = pool.helpers = 0;
}

static void watch_forks(void) { pthread_atfork(0, 0, forget_helpers); }

/* As many helpers as there can be, if not as many as wanted. Signals are for the process's other threads. */
static void start_helpers(int64_t wanted) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, watch_forks);
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (pthread_t thread; pool.helpers < wanted && !pthread_create(&thread, 0, help, 0); pool.helpers++)
        pthread_detach(thread);
    pthread_sigmask(SIG_SETMASK, &before, 0);
}

void share(struct work *work, int64_t threads) {
    const int64_t seats = (threads < work->pieces ? threads : work->pieces) - 1;
    if (seats < 1 || pthread_mutex_trylock(&pool.taken)) {
        work->run(work, 0);
        return;
    }
    pthread_mutex_lock(&pool.lock);
    if (pool.helpers < seats) start_helpers(seats);
    pool.work = work;
    pool.seats = seats;
    for (int64_t i = 0; i < seats; i++) pthread_cond_signal(&pool.begin);
    pthread_mutex_unlock(&pool.lock);
    work->run(work, 0);
    pthread_mutex_lock(&pool.lock);
    pool.seats = 0;
    while (pool.inside) pthread_cond_wait(&pool.end, &pool.lock);
    pthread_mutex_unlock(&pool.lock);
    pthread_mutex_unlock(&pool.taken);
}
