// The delta rule, token by token. Value channels do not mix: a unit of work is a few of them of one head of one
// sequence, whose part of the state stays in the first-level cache from its first token to its last. A token makes one
// pass over it: the update by the token before is added while this one's decay and the two products with its key and
// its query are taken. Operations and their order are the same however a prompt is cut.
#include <vector>

#include "blocks.h"
#include "vector.h"

namespace {

constexpr int WIDTH = 2;  // vectors of value channels in a unit
constexpr int64_t CHANNELS = WIDTH * LANES;
constexpr int64_t PARALLEL_ITEMS = 1 << 14;  // of state, from which on threads pay

thread_local Scratch scratch;

INLINE int64_t padded(int64_t n) { return (n + LANES - 1) / LANES * LANES; }

struct Problem {
    const void *q, *k, *v;
    const float *g, *beta;
    void* out;
    int64_t q_stride, k_stride, v_stride, g_stride, beta_stride;
    int64_t heads, k_heads, k_dim, v_dim;
    float scale;
    bool by_channel, l2norm;
    Blocks blocks;
};

struct Unit {
    int32_t sequence, head, channel;
};

// fp32 channels of a row, times `scale` and, if `unit`, brought to length 1; zeros behind them.
template <class E>
INLINE void load_row(const typename E::item* x, int64_t dim, float scale, bool unit, float* y) {
    V square = zero();
    for (int64_t d = 0; d < dim; d += LANES) {
        const V a = load_upto<E>(x + d, dim - d);
        square += a * a;
        Float32::store(y + d, a);
    }
    if (unit) scale /= std::sqrt(reduce_add(square) + 1e-6f);
    if (scale == 1.0f) return;
    for (int64_t d = 0; d < dim; d += LANES) Float32::store(y + d, Float32::load(y + d) * splat(scale));
}

INLINE float dot(const float* a, const float* b, int64_t dim) {
    V sum = zero();
    for (int64_t d = 0; d < dim; d += LANES) sum += Float32::load(a + d) * Float32::load(b + d);
    return reduce_add(sum);
}

template <class E, bool BY_CHANNEL>
void run_unit(const Problem& p, const Unit& unit) {
    typedef typename E::item item;
    const int64_t dim = p.k_dim, wide = padded(dim), width = p.v_dim - unit.channel, k_head = unit.head / (p.heads / p.k_heads);
    const int64_t first = p.blocks.first(unit.sequence), tokens = p.blocks.tokens(unit.sequence);
    float* memory = p.blocks.floats(unit.sequence) + int64_t(unit.head) * dim * p.v_dim + unit.channel;
    float* state = scratch.reserve(dim * CHANNELS + 4 * wide);
    float *q = state + dim * CHANNELS, *decay = q + wide, *key = decay + wide, *last = key + wide;
    if (p.blocks.fresh(unit.sequence)) {
        std::memset(state, 0, dim * CHANNELS * sizeof(float));
    } else if (width >= CHANNELS) {
        for (int64_t d = 0; d < dim; d++)
#pragma GCC unroll 4
            for (int c = 0; c < WIDTH; c++)
                Float32::store(state + d * CHANNELS + c * LANES, Float32::load(memory + d * p.v_dim + c * LANES));
    } else {
        for (int64_t d = 0; d < dim; d++)
            for (int c = 0; c < WIDTH; c++) {
                const int64_t left = width - c * LANES;
                Float32::store(state + d * CHANNELS + c * LANES,
                               left > 0 ? load_upto<Float32>(memory + d * p.v_dim + c * LANES, left) : zero());
            }
    }
    std::memset(last, 0, wide * sizeof(float));
    V delta[WIDTH];
    for (int c = 0; c < WIDTH; c++) delta[c] = zero();
    for (int64_t t = first; t < first + tokens; t++) {
        load_row<E>(static_cast<const item*>(p.q) + t * p.q_stride + k_head * dim, dim, p.scale, p.l2norm, q);
        load_row<E>(static_cast<const item*>(p.k) + t * p.k_stride + k_head * dim, dim, 1.0f, p.l2norm, key);
        const float* g = p.g + t * p.g_stride + unit.head * (BY_CHANNEL ? dim : 1);
        if (BY_CHANNEL)
            for (int64_t d = 0; d < dim; d += LANES)
                Float32::store(decay + d, exponential(load_upto<Float32>(g + d, dim - d)));
        const V whole = splat(BY_CHANNEL ? 0.0f : std::exp(*g));
        V by_key[WIDTH], by_query[WIDTH];
#pragma GCC unroll 4
        for (int c = 0; c < WIDTH; c++) by_key[c] = by_query[c] = zero();
        for (int64_t d = 0; d < dim; d++) {
            const V before = splat(last[d]), factor = BY_CHANNEL ? splat(decay[d]) : whole;
            const V kd = splat(key[d]), qd = splat(q[d]);
#pragma GCC unroll 4
            for (int c = 0; c < WIDTH; c++) {
                float* place = state + d * CHANNELS + c * LANES;
                V s = Float32::load(place) + before * delta[c];
                s *= factor;
                Float32::store(place, s);
                by_key[c] += s * kd;
                by_query[c] += s * qd;
            }
        }
        const V beta = splat(p.beta[t * p.beta_stride + unit.head]), both = splat(dot(q, key, wide));
        const item* value = static_cast<const item*>(p.v) + t * p.v_stride + unit.head * p.v_dim + unit.channel;
        item* result = static_cast<item*>(p.out) + (t * p.heads + unit.head) * p.v_dim + unit.channel;
        for (int c = 0; c < WIDTH; c++) {
            const int64_t left = width - c * LANES;
            if (left <= 0) break;
            delta[c] = (load_upto<E>(value + c * LANES, left) - by_key[c]) * beta;
            store_upto<E>(result + c * LANES, by_query[c] + both * delta[c], left);
        }
        float* swap = last;
        last = key;
        key = swap;
    }
    for (int64_t d = 0; d < dim; d++) {
        const V before = splat(last[d]);
        for (int c = 0; c < WIDTH; c++) {
            const int64_t left = width - c * LANES;
            if (left > 0)
                store_upto<Float32>(memory + d * p.v_dim + c * LANES,
                                    Float32::load(state + d * CHANNELS + c * LANES) + before * delta[c], left);
        }
    }
}

template <class E>
void run(const Problem& p, int64_t sequences, int64_t rows, int threads) {
    std::vector<Unit> units;
    for (int64_t s = 0; s < sequences; s++) {
        if (p.blocks.tokens(s) <= 0) continue;
        for (int64_t h = 0; h < p.heads; h++)
            for (int64_t c = 0; c < p.v_dim; c += CHANNELS) units.push_back({int32_t(s), int32_t(h), int32_t(c)});
    }
    clear_dead_rows(p.blocks, static_cast<typename E::item*>(p.out), sequences, rows, p.heads * p.v_dim);
    const int64_t count = int64_t(units.size());
#pragma omp parallel for schedule(dynamic) num_threads(threads) \
    if (threads > 1 && count > 1 && count * p.k_dim * CHANNELS > PARALLEL_ITEMS)
    for (int64_t i = 0; i < count; i++) {
        if (p.by_channel) run_unit<E, true>(p, units[i]);
        else run_unit<E, false>(p, units[i]);
    }
}

}  // namespace

