/* The CPU device: every operation of a V4 step on fp32 rows, invariant by construction.
 *
 * Each output element is accumulated in one fixed order that depends on nothing but the operation's own shape: never on
 * how many rows stand beside it, nor on where the prompt was cut. Rows are independent. With `round` set, results are
 * rounded once to bf16 (to nearest, ties to even) at the place where the model rounds; arithmetic stays fp32.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* A vector is a register of this processor, for compilers take wider ones to memory and back: 30 times as long. All that the
 * arithmetic knows are sixteen lanes: PARTS vectors beside one another. No bit depends on the width. */
#ifndef HR_LANES
#if defined(__AVX512F__)
#define HR_LANES 16
#elif defined(__AVX__)
#define HR_LANES 8
#else
#define HR_LANES 4
#endif
#endif
enum { LANES = HR_LANES };
enum { ROWS = LANES == 16 ? 8 : 6, WIDE = LANES == 16 ? 2 : 1 }; /* a product's tile: rows by panels, all sums in registers */
enum { PARTS = 16 / LANES };
typedef float vec __attribute__((vector_size(LANES * 4), aligned(4)));
typedef int32_t ivec __attribute__((vector_size(LANES * 4)));

enum { KV_FP32 = 0, KV_BF16 = 1, KV_FP8 = 2, INDEX_FP32 = 3, INDEX_BF16 = 4, INDEX_FP4 = 5 };
enum { KV_WIDTH = 512, PLAIN_WIDTH = 448, ROPE_WIDTH = 64, INDEX_WIDTH = 128 };

static inline uint32_t bits(float x) { uint32_t u; memcpy(&u, &x, 4); return u; }
static inline float from_bits(uint32_t u) { float x; memcpy(&x, &u, 4); return x; }
static inline uint16_t to_bf16(float x) {
    uint32_t u = bits(x);
    if ((u & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((u >> 16) | 0x40);
    return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1)) >> 16);
}
static inline float bf16_to_float(uint16_t h) { return from_bits((uint32_t)h << 16); }
static inline float rounded(float x, int round) { return round ? bf16_to_float(to_bf16(x)) : x; }
static inline vec at(const float *p) { return *(const vec *)p; }
static inline float lanes_sum(const vec *v) { /* of sixteen, in a fixed tree: lane i with i + 8, i + 4, i + 2, i + 1 */
    float t[16];
    memcpy(t, v, sizeof t);
    for (int step = 8; step; step /= 2)
        for (int i = 0; i < step; i++) t[i] += t[i + step];
    return t[0];
}
static inline float dot(const float *a, const float *b, int n) { /* four partial sums, whatever n: the order is n's alone */
    vec acc[4][PARTS] = {{{0}}}, sum[PARTS];
    int i = 0;
    for (; i + 64 <= n; i += 64)
        for (int j = 0; j < 4; j++)
            for (int v = 0; v < PARTS; v++) acc[j][v] += at(a + i + 16 * j + LANES * v) * at(b + i + 16 * j + LANES * v);
    for (; i < n; i += 16)
        for (int v = 0; v < PARTS; v++) acc[0][v] += at(a + i + LANES * v) * at(b + i + LANES * v);
    for (int v = 0; v < PARTS; v++) sum[v] = (acc[0][v] + acc[2][v]) + (acc[1][v] + acc[3][v]);
    return lanes_sum(sum);
}
static inline void store(float *y, const float *x, int cols, int round) {
    if (round)
        for (int j = 0; j < cols; j++) y[j] = rounded(x[j], 1);
    else memcpy(y, x, (size_t)cols * 4);
}

/* ---- products: y[T,N] = x[T,K] W[N,K]^T; W packed in panels of 16 outputs, [ceil(N/16)][K][16] ---- */

void hr_pack(const float *w, int64_t n, int64_t k, float *packed) {
    for (int64_t p = 0; p * 16 < n; p++)
        for (int64_t i = 0; i < k; i++)
            for (int64_t j = 0; j < 16; j++)
                packed[(p * k + i) * 16 + j] = p * 16 + j < n ? w[(p * 16 + j) * k + i] : 0.0f;
}

