/* y = x W' + x2 W2 in BF16 on processors with AVX512-BF16: products of pairs, summed in fp32.

Every sum has one order, so a row has the same bits whatever rows are multiplied beside it. W is read in panels of 48
columns of the result, `[N / 48, K / 2, 48, 2]`, the last one filled up with zeros: as it is held, or as it is made. */

#include <immintrin.h>

#include "vectors.h"

#define ROWS 8
#define PANEL 48
#define RUN 256 /* rows of x that stay in the cache while panels pass */

typedef struct {
    const uint16_t *x, *w, *bias; /* bias: BF16, or null */
    uint16_t *x2;                 /* given, or written as by * x FIRST' */
    const uint16_t *w2, *first;   /* w2: `[depth2, N]`; first: `[depth2, K]`, or null */
    void *y;
    int64_t x_row, y_row, w_row, x2_row, w2_row, first_row; /* elements from one row to the next */
    int64_t rows, columns, depth, depth2; /* depth2: 0 for no second product */
    float by;
    int32_t is_turned, y_is_fp32, threads; /* turned: `w` is `[K, N]`, else panels */
} Linear;

INLINE __m512 biases(const uint16_t *from, __mmask16 mask) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from)), 16));
}

INLINE void add_pair(__m512 acc[ROWS][3], const uint16_t *x, int64_t x_row, size_t size, const uint16_t *w, int rows) {
    __m512bh right[3];
    for (int j = 0; j < 3; j++) right[j] = (__m512bh)_mm512_loadu_si512(w + j * 2 * LANES);
    for (int i = 0; i < rows; i++) {
        int32_t pair = 0;
        memcpy(&pair, x + i * x_row, size);
        __m512bh left = (__m512bh)_mm512_set1_epi32(pair);
        for (int j = 0; j < 3; j++) acc[i][j] = _mm512_dpbf16_ps(acc[i][j], left, right[j]);
    }
}

/* `rows` rows of one panel, `w` and `w2`; meanwhile `bytes` of what is read next come into the cache. */
INLINE void part(const Linear *a, int64_t row, int64_t panel, const uint16_t *w, const uint16_t *w2, const char *next,
                 int64_t bytes, int rows) {
    __m512 acc[ROWS][3];
    const uint16_t *x = a->x + row * a->x_row, *x2 = a->x2 + row * a->x2_row;
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < 3; j++) acc[i][j] = _mm512_setzero_ps();
    int64_t step = bytes / (a->depth / 2) + 1; /* for each pair */
    const char *end = next + bytes;
    for (int64_t k = 0; k < a->depth; k += 2, w += 2 * PANEL, next += step) {
        if (next < end) __builtin_prefetch(next, 0, 2);
        add_pair(acc, x + k, a->x_row, 4, w, rows);
    }
    for (int64_t k = 0; k + 1 < a->depth2; k += 2, w2 += 2 * PANEL) add_pair(acc, x2 + k, a->x2_row, 4, w2, rows);
    if (a->depth2 % 2) add_pair(acc, x2 + a->depth2 - 1, a->x2_row, 2, w2, rows);
    for (int j = 0; j < 3; j++) {
        int64_t column = panel * PANEL + j * LANES;
        if (column >= a->columns) break;
        __mmask16 mask = (__mmask16)((1u << LEAST(a->columns - column, LANES)) - 1);
        __m512 bias = a->bias ? biases(a->bias + column, mask) : _mm512_setzero_ps();
        for (int i = 0; i < rows; i++) {
            int64_t to = (row + i) * a->y_row + column;
            __m512 sum = _mm512_add_ps(acc[i][j], bias);
            if (a->y_is_fp32) _mm512_mask_storeu_ps((float *)a->y + to, mask, sum);
            else _mm256_mask_storeu_epi16((uint16_t *)a->y + to, mask, (__m256i)_mm512_cvtneps_pbh(sum));
        }
    }
}

static void rows_of_panel(const Linear *a, int64_t start, int64_t stop, int64_t panel, const uint16_t *w,
                          const uint16_t *w2, const char *next) {
    int64_t bytes = 0;
    if (next) bytes = PANEL * a->depth * 2 / ((stop - start + ROWS - 1) / ROWS) / 64 * 64 + 64;
    for (int64_t row = start; row < stop; row += ROWS, next += bytes)
        switch (LEAST(stop - row, ROWS)) {
#define CASE(n) case n: part(a, row, panel, w, w2, next, bytes, n); break;
            CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8)
        }
}

/* A panel of a weight `[depth, N]`; zeros beyond its end. */
static const uint16_t *made(const uint16_t *w, int64_t w_row, int64_t depth, int64_t columns, uint16_t *room) {
    if (columns < PANEL || depth % 2) memset(room, 0, PANEL * (depth + depth % 2) * 2);
    for (int64_t k = 0; k < depth; k += 2) {
        const uint16_t *even = w + k * w_row, *odd = even + w_row;
        uint16_t *to = room + k * PANEL;
        if (k + 1 < depth)
            for (int64_t j = 0; j < columns; j++) { to[2 * j] = even[j]; to[2 * j + 1] = odd[j]; }
        else
            for (int64_t j = 0; j < columns; j++) to[2 * j] = even[j];
    }
    return room;
}

