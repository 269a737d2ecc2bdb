/* The small steps of a decoder on a CPU, forward and backward: norms with the addition before them, rotations, gates,
log-probs and draws. Each reads and writes its rows once.

All arithmetic is fp32, whatever is given, and each sum has one order. Rows are contiguous unless a stride is given. */

#include "vectors.h"

/* Few numbers are done sooner than threads are woken. */
#define EACH_ROW(row, rows, size, ...)                                           \
    TEAMWORK((rows) * (size) > 8192 ? threads : 1,                               \
             STATIC_ROWS for (int64_t row = 0; row < (rows); row++) __VA_ARGS__)

/* 16 values, zeros after the last one. */
INLINE vec take(const void *from, int64_t at, int64_t left, int is_bf16) {
    float values[LANES] = {0};
    if (left >= LANES) widen(values, from, at, LANES, is_bf16, 1.0f);
    else widen(values, from, at, left, is_bf16, 1.0f);
    return load(values);
}

INLINE void put(void *to, int64_t at, vec v, int64_t left, int is_bf16) {
    float values[LANES];
    store(values, v);
    if (left >= LANES) narrow(to, at, values, LANES, is_bf16, 1.0f);
    else narrow(to, at, values, left, is_bf16, 1.0f);
}

/* Calls a row's function with a dtype that the compiler knows. */
#define OF_DTYPE(call, ...) \
    if (is_bf16) call(__VA_ARGS__, 1); else call(__VA_ARGS__, 0)

/* --- sums = x + y, out = sums / sqrt(mean(sums^2) + eps) * weight --- */

INLINE void normed_row(const float *x, const void *y, const float *weight, float *sums, void *out, float *scale,
                       float eps, int64_t row, int64_t size, int is_bf16) {
    int64_t at = row * size;
    vec squares = same(0);
    for (int64_t i = 0; i < size; i += LANES) {
        vec v = take(x, at + i, size - i, 0);
        if (y) {
            v += take(y, at + i, size - i, is_bf16);
            put(sums, at + i, v, size - i, 0);
        }
        squares += v * v;
    }
    float by = 1.0f / sqrtf(sum(squares) / (float)size + eps);
    if (scale) scale[row] = by;
    for (int64_t i = 0; i < size; i += LANES) {
        vec v = take(y ? sums : x, at + i, size - i, 0);
        put(out, at + i, v * by * take(weight, i, size - i, 0), size - i, is_bf16);
    }
}

/* y: null for none; sums may be x; scale: [rows], or null. */
void normed(const float *x, const void *y, const float *weight, float *sums, void *out, float *scale, float eps,
            int64_t rows, int64_t size, int32_t is_bf16, int32_t threads) {
    EACH_ROW(row, rows, size, {
        OF_DTYPE(normed_row, x, y, weight, sums, out, scale, eps, row, size);
    });
}

INLINE void normed_row_backward(const float *x, const float *weight, const float *scale, const float *of_sums,
                                const void *of_out, float *of_x, void *of_y, int64_t row, int64_t size, int is_bf16) {
    int64_t at = row * size;
    vec along = same(0);
    for (int64_t i = 0; i < size; i += LANES)
        along += take(of_out, at + i, size - i, is_bf16) * take(weight, i, size - i, 0) * take(x, at + i, size - i, 0);
    float by = scale[row], slope = sum(along) * (by * by * by / (float)size);
    for (int64_t i = 0; i < size; i += LANES) {
        vec v = take(of_out, at + i, size - i, is_bf16) * take(weight, i, size - i, 0) * by;
        v -= take(x, at + i, size - i, 0) * slope;
        if (of_sums) v += take(of_sums, at + i, size - i, 0);
        put(of_x, at + i, v, size - i, 0);
        if (of_y) put(of_y, at + i, v, size - i, is_bf16);
    }
}

/* x: the sums that were normed; of_sums: their gradient from elsewhere, or null; of_y: null where none was added. */
void normed_backward(const float *x, const float *weight, const float *scale, const float *of_sums, const void *of_out,
                     float *of_x, void *of_y, int64_t rows, int64_t size, int32_t is_bf16, int32_t threads) {
    EACH_ROW(row, rows, size, {
        OF_DTYPE(normed_row_backward, x, weight, scale, of_sums, of_out, of_x, of_y, row, size);
    });
}

/* --- heads, normed where a weight is given, then turned: (first half, second half) -> (-second, first) by sine, whose
sign is part of the table --- */