static inline __attribute__((always_inline)) void panels(const float *x, int64_t ldx, int rows, int64_t k, const float *w, int num,
                                                         float *y, int64_t ldy, int cols, int round) {
    vec acc[ROWS][2 * PARTS], b[2 * PARTS];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < num * PARTS; v++) acc[r][v] = (vec){0};
    for (int64_t i = 0; i < k; i++) {
        for (int v = 0; v < num * PARTS; v++) b[v] = at(w + (v / PARTS * k + i) * 16 + v % PARTS * LANES);
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < num * PARTS; v++) acc[r][v] += x[r * ldx + i] * b[v];
    }
    for (int r = 0; r < rows; r++) {
        float t[32];
        memcpy(t, acc[r], (size_t)num * 64);
        store(y + r * ldy, t, cols, round);
    }
}

void hr_linear(const float *x, int64_t t, int64_t ldx, int64_t k, const float *packed, int64_t n, float *y, int64_t ldy,
               int round) {
    for (int64_t p = 0; p < n; p += 32) {
        const float *w = packed + p * k;
        int cols = (int)(n - p < 32 ? n - p : 32), more = cols - 16;
        float *out = y + p;
        int64_t r = 0;
        for (; r + ROWS <= t; r += ROWS) {
            const float *rows = x + r * ldx;
            if (more > 0 && WIDE == 2) panels(rows, ldx, ROWS, k, w, 2, out + r * ldy, ldy, cols, round);
            else {
                panels(rows, ldx, ROWS, k, w, 1, out + r * ldy, ldy, more > 0 ? 16 : cols, round);
                if (more > 0) panels(rows, ldx, ROWS, k, w + k * 16, 1, out + r * ldy + 16, ldy, more, round);
            }
        }
        for (; r < t; r++) {
            if (more > 0) panels(x + r * ldx, ldx, 1, k, w, 2, out + r * ldy, ldy, cols, round);
            else panels(x + r * ldx, ldx, 1, k, w, 1, out + r * ldy, ldy, cols, round);
        }
    }
}

/* ---- norms and rotation ---- */

static inline float inverse_rms(const float *x, int64_t k, float eps) { return 1.0f / sqrtf(dot(x, x, (int)k) / (float)k + eps); }

void hr_rms(const float *x, int64_t rows, int64_t k, const float *weight, float eps, float *y, int round) {
    for (int64_t r = 0; r < rows; r++) {
        float s = inverse_rms(x + r * k, k, eps);
        for (int64_t i = 0; i < k; i++) {
            float v = x[r * k + i] * s;
            y[r * k + i] = rounded(weight ? v * weight[i] : v, round);
        }
    }
}

/* Rotates the last 64 of each of `heads` vectors of `width` a token, in place; cos_sin [positions][2][32]; sign -1 inverts. */
void hr_rope(float *x, int64_t t, int64_t heads, int64_t width, const int64_t *positions, const float *cos_sin, float sign,
             int round) {
    for (int64_t r = 0; r < t; r++) {
        if (positions[r] < 0) continue;
        const float *cs = cos_sin + positions[r] * 64;
        for (int64_t h = 0; h < heads; h++) {
            float *v = x + (r * heads + h) * width + width - ROPE_WIDTH;
            for (int i = 0; i < 32; i++) {
                float a = v[2 * i], b = v[2 * i + 1], c = cs[i], s = sign * cs[32 + i];
                float ac = a * c, bs = b * s, bc = b * c, as = a * s;
                v[2 * i] = rounded(ac - bs, round);
                v[2 * i + 1] = rounded(bc + as, round);
            }
        }
    }
}

/* ---- hyper-connections ---- */

static inline float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

