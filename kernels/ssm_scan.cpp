// Mamba-2's scan, token by token. A unit of work is one head of one sequence; for a few tokens at a time, whose B and C
// are brought to fp32 once, every row of the state passes through registers: it is read and written once in decode.
#include <vector>

#include "blocks.h"
#include "vector.h"

namespace {

constexpr int64_t TOKENS = 32;               // whose B and C are held in fp32
constexpr int WIDTH = 8;                     // vectors of a row held in registers
constexpr int64_t PARALLEL_ITEMS = 1 << 14;  // of state, from which on threads pay

thread_local Scratch scratch;

INLINE int64_t padded(int64_t n) { return (n + LANES - 1) / LANES * LANES; }
INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

struct Problem {
    const void *x, *b, *c;
    const float *dt, *a, *d;
    void* out;
    int64_t x_stride, dt_stride, b_stride, c_stride, heads, dim, groups, size;
    Blocks blocks;
};

struct Unit {
    int32_t sequence, head;
};

// `size` <= 16 W channels of a row of the state through `tokens` tokens; adds the products with C to `sums`.
template <int W>
INLINE void row_part(float* memory, int64_t size, bool fresh, const float* decay, const float* added, int64_t stride,
                     const float* b, const float* c, int64_t wide, int64_t tokens, float* sums) {
    V s[W];
#pragma GCC unroll 8
    for (int i = 0; i < W; i++) {
        const int64_t left = size - i * LANES;
        s[i] = fresh || left <= 0 ? zero() : load_upto<Float32>(memory + i * LANES, left);
    }
    for (int64_t t = 0; t < tokens; t++) {
        const V factor = splat(decay[t]), input = splat(added[t * stride]);
        V sum = zero();
#pragma GCC unroll 8
        for (int i = 0; i < W; i++) {
            s[i] = s[i] * factor + input * Float32::load(b + t * wide + i * LANES);
            sum += s[i] * Float32::load(c + t * wide + i * LANES);
        }
        sums[t * stride] += reduce_add(sum);
    }
#pragma GCC unroll 8
    for (int i = 0; i < W; i++) {
        const int64_t left = size - i * LANES;
        if (left > 0) store_upto<Float32>(memory + i * LANES, s[i], left);
    }
}

template <class E>
void run_unit(const Problem& p, const Unit& unit) {
    typedef typename E::item item;
    const int64_t dim = p.dim, size = p.size, wide = (size + WIDTH * LANES - 1) / (WIDTH * LANES) * (WIDTH * LANES);
    const int64_t group = unit.head / (p.heads / p.groups), tall = padded(dim);
    const int64_t first = p.blocks.first(unit.sequence), count = p.blocks.tokens(unit.sequence);
    float* memory = p.blocks.floats(unit.sequence) + int64_t(unit.head) * dim * size;
    bool fresh = p.blocks.fresh(unit.sequence);
    float* b = scratch.reserve(TOKENS * (2 * wide + 2 * tall + 1));
    float *c = b + TOKENS * wide, *added = c + TOKENS * wide, *sums = added + TOKENS * tall, *decay = sums + TOKENS * tall;
    for (int64_t begin = 0; begin < count; begin += TOKENS) {
        const int64_t tokens = least(TOKENS, count - begin);
        for (int64_t t = 0; t < tokens; t++) {
            const int64_t row = first + begin + t;
            const item* bt = static_cast<const item*>(p.b) + row * p.b_stride + group * size;
            const item* ct = static_cast<const item*>(p.c) + row * p.c_stride + group * size;
            const item* xt = static_cast<const item*>(p.x) + row * p.x_stride + unit.head * dim;
            for (int64_t n = 0; n < wide; n += LANES) {
                Float32::store(b + t * wide + n, n < size ? load_upto<E>(bt + n, size - n) : zero());
                Float32::store(c + t * wide + n, n < size ? load_upto<E>(ct + n, size - n) : zero());
            }
            const float dt = p.dt[row * p.dt_stride + unit.head];
            decay[t] = std::exp(dt * p.a[unit.head]);
            for (int64_t i = 0; i < dim; i += LANES)
                Float32::store(added + t * tall + i, load_upto<E>(xt + i, dim - i) * splat(dt));
        }
        std::memset(sums, 0, tokens * tall * sizeof(float));
        for (int64_t i = 0; i < dim; i++) {
            float* row = memory + i * size;
            for (int64_t n = 0; n < size; n += WIDTH * LANES) {
                const int64_t left = size - n;
                if (left > 4 * LANES) row_part<8>(row + n, left, fresh, decay, added + i, tall, b + n, c + n, wide, tokens, sums + i);
                else if (left > LANES) row_part<4>(row + n, left, fresh, decay, added + i, tall, b + n, c + n, wide, tokens, sums + i);
                else row_part<1>(row + n, left, fresh, decay, added + i, tall, b + n, c + n, wide, tokens, sums + i);
            }
        }
        for (int64_t t = 0; t < tokens; t++) {
            const int64_t row = first + begin + t;
            const item* xt = static_cast<const item*>(p.x) + row * p.x_stride + unit.head * dim;
            item* yt = static_cast<item*>(p.out) + (row * p.heads + unit.head) * dim;
            for (int64_t i = 0; i < dim; i += LANES) {
                V y = Float32::load(sums + t * tall + i);
                if (p.d) y += splat(p.d[unit.head]) * load_upto<E>(xt + i, dim - i);
                store_upto<E>(yt + i, y, dim - i);
            }
        }
        fresh = false;
    }
}

template <class E>
void run(const Problem& p, int64_t sequences, int64_t rows, int threads) {
    std::vector<Unit> units;
    for (int64_t s = 0; s < sequences; s++)
        if (p.blocks.tokens(s) > 0)
            for (int64_t h = 0; h < p.heads; h++) units.push_back({int32_t(s), int32_t(h)});
    clear_dead_rows(p.blocks, static_cast<typename E::item*>(p.out), sequences, rows, p.heads * p.dim);
    const int64_t count = int64_t(units.size());
#pragma omp parallel for schedule(dynamic) num_threads(threads) \
    if (threads > 1 && count > 1 && count * p.dim * p.size > PARALLEL_ITEMS)
    for (int64_t i = 0; i < count; i++) run_unit<E>(p, units[i]);
}

}  // namespace

// x and out [rows, heads, dim], dt [rows, heads], a and d [heads] (d may be null), b and c [rows, groups, size]; row
// strides in items, what is inside a row is contiguous, out is contiguous.
extern "C" void treadle_ssm_scan(int dtype, const void* x, int64_t x_stride, const float* dt, int64_t dt_stride,
                                 const float* a, const void* b, int64_t b_stride, const void* c, int64_t c_stride,
                                 const float* d, void* out, int64_t rows, int64_t heads, int64_t dim, int64_t groups,
                                 int64_t size, void* memory, int64_t row_bytes, const int32_t* blocks,
                                 const int64_t* offset, const int32_t* q_starts, const int64_t* positions,
                                 const int32_t* kv_lens, int64_t sequences, int threads) {
    const Problem p{x, b, c, dt, a, d, out, x_stride, dt_stride, b_stride, c_stride, heads, dim, groups, size,
                    {static_cast<char*>(memory), row_bytes, blocks, offset, q_starts, positions, kv_lens}};
    with_dtype(dtype, [&](auto e) { run<decltype(e)>(p, sequences, rows, threads); });
}
