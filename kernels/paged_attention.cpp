// Causal attention over paged keys and values, fp32 inside. Two ways, chosen for each sequence by its number of queries:
//
// few queries (decode): the history is cut into spans of SPAN tokens, at fixed multiples, so that the result does not
//   depend on the batch or the number of threads; each (sequence, kv head, span) is one unit of work that reads its keys
//   and values once, straight from the pages; the spans of a head are then merged (flash decoding).
// many queries (prefill): a unit is a block of queries of one kv head; keys and values are brought, TILE at a time, into
//   contiguous fp32 and multiplied by a register-blocked product with a running softmax (flash attention).
//
// `one_way`: the second for any number of queries, with tiles at multiples of TILE. What a query adds up, and in which
// order, then depends on its position alone: keys that it does not see have weight 0 and change no bit.
#include <vector>

#include "attention.h"
#include "pages.h"

namespace {

constexpr int64_t SPAN = 256;
constexpr int64_t TILE = 64;         // keys of a prefill step
constexpr int64_t BLOCK_ROWS = 192;  // (query, head) rows of a prefill unit, about
constexpr int64_t LEAST_ROWS = 48;   // of a prefill unit, made small to feed every thread
constexpr int64_t FEW_ROWS = 16;     // up to this many rows of a kv head, the decode way
constexpr int ROWS = 6;              // rows of a register block
constexpr int COLUMNS = 4;           // vectors of a register block

thread_local Scratch scratch;      // of the unit at hand
thread_local Scratch span_results;  // of the call, owned by the thread that makes it

struct Problem {
    const void* q;
    int64_t q_stride;
    void* out;
    const float* sinks;
    const float* slopes;
    Pages pages;
    const int32_t* q_starts;
    const int32_t* kv_lens;
    int64_t heads, group;
    float scale, softcap;
    int64_t window, chunk;
    bool one_way;
};

// A unit of work.
struct Unit {
    int32_t sequence, head;
    int64_t first;    // prefill: first query; decode: first token of the span
    int64_t queries;  // prefill: how many; decode: 0
    int64_t partial;  // decode: where the span's running softmax goes, or -1: it is the only one
};

// A decode (sequence, head) whose spans wait to be merged.
struct Merge {
    int32_t sequence, head;
    int64_t partial, spans;
};

INLINE int64_t first_visible(const Problem& p, int64_t position) {
    const int64_t in_window = p.window ? most(0, position - p.window + 1) : 0;
    return p.chunk ? most(in_window, position / p.chunk * p.chunk) : in_window;
}

// The logits of 16 keys from `key` on, for a query head at `position`: lowered by distance, then capped.
INLINE V biased(const Problem& p, V logit, int64_t head, int64_t position, int64_t key) {
    if (p.slopes) {
        const V lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        logit -= splat(p.slopes[head]) * (splat(float(position - key)) - lane);
    }
    return p.softcap > 0 ? hyperbolic_tangent(logit / splat(p.softcap)) * splat(p.softcap) : logit;
}

// The softmax weights of logits [count] in place, relative to their maximum; returns it and their sum.
INLINE void soften(float* logits, int64_t count, float& maximum_out, float& sum_out) {
    V top = splat(MINUS_INFINITY);
    for (int64_t j = 0; j < count; j += LANES) top = maximum(top, Float32::load(logits + j));
    const float m = reduce_max(top);
    V sum = zero();
    if (m == MINUS_INFINITY) {
        for (int64_t j = 0; j < count; j += LANES) Float32::store(logits + j, zero());
    } else {
        for (int64_t j = 0; j < count; j += LANES) {
            const V w = exponential(Float32::load(logits + j) - splat(m));
            Float32::store(logits + j, w);
            sum += w;
        }
    }
    maximum_out = m;
    sum_out = reduce_add(sum);
}

// Logits of R rows against `count` contiguous keys.
template <class E, int R>
INLINE void score(const float* q, int64_t q_width, const typename E::item* keys, int64_t dim, int64_t count,
                  float* logits, int64_t stride) {
    for (int64_t j = 0; j < count; j++) {
        V sum[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) sum[r] = zero();
        const typename E::item* key = keys + j * dim;
        int64_t d = 0;
        for (; d + LANES <= dim; d += LANES) {
            const V k = E::load(key + d);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) sum[r] += k * Float32::load(q + r * q_width + d);
        }
        if (d < dim) {
            const V k = load_part<E>(key + d, int(dim - d));
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) sum[r] += k * Float32::load(q + r * q_width + d);
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) logits[r * stride + j] = reduce_add(sum[r]);
    }
}