void hr_hc_mix(const float *streams, const float *raw, int64_t t, int64_t flat, const float *scale, const float *base,
               int iterations, float eps, float norm_eps, float *pre, float *post, float *comb) {
    for (int64_t r = 0; r < t; r++) {
        float s = inverse_rms(streams + r * flat, flat, norm_eps), m[16];
        const float *mix = raw + r * 24;
        for (int i = 0; i < 4; i++) {
            pre[r * 4 + i] = sigmoid(mix[i] * s * scale[0] + base[i]) + eps;
            post[r * 4 + i] = 2.0f * sigmoid(mix[4 + i] * s * scale[1] + base[4 + i]);
        }
        for (int i = 0; i < 4; i++) {
            float top = -INFINITY, sum = 0.0f;
            for (int j = 0; j < 4; j++) {
                m[i * 4 + j] = mix[8 + i * 4 + j] * s * scale[2] + base[8 + i * 4 + j];
                top = fmaxf(top, m[i * 4 + j]);
            }
            for (int j = 0; j < 4; j++) sum += m[i * 4 + j] = expf(m[i * 4 + j] - top);
            for (int j = 0; j < 4; j++) m[i * 4 + j] = m[i * 4 + j] / sum + eps;
        }
        for (int round = 0; round < iterations; round++) {
            if (round)
                for (int i = 0; i < 4; i++) {
                    float sum = m[i * 4] + m[i * 4 + 1] + m[i * 4 + 2] + m[i * 4 + 3] + eps;
                    for (int j = 0; j < 4; j++) m[i * 4 + j] /= sum;
                }
            for (int j = 0; j < 4; j++) {
                float sum = m[j] + m[4 + j] + m[8 + j] + m[12 + j] + eps;
                for (int i = 0; i < 4; i++) m[i * 4 + j] /= sum;
            }
        }
        memcpy(comb + r * 16, m, sizeof m);
    }
}

void hr_hc_head_mix(const float *streams, const float *raw, int64_t t, int64_t flat, float scale, const float *base, float eps,
                    float norm_eps, float *pre) {
    for (int64_t r = 0; r < t; r++) {
        float s = inverse_rms(streams + r * flat, flat, norm_eps);
        for (int i = 0; i < 4; i++) pre[r * 4 + i] = sigmoid(raw[r * 4 + i] * s * scale + base[i]) + eps;
    }
}

void hr_hc_in(const float *streams, const float *pre, int64_t t, int64_t d, float *y, int round) {
    for (int64_t r = 0; r < t; r++) {
        const float *x = streams + r * 4 * d, *a = pre + r * 4;
        for (int64_t i = 0; i < d; i++)
            y[r * d + i] = rounded(a[0] * x[i] + a[1] * x[d + i] + a[2] * x[2 * d + i] + a[3] * x[3 * d + i], round);
    }
}

void hr_hc_out(const float *y, const float *streams, const float *post, const float *comb, int64_t t, int64_t d, float *out,
               int round) {
    for (int64_t r = 0; r < t; r++) {
        const float *x = streams + r * 4 * d, *c = comb + r * 16;
        for (int k = 0; k < 4; k++)
            for (int64_t i = 0; i < d; i++)
                out[(r * 4 + k) * d + i] = rounded(post[r * 4 + k] * y[r * d + i] + c[k] * x[i] + c[4 + k] * x[d + i] +
                                                       c[8 + k] * x[2 * d + i] + c[12 + k] * x[3 * d + i], round);
    }
}

/* ---- compressor: softmax over candidate rows, per channel; a row is kv[c] | score[c], address 0 means absent ---- */

void hr_pool(const int64_t *rows, int64_t n, int candidates, int overlap, int d, int c, float *out) {
    for (int64_t e = 0; e < n; e++) {
        const int64_t *row = rows + e * candidates;
        for (int ch = 0; ch < d; ch++) {
            float top = -INFINITY, sum = 0.0f, value = 0.0f;
            for (int t = 0; t < candidates; t++)
                if (row[t]) {
                    const float *p = (const float *)(uintptr_t)row[t] + (overlap && 2 * t >= candidates ? d : 0) + ch;
                    top = fmaxf(top, p[c]);
                }
            for (int t = 0; t < candidates; t++)
                if (row[t]) {
                    const float *p = (const float *)(uintptr_t)row[t] + (overlap && 2 * t >= candidates ? d : 0) + ch;
                    float weight = expf(p[c] - top);
                    sum += weight;
                    value += weight * p[0];
                }
            out[e * d + ch] = value / sum;
        }
    }
}

void hr_copy_rows(const float *rows, int64_t n, int64_t width, const int64_t *addresses) {
    for (int64_t r = 0; r < n; r++)
        if (addresses[r]) memcpy((void *)(uintptr_t)addresses[r], rows + r * width, (size_t)width * 4);
}

