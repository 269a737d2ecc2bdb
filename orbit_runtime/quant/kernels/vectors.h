/* Vectors of 16 fp32 values, by the vector types of GCC and Clang alone; rows in BF16 or fp32; teams of threads. */

#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define LANES 16
#define INLINE static inline __attribute__((always_inline))
#define WHOLE(n) (((n) + LANES - 1) / LANES * LANES)
#define LEAST(a, b) ((a) < (b) ? (a) : (b))
#define MOST(a, b) ((a) > (b) ? (a) : (b))

typedef float vec __attribute__((vector_size(64)));
typedef int32_t ints __attribute__((vector_size(64)));
typedef uint32_t bits __attribute__((vector_size(64)));
typedef uint16_t halves __attribute__((vector_size(32)));

INLINE vec load(const float *from) { vec v; memcpy(&v, from, sizeof v); return v; }
INLINE void store(float *to, vec v) { memcpy(to, &v, sizeof v); }
INLINE vec same(float value) { return value - (vec){0}; }
INLINE vec pick(ints mask, vec a, vec b) { return (vec)((mask & (ints)a) | (~mask & (ints)b)); }
INLINE vec larger(vec a, vec b) { return pick(a > b, a, b); }

#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (ints){__VA_ARGS__})
#endif
#define FOLDED(v, with)                                                             \
    v = with(v, SHUFFLE(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7)); \
    v = with(v, SHUFFLE(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11)); \
    v = with(v, SHUFFLE(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13)); \
    v = with(v, SHUFFLE(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));

INLINE vec added(vec a, vec b) { return a + b; }
INLINE float sum(vec v) { FOLDED(v, added) return v[0]; }
INLINE float largest(vec v) { FOLDED(v, larger) return v[0]; }

/* e^x to within two units in the last place; 0 below -87. */
INLINE vec power_of_e(vec x) {
    const vec magic = same(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
    vec n = (x * 1.44269504f + magic) - magic;
    vec r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    vec p = same(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = (p * r) * r + r + 1.0f;
    ints exponent = __builtin_convertvector(pick(x > -87.0f, n, same(0)), ints) << 23;
    vec found = pick(x > -87.0f, (vec)((ints)p + exponent), same(0));
    return pick(x == x, found, x); /* what is no number stays none */
}

/* `size` values as fp32, multiplied by `by`. */
INLINE void widen(float *to, const void *from, int64_t at, int64_t size, int is_bf16, float by) {
    int64_t i = 0;
    if (is_bf16) {
        const uint16_t *values = (const uint16_t *)from + at;
        for (; i + LANES <= size; i += LANES) {
            halves h;
            memcpy(&h, values + i, sizeof h);
            store(to + i, (vec)(__builtin_convertvector(h, bits) << 16) * by);
        }
        for (; i < size; i++) {
            uint32_t u = (uint32_t)values[i] << 16;
            memcpy(to + i, &u, sizeof u);
            to[i] *= by;
        }
    } else {
        const float *values = (const float *)from + at;
        for (; i < size; i++) to[i] = values[i] * by;
    }
}

/* Written in the given dtype, to the nearest even. */
INLINE void narrow(void *to, int64_t at, const float *from, int64_t size, int is_bf16, float by) {
    int64_t i = 0;
    if (is_bf16) {
        uint16_t *values = (uint16_t *)to + at;
        for (; i < size; i += LANES) {
            float some[LANES];
            if (size - i < LANES) memcpy(some, from + i, (size - i) * sizeof(float));
            vec v = load(size - i < LANES ? some : from + i) * by;
            bits u = (bits)v, rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
            halves h = __builtin_convertvector((bits)pick(v == v, (vec)rounded, (vec)((bits){0} + 0x7fc0)), halves);
            memcpy(values + i, &h, LEAST(size - i, LANES) * sizeof(uint16_t));
        }
    } else {
        for (; i < size; i++) ((float *)to)[at + i] = from[i] * by;
    }
}

/* --- teams ---

Where another process keeps a core, the thread of a team that waits for it costs the others milliseconds, each time. So
a team that was mostly idle is made as small as its busy part for a while. No result depends on its size. */

#define READING 0.01 /* seconds of teamwork that are looked at together */
#define SMALL 0.2    /* seconds for which a team is small then */

INLINE double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static struct {
    double took, busy, until; /* threads' seconds in all, and at work; when a team is whole again */
    int small;
} teams;

INLINE int team_of(int threads) {
    return threads > 1 && teams.until > 0 && now() < teams.until ? LEAST(threads, teams.small) : threads;
}

INLINE void told(int team, double took, double busy) {
    if (team < 2) return;
    teams.took += team * took, teams.busy += busy;
    if (teams.took < team * READING) return;
    double share = teams.busy / teams.took;
    teams.until = share < 0.6 ? now() + SMALL : 0;
    teams.small = (int)MOST(1, team * share + 0.4);
    teams.took = teams.busy = 0;
}

/* Each thread of a team carries this out; how long it is at work is noted. */
#define TEAMWORK(threads, ...)                                                                  \
    do {                                                                                        \
        int team = team_of(threads);                                                            \
        double busy = 0, since = team > 1 ? now() : 0;                                          \
        _Pragma("omp parallel num_threads(team) reduction(+ : busy)") {                         \
            double start = team > 1 ? now() : 0;                                                \
            __VA_ARGS__                                                                         \
            if (team > 1) busy += now() - start;                                                \
        }                                                                                       \
        if (team > 1) told(team, now() - since, busy);                                          \
    } while (0)
#define STATIC_ROWS _Pragma("omp for schedule(static) nowait")