// out [R, C vectors] += weights [R, count] x contiguous values, of which `width` channels are used.
template <class E, int R, int C>
INLINE void mix(const float* weights, int64_t stride, const typename E::item* values, int64_t dim, int64_t width,
                int64_t count, float* out, int64_t out_stride) {
    V sum[R][C];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int c = 0; c < C; c++) sum[r][c] = Float32::load(out + r * out_stride + c * LANES);
    const bool whole = width >= C * LANES;
    for (int64_t j = 0; j < count; j++) {
        V v[C];
#pragma GCC unroll 8
        for (int c = 0; c < C; c++)
            v[c] = whole ? E::load(values + j * dim + c * LANES)
                         : load_part<E>(values + j * dim + c * LANES, int(least(width - c * LANES, LANES)));
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const V w = splat(weights[r * stride + j]);
#pragma GCC unroll 8
            for (int c = 0; c < C; c++) sum[r][c] += w * v[c];
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int c = 0; c < C; c++) Float32::store(out + r * out_stride + c * LANES, sum[r][c]);
}

template <class E, int R>
INLINE void mix_row_block(const float* weights, int64_t stride, const typename E::item* values, int64_t dim,
                          int64_t count, float* out, int64_t out_stride) {
    int64_t c = 0;
    for (; c + 4 * LANES <= dim; c += 4 * LANES)
        mix<E, R, 4>(weights, stride, values + c, dim, dim - c, count, out + c, out_stride);
    for (; c < dim; c += LANES)
        mix<E, R, 1>(weights, stride, values + c, dim, dim - c, count, out + c, out_stride);
}

template <class E>
void write_row(const Problem& p, int64_t token, int64_t head, const float* sum, float m, float l) {
    const int64_t v_dim = p.pages.v_dim;
    typename E::item* y = static_cast<typename E::item*>(p.out) + (token * p.heads + head) * v_dim;
    float factor = 1.0f;
    if (p.sinks && m != MINUS_INFINITY) {
        const float top = m > p.sinks[head] ? m : p.sinks[head];
        factor = shrink(m, top);
        l = l * factor + expf(p.sinks[head] - top);
    }
    const V inverse = splat(l > 0 ? factor / l : 0.0f);
    for (int64_t c = 0; c < v_dim; c += LANES) store_upto<E>(y + c, Float32::load(sum + c) * inverse, v_dim - c);
}

// Queries of one kv head as fp32 rows, ordered by token, then head in the group; scaled.
template <class E>
void load_queries(const Problem& p, int64_t head, int64_t token, int64_t tokens, float* rows) {
    const int64_t dim = p.pages.k_dim, width = padded(dim);
    for (int64_t r = 0; r < tokens * p.group; r++) {
        const typename E::item* x = static_cast<const typename E::item*>(p.q) + (token + r / p.group) * p.q_stride +
                                    (head * p.group + r % p.group) * dim;
        for (int64_t d = 0; d < dim; d += LANES)
            Float32::store(rows + r * width + d, load_upto<E>(x + d, dim - d) * splat(p.scale));
    }
}