/* ---- entry formats ---- */

static inline int ceil_log2(float x) { /* exact, from the bits; x a positive normal number */
    uint32_t u = bits(x);
    return (int)(u >> 23) - 127 + ((u & 0x7fffff) != 0);
}
static inline float exp2_int(int e) { /* 2^e for e in [-149, 127] */
    return e >= -126 ? from_bits((uint32_t)(e + 127) << 23) : from_bits(1u << (e + 149));
}
static uint8_t to_e4m3(float x) { /* nearest even; |x| <= 448 */
    if (x != x) return 0x7f;
    uint8_t sign = (uint8_t)(bits(x) >> 31 << 7);
    float a = fabsf(x);
    if (a < 0.015625f) return sign | (uint8_t)rintf(a * 512.0f); /* subnormals: steps of 2^-9; 8 is the first normal */
    uint32_t u = bits(a);
    u += 0x7ffffu + ((u >> 20) & 1);
    return sign | (uint8_t)((u >> 20) - (120u << 3));
}
static float e4m3[256];
static const float e2m1[16] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};
__attribute__((constructor)) static void make_tables(void) {
    for (int code = 0; code < 256; code++) {
        int exponent = (code >> 3) & 15, mantissa = code & 7;
        float a = exponent ? ldexpf(1.0f + mantissa / 8.0f, exponent - 7) : ldexpf(mantissa / 8.0f, -6);
        if ((code & 127) == 127) a = NAN;
        e4m3[code] = code & 128 ? -a : a;
    }
}
static inline uint8_t to_e2m1(float x) { /* nearest, ties to the even code; |x| <= 6; zero keeps no sign */
    float a = fabsf(x);
    int code = (a > 0.25f) + (a >= 0.75f) + (a > 1.25f) + (a >= 1.75f) + (a > 2.5f) + (a >= 3.5f) + (a > 5.0f);
    return (uint8_t)(code | (code > 0 && x < 0 ? 8 : 0));
}
static inline float clamp(float x, float limit) { return x > limit ? limit : x < -limit ? -limit : x; } /* NaN stays NaN */

enum { BROKEN = 255 }; /* scale of a group that holds what is no finite number: its codes may not tell, and fp4 cannot */

static void encode_fp8(const float *v, uint8_t *data, uint8_t *scale) {
    for (int g = 0; g < 7; g++) {
        float top = 1e-4f;
        int broken = 0;
        for (int i = 0; i < 64; i++) {
            float a = fabsf(bf16_to_float(to_bf16(v[g * 64 + i])));
            top = fmaxf(top, a);
            broken |= !(a < INFINITY);
        }
        int e = ceil_log2(top / 448.0f);
        for (int i = 0; i < 64; i++)
            data[g * 64 + i] = to_e4m3(clamp(bf16_to_float(to_bf16(v[g * 64 + i])) * exp2_int(-e), 448.0f));
        scale[g] = broken ? BROKEN : (uint8_t)(e + 127);
    }
    scale[7] = 0;
    for (int i = 0; i < ROPE_WIDTH; i++) {
        uint16_t h = to_bf16(v[PLAIN_WIDTH + i]);
        memcpy(data + PLAIN_WIDTH + 2 * i, &h, 2);
    }
}
static void encode_fp4(const float *v, uint8_t *data, uint8_t *scale) {
    for (int g = 0; g < 4; g++) {
        float top = 6.0f * 0x1p-126f;
        int broken = 0;
        for (int i = 0; i < 32; i++) {
            top = fmaxf(top, fabsf(v[g * 32 + i]));
            broken |= !(fabsf(v[g * 32 + i]) < INFINITY);
        }
        int e = ceil_log2(top / 6.0f);
        float inverse = exp2_int(-e); /* e is at least -126, and below 126: both powers are normal */
        uint8_t code[32];
        for (int i = 0; i < 32; i++) code[i] = to_e2m1(clamp(v[g * 32 + i] * inverse, 6.0f));
        for (int i = 0; i < 16; i++) data[g * 16 + i] = (uint8_t)(code[2 * i] | code[2 * i + 1] << 4);
        scale[g] = broken ? BROKEN : (uint8_t)(e + 127);
    }
}
static const int DATA[6] = {2048, 1024, 576, 512, 256, 64}, SCALE[6] = {0, 0, 8, 0, 0, 4}, WIDTH[6] = {512, 512, 512, 128, 128, 128};

