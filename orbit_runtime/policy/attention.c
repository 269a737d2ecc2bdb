/* Exact attention on a CPU, forward and backward, for packed rows and for cached ones.

A query's keys are read in blocks of 64, counted from the first position of its sequence, and the softmax over them is
assembled as in `chunked.py`. All arithmetic is fp32, whatever is given; each sum has one order, so a query's result has
the same bits whatever is computed beside it, packed or decoded alone.

Runs: see `policy.packed.Row`. All strides and places count elements; the last dimension is contiguous. */

#include "vectors.h"

#define BLOCK 64

typedef struct {
    int64_t first, length, prefix_first, prefix_length, before, own_first;
    int64_t next; /* the next run that sees the same prefix, or the first one that sees this run; -1: none */
} Run;

typedef struct {
    const void *data;
    int64_t token, head, size;
} Rows;

typedef struct {
    Rows q, k, v, dout;
    const Run *runs;
    const float *sinks; /* of each query head, or null */
    void *out;          /* [tokens, heads, size of v] */
    float *lse;         /* [heads, tokens]: log of each query's sum of exponentials; may be null */
    void *dq, *dk, *dv; /* contiguous */
    int64_t num_runs, tokens, heads, kv_heads, window; /* window 0: all keys */
    float scale, cap;                                  /* cap 0: none */
    int32_t is_bf16, threads;
} Attention;

INLINE vec capped(vec scores, float cap) {
    vec most = same(40.0f * cap), bounded = larger(pick(scores < most, scores, most), -most);
    vec e = power_of_e(bounded * (2.0f / cap));
    return cap * ((e - 1.0f) / (e + 1.0f));
}

#define EXCHANGE(step, low, high)                          \
    for (int i = 0; i < LANES; i++)                        \
        if (!(i & step)) {                                 \
            vec a = r[i], b = r[i | step];                 \
            r[i] = low; r[i | step] = high;                \
        }

/* [16, 16] values turned about the diagonal. */
INLINE void turn(vec *r) {
#pragma GCC unroll 16
    EXCHANGE(1, SHUFFLE(a, b, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30),
             SHUFFLE(a, b, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31))
#pragma GCC unroll 16
    EXCHANGE(2, SHUFFLE(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29),
             SHUFFLE(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31))
#pragma GCC unroll 16
    EXCHANGE(4, SHUFFLE(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27),
             SHUFFLE(a, b, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31))
#pragma GCC unroll 16
    EXCHANGE(8, SHUFFLE(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23),
             SHUFFLE(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31))
}

/* `rows` x 16 `columns` of C += A B, over `depth`; the terms of a sum are added in their order. */
INLINE void part(float *c, int64_t c_row, const float *a, int64_t a_row, int64_t a_step, const float *b, int64_t b_row,
                 int64_t depth, int adds, int rows, int columns) {
    vec acc[4][4];
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < columns; j++) acc[i][j] = adds ? load(c + i * c_row + j * LANES) : same(0);
    for (int64_t k = 0; k < depth; k++)
        for (int j = 0; j < columns; j++) {
            vec right = load(b + k * b_row + j * LANES);
            for (int i = 0; i < rows; i++) acc[i][j] += a[i * a_row + k * a_step] * right;
        }
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < columns; j++) store(c + i * c_row + j * LANES, acc[i][j]);
}

#define PART(rows, columns)                                                            \
    case rows * 8 + columns:                                                           \
        part(c + i * c_row + j, c_row, a + i * a_row, a_row, a_step, b + j, b_row, depth, adds, rows, columns); \
        break;
#define PARTS(rows) PART(rows, 1) PART(rows, 2) PART(rows, 3) PART(rows, 4)

/* C [rows, columns] (+)= A [rows, depth] B [depth, columns]; columns are whole vectors. */
static void multiply(float *c, int64_t c_row, const float *a, int64_t a_row, int64_t a_step, const float *b,
                     int64_t b_row, int64_t rows, int64_t columns, int64_t depth, int adds) {
    for (int64_t j = 0; j < columns; j += 4 * LANES)
        for (int64_t i = 0; i < rows; i += 4)
            switch (LEAST(rows - i, 4) * 8 + LEAST(columns - j, 4 * LANES) / LANES) {
                PARTS(1) PARTS(2) PARTS(3) PARTS(4)
            }
}

/* One thread's room. `q`, `dout` and results have a row per query of a tile, `kt` and `vt` a row per dimension. */
typedef struct {
    void *all;
    float *q, *dout, *scores, *weights, *out, *dq, *top, *total, *delta, *k, *v, *kt, *vt, *dk, *dv;
} Room;

