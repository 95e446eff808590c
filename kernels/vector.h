// Sixteen floats at a time, for every machine: GCC and Clang lower these vector types to AVX-512, AVX2 or NEON.
// Elements of memory (float, bfloat16, half) are converted to fp32 on load and rounded to nearest even on store.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <type_traits>

#if defined(__AVX512F__) || defined(__F16C__)
#include <immintrin.h>
#endif

#define INLINE inline __attribute__((always_inline))

constexpr int LANES = 16;

typedef float V __attribute__((vector_size(64)));
typedef int32_t VI __attribute__((vector_size(64)));
typedef uint32_t VU __attribute__((vector_size(64)));
typedef float V_unaligned __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint16_t H_unaligned __attribute__((vector_size(32), aligned(2), may_alias));
typedef int8_t B_unaligned __attribute__((vector_size(16), aligned(1), may_alias));

INLINE V splat(float x) { return V{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
INLINE V zero() { return V{}; }

INLINE V bits_to_float(VU x) { V y; memcpy(&y, &x, sizeof y); return y; }
INLINE VU float_to_bits(V x) { VU y; memcpy(&y, &x, sizeof y); return y; }

INLINE V maximum(V a, V b) { return a > b ? a : b; }

INLINE float reduce_add(V x) {
    V a = x + __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
    a += __builtin_shufflevector(a, a, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
    a += __builtin_shufflevector(a, a, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
    return a[0] + a[1];
}

INLINE float reduce_max(V x) {
    V a = maximum(x, __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
    a = maximum(a, __builtin_shufflevector(a, a, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
    a = maximum(a, __builtin_shufflevector(a, a, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
    return a[0] > a[1] ? a[0] : a[1];
}

// e^x to about one unit in the last place; exactly 0 below -87 (minus infinity included).
INLINE V exponential(V x) {
    const V magic = splat(12582912.0f);
    V y = x > splat(88.0f) ? splat(88.0f) : x;
    y = y < splat(-87.0f) ? splat(-87.0f) : y;
    V shifted = y * splat(1.44269504f) + magic;
    V n = shifted - magic;
    V r = y - n * splat(0.693145752f) - n * splat(1.42860677e-6f);
    V p = splat(1.38888889e-3f);
    p = p * r + splat(8.33333333e-3f);
    p = p * r + splat(4.16666667e-2f);
    p = p * r + splat(1.66666667e-1f);
    p = p * r + splat(0.5f);
    p = p * r + splat(1.0f);
    p = p * r + splat(1.0f);
    VU exponent = (float_to_bits(shifted) - float_to_bits(magic)) << 23;
    V result = bits_to_float(float_to_bits(p) + exponent);
    return x < splat(-87.0f) ? zero() : result;
}

INLINE V hyperbolic_tangent(V x) {
    V positive = splat(1.0f) - splat(2.0f) / (exponential(x + x) + splat(1.0f));
    // The difference above cancels near 0, where the series is exact.
    V square = x * x;
    V small = x - x * square * (splat(0.333333333f) - square * splat(0.133333333f));
    return square < splat(0.0025f) ? small : positive;
}

// One element type of memory: `item` is what an array holds.
struct Float32 {
    typedef float item;
    static INLINE V load(const item* p) { return *reinterpret_cast<const V_unaligned*>(p); }
    static INLINE void store(item* p, V x) { *reinterpret_cast<V_unaligned*>(p) = x; }
    static INLINE float get(item x) { return x; }
    static INLINE item put(float x) { return x; }
};

struct BFloat16 {
    typedef uint16_t item;
    static INLINE V load(const item* p) {
        return bits_to_float(__builtin_convertvector(*reinterpret_cast<const H_unaligned*>(p), VU) << 16);
    }
    static INLINE void store(item* p, V x) {
        VU u = float_to_bits(x);
        VU rounded = (u + 0x7FFF + ((u >> 16) & 1)) >> 16;
        rounded = x == x ? rounded : (u >> 16) | 0x40;
        typedef uint16_t H __attribute__((vector_size(32)));
        *reinterpret_cast<H_unaligned*>(p) = __builtin_convertvector(rounded, H);
    }
    static INLINE float get(item x) {
        uint32_t u = uint32_t(x) << 16;
        float y;
        memcpy(&y, &u, 4);
        return y;
    }
    static INLINE item put(float x) {
        uint32_t u;
        memcpy(&u, &x, 4);
        return x == x ? (u + 0x7FFF + ((u >> 16) & 1)) >> 16 : (u >> 16) | 0x40;
    }
};

struct Float16 {
    typedef uint16_t item;
#if defined(__aarch64__)
    typedef __fp16 Half;
#elif !defined(__F16C__)
    typedef _Float16 Half;
#endif
#if defined(__AVX512F__)
    static INLINE V load(const item* p) {
        return reinterpret_cast<V>(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
    }
    static INLINE void store(item* p, V x) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(reinterpret_cast<__m512>(x), 0));
    }
#else
    static INLINE V load(const item* p) {
        V y;
        for (int i = 0; i < LANES; i++) y[i] = get(p[i]);
        return y;
    }
    static INLINE void store(item* p, V x) {
        for (int i = 0; i < LANES; i++) p[i] = put(x[i]);
    }
#endif
    static INLINE float get(item x) {
#if defined(__F16C__)
        return _cvtsh_ss(x);
#else
        Half h;
        memcpy(&h, &x, 2);
        return float(h);
#endif
    }
    static INLINE item put(float x) {
#if defined(__F16C__)
        return _cvtss_sh(x, 0);
#else
        Half h = static_cast<Half>(x);
        item y;
        memcpy(&y, &h, 2);
        return y;
#endif
    }
};

struct Int8 {
    typedef int8_t item;
    static INLINE V load(const item* p) {
#if defined(__AVX512F__)
        // GCC 12 lowers the conversion below to scalar code.
        __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
        return reinterpret_cast<V>(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)));
#else
        typedef int16_t S __attribute__((vector_size(32)));
        S wide = __builtin_convertvector(*reinterpret_cast<const B_unaligned*>(p), S);
        return __builtin_convertvector(__builtin_convertvector(wide, VI), V);
#endif
    }
    static INLINE float get(item x) { return x; }
};

// The first n < LANES elements, zeros after them; reads nothing past the n-th.
template <class E>
INLINE V load_part(const typename E::item* p, int n) {
    typename E::item buffer[LANES] = {};
    memcpy(buffer, p, n * sizeof *p);
    return E::load(buffer);
}

template <class E>
INLINE V load_upto(const typename E::item* p, int64_t n) {
    return n >= LANES ? E::load(p) : load_part<E>(p, int(n));
}

template <class E>
INLINE void store_upto(typename E::item* p, V x, int64_t n) {
    if (n >= LANES) return E::store(p, x);
    typename E::item buffer[LANES];
    E::store(buffer, x);
    memcpy(p, buffer, n * sizeof *p);
}

// 16 x 16 transpose: four rounds of a perfect shuffle.
INLINE void transpose(V x[LANES]) {
    V y[LANES];
#pragma GCC unroll 2
    for (int round = 0; round < 2; round++) {
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) {
            y[2 * i] = __builtin_shufflevector(x[i], x[i + 8], 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
            y[2 * i + 1] =
                __builtin_shufflevector(x[i], x[i + 8], 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
        }
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) {
            x[2 * i] = __builtin_shufflevector(y[i], y[i + 8], 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
            x[2 * i + 1] =
                __builtin_shufflevector(y[i], y[i + 8], 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
        }
    }
}

// Calls f with an element type: 0 float, 1 bfloat16, 2 half (kernels/native.py: DTYPES).
template <class F>
INLINE void with_dtype(int dtype, F f) {
    if (dtype == 0) f(Float32{});
    else if (dtype == 1) f(BFloat16{});
    else f(Float16{});
}

// Uninitialised floats on a cache line, owned by the calling thread, reused by its next call.
struct Scratch {
    float* data = nullptr;
    size_t capacity = 0;
    float* reserve(size_t count) {
        if (count > capacity) {
            free(data);
            capacity = (count + 1023) / 1024 * 1024;
            data = static_cast<float*>(aligned_alloc(64, capacity * sizeof(float)));
        }
        return data;
    }
    ~Scratch() { free(data); }
};