template <class E>
void decode_unit(const Problem& p, const Unit& unit, float* partials) {
    typedef typename E::item item;
    const Pages& pages = p.pages;
    const int64_t start = p.q_starts[unit.sequence], queries = p.q_starts[unit.sequence + 1] - start;
    const int64_t length = p.kv_lens[unit.sequence], offset = length - queries;
    const int64_t rows = queries * p.group, k_width = padded(pages.k_dim), v_width = padded(pages.v_dim);
    const int64_t low = most(unit.first, first_visible(p, most(offset, 0)));
    const int64_t high = least(unit.first + SPAN, length), count = high - low, stride = padded(SPAN);
    const bool alone = unit.partial < 0;
    float* q = scratch.reserve(rows * (k_width + stride + v_width + 2));
    float* logits = q + rows * k_width;
    float* sums = alone ? logits + rows * stride : partials + unit.partial;
    float* stats = sums + rows * v_width;  // maximum and sum of every row
    load_queries<E>(p, unit.head, start, queries, q);
    for (int64_t j = low; j < high;) {
        const int64_t run = pages.run(j, high);
        const item* keys = reinterpret_cast<const item*>(pages.key(unit.sequence, unit.head, j));
        float* target = logits + (j - low);
        int64_t r = 0;
        for (; r + 4 <= rows; r += 4)
            score<E, 4>(q + r * k_width, k_width, keys, pages.k_dim, run, target + r * stride, stride);
        if (r + 3 == rows) score<E, 3>(q + r * k_width, k_width, keys, pages.k_dim, run, target + r * stride, stride);
        if (r + 2 == rows) score<E, 2>(q + r * k_width, k_width, keys, pages.k_dim, run, target + r * stride, stride);
        if (r + 1 == rows) score<E, 1>(q + r * k_width, k_width, keys, pages.k_dim, run, target + r * stride, stride);
        j += run;
    }
    std::memset(sums, 0, rows * v_width * sizeof(float));
    for (int64_t r = 0; r < rows; r++) {
        const int64_t position = offset + r / p.group;
        const int64_t from = first_visible(p, position) - low, to = position + 1 - low;
        float* row = logits + r * stride;
        for (int64_t j = 0; j < count; j += LANES)
            Float32::store(row + j, masked(biased(p, Float32::load(row + j), unit.head * p.group + r % p.group, position,
                                                  low + j), j, from, least(to, count)));
        soften(row, count, stats[2 * r], stats[2 * r + 1]);
    }
    for (int64_t j = low; j < high;) {
        const int64_t run = pages.run(j, high);
        const item* values = reinterpret_cast<const item*>(pages.value(unit.sequence, unit.head, j));
        const float* source = logits + (j - low);
        int64_t r = 0;
        for (; r + 4 <= rows; r += 4)
            mix_row_block<E, 4>(source + r * stride, stride, values, pages.v_dim, run, sums + r * v_width, v_width);
        if (r + 3 == rows)
            mix_row_block<E, 3>(source + r * stride, stride, values, pages.v_dim, run, sums + r * v_width, v_width);
        if (r + 2 == rows)
            mix_row_block<E, 2>(source + r * stride, stride, values, pages.v_dim, run, sums + r * v_width, v_width);
        if (r + 1 == rows)
            mix_row_block<E, 1>(source + r * stride, stride, values, pages.v_dim, run, sums + r * v_width, v_width);
        j += run;
    }
    if (!alone) return;
    for (int64_t r = 0; r < rows; r++)
        write_row<E>(p, start + r / p.group, unit.head * p.group + r % p.group, sums + r * v_width, stats[2 * r],
                     stats[2 * r + 1]);
}

// Floats that one span's running softmax takes.
INLINE int64_t partial_size(const Problem& p, int64_t rows) { return rows * (padded(p.pages.v_dim) + 2) + LANES; }

template <class E>
void merge_spans(const Problem& p, const Merge& merge, float* partials) {
    const int64_t start = p.q_starts[merge.sequence], queries = p.q_starts[merge.sequence + 1] - start;
    const int64_t rows = queries * p.group, v_width = padded(p.pages.v_dim), size = partial_size(p, rows);
    float* base = partials + merge.partial;
    for (int64_t r = 0; r < rows; r++) {
        float top = MINUS_INFINITY, total = 0.0f;
        for (int64_t s = 0; s < merge.spans; s++) {
            const float m = base[s * size + rows * v_width + 2 * r];
            top = m > top ? m : top;
        }
        float* sum = base + r * v_width;
        for (int64_t s = 0; s < merge.spans; s++) {
            const float* part = base + s * size;
            const float factor = shrink(part[rows * v_width + 2 * r], top);
            total += part[rows * v_width + 2 * r + 1] * factor;
            for (int64_t c = 0; c < v_width; c += LANES) {
                const V scaled = Float32::load(part + r * v_width + c) * splat(factor);
                Float32::store(sum + c, s ? Float32::load(sum + c) + scaled : scaled);
            }
        }
        write_row<E>(p, start + r / p.group, merge.head * p.group + r % p.group, sum, top, total);
    }
}

