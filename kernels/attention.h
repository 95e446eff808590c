// What kernels of attention share: register-blocked products and the parts of a running softmax.
#pragma once

#include "vector.h"

namespace {

constexpr float MINUS_INFINITY = -INFINITY;

INLINE int64_t padded(int64_t n) { return (n + LANES - 1) / LANES * LANES; }
INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

// Minus infinity in the lanes whose key index, from `key` on, is outside [low, high).
INLINE V masked(V x, int64_t key, int64_t low, int64_t high) {
    if (key >= low && key + LANES <= high) return x;
    const VI lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const int32_t from = int32_t(most(least(low - key, LANES), 0));
    const int32_t to = int32_t(most(least(high - key, LANES), 0));
    const V outside = splat(MINUS_INFINITY);
    x = lane < from ? outside : x;
    return lane >= to ? outside : x;
}

// Factor of a running sum with maximum m once its maximum is `top`.
INLINE float shrink(float m, float top) { return m == MINUS_INFINITY ? 0.0f : expf(m - top); }

// c [R, C vectors] = a [R, depth] x b [depth, C vectors], on top of what c holds if `accumulate`.
template <int R, int C>
INLINE void product(const float* a, int64_t a_stride, const float* b, int64_t b_stride, int64_t depth, float* c,
                    int64_t c_stride, bool accumulate) {
    V sum[R][C];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int i = 0; i < C; i++) sum[r][i] = accumulate ? Float32::load(c + r * c_stride + i * LANES) : zero();
    for (int64_t k = 0; k < depth; k++) {
        V v[C];
#pragma GCC unroll 8
        for (int i = 0; i < C; i++) v[i] = Float32::load(b + k * b_stride + i * LANES);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const V w = splat(a[r * a_stride + k]);
#pragma GCC unroll 8
            for (int i = 0; i < C; i++) sum[r][i] += w * v[i];
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int i = 0; i < C; i++) Float32::store(c + r * c_stride + i * LANES, sum[r][i]);
}

}  // namespace
