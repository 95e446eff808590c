// Mamba-1's scan, token by token. A unit of work is some channels of one sequence; for a few tokens at a time, whose B
// and C are brought to fp32 once, every channel's row of the state passes through registers.
#include <vector>

#include "blocks.h"
#include "vector.h"

namespace {

constexpr int64_t TOKENS = 32;               // whose B and C are held in fp32
constexpr int64_t CHANNELS = 128;            // of a unit
constexpr int64_t PARALLEL_ITEMS = 1 << 13;  // of state, from which on threads pay

thread_local Scratch scratch;

INLINE int64_t padded(int64_t n) { return (n + LANES - 1) / LANES * LANES; }
INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

struct Problem {
    const void *x, *b, *c;
    const float *dt, *a, *d;
    void* out;
    int64_t x_stride, dt_stride, b_stride, c_stride, channels, size;
    Blocks blocks;
};

struct Unit {
    int32_t sequence, channel;
};

template <class E>
void run_unit(const Problem& p, const Unit& unit) {
    typedef typename E::item item;
    const int64_t size = p.size, wide = padded(size), channels = least(CHANNELS, p.channels - unit.channel);
    const int64_t first = p.blocks.first(unit.sequence), count = p.blocks.tokens(unit.sequence);
    float* memory = p.blocks.floats(unit.sequence) + int64_t(unit.channel) * size;
    bool fresh = p.blocks.fresh(unit.sequence);
    float* b = scratch.reserve(TOKENS * (2 * wide + 3 * CHANNELS));
    float *c = b + TOKENS * wide, *dt = c + TOKENS * wide, *added = dt + TOKENS * CHANNELS, *sums = added + TOKENS * CHANNELS;
    for (int64_t begin = 0; begin < count; begin += TOKENS) {
        const int64_t tokens = least(TOKENS, count - begin);
        for (int64_t t = 0; t < tokens; t++) {
            const int64_t row = first + begin + t;
            for (int64_t n = 0; n < size; n += LANES) {
                Float32::store(b + t * wide + n, load_upto<E>(static_cast<const item*>(p.b) + row * p.b_stride + n, size - n));
                Float32::store(c + t * wide + n, load_upto<E>(static_cast<const item*>(p.c) + row * p.c_stride + n, size - n));
            }
            const item* xt = static_cast<const item*>(p.x) + row * p.x_stride + unit.channel;
            const float* dtt = p.dt + row * p.dt_stride + unit.channel;
            for (int64_t i = 0; i < channels; i += LANES) {
                const V step = load_upto<Float32>(dtt + i, channels - i);
                Float32::store(dt + t * CHANNELS + i, step);
                Float32::store(added + t * CHANNELS + i, step * load_upto<E>(xt + i, channels - i));
            }
        }
        std::memset(sums, 0, tokens * CHANNELS * sizeof(float));
        for (int64_t i = 0; i < channels; i++) {
            const float* a_row = p.a + (unit.channel + i) * size;
            for (int64_t n = 0; n < size; n += LANES) {
                float* place = memory + i * size + n;
                const V a = load_upto<Float32>(a_row + n, size - n);
                V s = fresh ? zero() : load_upto<Float32>(place, size - n);
                for (int64_t t = 0; t < tokens; t++) {
                    const V decay = exponential(splat(dt[t * CHANNELS + i]) * a);
                    s = s * decay + splat(added[t * CHANNELS + i]) * Float32::load(b + t * wide + n);
                    sums[t * CHANNELS + i] += reduce_add(s * Float32::load(c + t * wide + n));
                }
                store_upto<Float32>(place, s, size - n);
            }
        }
        for (int64_t t = 0; t < tokens; t++) {
            const int64_t row = first + begin + t;
            const item* xt = static_cast<const item*>(p.x) + row * p.x_stride + unit.channel;
            item* yt = static_cast<item*>(p.out) + row * p.channels + unit.channel;
            for (int64_t i = 0; i < channels; i += LANES) {
                V y = Float32::load(sums + t * CHANNELS + i);
                if (p.d) y += load_upto<Float32>(p.d + unit.channel + i, channels - i) * load_upto<E>(xt + i, channels - i);
                store_upto<E>(yt + i, y, channels - i);
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
            for (int64_t i = 0; i < p.channels; i += CHANNELS) units.push_back({int32_t(s), int32_t(i)});
    clear_dead_rows(p.blocks, static_cast<typename E::item*>(p.out), sequences, rows, p.channels);
    const int64_t count = int64_t(units.size());
#pragma omp parallel for schedule(dynamic) num_threads(threads) \
    if (threads > 1 && count > 1 && count * CHANNELS * p.size > PARALLEL_ITEMS)
    for (int64_t i = 0; i < count; i++) run_unit<E>(p, units[i]);
}

}  // namespace

// x, dt and out [rows, channels], a [channels, size], b and c [rows, size], d [channels] or null; row strides in items,
// what is inside a row is contiguous, out is contiguous.
extern "C" void treadle_selective_scan(int dtype, const void* x, int64_t x_stride, const float* dt, int64_t dt_stride,
                                       const float* a, const void* b, int64_t b_stride, const void* c,
                                       int64_t c_stride, const float* d, void* out, int64_t rows, int64_t channels,
                                       int64_t size, void* memory, int64_t row_bytes, const int32_t* blocks,
                                       const int64_t* offset, const int32_t* q_starts, const int64_t* positions,
                                       const int32_t* kv_lens, int64_t sequences, int threads) {
    const Problem p{x, b, c, dt, a, d, out, x_stride, dt_stride, b_stride, c_stride, channels, size,
                    {static_cast<char*>(memory), row_bytes, blocks, offset, q_starts, positions, kv_lens}};
    with_dtype(dtype, [&](auto e) { run<decltype(e)>(p, sequences, rows, threads); });
}