typedef struct {
    const void *x; /* [tokens, heads, size] */
    const void *grad;
    const float *weight, *cos, *sin; /* [heads, size] or null, [tokens, size] */
    float *scale;                    /* [tokens, heads] or null */
    void *out;
    int64_t x_row, grad_row, tokens, heads, size;
    float eps;
    int32_t is_bf16, threads;
} Turn;

INLINE void turned_values(const float *from, const float *cos, const float *sin, float sign, int64_t size, float *to) {
    int64_t half = size / 2;
    for (int64_t i = 0; i < half; i++) to[i] = from[i] * cos[i] + from[i + half] * (sign * sin[i]);
    for (int64_t i = half; i < size; i++) to[i] = from[i] * cos[i] + from[i - half] * (sign * sin[i]);
}

INLINE float product_sum(const float *a, const float *b, int64_t size) {
    vec found = same(0);
    for (int64_t i = 0; i < size; i += LANES) found += take(a, i, size - i, 0) * take(b, i, size - i, 0);
    return sum(found);
}

INLINE void turned_token(const Turn *a, int64_t token, int is_bf16) {
    float x[a->size], found[a->size];
    for (int64_t head = 0; head < a->heads; head++) {
        widen(x, a->x, token * a->x_row + head * a->size, a->size, is_bf16, 1.0f);
        if (a->weight) {
            float by = 1.0f / sqrtf(product_sum(x, x, a->size) / (float)a->size + a->eps);
            if (a->scale) a->scale[token * a->heads + head] = by;
            for (int64_t i = 0; i < a->size; i++) x[i] *= by * a->weight[head * a->size + i];
        }
        turned_values(x, a->cos + token * a->size, a->sin + token * a->size, 1.0f, a->size, found);
        narrow(a->out, (token * a->heads + head) * a->size, found, a->size, is_bf16, 1.0f);
    }
}

INLINE void turned_token_backward(const Turn *a, int64_t token, int is_bf16) {
    float grad[a->size], x[a->size], found[a->size];
    for (int64_t head = 0; head < a->heads; head++) {
        widen(grad, a->grad, token * a->grad_row + head * a->size, a->size, is_bf16, 1.0f);
        turned_values(grad, a->cos + token * a->size, a->sin + token * a->size, -1.0f, a->size, found);
        if (a->weight) {
            widen(x, a->x, token * a->x_row + head * a->size, a->size, is_bf16, 1.0f);
            for (int64_t i = 0; i < a->size; i++) found[i] *= a->weight[head * a->size + i];
            float by = a->scale[token * a->heads + head];
            float slope = product_sum(found, x, a->size) * (by * by * by / (float)a->size);
            for (int64_t i = 0; i < a->size; i++) found[i] = found[i] * by - x[i] * slope;
        }
        narrow(a->out, (token * a->heads + head) * a->size, found, a->size, is_bf16, 1.0f);
    }
}

void turned(const Turn *a) {
    int32_t is_bf16 = a->is_bf16, threads = a->threads;
    EACH_ROW(token, a->tokens, a->heads * a->size, {
        OF_DTYPE(turned_token, a, token);
    });
}

void turned_backward(const Turn *a) {
    int32_t is_bf16 = a->is_bf16, threads = a->threads;
    EACH_ROW(token, a->tokens, a->heads * a->size, {
        OF_DTYPE(turned_token_backward, a, token);
    });
}

/* --- silu(gate) * up, of gate and up side by side --- */

INLINE vec sigmoid(vec x) { return 1.0f / (1.0f + power_of_e(-larger(x, same(-87.0f)))); }

INLINE void gated_row(const void *both, void *out, int64_t row, int64_t size, int is_bf16) {
    for (int64_t i = 0; i < size; i += LANES) {
        vec gate = take(both, 2 * row * size + i, size - i, is_bf16);
        vec up = take(both, (2 * row + 1) * size + i, size - i, is_bf16);
        put(out, row * size + i, gate * sigmoid(gate) * up, size - i, is_bf16);
    }
}

/* size: of the result. */
void gated(const void *both, void *out, int64_t rows, int64_t size, int32_t is_bf16, int32_t threads) {
    EACH_ROW(row, rows, size, {
        OF_DTYPE(gated_row, both, out, row, size);
    });
}

INLINE void gated_row_backward(const void *both, const void *grad, void *of_both, int64_t row, int64_t size,
                               int is_bf16) {
    for (int64_t i = 0; i < size; i += LANES) {
        int64_t gates = 2 * row * size + i, ups = gates + size;
        vec gate = take(both, gates, size - i, is_bf16), up = take(both, ups, size - i, is_bf16);
        vec given = take(grad, row * size + i, size - i, is_bf16), share = sigmoid(gate);
        put(of_both, gates, given * up * share * (1.0f + gate * (1.0f - share)), size - i, is_bf16);
        put(of_both, ups, given * gate * share, size - i, is_bf16);
    }
}

