// A mixture of experts for a few rows each: only the experts that some row visits are read, each once for its rows.
// Rows are gathered by expert; both products accumulate in fp32 and nothing between them is rounded.
#include "skinny.h"

namespace {

thread_local Scratch gathered, middle, hidden, results, plan;

// As kernels/experts_native.py numbers them. The last two are functions of gate and up.
enum Act { SILU, GELU, GELU_TANH, QUICK_GELU, RELU, RELU2, SIGMOID, TANH, LINEAR, SWIGLU_OAI, SITU };

struct Shape {
    int act;
    bool gated;
    float limit, alpha, beta, linear_beta;
};

INLINE V minimum(V a, V b) { return a < b ? a : b; }
INLINE V sigmoid(V x) { return splat(1.0f) / (splat(1.0f) + exponential(-x)); }

INLINE V activate(int act, V x) {
    switch (act) {
        case SILU: return x * sigmoid(x);
        case GELU: {
            V y;
            for (int i = 0; i < LANES; i++) y[i] = 0.5f * x[i] * (1.0f + std::erf(x[i] * 0.70710678f));
            return y;
        }
        case GELU_TANH: {
            const V inner = splat(0.79788456f) * (x + splat(0.044715f) * x * x * x);
            return splat(0.5f) * x * (splat(1.0f) + hyperbolic_tangent(inner));
        }
        case QUICK_GELU: return x * sigmoid(splat(1.702f) * x);
        case RELU: return maximum(x, zero());
        case RELU2: return maximum(x, zero()) * maximum(x, zero());
        case SIGMOID: return sigmoid(x);
        case TANH: return hyperbolic_tangent(x);
        default: return x;
    }
}

INLINE V activate_gated(const Shape& s, V gate, V up) {
    if (s.limit > 0.0f) {
        gate = minimum(gate, splat(s.limit));
        up = maximum(minimum(up, splat(s.limit)), splat(-s.limit));
    }
    if (s.act == SWIGLU_OAI) return (up + splat(1.0f)) * (gate * sigmoid(gate * splat(s.alpha)));
    if (s.act == SITU) {
        gate = splat(s.beta) * hyperbolic_tangent(gate / splat(s.beta)) * sigmoid(gate);
        return gate * (splat(s.linear_beta) * hyperbolic_tangent(up / splat(s.linear_beta)));
    }
    return activate(s.act, gate) * up;
}

// Rows `first` .. `first + count` of the gathered pairs belong to one expert.
struct Group {
    int64_t expert, first, count;
};

// Sorts the pairs (token, choice) by expert; returns the number of groups. Ids outside 0 .. experts - 1 are left out.
int64_t group_pairs(const int32_t* ids, int64_t pairs, int64_t experts, int64_t* starts, int64_t* order, Group* groups) {
    for (int64_t e = 0; e <= experts; e++) starts[e] = 0;
    for (int64_t p = 0; p < pairs; p++)
        if (ids[p] >= 0 && ids[p] < experts) starts[ids[p] + 1]++;
    int64_t count = 0;
    for (int64_t e = 0; e < experts; e++) {
        if (starts[e + 1]) groups[count++] = Group{e, starts[e], starts[e + 1]};
        starts[e + 1] += starts[e];
    }
    for (int64_t p = 0; p < pairs; p++)
        if (ids[p] >= 0 && ids[p] < experts) order[starts[ids[p]]++] = p;
    return count;
}

// out[row, :] = x[row, :] w[expert of row]^T for all groups; x [pairs, width] and out [pairs, outputs] are fp32.
template <class W, bool Scaled>
void products(const Group* groups, int64_t num_groups, const float* x, const void* w, const float* scale, float* out,
              int64_t outputs, int64_t width, int64_t span, int threads) {
    const int64_t blocks = (outputs + BLOCK_ROWS - 1) / BLOCK_ROWS, scales = outputs * (width / span);
#pragma omp parallel for num_threads(threads) schedule(dynamic, 4) if (threads > 1)
    for (int64_t task = 0; task < num_groups * blocks; task++) {
        const Group group = groups[task / blocks];
        const int64_t first = task % blocks * BLOCK_ROWS;
        const int64_t last = first + BLOCK_ROWS < outputs ? first + BLOCK_ROWS : outputs;
        const typename W::item* matrix = static_cast<const typename W::item*>(w) + group.expert * outputs * width;
        skinny<Float32, W, Scaled>(x + group.first * width, matrix, Scaled ? scale + group.expert * scales : nullptr,
                                   nullptr, out + group.first * outputs, outputs, group.count, width, span, first,
                                   last);
    }
}

template <class E, class W, bool Scaled>
void run(const void* x_, const float* weights, const int32_t* ids, const void* up, const float* up_scale,
         const void* up_bias_, const void* down, const float* down_scale, const void* down_bias_, void* y_,
         int64_t tokens, int64_t chosen, int64_t experts, int64_t channels, int64_t inner, int64_t group, Shape shape,
         bool weigh_input, int threads) {
    typedef typename E::item item;
    const item *x = static_cast<const item*>(x_), *up_bias = static_cast<const item*>(up_bias_);
    const item* down_bias = static_cast<const item*>(down_bias_);
    item* y = static_cast<item*>(y_);
    const int64_t pairs = tokens * chosen, rows = shape.gated ? 2 * inner : inner;
    // starts [experts + 1], order [pairs], place [pairs], groups [min(experts, pairs)]
    const size_t words = size_t(experts + 1 + 2 * pairs) + 3 * size_t(experts < pairs ? experts : pairs);
    int64_t* starts = reinterpret_cast<int64_t*>(plan.reserve(2 * words));
    int64_t *order = starts + experts + 1, *place = order + pairs;
    Group* groups = reinterpret_cast<Group*>(place + pairs);
    const int64_t num_groups = group_pairs(ids, pairs, experts, starts, order, groups);
    const int64_t used = num_groups ? groups[num_groups - 1].first + groups[num_groups - 1].count : 0;
    for (int64_t p = 0; p < pairs; p++) place[p] = -1;
    for (int64_t row = 0; row < used; row++) place[order[row]] = row;

    float* in = gathered.reserve(size_t(pairs * channels) + LANES);
    float* mid = middle.reserve(size_t(pairs * rows) + LANES);
    float* act = hidden.reserve(size_t(pairs * inner) + LANES);
    float* out = results.reserve(size_t(pairs * channels) + LANES);
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && used > 8)
    for (int64_t row = 0; row < used; row++) {
        const int64_t pair = order[row];
        const item* source = x + pair / chosen * channels;
        const float factor = weigh_input ? E::get(E::put(weights[pair])) : 1.0f;
        for (int64_t c = 0; c < channels; c += LANES) {
            V value = load_upto<E>(source + c, channels - c);
            if (weigh_input) {
                // rounded as the product that a model makes of it
                value = value * splat(factor);
                item rounded[LANES];
                E::store(rounded, value);
                value = E::load(rounded);
            }
            store_upto<Float32>(in + row * channels + c, value, channels - c);
        }
    }
    products<W, Scaled>(groups, num_groups, in, up, up_scale, mid, rows, channels, Scaled ? group : channels, threads);
    const int64_t steps = (inner + LANES - 1) / LANES;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int64_t task = 0; task < used * steps; task++) {
        const int64_t row = task / steps, f = task % steps * LANES, left = inner - f;
        const float* source = mid + row * rows;
        const item* bias = up_bias ? up_bias + ids[order[row]] * rows : nullptr;
        V first = load_upto<Float32>(source + f, left);
        if (bias) first = first + load_upto<E>(bias + f, left);
        if (shape.gated) {
            V second = load_upto<Float32>(source + inner + f, left);
            if (bias) second = second + load_upto<E>(bias + inner + f, left);
            first = activate_gated(shape, first, second);
        } else {
            first = activate(shape.act, first);
        }
        store_upto<Float32>(act + row * inner + f, first, left);
    }
    products<W, Scaled>(groups, num_groups, act, down, down_scale, out, channels, inner, Scaled ? group : inner, threads);
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && tokens > 1)
    for (int64_t t = 0; t < tokens; t++) {
        for (int64_t c = 0; c < channels; c += LANES) {
            const int64_t left = channels - c;
            V sum = zero();
            for (int64_t pair = t * chosen; pair < (t + 1) * chosen; pair++) {
                if (place[pair] < 0) continue;
                V value = load_upto<Float32>(out + place[pair] * channels + c, left);
                if (down_bias) value = value + load_upto<E>(down_bias + ids[pair] * channels + c, left);
                sum = sum + (weigh_input ? value : value * splat(weights[pair]));
            }
            store_upto<E>(y + t * channels + c, sum, left);
        }
    }
}

}  // namespace