typedef struct {
    int64_t run, head, start, stop; /* of queries, or of the run's own keys */
    int64_t is_last;
} Tile;

INLINE int64_t queries_of_tile(const Attention *a) { return MOST(1, 64 / (a->heads / a->kv_heads)); }

/* Kept by its thread, so that a decode step clears nothing. What pads a head's size stays zero. */
static Room *take_room(const Attention *a) {
    static _Thread_local Room room;
    static _Thread_local int64_t held[4];
    int64_t queries = queries_of_tile(a) * (a->heads / a->kv_heads), size = WHOLE(a->q.size), wide = WHOLE(a->v.size);
    int64_t asked[] = {queries, a->q.size, a->v.size, 1};
    if (!memcmp(held, asked, sizeof held)) return &room;
    int64_t sizes[] = {queries * size, queries * wide, queries * BLOCK, queries * BLOCK, queries * wide, queries * size,
                       WHOLE(queries), WHOLE(queries), WHOLE(queries), BLOCK * size, BLOCK * wide, size * BLOCK,
                       wide * BLOCK, BLOCK * size, BLOCK * wide};
    int64_t count = sizeof sizes / sizeof *sizes, all = 0;
    for (int64_t i = 0; i < count; i++) all += sizes[i];
    free(room.all);
    if (posix_memalign(&room.all, 64, all * sizeof(float))) abort();
    memset(room.all, 0, all * sizeof(float));
    float *next = room.all, **parts = &room.q;
    for (int64_t i = 0; i < count; i++) { parts[i] = next; next += sizes[i]; }
    memcpy(held, asked, sizeof held);
    return &room;
}

INLINE int64_t token_of(const Run *run, int64_t position) {
    int64_t own = position - run->prefix_length;
    return own < 0 ? run->prefix_first + position : run->own_first + own;
}

/* What is read next comes into the cache meanwhile, a row with each row. */
INLINE void fetch(const Attention *a, const Rows *rows, int64_t from) {
    int64_t width = a->is_bf16 ? 2 : 4;
    for (int64_t byte = 0; byte < rows->size * width; byte += 64)
        __builtin_prefetch((const char *)rows->data + from * width + byte, 0, 2);
}

/* Keys or values of positions `base` to `base + count` as fp32 rows, of which those that fill a vector are zero.
`fetched`: where the first row lies that is read next; -1: not known. */
static void read_keys(const Attention *a, const Rows *rows, const Run *run, int64_t head, int64_t base, int64_t count,
                      float *to, int64_t fetched) {
    int64_t row = WHOLE(rows->size);
    for (int64_t i = 0; i < WHOLE(count); i++) {
        if (fetched >= 0) fetch(a, rows, fetched + i * rows->token);
        int64_t from = token_of(run, base + i) * rows->token + head * rows->head;
        if (i < count) widen(to + i * row, rows->data, from, rows->size, a->is_bf16, 1.0f);
        else memset(to + i * row, 0, row * sizeof(float));
    }
}

/* Rows that were read, with a row per dimension. */
static void turn_keys(const float *from, int64_t row, int64_t count, float *to) {
    for (int64_t i = 0; i < WHOLE(count); i += LANES)
        for (int64_t d = 0; d < row; d += LANES) {
            vec r[LANES];
#pragma GCC unroll 16
            for (int j = 0; j < LANES; j++) r[j] = load(from + (i + j) * row + d);
            turn(r);
#pragma GCC unroll 16
            for (int j = 0; j < LANES; j++) store(to + (d + j) * BLOCK + i, r[j]);
        }
}

/* Both at once, of BF16 in whole pairs of vectors: pairs are turned before they are widened. */
static void read_turned(const Attention *a, const Rows *rows, const Run *run, int64_t head, int64_t base, int64_t count,
                        float *to, int64_t fetched) {
    for (int64_t i = 0; i < WHOLE(count); i += LANES)
        for (int64_t d = 0; d < rows->size; d += 2 * LANES) {
            vec r[LANES];
            for (int64_t j = 0; j < LANES; j++) {
                if (!d && fetched >= 0) fetch(a, rows, fetched + (i + j) * rows->token);
                int64_t from = token_of(run, base + i + j) * rows->token + head * rows->head + d;
                if (i + j < count) memcpy(r + j, (const uint16_t *)rows->data + from, sizeof *r);
                else r[j] = same(0);
            }
            turn(r);
#pragma GCC unroll 16
            for (int j = 0; j < LANES; j++) {
                store(to + (d + 2 * j) * BLOCK + i, (vec)((bits)r[j] << 16));
                store(to + (d + 2 * j + 1) * BLOCK + i, (vec)((bits)r[j] & 0xffff0000u));
            }
        }
}