void gated_backward(const void *both, const void *grad, void *of_both, int64_t rows, int64_t size, int32_t is_bf16,
                    int32_t threads) {
    EACH_ROW(row, rows, size, {
        OF_DTYPE(gated_row_backward, both, grad, of_both, row, size);
    });
}

/* --- distributions over the columns of fp32 logits --- */

#define PART 1024 /* columns whose exponentials are added in fp32; parts are added in double precision */

/* 16 logits, those after the last one impossible. */
INLINE vec logits_at(const float *from, int64_t left) {
    if (left >= LANES) return load(from);
    float values[LANES];
    for (int64_t i = 0; i < LANES; i++) values[i] = i < left ? from[i] : -INFINITY;
    return load(values);
}

static float top_of(const float *logits, int64_t columns) {
    vec top = same(-INFINITY);
    for (int64_t i = 0; i < columns; i += LANES) top = larger(top, logits_at(logits + i, columns - i));
    return largest(top);
}

/* Sum of e^(logit - top); `ends`: the sum up to the end of each part, or null; `along`: with each term times
(logit - top), or null. */
INLINE double total_of(const float *logits, int64_t columns, float top, double *ends, double *along) {
    double total = 0, product = 0;
    for (int64_t part = 0; part * PART < columns; part++) {
        vec mass = same(0), products = same(0);
        for (int64_t i = part * PART; i < LEAST(columns, (part + 1) * PART); i += LANES) {
            vec below = logits_at(logits + i, columns - i) - top, e = power_of_e(below);
            mass += e;
            if (along) products += e * larger(below, same(-100.0f)); /* of no mass: 0 */
        }
        total += sum(mass);
        if (along) product += sum(products);
        if (ends) ends[part] = total;
    }
    if (along) *along = product;
    return total;
}

INLINE float logprob_of(float logit, float top, double total) { return logit - top - (float)log(total); }

/* entropies: or null; is_sloped: each row becomes its log-prob's gradient, negated. */
void scored(float *logits, int64_t row_size, const int64_t *targets, float *logprobs, float *entropies,
            int32_t is_sloped, int64_t rows, int64_t columns, int32_t threads) {
    EACH_ROW(row, rows, columns, {
        float *mine = logits + row * row_size, top = top_of(mine, columns);
        double along, total = total_of(mine, columns, top, NULL, entropies ? &along : NULL);
        logprobs[row] = logprob_of(mine[targets[row]], top, total);
        if (entropies) entropies[row] = (float)(log(total) - along / total);
        if (is_sloped) {
            float by = (float)(1.0 / total);
            for (int64_t i = 0; i < columns; i += LANES)
                put(mine, i, power_of_e(logits_at(mine + i, columns - i) - top) * by, columns - i, 0);
            mine[targets[row]] -= 1.0f;
        }
    });
}

/* The first token up to which there is more mass than `below`; it has mass itself. */
static int64_t token_at(const float *logits, int64_t columns, float top, const double *ends, double below) {
    int64_t found = columns - 1;
    for (int64_t part = 0; part * PART < columns; part++) {
        if (!(ends[part] > below)) continue;
        double mass = part ? ends[part - 1] : 0;
        for (int64_t i = part * PART; i < LEAST(columns, (part + 1) * PART); i += LANES) {
            vec e = power_of_e(logits_at(logits + i, columns - i) - top);
            for (int lane = 0; lane < LANES; lane++) {
                if (!(e[lane] > 0)) continue;
                mass += e[lane], found = i + lane;
                if (mass > below) return found;
            }
        }
        return found; /* rounded otherwise than the part's sum */
    }
    while (found > 0 && !(logits[found] - top > -87.0f)) found--;
    return found;
}

/* A token of each row by its share of all mass, [0, 1); below 0: the most probable one. */
void drawn(const float *logits, int64_t row_size, const double *shares, int64_t *tokens, float *logprobs, int64_t rows,
           int64_t columns, int32_t threads) {
    EACH_ROW(row, rows, columns, {
        const float *mine = logits + row * row_size;
        float top = top_of(mine, columns);
        double ends[(columns + PART - 1) / PART], total = total_of(mine, columns, top, ends, NULL);
        int64_t token = 0;
        if (shares[row] < 0) while (token < columns - 1 && mine[token] != top) token++;
        else token = token_at(mine, columns, top, ends, shares[row] * total);
        tokens[row] = token;
        logprobs[row] = logprob_of(mine[token], top, total);
    });
}
