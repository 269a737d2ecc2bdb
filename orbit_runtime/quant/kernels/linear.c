/* y = x W' in BF16 on processors with AVX512-BF16: products of pairs, summed in fp32.

Every sum has one order, so a row has the same bits whatever rows are multiplied beside it. W is read in panels of 48
columns of the result, `[N / 48, K / 2, 48, 2]`, the last one filled up with zeros: as it is held, or as it is made. */

#include <immintrin.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define ROWS 8
#define LANES 16
#define PANEL 48
#define RUN 256 /* rows of x that stay in the cache while panels pass */
#define INLINE static inline __attribute__((always_inline))
#define LEAST(a, b) ((a) < (b) ? (a) : (b))

typedef struct {
    const uint16_t *x, *w, *bias; /* bias: BF16, or null */
    void *y;
    int64_t x_row, y_row, w_row, rows, columns, depth; /* `_row`: elements from one row to the next */
    int32_t is_turned, y_is_fp32, threads; /* turned: `w` is `[K, N]`, else panels */
} Linear;

INLINE __m512 widened(const uint16_t *from, __mmask16 mask) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from)), 16));
}

/* `rows` rows of one panel; meanwhile `bytes` of what is read next come into the cache. */
INLINE void part(const Linear *a, int64_t row, int64_t panel, const uint16_t *w, const char *next, int64_t bytes,
                 int rows) {
    __m512 acc[ROWS][3];
    const uint16_t *x = a->x + row * a->x_row;
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < 3; j++) acc[i][j] = _mm512_setzero_ps();
    int64_t step = bytes / (a->depth / 2) + 1; /* for each pair */
    const char *end = next + bytes;
    for (int64_t k = 0; k < a->depth; k += 2, w += 2 * PANEL, next += step) {
        if (next < end) __builtin_prefetch(next, 0, 2);
        __m512bh right[3];
        for (int j = 0; j < 3; j++) right[j] = (__m512bh)_mm512_loadu_si512(w + j * 2 * LANES);
        for (int i = 0; i < rows; i++) {
            int32_t pair;
            memcpy(&pair, x + i * a->x_row + k, sizeof pair);
            __m512bh left = (__m512bh)_mm512_set1_epi32(pair);
            for (int j = 0; j < 3; j++) acc[i][j] = _mm512_dpbf16_ps(acc[i][j], left, right[j]);
        }
    }
    for (int j = 0; j < 3; j++) {
        int64_t column = panel * PANEL + j * LANES;
        if (column >= a->columns) break;
        __mmask16 mask = (__mmask16)((1u << LEAST(a->columns - column, LANES)) - 1);
        __m512 bias = a->bias ? widened(a->bias + column, mask) : _mm512_setzero_ps();
        for (int i = 0; i < rows; i++) {
            int64_t to = (row + i) * a->y_row + column;
            __m512 sum = _mm512_add_ps(acc[i][j], bias);
            if (a->y_is_fp32) _mm512_mask_storeu_ps((float *)a->y + to, mask, sum);
            else _mm256_mask_storeu_epi16((uint16_t *)a->y + to, mask, (__m256i)_mm512_cvtneps_pbh(sum));
        }
    }
}

static void rows_of_panel(const Linear *a, int64_t start, int64_t stop, int64_t panel, const uint16_t *w,
                          const char *next) {
    int64_t bytes = 0;
    if (next) bytes = PANEL * a->depth * 2 / ((stop - start + ROWS - 1) / ROWS) / 64 * 64 + 64;
    for (int64_t row = start; row < stop; row += ROWS, next += bytes)
        switch (LEAST(stop - row, ROWS)) {
#define CASE(n) case n: part(a, row, panel, w, next, bytes, n); break;
            CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8)
        }
}

/* A panel of a weight that is not held in panels. */
static const uint16_t *made(const Linear *a, int64_t panel, uint16_t *room) {
    int64_t first = panel * PANEL, columns = LEAST(a->columns - first, PANEL);
    if (columns < PANEL) memset(room, 0, PANEL * a->depth * 2);
    for (int64_t k = 0; k < a->depth; k += 2) {
        const uint16_t *even = a->w + k * a->w_row + first, *odd = even + a->w_row;
        uint16_t *to = room + k * PANEL;
        for (int64_t j = 0; j < columns; j++) { to[2 * j] = even[j]; to[2 * j + 1] = odd[j]; }
    }
    return room;
}

/* Each thread has some panels, or some rows where there are few panels. */
static void share(const Linear *a, int64_t number) {
    int64_t panels = (a->columns + PANEL - 1) / PANEL, n = a->threads, size = PANEL * a->depth;
    int64_t from = 0, to = panels, top = 0, bottom = a->rows;
    if (panels >= 2 * n) {
        from = panels * number / n, to = panels * (number + 1) / n;
    } else {
        int64_t groups = (a->rows + ROWS - 1) / ROWS;
        top = groups * number / n * ROWS, bottom = LEAST(groups * (number + 1) / n * ROWS, a->rows);
    }
    static _Thread_local uint16_t *room;
    static _Thread_local int64_t held;
    if (a->is_turned && held < size) {
        free(room);
        if (posix_memalign((void **)&room, 64, size * 2)) abort();
        held = size;
    }
    int64_t run = a->is_turned ? bottom - top : RUN; /* a panel is made once for all rows */
    for (int64_t start = top; start < bottom; start += run)
        for (int64_t panel = from; panel < to; panel++) {
            const uint16_t *w = a->is_turned ? made(a, panel, room) : a->w + panel * size;
            const char *next = !a->is_turned && panel + 1 < to ? (const char *)(w + size) : NULL;
            rows_of_panel(a, start, LEAST(start + run, bottom), panel, w, next);
        }
}

void multiply(const Linear *a) {
#pragma omp parallel for num_threads(a->threads) schedule(static)
    for (int32_t number = 0; number < a->threads; number++) share(a, number);
}
