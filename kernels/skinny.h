// y[t, n] = sum_k x[t, k] w[n, k] + b[n] for a few rows t, bound by reading w once. fp32 accumulation.
// Weights: float, bfloat16 or half, or int8 with an fp32 scale per (row, group). x is fp32.
#pragma once

#include "vector.h"

namespace {

constexpr int64_t BLOCK_ROWS = 32;
constexpr int64_t PREFETCH_BYTES = 2048;

// R weight rows times T rows of x. `groups` spans of `span` channels, each with one scale per row (Scaled).
template <class W, bool Scaled, int R, int T>
INLINE void tile(const float* x, int64_t x_stride, const typename W::item* w, const float* scale, int64_t width,
                 int64_t span, float out[R][T]) {
    // Every loop over R or T is unrolled, so that the sums stay in registers.
    V sum[R][T];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int t = 0; t < T; t++) sum[r][t] = zero();
    const int64_t groups = width / span;
    for (int64_t g = 0; g < groups; g++) {
        const int64_t end = (g + 1) * span;
        V s[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) s[r] = Scaled ? splat(scale[r * groups + g]) : splat(1.0f);
        int64_t k = g * span;
        for (; k + LANES <= end; k += LANES) {
            V v[R];
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) v[r] = Scaled ? W::load(w + r * width + k) * s[r] : W::load(w + r * width + k);
#pragma GCC unroll 8
            for (int t = 0; t < T; t++) {
                const V a = Float32::load(x + t * x_stride + k);
#pragma GCC unroll 8
                for (int r = 0; r < R; r++) sum[r][t] += v[r] * a;
            }
        }
        if (k < end) {
            V v[R];
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) v[r] = load_part<W>(w + r * width + k, int(end - k)) * s[r];
#pragma GCC unroll 8
            for (int t = 0; t < T; t++) {
                const V a = load_part<Float32>(x + t * x_stride + k, int(end - k));
#pragma GCC unroll 8
                for (int r = 0; r < R; r++) sum[r][t] += v[r] * a;
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int t = 0; t < T; t++) out[r][t] = reduce_add(sum[r][t]);
}

template <class E, class W, bool Scaled, int R, int T>
void rows(const float* x, const typename W::item* w, const float* scale, const typename E::item* bias,
          typename E::item* y, int64_t y_stride, int64_t width, int64_t span, int64_t first, int64_t last) {
    const int64_t groups = width / span;
    int64_t n = first;
    for (; n + R <= last; n += R) {
        float out[R][T];
        const char* ahead = reinterpret_cast<const char*>(w + (n + R) * width) + PREFETCH_BYTES;
        for (int64_t byte = 0; byte < R * width * int64_t(sizeof *w); byte += 64) __builtin_prefetch(ahead + byte);
        tile<W, Scaled, R, T>(x, width, w + n * width, scale + n * groups, width, span, out);
        for (int r = 0; r < R; r++) {
            const float b = bias ? E::get(bias[n + r]) : 0.0f;
            for (int t = 0; t < T; t++) y[t * y_stride + n + r] = E::put(out[r][t] + b);
        }
    }
    for (; n < last; n++) {
        float out[1][T];
        tile<W, Scaled, 1, T>(x, width, w + n * width, scale + n * groups, width, span, out);
        const float b = bias ? E::get(bias[n]) : 0.0f;
        for (int t = 0; t < T; t++) y[t * y_stride + n] = E::put(out[0][t] + b);
    }
}

// At most 8 rows of x at once: more accumulators than that do not fit the registers.
template <class E, class W, bool Scaled>
void skinny(const float* x, const typename W::item* w, const float* scale, const typename E::item* bias,
            typename E::item* y, int64_t y_stride, int64_t tokens, int64_t width, int64_t span, int64_t first,
            int64_t last) {
    while (tokens > 0) {
        int64_t step = tokens >= 8 ? 8 : tokens;
#define CASE(R, T) \
    case T: rows<E, W, Scaled, R, T>(x, w, scale, bias, y, y_stride, width, span, first, last); break;
        switch (step) {
            CASE(4, 1)
            CASE(4, 2)
            CASE(4, 3)
            CASE(4, 4)
            CASE(4, 5)
            CASE(3, 6)
            CASE(3, 7)
            CASE(3, 8)
        }
#undef CASE
        x += step * width;
        y += step * y_stride;
        tokens -= step;
    }
}

}  // namespace
