/* y = x W' + x2 W2 on processors with AVX512: of fp32 numbers, or of BF16 numbers by products of pairs, summed in fp32.

Every sum has one order, so a row has the same bits whatever rows are multiplied beside it. W is read in panels of 48
columns of the result, `[N / 48, K, 48]` words, the last one filled up with zeros: as it is held, or as it is made. A
word is an fp32 number or two BF16 numbers of one row of W. */

#include <immintrin.h>

#include "vectors.h"

#define ROWS 8
#define PANEL 48
#define RUN 256 /* rows of x that stay in the cache while panels pass */

enum { IN_PANELS, TURNED, SAVED }; /* how W lies; turned: `[K, N]`; saved: `[N, K]` */

typedef struct {
    const char *x, *w, *bias; /* bias: or null */
    char *x2;                 /* given, or written as by2 * x FIRST' */
    const char *w2, *first;   /* w2: `[depth2, N]`; first: `[depth2, K]`, or null */
    char *y;
    int64_t x_row, y_row, w_row, x2_row, w2_row, first_row; /* elements from one row to the next */
    int64_t rows, columns, depth, depth2; /* depth2: 0 for no second product */
    float by, by2;            /* by: of y's sums */
    int32_t layout, is_bf16, y_is_fp32, threads; /* y: else as x */
} Linear;

typedef struct {
    const uint32_t *w; /* words of its columns, which lie `step` from one depth to the next */
    int64_t step, start, stop;
} Panel;

#define SIZE(is_bf16) ((is_bf16) ? 2 : 4) /* bytes of a number */
#define WORDS(n, is_bf16) ((is_bf16) ? ((n) + 1) / 2 : (n))

INLINE __m512 multiplied(__m512 sum, __m512i a, __m512i b, int is_bf16) {
#ifdef __AVX512BF16__
    if (is_bf16) return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
#endif
    return _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), sum);
}

INLINE __m512 numbers(const char *from, __mmask16 mask, int is_bf16) {
    if (!is_bf16) return _mm512_maskz_loadu_ps(mask, from);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from)), 16));
}

INLINE void write(char *to, __mmask16 mask, __m512 v, int is_bf16) {
#ifdef __AVX512BF16__
    if (is_bf16) _mm256_mask_storeu_epi16(to, mask, (__m256i)_mm512_cvtneps_pbh(v));
    else
#endif
        _mm512_mask_storeu_ps(to, mask, v);
}

/* Adds the products of a word of each row, of which `size` bytes are numbers, and a word of each column. */
INLINE void add_word(__m512 acc[ROWS][3], const char *x, int64_t x_row, size_t size, const uint32_t *w, int rows,
                     int vectors, int is_bf16) {
    __m512i right[3];
    for (int j = 0; j < vectors; j++) right[j] = _mm512_loadu_si512(w + j * LANES);
    for (int i = 0; i < rows; i++) {
        int32_t word = 0;
        memcpy(&word, x + i * x_row, size);
        __m512i left = _mm512_set1_epi32(word);
        for (int j = 0; j < vectors; j++) acc[i][j] = multiplied(acc[i][j], left, right[j], is_bf16);
    }
}

/* `rows` rows of one panel, of which so many vectors are there; meanwhile `bytes` of what is read next come into the
cache. */
INLINE void part(const Linear *a, int64_t row, int64_t column, const Panel *p, const Panel *p2, const char *next,
                 int64_t bytes, int rows, int vectors, int is_bf16) {
    __m512 acc[ROWS][3];
    int64_t size = SIZE(is_bf16), x_row = a->x_row * size, x2_row = a->x2_row * size, step = bytes / MOST(1, p->stop) + 1;
    const char *x = a->x + row * x_row, *x2 = a->x2 + row * x2_row, *end = next + bytes;
    const uint32_t *w = p->w, *w2 = p2->w + p2->start * PANEL;
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < vectors; j++) acc[i][j] = _mm512_setzero_ps();
    for (int64_t k = 0; k < p->stop; k++, w += p->step, next += step) {
        if (next < end) __builtin_prefetch(next, 0, 2);
        add_word(acc, x + 4 * k, x_row, 4, w, rows, vectors, is_bf16);
    }
    int64_t whole = LEAST(p2->stop, a->depth2 * size / 4);
    for (int64_t k = p2->start; k < whole; k++, w2 += PANEL)
        add_word(acc, x2 + 4 * k, x2_row, 4, w2, rows, vectors, is_bf16);
    if (whole < p2->stop) add_word(acc, x2 + 4 * whole, x2_row, 2, w2, rows, vectors, is_bf16);
    for (int j = 0; j < vectors; j++, column += LANES) {
        if (column >= a->columns) break;
        __mmask16 mask = (__mmask16)((1u << LEAST(a->columns - column, LANES)) - 1);
        __m512 bias = a->bias ? numbers(a->bias + column * size, mask, is_bf16) : _mm512_setzero_ps();
        int narrows = is_bf16 && !a->y_is_fp32;
        for (int i = 0; i < rows; i++) {
            __m512 sum = _mm512_fmadd_ps(acc[i][j], _mm512_set1_ps(a->by), bias);
            write(a->y + ((row + i) * a->y_row + column) * SIZE(narrows), mask, sum, narrows);
        }
    }
}