// Keys [low + skip, low + count) as columns of fp32 [k_dim, TILE], values as rows of fp32 [TILE, v_width]; zeros
// around.
template <class E>
void gather(const Pages& pages, int64_t sequence, int64_t head, int64_t low, int64_t skip, int64_t count, float* keys,
            float* values) {
    typedef typename E::item item;
    const int64_t k_dim = pages.k_dim, v_dim = pages.v_dim, v_width = padded(v_dim);
    const item* rows[TILE];
    std::memset(values, 0, skip * v_width * sizeof(float));
    for (int64_t j = skip; j < count;) {
        const int64_t run = pages.run(low + j, low + count);
        const item* k = reinterpret_cast<const item*>(pages.key(sequence, head, low + j));
        const item* v = reinterpret_cast<const item*>(pages.value(sequence, head, low + j));
        for (int64_t i = 0; i < run; i++, j++, k += k_dim, v += v_dim) {
            rows[j] = k;
            for (int64_t c = 0; c < v_dim; c += LANES)
                Float32::store(values + j * v_width + c, load_upto<E>(v + c, v_dim - c));
        }
    }
    std::memset(values + count * v_width, 0, (TILE - count) * v_width * sizeof(float));
    for (int64_t j = 0; j < TILE; j += LANES) {
        for (int64_t d = 0; d < k_dim; d += LANES) {
            V block[LANES];
            for (int i = 0; i < LANES; i++)
                block[i] = j + i >= skip && j + i < count ? load_upto<E>(rows[j + i] + d, k_dim - d) : zero();
            transpose(block);
            for (int i = 0; i < least(LANES, k_dim - d); i++) Float32::store(keys + (d + i) * TILE + j, block[i]);
        }
    }
}

template <class E>
void prefill_unit(const Problem& p, const Unit& unit) {
    const Pages& pages = p.pages;
    const int64_t start = p.q_starts[unit.sequence], queries = p.q_starts[unit.sequence + 1] - start;
    const int64_t tokens = unit.queries, rows = tokens * p.group;
    const int64_t offset = p.kv_lens[unit.sequence] - queries + unit.first;  // position of the first query
    const int64_t tall = ceil_div(rows, ROWS) * ROWS;
    const int64_t k_width = padded(pages.k_dim), v_width = padded(pages.v_dim);
    float* q = scratch.reserve(tall * (k_width + v_width + 2) + ROWS * TILE + TILE * (pages.k_dim + v_width) + 64);
    float* sums = q + tall * k_width;
    float* keys = sums + tall * v_width;
    float* values = keys + pages.k_dim * TILE;
    float* logits = values + TILE * v_width;
    float* tops = logits + ROWS * TILE;
    float* totals = tops + tall;
    load_queries<E>(p, unit.head, start + unit.first, tokens, q);
    std::memset(q + rows * k_width, 0, (tall - rows) * k_width * sizeof(float));
    std::memset(sums, 0, tall * v_width * sizeof(float));
    for (int64_t r = 0; r < tall; r++) tops[r] = MINUS_INFINITY, totals[r] = 0.0f;
    const int64_t end = offset + tokens;
    // Starts at the first key that somebody sees: pages before a window may be gone, and 0 * NaN is NaN.
    const int64_t first = first_visible(p, most(offset, 0));
    for (int64_t low = p.one_way ? first / TILE * TILE : first; low < end; low += TILE) {
        gather<E>(pages, unit.sequence, unit.head, low, most(first - low, 0), least(TILE, end - low), keys, values);
        for (int64_t r = 0; r < rows; r += ROWS) {
            const int64_t last = offset + least(r + ROWS - 1, rows - 1) / p.group;
            if (last < low || first_visible(p, offset + r / p.group) >= low + TILE) continue;
            product<ROWS, COLUMNS>(q + r * k_width, k_width, keys, TILE, pages.k_dim, logits, TILE, false);
            for (int64_t i = 0; i < ROWS; i++) {
                const int64_t position = offset + (r + i) / p.group;
                float* row = logits + i * TILE;
                V x[COLUMNS], top = splat(tops[r + i]);
#pragma GCC unroll 4
                for (int c = 0; c < COLUMNS; c++) {
                    x[c] = masked(biased(p, Float32::load(row + c * LANES), unit.head * p.group + (r + i) % p.group,
                                         position, low + c * LANES),
                                  low + c * LANES, first_visible(p, position), position + 1);
                    top = maximum(top, x[c]);
                }
                const float m = reduce_max(top);
                if (m == MINUS_INFINITY) {
                    std::memset(row, 0, TILE * sizeof(float));
                    continue;
                }
                V sum = zero();
#pragma GCC unroll 4
                for (int c = 0; c < COLUMNS; c++) {
                    const V w = exponential(x[c] - splat(m));
                    Float32::store(row + c * LANES, w);
                    sum += w;
                }
                const float factor = shrink(tops[r + i], m);
                totals[r + i] = totals[r + i] * factor + reduce_add(sum);
                tops[r + i] = m;
                if (factor != 1.0f)
                    for (int64_t c = 0; c < v_width; c += LANES)
                        Float32::store(sums + (r + i) * v_width + c,
                                       Float32::load(sums + (r + i) * v_width + c) * splat(factor));
            }
            float* target = sums + r * v_width;
            int64_t c = 0;
            for (; c + COLUMNS * LANES <= v_width; c += COLUMNS * LANES)
                product<ROWS, COLUMNS>(logits, TILE, values + c, v_width, TILE, target + c, v_width, true);
            for (; c < v_width; c += LANES)
                product<ROWS, 1>(logits, TILE, values + c, v_width, TILE, target + c, v_width, true);
        }
    }
    for (int64_t r = 0; r < rows; r++)
        write_row<E>(p, start + unit.first + r / p.group, unit.head * p.group + r % p.group, sums + r * v_width,
                     tops[r], totals[r]);
}

