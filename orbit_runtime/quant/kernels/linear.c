/* y = x W' in BF16 on processors with AVX512-BF16: products of pairs, summed in fp32.

Every sum has one order, so a row has the same bits whatever rows are multiplied beside it. W lies in panels of 48
columns of the result, `[N / 48, K / 2, 48, 2]`, the last one filled up with zeros. */

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#define ROWS 8
#define LANES 16
#define PANEL 48
#define INLINE static inline __attribute__((always_inline))
#define LEAST(a, b) ((a) < (b) ? (a) : (b))

typedef struct {
    const uint16_t *x, *packed, *bias; /* bias: BF16, or null */
    void *y;
    int64_t x_row, y_row, rows, columns, depth; /* rows of x and y lie so many elements apart */
    int32_t y_is_fp32, threads;
} Linear;

/* `rows` rows of one panel; meanwhile `bytes` of what is read next come into the cache. */
INLINE void part(const Linear *a, int64_t row, int64_t panel, const char *next, int64_t bytes, int rows) {
    __m512 acc[ROWS][3];
    const uint16_t *x = a->x + row * a->x_row, *w = a->packed + panel * PANEL * a->depth;
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
        __m512 bias = _mm512_setzero_ps();
        if (a->bias)
            bias = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, a->bias + column)), 16));
        for (int i = 0; i < rows; i++) {
            __m512 sum = _mm512_add_ps(acc[i][j], bias);
            int64_t to = (row + i) * a->y_row + column;
            if (a->y_is_fp32) _mm512_mask_storeu_ps((float *)a->y + to, mask, sum);
            else _mm256_mask_storeu_epi16((uint16_t *)a->y + to, mask, (__m256i)_mm512_cvtneps_pbh(sum));
        }
    }
}

static void block(const Linear *a, int64_t row, int64_t panel, const char *next, int64_t bytes) {
    switch (LEAST(a->rows - row, ROWS)) {
#define CASE(n) case n: part(a, row, panel, next, bytes, n); break;
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8)
    }
}

#define RUN 256 /* rows of x that stay in the cache while panels pass */

void multiply(const Linear *a) {
    int64_t panels = (a->columns + PANEL - 1) / PANEL, bytes = PANEL * a->depth * 2;
#pragma omp parallel for num_threads(a->threads) schedule(static)
    for (int64_t share = 0; share < a->threads; share++)
        for (int64_t start = 0; start < a->rows; start += RUN)
            for (int64_t panel = panels * share / a->threads, last = panels * (share + 1) / a->threads; panel < last; panel++) {
                int64_t stop = LEAST(start + RUN, a->rows), piece = bytes / ((stop - start + ROWS - 1) / ROWS) / 64 * 64 + 64;
                const char *next = (const char *)(a->packed + (panel + 1) * PANEL * a->depth);
                for (int64_t row = start; row < stop; row += ROWS, next += piece)
                    block(a, row, panel, next, panel + 1 < last ? piece : 0);
            }
}