/* Of each query of a tile, by token and head of its group. */
static void read_queries(const Attention *a, const Rows *rows, const Run *run, const Tile *tile, float *to, float by) {
    int64_t sharing = a->heads / a->kv_heads, row = WHOLE(rows->size);
    for (int64_t i = tile->start; i < tile->stop; i++)
        for (int64_t g = 0; g < sharing; g++, to += row)
            widen(to, rows->data, (run->first + i) * rows->token + (tile->head * sharing + g) * rows->head, rows->size,
                  a->is_bf16, by);
}

INLINE ints seen(const Attention *a, int64_t key, int64_t position) {
    const ints lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    ints after = lanes + (int32_t)LEAST(MOST(key - position, -BLOCK), BLOCK); /* 0: the query's own */
    ints visible = after <= 0;
    if (a->window) {
        int64_t oldest = position - a->window + 1 - key;
        visible &= lanes >= (int32_t)LEAST(MOST(oldest, -BLOCK), BLOCK);
    }
    return visible;
}

/* Of a tile's first query in its sequence, and of the first block of keys that it sees. */
INLINE int64_t first_position(const Run *run, const Tile *tile) {
    return run->prefix_length + run->before + tile->start;
}
INLINE int64_t first_block(const Attention *a, int64_t position) {
    return a->window ? MOST(0, position - a->window + 1) / BLOCK * BLOCK : 0;
}

static void forward_tile(const Attention *a, Room *room, const Tile *tile) {
    const Run *run = a->runs + tile->run;
    int64_t sharing = a->heads / a->kv_heads, count = (tile->stop - tile->start) * sharing;
    int64_t size = WHOLE(a->q.size), wide = WHOLE(a->v.size);
    int64_t first = first_position(run, tile), end = first + tile->stop - tile->start;
    read_queries(a, &a->q, run, tile, room->q, a->scale);
    memset(room->out, 0, count * wide * sizeof(float));
    for (int64_t x = 0; x < count; x++) {
        room->top[x] = a->sinks ? a->sinks[tile->head * sharing + x % sharing] : -INFINITY;
        room->total[x] = a->sinks ? 1.0f : 0.0f;
    }
    for (int64_t base = first_block(a, first); base < end; base += BLOCK) {
        int64_t keys = LEAST(BLOCK, end - base), lanes = WHOLE(keys);
        /* What is read next comes into the cache meanwhile: the tile's next block, or the next tile's first one. */
        const Tile *then = base + BLOCK < end || tile->is_last ? tile : tile + 1;
        int64_t next = then == tile ? LEAST(base + BLOCK, end - 1) : first_block(a, first_position(a->runs + then->run, then));
        int64_t from = token_of(a->runs + then->run, next), row;
        row = from * a->k.token + then->head * a->k.head;
        if (a->is_bf16 && a->k.size % (2 * LANES) == 0) {
            read_turned(a, &a->k, run, tile->head, base, keys, room->kt, row);
        } else {
            read_keys(a, &a->k, run, tile->head, base, keys, room->k, row);
            turn_keys(room->k, size, keys, room->kt);
        }
        row = from * a->v.token + then->head * a->v.head;
        read_keys(a, &a->v, run, tile->head, base, keys, room->v, row);
        multiply(room->scores, BLOCK, room->q, size, 1, room->kt, BLOCK, count, lanes, a->q.size, 0);
        for (int64_t x = 0; x < count; x++) {
            float *scores = room->scores + x * BLOCK, *out = room->out + x * wide;
            vec s[4] = {same(-INFINITY), same(-INFINITY), same(-INFINITY), same(-INFINITY)};
            for (int64_t i = 0; i < lanes / LANES; i++) {
                vec given = load(scores + i * LANES);
                if (a->cap) given = capped(given, a->cap);
                s[i] = pick(seen(a, base + i * LANES, first + x / sharing), given, s[i]);
            }
            float top = MOST(room->top[x], largest(larger(larger(s[0], s[1]), larger(s[2], s[3]))));
            float from = top == -INFINITY ? 0.0f : top; /* nothing seen yet */
            vec shrink = power_of_e(same(room->top[x] - from));
            for (int i = 0; i < 4; i++) s[i] = power_of_e(s[i] - from);
            for (int64_t i = 0; i < lanes / LANES; i++) store(scores + i * LANES, s[i]);
            room->total[x] = room->total[x] * shrink[0] + sum((s[0] + s[1]) + (s[2] + s[3]));
            room->top[x] = top;
            for (int64_t d = 0; d < wide; d += LANES) store(out + d, load(out + d) * shrink);
        }
        multiply(room->out, wide, room->scores, BLOCK, 1, room->v, wide, count, wide, keys, 1);
    }
    for (int64_t x = 0; x < count; x++) {
        int64_t token = run->first + tile->start + x / sharing, head = tile->head * sharing + x % sharing;
        narrow(a->out, (token * a->heads + head) * a->v.size, room->out + x * wide, a->v.size, a->is_bf16,
               1.0f / room->total[x]);
        if (a->lse) a->lse[head * a->tokens + token] = room->top[x] + logf(room->total[x]);
    }
}