template <class E>
void run(const Problem& p, int64_t sequences, int64_t tokens, int threads) {
    typedef typename E::item item;
    const int64_t row_items = p.heads * p.pages.v_dim, kv_heads = p.pages.kv_heads;
    item* out = static_cast<item*>(p.out);
    std::vector<Unit> units;
    std::vector<Merge> merges;
    int64_t partial = 0;
    for (int64_t s = 0; s < sequences; s++) {
        const int64_t start = p.q_starts[s], queries = p.q_starts[s + 1] - start, length = p.kv_lens[s];
        if (queries <= 0) continue;
        if (length <= 0) {
            std::memset(out + start * row_items, 0, queries * row_items * sizeof(item));
            continue;
        }
        const bool few = !p.one_way && (queries == 1 || queries * p.group <= FEW_ROWS);
        const int64_t low = first_visible(p, most(length - queries, 0)) / SPAN * SPAN;
        const int64_t spans = ceil_div(length - low, SPAN);
        for (int32_t h = 0; h < kv_heads; h++) {
            if (!few) {
                int64_t block = most(1, BLOCK_ROWS / p.group);
                if (kv_heads * ceil_div(queries, block) < 4 * threads)
                    block = most(ceil_div(LEAST_ROWS, p.group), ceil_div(queries * kv_heads, 4 * threads));
                // The last queries see the most keys: they start first, so that no thread ends late.
                for (int64_t first = (queries - 1) / block * block; first >= 0; first -= block)
                    units.push_back({int32_t(s), h, first, least(block, queries - first), -1});
                continue;
            }
            if (spans > 1) merges.push_back({int32_t(s), h, partial, spans});
            for (int64_t span = 0; span < spans; span++) {
                units.push_back({int32_t(s), h, low + span * SPAN, 0, spans > 1 ? partial : -1});
                if (spans > 1) partial += partial_size(p, queries * p.group);
            }
        }
    }
    const int64_t covered = sequences ? p.q_starts[sequences] : 0;
    if (covered < tokens) std::memset(out + covered * row_items, 0, (tokens - covered) * row_items * sizeof(item));
    float* partials = span_results.reserve(partial);
    const int64_t num_units = int64_t(units.size()), num_merges = int64_t(merges.size());
#pragma omp parallel num_threads(threads) if (threads > 1 && num_units > 1)
    {
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < num_units; i++) {
            if (units[i].queries) prefill_unit<E>(p, units[i]);
            else decode_unit<E>(p, units[i], partials);
        }
#pragma omp for schedule(static)
        for (int64_t i = 0; i < num_merges; i++) merge_spans<E>(p, merges[i], partials);
    }
}

}  // namespace

// q [tokens, heads, k_dim] with row stride q_stride (items), out [tokens, heads, v_dim] contiguous, sinks and slopes
// [heads] fp32 or null. Everything else as in kernels/paged_attention.py.
extern "C" void treadle_paged_attention(int dtype, const void* q, int64_t q_stride, void* out, void* arena,
                                        const int32_t* page_table, int64_t table_stride, const int32_t* q_starts,
                                        const int32_t* kv_lens, const int64_t* layer_offset, const float* sinks,
                                        const float* slopes,
                                        int64_t sequences, int64_t tokens, int64_t heads, int64_t kv_heads,
                                        int64_t k_dim, int64_t v_dim, int64_t page_tokens, float scale,
                                        int64_t window, int64_t chunk, float softcap, int one_way, int threads) {
    with_dtype(dtype, [&](auto e) {
        typedef decltype(e) E;
        const Pages pages{static_cast<char*>(arena), page_table, table_stride, *layer_offset, page_tokens,
                          kv_heads, k_dim, v_dim, sizeof(typename E::item)};
        const Problem p{q, q_stride, out, sinks, slopes, pages, q_starts, kv_lens, heads, heads / kv_heads,
                        scale, softcap, window, chunk, one_way != 0};
        run<E>(p, sequences, tokens, threads);
    });
}
