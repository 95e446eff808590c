// The keys that each token of a sparse attention sees: scores over paged side keys, in fp32, and the highest of them.
//
// A unit is one token. TILE keys at a time are brought into contiguous fp32 columns and multiplied by all index heads; a
// score is their weighted sum. What a token adds up, and in which order, depends on its position alone.
#include <algorithm>
#include <vector>

#include "attention.h"
#include "pages.h"

namespace {

constexpr int64_t TILE = 64;
constexpr int ROWS = 6;     // rows of a register block
constexpr int COLUMNS = 4;  // vectors of a register block

thread_local Scratch scratch;  // of the unit at hand
thread_local std::vector<int32_t> places;

struct Problem {
    const void* q;
    int64_t q_stride;
    const float* weights;
    int32_t* out;
    Pages pages;
    int64_t heads, topk;
};

// scores [TILE multiple] of keys 0 .. count - 1 for one token.
template <class E>
void score(const Problem& p, int32_t sequence, int64_t token, int64_t count, float* buffers, float* scores) {
    typedef typename E::item item;
    const int64_t dim = p.pages.k_dim, width = padded(dim), tall = ceil_div(p.heads, ROWS) * ROWS;
    float* q = buffers;
    float* keys = q + tall * width;
    float* logits = keys + dim * TILE;
    for (int64_t h = 0; h < p.heads; h++) {
        const item* x = static_cast<const item*>(p.q) + token * p.q_stride + h * dim;
        for (int64_t d = 0; d < dim; d += LANES) Float32::store(q + h * width + d, load_upto<E>(x + d, dim - d));
    }
    std::memset(q + p.heads * width, 0, (tall - p.heads) * width * sizeof(float));
    for (int64_t low = 0; low < count; low += TILE) {
        const int64_t live = least(TILE, count - low);
        const item* rows[TILE];
        for (int64_t j = 0; j < live; j++) rows[j] = reinterpret_cast<const item*>(p.pages.key(sequence, 0, low + j));
        for (int64_t j = 0; j < TILE; j += LANES) {
            for (int64_t d = 0; d < dim; d += LANES) {
                V part[LANES];
                for (int i = 0; i < LANES; i++) part[i] = j + i < live ? load_upto<E>(rows[j + i] + d, dim - d) : zero();
                transpose(part);
                for (int i = 0; i < least(LANES, dim - d); i++) Float32::store(keys + (d + i) * TILE + j, part[i]);
            }
        }
        V sum[COLUMNS] = {};
        for (int64_t r = 0; r < p.heads; r += ROWS) {
            product<ROWS, COLUMNS>(q + r * width, width, keys, TILE, dim, logits, TILE, false);
            for (int64_t i = 0; i < least(ROWS, p.heads - r); i++) {
                const V weight = splat(p.weights[token * p.heads + r + i]);
#pragma GCC unroll 4
                for (int c = 0; c < COLUMNS; c++)
                    sum[c] += weight * maximum(Float32::load(logits + i * TILE + c * LANES), zero());
            }
        }
        // NaN has no place in an order.
        for (int c = 0; c < COLUMNS; c++)
            Float32::store(scores + low + c * LANES, sum[c] == sum[c] ? sum[c] : splat(MINUS_INFINITY));
    }
}

// The places of the topk highest scores, ascending; the earlier of equal ones.
void choose(const float* scores, int64_t count, int64_t topk, int32_t* out) {
    const int64_t kept = least(count, topk);
    places.resize(count);
    for (int64_t j = 0; j < count; j++) places[j] = int32_t(j);
    if (count > topk) {
        std::nth_element(places.begin(), places.begin() + topk, places.end(), [&](int32_t a, int32_t b) {
            return scores[a] > scores[b] || (scores[a] == scores[b] && a < b);
        });
        std::sort(places.begin(), places.begin() + topk);
    }
    std::copy(places.begin(), places.begin() + kept, out);
    std::fill(out + kept, out + topk, -1);
}

}  // namespace

// q [tokens, heads, dim] with row stride q_stride (items), weights [tokens, heads] fp32 contiguous, out [tokens, topk].
// Everything else as in kernels/paged_index_select.py.
extern "C" void treadle_paged_index_select(int dtype, const void* q, int64_t q_stride, const float* weights,
                                           int32_t* out, void* arena, const int32_t* page_table, int64_t table_stride,
                                           const int32_t* q_starts, const int32_t* kv_lens,
                                           const int64_t* layer_offset, int64_t sequences, int64_t tokens,
                                           int64_t heads, int64_t dim, int64_t page_tokens, int64_t topk, int threads) {
    with_dtype(dtype, [&](auto e) {
        typedef decltype(e) E;
        const Pages pages{static_cast<char*>(arena), page_table, table_stride, *layer_offset, page_tokens,
                          1, dim, 0, sizeof(typename E::item)};
        const Problem p{q, q_stride, weights, out, pages, heads, topk};
        std::vector<int32_t> owner(tokens, -1);
        for (int32_t s = 0; s < sequences; s++)
            if (kv_lens[s] > 0)
                for (int64_t t = q_starts[s]; t < q_starts[s + 1]; t++) owner[t] = s;
#pragma omp parallel for num_threads(threads) schedule(dynamic) if (threads > 1 && tokens > 1)
        for (int64_t t = 0; t < tokens; t++) {
            const int32_t s = owner[t];
            const int64_t count = s < 0 ? 0 : kv_lens[s] - (q_starts[s + 1] - t) + 1;
            if (count <= topk) {
                choose(nullptr, most(count, 0), topk, out + t * topk);
                continue;
            }
            const int64_t tall = ceil_div(heads, ROWS) * ROWS;
            const int64_t buffers = tall * padded(dim) + (dim + ROWS) * TILE;
            float* data = scratch.reserve(buffers + ceil_div(count, TILE) * TILE);
            score<E>(p, s, t, count, data, data + buffers);
            choose(data + buffers, count, topk, out + t * topk);
        }
    });
}