/* Reads a tile's queries, gradients and results, and makes each query's sum(p * dp): it follows from the result. */
static void read_tile(const Attention *a, Room *room, const Run *run, const Tile *tile) {
    Rows out = {a->out, a->heads * a->v.size, a->v.size, a->v.size};
    int64_t sharing = a->heads / a->kv_heads, count = (tile->stop - tile->start) * sharing, wide = WHOLE(a->v.size);
    read_queries(a, &a->q, run, tile, room->q, a->scale);
    read_queries(a, &a->dout, run, tile, room->dout, 1.0f);
    read_queries(a, &out, run, tile, room->out, 1.0f);
    for (int64_t x = 0; x < count; x++) {
        const float *dout = room->dout + x * wide, *results = room->out + x * wide;
        vec delta = {0};
        for (int64_t d = 0; d < wide; d += LANES) delta += load(dout + d) * load(results + d);
        room->delta[x] = sum(delta);
    }
}

/* Weights of a tile's queries for the block of keys at `base`, and the gradients of their scores in `scores`. */
static void slopes(const Attention *a, Room *room, const Run *run, const Tile *tile, int64_t base, int64_t keys) {
    int64_t sharing = a->heads / a->kv_heads, count = (tile->stop - tile->start) * sharing, lanes = WHOLE(keys);
    int64_t first = first_position(run, tile);
    multiply(room->weights, BLOCK, room->q, WHOLE(a->q.size), 1, room->kt, BLOCK, count, lanes, a->q.size, 0);
    multiply(room->scores, BLOCK, room->dout, WHOLE(a->v.size), 1, room->vt, BLOCK, count, lanes, a->v.size, 0);
    for (int64_t x = 0; x < count; x++) {
        int64_t head = tile->head * sharing + x % sharing, token = run->first + tile->start + x / sharing;
        float lse = a->lse[head * a->tokens + token];
        for (int64_t i = 0; i < lanes; i += LANES) {
            float *at = room->weights + x * BLOCK + i, *to = room->scores + x * BLOCK + i;
            vec score = load(at), slope = same(1.0f);
            if (a->cap) {
                score = capped(score, a->cap);
                slope = 1.0f - (score / a->cap) * (score / a->cap);
            }
            vec weight = pick(seen(a, base + i, first + x / sharing), power_of_e(score - lse), same(0));
            store(at, weight);
            store(to, weight * (load(to) - room->delta[x]) * slope);
        }
    }
}

static void query_gradients(const Attention *a, Room *room, const Tile *tile) {
    const Run *run = a->runs + tile->run;
    int64_t sharing = a->heads / a->kv_heads, count = (tile->stop - tile->start) * sharing;
    int64_t size = WHOLE(a->q.size), wide = WHOLE(a->v.size);
    int64_t first = first_position(run, tile), end = first + tile->stop - tile->start;
    read_tile(a, room, run, tile);
    memset(room->dq, 0, count * size * sizeof(float));
    for (int64_t base = first_block(a, first); base < end; base += BLOCK) {
        int64_t keys = LEAST(BLOCK, end - base);
        read_keys(a, &a->k, run, tile->head, base, keys, room->k, -1);
        turn_keys(room->k, size, keys, room->kt);
        read_keys(a, &a->v, run, tile->head, base, keys, room->v, -1);
        turn_keys(room->v, wide, keys, room->vt);
        slopes(a, room, run, tile, base, keys);
        multiply(room->dq, size, room->scores, BLOCK, 1, room->k, size, count, size, keys, 1);
    }
    for (int64_t x = 0; x < count; x++) {
        int64_t token = run->first + tile->start + x / sharing, head = tile->head * sharing + x % sharing;
        narrow(a->dq, (token * a->heads + head) * a->q.size, room->dq + x * size, a->q.size, a->is_bf16, a->scale);
    }
}