static void rows_of_panel(const Linear *a, int64_t start, int64_t stop, int64_t column, const Panel *p,
                          const Panel *p2, const char *next) {
    int64_t bytes = 0, vectors = (LEAST(a->columns - column, PANEL) + LANES - 1) / LANES;
    if (next) bytes = PANEL * 4 * p->stop / ((stop - start + ROWS - 1) / ROWS) / 64 * 64 + 64;
    for (int64_t row = start; row < stop; row += ROWS, next += bytes) {
        int64_t rows = LEAST(stop - row, ROWS), wide = rows < ROWS ? 3 : vectors;
        switch (rows + ROWS * (3 - wide) + 32 * !!a->is_bf16) {
#define CASE(n, rows, vectors)                                                             \
    case n: part(a, row, column, p, p2, next, bytes, rows, vectors, 0); break;             \
    case n + 32: part(a, row, column, p, p2, next, bytes, rows, vectors, 1); break;
            CASE(1, 1, 3) CASE(2, 2, 3) CASE(3, 3, 3) CASE(4, 4, 3) CASE(5, 5, 3) CASE(6, 6, 3) CASE(7, 7, 3)
            CASE(8, 8, 3) CASE(16, 8, 2) CASE(24, 8, 1)
        }
    }
}

/* A panel of a weight `[depth, N]`; zeros beyond its end. */
static const uint32_t *made(const char *w, int64_t w_row, int64_t depth, int64_t columns, int is_bf16, uint32_t *room) {
    if (columns < PANEL) memset(room, 0, PANEL * 4 * WORDS(depth, is_bf16));
    if (!is_bf16) {
        for (int64_t k = 0; k < depth; k++) memcpy(room + k * PANEL, w + 4 * k * w_row, 4 * columns);
        return room;
    }
    for (int64_t k = 0; k < depth; k += 2) {
        const uint16_t *even = (const uint16_t *)w + k * w_row, *odd = even + w_row;
        uint32_t *to = room + k / 2 * PANEL;
        if (k + 1 < depth)
            for (int64_t j = 0; j < columns; j++) to[j] = even[j] | (uint32_t)odd[j] << 16;
        else
            for (int64_t j = 0; j < columns; j++) to[j] = even[j];
    }
    return room;
}

/* 16 columns of a panel, of a weight `[N, depth]`, of which `columns` are there. */
INLINE void turned(const char *w, int64_t w_row, int64_t depth, int64_t columns, int is_bf16, uint32_t *to) {
    int64_t size = SIZE(is_bf16), words = depth * size / 4;
    for (int64_t k = 0; k < words; k += LANES) {
        __mmask16 mask = words - k < LANES ? (1u << (words - k)) - 1 : 0xffff;
        __m512i a[LANES], b[LANES];
        for (int i = 0; i < LANES; i++) {
            const char *from = w + LEAST(i, columns - 1) * w_row * size + 4 * k;
            a[i] = _mm512_maskz_loadu_epi32(i < columns ? mask : 0, from);
            __builtin_prefetch(from + 256, 0, 2);
        }
        for (int i = 0; i < LANES; i += 2) {
            b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
            b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
        }
        for (int i = 0; i < LANES; i += 4)
            for (int j = 0; j < 2; j++) {
                a[i + 2 * j] = _mm512_unpacklo_epi64(b[i + j], b[i + j + 2]);
                a[i + 2 * j + 1] = _mm512_unpackhi_epi64(b[i + j], b[i + j + 2]);
            }
        for (int j = 0; j < 4; j++) {
            __m512i even = _mm512_shuffle_i32x4(a[j], a[j + 4], 0x88), odd = _mm512_shuffle_i32x4(a[j], a[j + 4], 0xdd);
            __m512i e = _mm512_shuffle_i32x4(a[j + 8], a[j + 12], 0x88), o = _mm512_shuffle_i32x4(a[j + 8], a[j + 12], 0xdd);
            b[j] = _mm512_shuffle_i32x4(even, e, 0x88), b[j + 8] = _mm512_shuffle_i32x4(even, e, 0xdd);
            b[j + 4] = _mm512_shuffle_i32x4(odd, o, 0x88), b[j + 12] = _mm512_shuffle_i32x4(odd, o, 0xdd);
        }
        for (int i = 0; i < LEAST(words - k, LANES); i++) _mm512_storeu_si512(to + (k + i) * PANEL, b[i]);
    }
}