// q and k [rows, k_heads, k_dim], v and out [rows, heads, v_dim], g [rows, heads] or, `by_channel`, [rows, heads,
// k_dim], beta [rows, heads]; row strides in items, what is inside a row is contiguous, out is contiguous.
extern "C" void treadle_delta_rule(int dtype, const void* q, int64_t q_stride, const void* k, int64_t k_stride,
                                   const void* v, int64_t v_stride, const float* g, int64_t g_stride,
                                   const float* beta, int64_t beta_stride, void* out, int64_t rows, int64_t heads,
                                   int64_t k_heads, int64_t k_dim, int64_t v_dim, float scale, int by_channel,
                                   int l2norm, void* memory, int64_t row_bytes, const int32_t* blocks,
                                   const int64_t* offset, const int32_t* q_starts, const int64_t* positions,
                                   const int32_t* kv_lens, int64_t sequences, int threads) {
    const Problem p{q, k, v, g, beta, out, q_stride, k_stride, v_stride, g_stride, beta_stride, heads, k_heads, k_dim,
                    v_dim, scale, by_channel != 0, l2norm != 0,
                    {static_cast<char*>(memory), row_bytes, blocks, offset, q_starts, positions, kv_lens}};
    with_dtype(dtype, [&](auto e) { run<decltype(e)>(p, sequences, rows, threads); });
}