static void encode(int format, const float *v, uint8_t *data, uint8_t *scale) {
    if (format == KV_FP8) encode_fp8(v, data, scale);
    else if (format == INDEX_FP4) encode_fp4(v, data, scale);
    else if (format == KV_FP32 || format == INDEX_FP32) memcpy(data, v, (size_t)DATA[format]);
    else for (int i = 0; i < WIDTH[format]; i++) { uint16_t h = to_bf16(v[i]); memcpy(data + 2 * i, &h, 2); }
}
static void decode(int format, const uint8_t *data, const uint8_t *scale, float *v) {
    if (format == KV_FP8) {
        for (int g = 0; g < 7; g++) {
            float s = scale[g] == BROKEN ? NAN : exp2_int(scale[g] - 127);
            for (int i = 0; i < 64; i++) v[g * 64 + i] = e4m3[data[g * 64 + i]] * s;
        }
        for (int i = 0; i < ROPE_WIDTH; i++) { uint16_t h; memcpy(&h, data + PLAIN_WIDTH + 2 * i, 2); v[PLAIN_WIDTH + i] = bf16_to_float(h); }
    } else if (format == INDEX_FP4) {
        for (int g = 0; g < 4; g++) {
            float s = scale[g] == BROKEN ? NAN : exp2_int(scale[g] - 127);
            for (int i = 0; i < 16; i++) {
                v[g * 32 + 2 * i] = e2m1[data[g * 16 + i] & 15] * s;
                v[g * 32 + 2 * i + 1] = e2m1[data[g * 16 + i] >> 4] * s;
            }
        }
    } else if (format == KV_FP32 || format == INDEX_FP32) memcpy(v, data, (size_t)DATA[format]);
    else for (int i = 0; i < WIDTH[format]; i++) { uint16_t h; memcpy(&h, data + 2 * i, 2); v[i] = bf16_to_float(h); }
}

/* A stream of one layer in a pool: pages at base + page * stride, `entries` each, data rows first, then scale rows. */
typedef struct { uint8_t *base; int64_t stride; int32_t entries, format; } view;

static inline void locate(const view *v, int64_t slot, uint8_t **data, uint8_t **scale) {
    uint8_t *page = v->base + (slot / v->entries) * v->stride;
    int64_t i = slot % v->entries;
    *data = page + i * DATA[v->format];
    *scale = page + (int64_t)v->entries * DATA[v->format] + i * SCALE[v->format];
}
void hr_insert(const view *v, const int64_t *slots, int64_t n, const float *values) {
    uint8_t *data, *scale;
    for (int64_t i = 0; i < n; i++)
        if (slots[i] >= 0) { locate(v, slots[i], &data, &scale); encode(v->format, values + i * WIDTH[v->format], data, scale); }
}
void hr_read(const view *v, const int64_t *slots, int64_t n, float *values) {
    uint8_t *data, *scale;
    for (int64_t i = 0; i < n; i++) { locate(v, slots[i], &data, &scale); decode(v->format, data, scale, values + i * WIDTH[v->format]); }
}
/* What a value becomes by being stored and read. */
void hr_round_trip(int format, const float *values, int64_t n, float *out) {
    uint8_t data[2048], scale[8];
    for (int64_t i = 0; i < n; i++) { encode(format, values + i * WIDTH[format], data, scale); decode(format, data, scale, out + i * WIDTH[format]); }
}
/* 128-point Hadamard, orthonormal, from bf16 to bf16, fp32 inside. */
void hr_hadamard(float *x, int64_t n) {
    for (int64_t r = 0; r < n; r++) {
        float *v = x + r * 128;
        for (int i = 0; i < 128; i++) v[i] = rounded(v[i], 1);
        for (int step = 1; step < 128; step *= 2)
            for (int i = 0; i < 128; i += 2 * step)
                for (int j = i; j < i + step; j++) { float a = v[j], b = v[j + step]; v[j] = a + b; v[j + step] = a - b; }
        for (int i = 0; i < 128; i++) v[i] = rounded(v[i] * 0.08838834764831845f, 1);
    }
}

