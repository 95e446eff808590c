// Causal convolution over each channel. A unit of work is some channels of a run of tokens of one sequence. The first
// run reads the tail of the step before and leaves the new one: no other run touches it.
#include <vector>

#include "blocks.h"
#include "vector.h"

namespace {

constexpr int64_t CHANNELS = 256;            // of a unit
constexpr int64_t TOKENS = 128;              // of a unit
constexpr int64_t PARALLEL_ITEMS = 1 << 15;  // of the result, from which on threads pay

thread_local Scratch scratch;

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

struct Problem {
    const void *x, *weight, *bias;
    void* out;
    int64_t x_stride, channels, taps;
    bool silu;
    Blocks blocks;
};

struct Unit {
    int32_t sequence, channel;
    int64_t begin;
};

// LANES channels at `channel`, `tokens` tokens from the sequence's token `begin` on.
template <class E>
INLINE void run_lanes(const Problem& p, const Unit& unit, int64_t channel, int64_t tokens, float* buffer) {
    typedef typename E::item item;
    const int64_t tail = p.taps - 1, left = p.channels - channel, lanes = least(LANES, left);
    const int64_t first = p.blocks.first(unit.sequence) + unit.begin, count = p.blocks.tokens(unit.sequence);
    const item* x = static_cast<const item*>(p.x) + first * p.x_stride + channel;
    const item* weight = static_cast<const item*>(p.weight) + channel * p.taps;
    item* out = static_cast<item*>(p.out) + first * p.channels + channel;
    item* state = reinterpret_cast<item*>(p.blocks.bytes(unit.sequence)) + channel;
    float *taps = buffer, *before = buffer + p.taps * LANES;
    std::memset(buffer, 0, (p.taps + tail) * LANES * sizeof(float));
    for (int64_t i = 0; i < lanes; i++)
        for (int64_t j = 0; j < p.taps; j++) taps[j * LANES + i] = E::get(weight[i * p.taps + j]);
    const bool old = unit.begin == 0 && !p.blocks.fresh(unit.sequence);
    for (int64_t j = 0; j < tail; j++) {
        const int64_t t = unit.begin - tail + j;
        if (t >= 0)
            Float32::store(before + j * LANES, load_upto<E>(x - (tail - j) * p.x_stride, left));
        else if (old)
            Float32::store(before + j * LANES, load_upto<E>(state + (tail + t) * p.channels, left));
    }
    if (unit.begin == 0) {
        // The new tail: the last inputs; where the step has too few, the end of the old tail.
        for (int64_t j = 0; j < tail; j++) {
            const int64_t t = count - tail + j;
            const item* row = x + t * p.x_stride;
            for (int64_t i = 0; i < lanes; i++)
                state[j * p.channels + i] = t >= 0 ? row[i] : E::put(before[(tail + t) * LANES + i]);
        }
    }
    const V bias = p.bias ? load_upto<E>(static_cast<const item*>(p.bias) + channel, left) : zero();
    int64_t oldest = 0;  // `before` is a ring
    for (int64_t t = 0; t < tokens; t++, x += p.x_stride, out += p.channels) {
        const V now = load_upto<E>(x, left);
        V y = bias;
        for (int64_t j = 0; j < tail; j++) {
            const int64_t at = oldest + j < tail ? oldest + j : oldest + j - tail;
            y += Float32::load(taps + j * LANES) * Float32::load(before + at * LANES);
        }
        y += Float32::load(taps + tail * LANES) * now;
        if (tail) {
            Float32::store(before + oldest * LANES, now);
            oldest = oldest + 1 < tail ? oldest + 1 : 0;
        }
        if (p.silu) y = y / (splat(1.0f) + exponential(-y));
        store_upto<E>(out, y, left);
    }
}

template <class E>
void run(const Problem& p, int64_t sequences, int64_t rows, int threads) {
    std::vector<Unit> units;
    int64_t items = 0;
    for (int64_t s = 0; s < sequences; s++) {
        const int64_t count = p.blocks.tokens(s);
        items += most(count, 0) * p.channels;
        for (int64_t t = 0; t < count; t += TOKENS)
            for (int64_t c = 0; c < p.channels; c += CHANNELS) units.push_back({int32_t(s), int32_t(c), t});
    }
    clear_dead_rows(p.blocks, static_cast<typename E::item*>(p.out), sequences, rows, p.channels);
    const int64_t count = int64_t(units.size());
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1 && count > 1 && items > PARALLEL_ITEMS)
    for (int64_t u = 0; u < count; u++) {
        float* buffer = scratch.reserve(2 * p.taps * LANES);
        const int64_t end = least(units[u].channel + CHANNELS, p.channels);
        const int64_t tokens = least(TOKENS, p.blocks.tokens(units[u].sequence) - units[u].begin);
        for (int64_t c = units[u].channel; c < end; c += LANES) run_lanes<E>(p, units[u], c, tokens, buffer);
    }
}

}  // namespace

// x and out [rows, channels], weight [channels, taps], bias [channels] or null, all of one element type; the row stride
// of x in items, everything else contiguous.
extern "C" void treadle_conv1d(int dtype, const void* x, int64_t x_stride, const void* weight, const void* bias,
                               void* out, int64_t rows, int64_t channels, int64_t taps, int silu, void* memory,
                               int64_t row_bytes, const int32_t* blocks, const int64_t* offset,
                               const int32_t* q_starts, const int64_t* positions, const int32_t* kv_lens,
                               int64_t sequences, int threads) {
    const Problem p{x, weight, bias, out, x_stride, channels, taps, silu != 0,
                    {static_cast<char*>(memory), row_bytes, blocks, offset, q_starts, positions, kv_lens}};
    with_dtype(dtype, [&](auto e) { run<decltype(e)>(p, sequences, rows, threads); });
}