/* Of the run's own keys from `start` to `stop`, at most a block: its own queries see them, and those of all runs whose
prefix it is. */
static void key_gradients(const Attention *a, Room *room, const Tile *tile) {
    const Run *owner = a->runs + tile->run;
    int64_t sharing = a->heads / a->kv_heads, keys = tile->stop - tile->start;
    int64_t base = owner->prefix_length + tile->start;
    int64_t size = WHOLE(a->q.size), wide = WHOLE(a->v.size), step = queries_of_tile(a);
    read_keys(a, &a->k, owner, tile->head, base, keys, room->k, -1);
    turn_keys(room->k, size, keys, room->kt);
    read_keys(a, &a->v, owner, tile->head, base, keys, room->v, -1);
    turn_keys(room->v, wide, keys, room->vt);
    memset(room->dk, 0, keys * size * sizeof(float));
    memset(room->dv, 0, keys * wide * sizeof(float));
    for (const Run *run = owner; run; run = run->next < 0 ? NULL : a->runs + run->next) {
        int64_t zero = run->prefix_length + run->before; /* position of the run's first query */
        int64_t start = MOST(0, base - zero), stop = run->length;
        if (a->window) stop = LEAST(stop, base + keys - 1 + a->window - zero);
        for (int64_t at = start; at < stop; at += step) {
            Tile queries = {run - a->runs, tile->head, at, LEAST(at + step, stop), 1};
            int64_t count = (queries.stop - at) * sharing;
            read_tile(a, room, run, &queries);
            slopes(a, room, run, &queries, base, keys);
            multiply(room->dv, wide, room->weights, 1, BLOCK, room->dout, wide, keys, wide, count, 1);
            multiply(room->dk, size, room->scores, 1, BLOCK, room->q, size, keys, size, count, 1);
        }
        if (owner->prefix_length) break; /* nothing but itself sees a continuation */
    }
    for (int64_t i = 0; i < keys; i++) {
        int64_t row = (owner->own_first + tile->start + i) * a->kv_heads + tile->head;
        narrow(a->dk, row * a->k.size, room->dk + i * size, a->k.size, a->is_bf16, 1.0f);
        narrow(a->dv, row * a->v.size, room->dv + i * wide, a->v.size, a->is_bf16, 1.0f);
    }
}

static void each_tile(const Attention *a, int64_t step, void (*work)(const Attention *, Room *, const Tile *)) {
    int64_t count = 0;
    for (int64_t i = 0; i < a->num_runs; i++) count += (a->runs[i].length + step - 1) / step * a->kv_heads;
    Tile *tiles = malloc(count * sizeof *tiles), *next = tiles;
    if (!tiles) abort();
    for (int64_t i = 0; i < a->num_runs; i++)
        for (int64_t head = 0; head < a->kv_heads; head++)
            for (int64_t at = 0; at < a->runs[i].length; at += step)
                *next++ = (Tile){i, head, at, LEAST(at + step, a->runs[i].length), 0};
    if (count) tiles[count - 1].is_last = 1;
    int64_t together = MOST(1, LEAST(8, count / (4 * a->threads))); /* a tile has the next one's keys fetched */
    TEAMWORK((int)MOST(1, LEAST(a->threads, count)), {
        Room *room = take_room(a);
        _Pragma("omp for schedule(dynamic, together) nowait")
        for (int64_t i = 0; i < count; i++) work(a, room, tiles + i);
    });
    free(tiles);
}

/* Writes the newest token's keys, or values, of each row to its place in a cache `[rows, heads, positions]` of vectors
that are `bytes` long: `row` is from one token's to the next. */
void keep(char *cache, const char *from, const int64_t *position, int64_t rows, int64_t heads, int64_t positions,
          int64_t bytes, int64_t row) {
    for (int64_t i = 0; i < rows; i++)
        for (int64_t head = 0; head < heads; head++)
            memcpy(cache + ((i * heads + head) * positions + position[i]) * bytes, from + i * row + head * bytes, bytes);
}

void attend(const Attention *a) { each_tile(a, queries_of_tile(a), forward_tile); }

void attend_backward(const Attention *a) {
    each_tile(a, queries_of_tile(a), query_gradients);
    each_tile(a, BLOCK, key_gradients);
}