/* ---- indexer: scores over the visible keys, the `topk` best, ties to the lower entry, ascending; -1 of them if a score is no
 * finite number, for a broken key must not look like one that nobody wants ---- */

static void select_top(uint64_t *a, int64_t n, int64_t k) { /* the k largest to the front; keys are distinct */
    int64_t lo = 0, hi = n - 1;
    while (lo < hi) {
        uint64_t pivot = a[lo + (hi - lo) / 2];
        int64_t i = lo, j = hi;
        while (i <= j) {
            while (a[i] > pivot) i++;
            while (a[j] < pivot) j--;
            if (i <= j) { uint64_t t = a[i]; a[i] = a[j]; a[j] = t; i++; j--; }
        }
        if (k - 1 <= j) hi = j; else if (k - 1 >= i) lo = i; else return;
    }
}
static int by_value(const void *a, const void *b) { return *(const int32_t *)a < *(const int32_t *)b ? -1 : *(const int32_t *)a > *(const int32_t *)b; }

int hr_select(const float *q, const float *w, int64_t t, int heads, const int64_t *positions, const int32_t *seq, const view *keys,
              const int32_t *history, int64_t ldh, int64_t topk, int32_t *chosen, int32_t *num_chosen) {
    float *keys_t = NULL, *scores = NULL, key[INDEX_WIDTH]; /* keys in panels of 16: [panel][channel][16] */
    uint64_t *order = NULL;
    int64_t have = 0, room = 0;
    int32_t owner = -1;
    for (int64_t r = 0; r < t; r++) {
        int32_t *out = chosen + r * topk;
        int64_t n = positions[r] < 0 ? 0 : (positions[r] + 1) / 4;
        if (n <= topk) {
            for (int64_t j = 0; j < n; j++) out[j] = (int32_t)j;
            num_chosen[r] = (int32_t)n;
            continue;
        }
        if (n > room) {
            room = (n + n / 2 + 15) / 16 * 16;
            float *d = realloc(keys_t, (size_t)room * INDEX_WIDTH * 4);
            if (d) keys_t = d;
            float *f = realloc(scores, (size_t)room * 4);
            if (f) scores = f;
            uint64_t *o = realloc(order, (size_t)room * 8);
            if (o) order = o;
            if (!d || !f || !o) { free(keys_t); free(scores); free(order); return -1; }
        }
        if (owner != seq[r]) { owner = seq[r]; have = 0; }
        for (; have < n; have++) {
            uint8_t *data, *scale;
            locate(keys, (int64_t)history[owner * ldh + have / 64] * 64 + have % 64, &data, &scale);
            decode(keys->format, data, scale, key);
            float *panel = keys_t + have / 16 * 16 * INDEX_WIDTH + have % 16;
            for (int c = 0; c < INDEX_WIDTH; c++) panel[c * 16] = key[c];
        }
        for (int64_t j = 0; j < n; j += 16) { /* lanes past `have` hold anything; they are never looked at */
            const float *panel = keys_t + j * INDEX_WIDTH;
            vec total[PARTS] = {{0}}, zero = {0};
            for (int h = 0; h < heads; h += 4) {
                vec acc[4][PARTS] = {{{0}}};
                int some = heads - h < 4 ? heads - h : 4;
                const float *qh = q + (r * heads + h) * INDEX_WIDTH;
                if (some == 4)
                    for (int c = 0; c < INDEX_WIDTH; c++)
                        for (int g = 0; g < 4; g++)
                            for (int v = 0; v < PARTS; v++) acc[g][v] += qh[g * INDEX_WIDTH + c] * at(panel + c * 16 + v * LANES);
                else
                    for (int c = 0; c < INDEX_WIDTH; c++)
                        for (int g = 0; g < some; g++)
                            for (int v = 0; v < PARTS; v++) acc[g][v] += qh[g * INDEX_WIDTH + c] * at(panel + c * 16 + v * LANES);
                for (int g = 0; g < some; g++)
                    for (int v = 0; v < PARTS; v++)
                        total[v] += w[r * heads + h + g] * (vec)(~(acc[g][v] <= zero) & (ivec)acc[g][v]); /* NaN stays NaN */
            }
            memcpy(scores + j, total, sizeof total);
        }
        int whole = 1;
        for (int64_t j = 0; j < n; j++) {
            whole &= fabsf(scores[j]) < INFINITY;
            uint32_t u = bits(scores[j] == 0.0f ? 0.0f : scores[j]);
            u = u >> 31 ? ~u : u | 0x80000000u;
            order[j] = (uint64_t)u << 32 | (0xffffffffu - (uint32_t)j);
        }
        select_top(order, n, topk);
        for (int64_t j = 0; j < topk; j++) out[j] = (int32_t)(0xffffffffu - (uint32_t)order[j]);
        qsort(out, (size_t)topk, 4, by_value);
        num_chosen[r] = whole ? (int32_t)topk : -1;
    }
    free(keys_t);
    free(scores);
    free(order);
    return 0;
}