/* The panel at a column of W, for so many rows of the result. */
static Panel found(const Linear *a, int64_t column, int64_t rows, uint32_t *room) {
    int64_t columns = LEAST(a->columns - column, PANEL), size = SIZE(a->is_bf16), depth = WORDS(a->depth, a->is_bf16);
    const char *at = a->w + column * size;
    if (a->layout == IN_PANELS) return (Panel){(const uint32_t *)a->w + column * depth, PANEL, 0, depth};
    if (a->layout == TURNED) {
        if (!a->is_bf16 && columns == PANEL && rows <= 2 * ROWS) return (Panel){(const uint32_t *)at, a->w_row, 0, depth};
        return (Panel){made(at, a->w_row, a->depth, columns, a->is_bf16, room), PANEL, 0, depth};
    }
    for (int64_t j = 0; j < PANEL; j += LANES)
        turned(a->w + (column + LEAST(j, columns - 1)) * a->w_row * size, a->w_row, a->depth, MOST(0, columns - j),
               a->is_bf16, room + j);
    return (Panel){room, PANEL, 0, depth};
}

/* The panel at a column of W2, without the zeros before and after its numbers: of several matrices in one, each of which
has its own columns. */
static Panel found2(const Linear *a, int64_t column, uint32_t *room) {
    Panel p = {NULL, PANEL, 0, WORDS(a->depth2, a->is_bf16)};
    if (!a->depth2) return p;
    p.w = made(a->w2 + column * SIZE(a->is_bf16), a->w2_row, a->depth2, LEAST(a->columns - column, PANEL), a->is_bf16, room);
    for (uint32_t any = 0; p.stop > 0; p.stop--) {
        for (int64_t j = 0; j < PANEL; j++) any |= p.w[(p.stop - 1) * PANEL + j];
        if (any) break;
    }
    for (uint32_t any = 0; p.start < p.stop; p.start++) {
        for (int64_t j = 0; j < PANEL; j++) any |= p.w[p.start * PANEL + j];
        if (any) break;
    }
    return p;
}

/* Each thread has some panels, or some rows where there are few panels. */
static void share(const Linear *a, int64_t number, int64_t n) {
    int64_t panels = (a->columns + PANEL - 1) / PANEL, size = PANEL * WORDS(a->depth, a->is_bf16);
    int64_t from = 0, to = panels, top = 0, bottom = a->rows;
    if (panels >= 2 * n) {
        from = panels * number / n, to = panels * (number + 1) / n;
    } else {
        int64_t groups = (a->rows + ROWS - 1) / ROWS;
        top = groups * number / n * ROWS, bottom = LEAST(groups * (number + 1) / n * ROWS, a->rows);
    }
    if (top >= bottom) return;
    static _Thread_local uint32_t *room;
    static _Thread_local int64_t held;
    int64_t first = a->layout == IN_PANELS ? 0 : size, needed = first + PANEL * (a->depth2 + 1);
    if (held < needed) {
        free(room);
        if (posix_memalign((void **)&room, 64, needed * 4)) abort();
        held = needed;
    }
    int64_t run = a->layout == IN_PANELS ? RUN : bottom - top; /* a panel is made once for all rows */
    for (int64_t start = top; start < bottom; start += run)
        for (int64_t panel = from; panel < to; panel++) {
            int64_t column = panel * PANEL;
            Panel p = found(a, column, bottom - top, room), p2 = found2(a, column, room + first);
            const char *next = a->layout == IN_PANELS && panel + 1 < to ? (const char *)(p.w + size) : NULL;
            rows_of_panel(a, start, LEAST(start + run, bottom), column, &p, &p2, next);
        }
}

int has_bf16(void) {
#ifdef __AVX512BF16__
    return 1;
#else
    return 0;
#endif
}

void multiply(const Linear *a) {
    Linear first = {.x = a->x, .w = a->first, .y = a->x2, .x_row = a->x_row, .y_row = a->x2_row, .w_row = a->first_row,
                    .rows = a->rows, .columns = a->depth2, .depth = a->depth, .by = a->by2, .layout = SAVED,
                    .is_bf16 = a->is_bf16};
    TEAMWORK(a->threads, {
        int number = omp_get_thread_num(), n = omp_get_num_threads();
        if (a->first) {
            share(&first, number, n);
            busy -= now();
            _Pragma("omp barrier")
            busy += now();
        }
        share(a, number, n);
    });
}
