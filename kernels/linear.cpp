// y[t, n] = sum_k x[t, k] w[n, k] + b[n] for a few rows t, bound by reading w once. fp32 accumulation.
// Weights: float, bfloat16 or half (of x's type), or int8 with an fp32 scale per (row, group).
#include "skinny.h"

namespace {

thread_local Scratch activations;

template <class E, class W, bool Scaled>
void run(const void* x, const void* w, const float* scale, const void* bias, void* y, int64_t tokens, int64_t outputs,
         int64_t width, int64_t span, int threads) {
    typedef typename E::item item;
    float* values = activations.reserve(size_t(tokens * width) + LANES);
    const item* source = static_cast<const item*>(x);
    for (int64_t i = 0; i < tokens * width; i += LANES)
        Float32::store(values + i, load_upto<E>(source + i, tokens * width - i));
    const int64_t blocks = (outputs + BLOCK_ROWS - 1) / BLOCK_ROWS;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int64_t block = 0; block < blocks; block++) {
        const int64_t first = block * BLOCK_ROWS;
        const int64_t last = first + BLOCK_ROWS < outputs ? first + BLOCK_ROWS : outputs;
        skinny<E, W, Scaled>(values, static_cast<const typename W::item*>(w), scale, static_cast<const item*>(bias),
                             static_cast<item*>(y), outputs, tokens, width, span, first, last);
    }
}

}  // namespace

// x [tokens, width], w [outputs, width], bias [outputs] or null, y [tokens, outputs]: contiguous, one dtype.
extern "C" void treadle_linear(int dtype, const void* x, const void* w, const void* bias, void* y, int64_t tokens,
                               int64_t outputs, int64_t width, int threads) {
    with_dtype(dtype, [&](auto e) {
        typedef decltype(e) E;
        run<E, E, false>(x, w, nullptr, bias, y, tokens, outputs, width, width, threads);
    });
}

// As above with w int8 and scale [outputs, width / group].
extern "C" void treadle_linear_int8(int dtype, const void* x, const void* w, const void* scale, const void* bias,
                                    void* y, int64_t tokens, int64_t outputs, int64_t width, int64_t group,
                                    int threads) {
    with_dtype(dtype, [&](auto e) {
        typedef decltype(e) E;
        run<E, Int8, true>(x, w, static_cast<const float*>(scale), bias, y, tokens, outputs, width, group, threads);
    });
}

// out [rows, width] = w * scale, rounded to dtype.
extern "C" void treadle_dequantize_int8(int dtype, const void* w, const void* scale, void* out, int64_t rows,
                                        int64_t width, int64_t group, int threads) {
    with_dtype(dtype, [&](auto e) {
        typedef decltype(e) E;
        const int64_t groups = width / group;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
        for (int64_t n = 0; n < rows; n++) {
            const int8_t* source = static_cast<const int8_t*>(w) + n * width;
            typename E::item* target = static_cast<typename E::item*>(out) + n * width;
            for (int64_t g = 0; g < groups; g++) {
                const V s = splat(static_cast<const float*>(scale)[n * groups + g]);
                for (int64_t k = g * group; k < (g + 1) * group; k += LANES) {
                    const int64_t left = (g + 1) * group - k;
                    store_upto<E>(target + k, load_upto<Int8>(source + k, left) * s, left);
                }
            }
        }
    });
}