/* ---- attention over window and compressed entries, one softmax with a sink ---- */

int hr_attend(const float *q, int64_t t, int heads, const int64_t *positions, const int32_t *seq, const view *window,
              const int32_t *window_pages, const int32_t *window_first, int64_t ldw, const view *entries, const int32_t *history,
              int64_t ldh, int ratio, const int32_t *chosen, const int32_t *num_chosen, int64_t topk, const float *sink, float *out,
              int round) {
    /* Decoded rows of the sequence at hand: raw ones by position from `low` on, compressed ones. Neighbouring tokens share
     * all but one of the first, and in c128a all but one of the second; c4a's choice is decoded for each token. */
    float *raw = NULL, *packed = NULL, *p = NULL;
    int64_t raw_room = 0, packed_room = 0, p_room = 0, low = 0, high = 0, have = 0;
    int32_t owner = -1;
    const float scale = 0.044194173824159216f; /* 512^-0.5 */
    uint8_t *data, *sc;
    for (int64_t r = 0; r < t; r++) {
        int64_t pos = positions[r];
        if (pos < 0) { memset(out + r * heads * KV_WIDTH, 0, (size_t)heads * KV_WIDTH * 4); continue; }
        int32_t s = seq[r];
        int64_t first = pos > 127 ? pos - 127 : 0, num_raw = pos - first + 1;
        int64_t extra = ratio == 4 ? num_chosen[r] : ratio ? (pos + 1) / ratio : 0;
        if (extra < 0) { /* the choice is broken, and so is what is made of it */
            for (int64_t i = 0; i < heads * KV_WIDTH; i++) out[r * heads * KV_WIDTH + i] = NAN;
            continue;
        }
        if (owner != s || first < low) { owner = s; low = high = first; have = 0; }
        if (pos + 1 - low > raw_room) { /* drop what is out of sight before asking for more */
            int64_t keep = high > first ? high - first : 0;
            if (keep) memmove(raw, raw + (first - low) * KV_WIDTH, (size_t)keep * KV_WIDTH * 4);
            low = first;
            high = first + keep;
            if (!raw_room) {
                raw_room = 512;
                raw = malloc((size_t)raw_room * KV_WIDTH * 4);
            }
        }
        if (extra > packed_room) {
            packed_room = extra + extra / 2 + 16;
            float *a = realloc(packed, (size_t)packed_room * KV_WIDTH * 4);
            if (!a) { free(raw); free(packed); free(p); return -1; }
            packed = a;
        }
        if (num_raw + extra > p_room) {
            p_room = num_raw + extra + 256;
            float *a = realloc(p, (size_t)p_room * 4);
            if (!a) { free(raw); free(packed); free(p); return -1; }
            p = a;
        }
        if (!raw) { free(packed); free(p); return -1; }
        if (high < first) high = first;
        for (; high <= pos; high++) {
            int64_t page = high / 64 - window_first[s];
            locate(window, (int64_t)window_pages[s * ldw + page] * 64 + high % 64, &data, &sc);
            decode(window->format, data, sc, raw + (high - low) * KV_WIDTH);
        }
        if (ratio == 4) have = 0;
        for (; have < extra; have++) {
            int64_t e = ratio == 4 ? chosen[r * topk + have] : have, per = entries->entries;
            locate(entries, (int64_t)history[s * ldh + e / per] * per + e % per, &data, &sc);
            decode(entries->format, data, sc, packed + have * KV_WIDTH);
        }
        const float *rows[2] = {raw + (first - low) * KV_WIDTH, packed};
        int64_t counts[2] = {num_raw, extra};
        for (int h = 0; h < heads; h++) {
            const float *qh = q + (r * heads + h) * KV_WIDTH;
            float *oh = out + (r * heads + h) * KV_WIDTH, top = sink[h], sum;
            int64_t n = 0;
            for (int list = 0; list < 2; list++)
                for (int64_t i = 0; i < counts[list]; i++, n++) {
                    p[n] = dot(qh, rows[list] + i * KV_WIDTH, KV_WIDTH) * scale;
                    top = fmaxf(top, p[n]);
                }
            sum = expf(sink[h] - top);
            for (int64_t i = 0; i < n; i++) sum += p[i] = expf(p[i] - top);
            for (int part = 0; part < KV_WIDTH; part += 8 * LANES) {
                vec acc[8] = {{0}};
                float t[8 * LANES];
                n = 0;
                for (int list = 0; list < 2; list++)
                    for (int64_t i = 0; i < counts[list]; i++, n++)
                        for (int j = 0; j < 8; j++) acc[j] += p[n] * at(rows[list] + i * KV_WIDTH + part + j * LANES);
                for (int j = 0; j < 8; j++) acc[j] /= sum;
                memcpy(t, acc, sizeof t);
                store(oh + part, t, 8 * LANES, round);
            }
        }
    }
    free(raw);
    free(packed);
    free(p);
    return 0;
}