/* Each thread has some panels, or some rows where there are few panels. */
static void share(const Linear *a, int64_t number, int64_t n) {
    int64_t panels = (a->columns + PANEL - 1) / PANEL, size = PANEL * a->depth;
    int64_t from = 0, to = panels, top = 0, bottom = a->rows;
    if (panels >= 2 * n) {
        from = panels * number / n, to = panels * (number + 1) / n;
    } else {
        int64_t groups = (a->rows + ROWS - 1) / ROWS;
        top = groups * number / n * ROWS, bottom = LEAST(groups * (number + 1) / n * ROWS, a->rows);
    }
    static _Thread_local uint16_t *room;
    static _Thread_local int64_t held;
    int64_t first = a->is_turned ? size : 0, needed = first + PANEL * (a->depth2 + 1);
    if (held < needed) {
        free(room);
        if (posix_memalign((void **)&room, 64, needed * 2)) abort();
        held = needed;
    }
    int64_t run = a->is_turned ? bottom - top : RUN; /* a panel is made once for all rows */
    for (int64_t start = top; start < bottom; start += run)
        for (int64_t panel = from; panel < to; panel++) {
            int64_t column = panel * PANEL, columns = LEAST(a->columns - column, PANEL);
            const uint16_t *w = a->w + panel * size, *w2 = NULL;
            if (a->is_turned) w = made(a->w + column, a->w_row, a->depth, columns, room);
            if (a->depth2) w2 = made(a->w2 + column, a->w2_row, a->depth2, columns, room + first);
            const char *next = !a->is_turned && panel + 1 < to ? (const char *)(w + size) : NULL;
            rows_of_panel(a, start, LEAST(start + run, bottom), panel, w, w2, next);
        }
}

/* --- few columns: x2 = by * x FIRST' --- */

#define FEW 4 /* rows and columns that are computed together */

INLINE __m512 folded(__m512 a, __m512 b) { return _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)); }
INLINE __m512 folded_twice(__m512 a, __m512 b) {
    __m512d x = _mm512_castps_pd(a), y = _mm512_castps_pd(b);
    return _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
}
INLINE __m512 joined(__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}

/* `rows` x `columns` sums; those beyond are of the last row and column again, and are not stored. */
INLINE void few(const Linear *a, int64_t row, int64_t column, int rows, int columns) {
    __m512 acc[FEW][FEW];
    for (int i = 0; i < FEW; i++)
        for (int j = 0; j < FEW; j++) acc[i][j] = _mm512_setzero_ps();
    for (int64_t k = 0; k < a->depth; k += 2 * LANES) {
        __mmask32 mask = a->depth - k < 2 * LANES ? (1u << (a->depth - k)) - 1 : ~0u;
        __m512bh right[FEW];
        for (int j = 0; j < FEW; j++)
            right[j] = (__m512bh)_mm512_maskz_loadu_epi16(mask, a->first + (column + LEAST(j, columns - 1)) * a->first_row + k);
        for (int i = 0; i < FEW; i++) {
            const uint16_t *x = a->x + (row + LEAST(i, rows - 1)) * a->x_row + k;
            __m512bh left = (__m512bh)_mm512_maskz_loadu_epi16(mask, x);
            for (int j = 0; j < FEW; j++) acc[i][j] = _mm512_dpbf16_ps(acc[i][j], left, right[j]);
        }
    }
    __m512 of_row[FEW]; /* the 4 columns' sums, of 4 values each */
    for (int i = 0; i < FEW; i++)
        of_row[i] = folded_twice(folded(acc[i][0], acc[i][1]), folded(acc[i][2], acc[i][3]));
    __m512 sums = joined(joined(of_row[0], of_row[1]), joined(of_row[2], of_row[3]));
    uint16_t found[LANES];
    _mm256_storeu_si256((__m256i *)found, (__m256i)_mm512_cvtneps_pbh(_mm512_mul_ps(sums, _mm512_set1_ps(a->by))));
    for (int i = 0; i < rows; i++)
        memcpy(a->x2 + (row + i) * a->x2_row + column, found + i * FEW, columns * sizeof(uint16_t));
}

void multiply(const Linear *a) {
    TEAMWORK(a->threads, {
        if (a->first) {
            STATIC_ROWS for (int64_t row = 0; row < a->rows; row += FEW)
                for (int64_t column = 0; column < a->depth2; column += FEW)
                    few(a, row, column, LEAST(a->rows - row, FEW), LEAST(a->depth2 - column, FEW));
            busy -= now();
            _Pragma("omp barrier")
            busy += now();
        }
        share(a, omp_get_thread_num(), omp_get_num_threads());
    });
}