// x, y [tokens, channels]; weights fp32, ids int32 [tokens, chosen]; up [experts, inner or 2 inner, channels]; down
// [experts, channels, inner]; biases or null: contiguous. With scales, up and down are int8, `group` channels a scale.
extern "C" void treadle_experts(int dtype, const void* x, const void* weights, const void* ids, const void* up,
                                const void* up_scale, const void* up_bias, const void* down, const void* down_scale,
                                const void* down_bias, void* y, int64_t tokens, int64_t chosen, int64_t experts,
                                int64_t channels, int64_t inner, int64_t group, int act, int gated, float limit,
                                float alpha, float beta, float linear_beta, int weigh_input, int threads) {
    const Shape shape{act, gated != 0, limit, alpha, beta, linear_beta};
    with_dtype(dtype, [&](auto e) {
        typedef decltype(e) E;
        const auto call = [&](auto w, auto scaled) {
            run<E, decltype(w), decltype(scaled)::value>(
                x, static_cast<const float*>(weights), static_cast<const int32_t*>(ids), up,
                static_cast<const float*>(up_scale), up_bias, down, static_cast<const float*>(down_scale), down_bias,
                y, tokens, chosen, experts, channels, inner, group, shape, weigh_input != 0, threads);
        };
        if (up_scale) call(Int8{}, std::true_type{});
        else call(E{}, std::false_type{});
    });
}