/* ---- experts ---- */

/* Scores, choice and weights of `k` experts a token; `fixed` names them (hash layers), else score + bias, ties to the lower id. */
void hr_gate(const float *logits, int64_t t, int experts, const float *bias, const int64_t *fixed, int k, float scaling, int normalise,
             int32_t *ids, float *weights) {
    for (int64_t r = 0; r < t; r++) {
        const float *x = logits + r * experts;
        float sum = 0.0f;
        int broken = 0; /* a NaN would be no expert's largest score */
        for (int e = 0; e < experts; e++) broken |= x[e] != x[e];
        for (int c = 0; c < k; c++) {
            int best = -1;
            float best_value = -INFINITY;
            if (fixed) best = (int)fixed[r * k + c];
            else
                for (int e = 0; e < experts; e++) {
                    int taken = 0;
                    for (int d = 0; d < c; d++) taken |= ids[r * k + d] == e;
                    float v = sqrtf(x[e] > 20.0f ? x[e] : log1pf(expf(x[e]))) + bias[e];
                    if (!taken && v > best_value) { best_value = v; best = e; }
                }
            if (best < 0) best = 0; /* all NaN */
            ids[r * k + c] = best;
            weights[r * k + c] = broken ? NAN : sqrtf(x[best] > 20.0f ? x[best] : log1pf(expf(x[best])));
            sum += weights[r * k + c];
        }
        for (int c = 0; c < k; c++) weights[r * k + c] = (normalise ? weights[r * k + c] / (sum + 1e-20f) : weights[r * k + c]) * scaling;
    }
}

void hr_swiglu(const float *ab, int64_t t, int64_t f, float limit, float *out, int round) {
    for (int64_t r = 0; r < t; r++)
        for (int64_t i = 0; i < f; i++) {
            float a = ab[r * 2 * f + i] > limit ? limit : ab[r * 2 * f + i], b = clamp(ab[r * 2 * f + f + i], limit);
            out[r * f + i] = rounded(a / (1.0f + expf(-a)) * b, round);
        }
}

void hr_add_rows(float *y, int64_t d, const int64_t *rows, const float *weights, int64_t n, const float *x) {
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j < d; j++) y[rows[i] * d + j] += weights[i] * x[i * d + j];
}

void hr_round(float *x, int64_t n) { for (int64_t i = 0; i < n; i++) x[i] = rounded(x[i], 1); }
