// Attention over paged keys that all query heads share, fp32 inside; a value is the first channels of its key.
//
// The (query, head) rows of a sequence go in blocks. A block sweeps over its keys in spans of SPAN, at fixed multiples,
// and a span in tiles: TILE keys are brought into contiguous fp32, once as columns and once as rows, and multiplied by
// a register-blocked product with a running softmax. Spans are joined in order, by the block itself or, where blocks
// are few, after each of them was a unit of work of its own. What a row adds up, and in which order, depends on its
// position alone either way: keys that it does not see have weight 0 and change no bit.
//
// With `select` a block holds heads of one query, and sweeps over the places of the list that names its keys.
#include <vector>

#include "attention.h"
#include "pages.h"

namespace {

constexpr int64_t SPAN = 1024;
constexpr int64_t TILE = 64;
constexpr int64_t BLOCK_ROWS = 96;  // rows of a unit at most
constexpr int ROWS = 6;             // rows of a register block
constexpr int COLUMNS = 4;          // vectors of a register block
constexpr int64_t MOST_FLOATS = int64_t(1) << 25;  // of results of spans that wait to be joined

thread_local Scratch scratch;       // of the unit at hand
thread_local Scratch span_results;  // of the call, owned by the thread that makes it

struct Problem {
    const void* q;
    int64_t q_stride;
    void* out;
    const float* sinks;
    const int32_t* select;  // [tokens, choices] or null
    int64_t choices;
    Pages pages;
    const int32_t* q_starts;
    const int32_t* kv_lens;
    int64_t heads, v_dim;
    float scale;
    int64_t window;
};

// Rows of a sequence, from `first` on; [low, high) are the keys, or places of a list of keys, that they sweep over.
struct Block {
    int32_t sequence;
    int64_t first, rows, low, high;
    int64_t partial;  // where the results of its spans go, or -1: it joins them itself
};

// One span of a block, or all of them.
struct Unit {
    int64_t block, span;
    bool all;
};

INLINE int64_t first_visible(const Problem& p, int64_t position) {
    return p.window ? most(0, position - p.window + 1) : 0;
}

INLINE int64_t queries_of(const Problem& p, int32_t sequence) { return p.q_starts[sequence + 1] - p.q_starts[sequence]; }

// The running softmax of rows: sums [rows, width], then maximum and total of each.
struct Running {
    float *sums, *tops, *totals;
    Running(float* data, int64_t rows, int64_t width) : sums(data), tops(data + rows * width), totals(tops + rows) {}
    static int64_t size(int64_t rows, int64_t width) { return rows * (width + 2); }
    void clear(int64_t rows, int64_t width) {
        std::memset(sums, 0, rows * width * sizeof(float));
        for (int64_t r = 0; r < rows; r++) tops[r] = MINUS_INFINITY, totals[r] = 0.0f;
    }
};

// Not inlined: spans are joined by the same instructions wherever they are.
__attribute__((noinline)) void join(Running into, Running from, int64_t rows, int64_t width) {
    for (int64_t r = 0; r < rows; r++) {
        if (from.tops[r] == MINUS_INFINITY) continue;
        const float top = into.tops[r] > from.tops[r] ? into.tops[r] : from.tops[r];
        const float kept = shrink(into.tops[r], top), added = shrink(from.tops[r], top);
        into.tops[r] = top;
        into.totals[r] = into.totals[r] * kept + from.totals[r] * added;
        for (int64_t c = 0; c < width; c += LANES) {
            const V sum = Float32::load(into.sums + r * width + c) * splat(kept);
            Float32::store(into.sums + r * width + c, sum + Float32::load(from.sums + r * width + c) * splat(added));
        }
    }
}

// A block's queries as fp32 rows, scaled; zeros up to `tall` rows.
template <class E>
void load_queries(const Problem& p, const Block& block, int64_t tall, float* rows) {
    const int64_t dim = p.pages.k_dim, width = padded(dim);
    for (int64_t r = 0; r < block.rows; r++) {
        const int64_t row = block.first + r, token = p.q_starts[block.sequence] + row / p.heads;
        const typename E::item* x =
            static_cast<const typename E::item*>(p.q) + token * p.q_stride + row % p.heads * dim;
        for (int64_t d = 0; d < dim; d += LANES)
            Float32::store(rows + r * width + d, load_upto<E>(x + d, dim - d) * splat(p.scale));
    }
    std::memset(rows + block.rows * width, 0, (tall - block.rows) * width * sizeof(float));
}

// Keys [low, low + count) as columns of fp32 [k_dim, TILE], and their first channels as rows [TILE, v_width]; zeros in
// place of those before `skip` and those behind.
template <class E>
void gather(const Problem& p, const Block& block, const int32_t* chosen, int64_t low, int64_t skip, int64_t count,
            float* keys, float* values) {
    typedef typename E::item item;
    const int64_t k_dim = p.pages.k_dim, v_width = padded(p.v_dim);
    const item* rows[TILE];
    for (int64_t j = 0; j < TILE; j++) {
        float* target = values + j * v_width;
        if (j < skip || j >= count) {
            std::memset(target, 0, v_width * sizeof(float));
            continue;
        }
        const int64_t position = chosen ? chosen[low + j] : low + j;
        rows[j] = reinterpret_cast<const item*>(p.pages.key(block.sequence, 0, position));
        for (int64_t c = 0; c < p.v_dim; c += LANES)
            Float32::store(target + c, load_upto<E>(rows[j] + c, p.v_dim - c));
    }
    for (int64_t j = 0; j < TILE; j += LANES) {
        for (int64_t d = 0; d < k_dim; d += LANES) {
            V part[LANES];
            for (int i = 0; i < LANES; i++)
                part[i] = j + i >= skip && j + i < count ? load_upto<E>(rows[j + i] + d, k_dim - d) : zero();
            transpose(part);
            for (int i = 0; i < least(LANES, k_dim - d); i++) Float32::store(keys + (d + i) * TILE + j, part[i]);
        }
    }
}

// Takes the logits of one row against TILE keys from `low` on into its running softmax: they become weights.
INLINE void soften(float* row, int64_t low, int64_t from, int64_t to, float* sum, int64_t width, float& top,
                   float& total) {
    V x[COLUMNS], high = splat(top);
#pragma GCC unroll 4
    for (int c = 0; c < COLUMNS; c++) {
        x[c] = masked(Float32::load(row + c * LANES), low + c * LANES, from, to);
        high = maximum(high, x[c]);
    }
    const float m = reduce_max(high);
    if (m == MINUS_INFINITY) {
        std::memset(row, 0, TILE * sizeof(float));
        return;
    }
    V added = zero();
#pragma GCC unroll 4
    for (int c = 0; c < COLUMNS; c++) {
        const V w = exponential(x[c] - splat(m));
        Float32::store(row + c * LANES, w);
        added += w;
    }
    const float factor = shrink(top, m);
    total = total * factor + reduce_add(added);
    top = m;
    if (factor != 1.0f)
        for (int64_t c = 0; c < width; c += LANES) Float32::store(sum + c, Float32::load(sum + c) * splat(factor));
}

// Takes the keys of one span into `result`, which is empty.
template <class E>
void sweep(const Problem& p, const Block& block, int64_t span, int64_t tall, const float* q, float* buffers,
           Running result) {
    const int64_t k_width = padded(p.pages.k_dim), v_width = padded(p.v_dim);
    const int64_t start = p.q_starts[block.sequence];
    const int64_t offset = p.kv_lens[block.sequence] - queries_of(p, block.sequence);  // position of the first query
    const int32_t* chosen = p.select ? p.select + (start + block.first / p.heads) * p.choices : nullptr;
    float* keys = buffers;
    float* values = keys + p.pages.k_dim * TILE;
    float* logits = values + TILE * v_width;
    const int64_t end = least(block.high, (span + 1) * SPAN);
    for (int64_t low = most(span * SPAN, block.low / TILE * TILE); low < end; low += TILE) {
        gather<E>(p, block, chosen, low, most(block.low - low, 0), least(TILE, end - low), keys, values);
        for (int64_t r = 0; r < block.rows; r += ROWS) {
            product<ROWS, COLUMNS>(q + r * k_width, k_width, keys, TILE, p.pages.k_dim, logits, TILE, false);
            for (int64_t i = 0; i < ROWS; i++) {
                const int64_t position = offset + least(block.first + r + i, block.first + block.rows - 1) / p.heads;
                const int64_t from = chosen ? 0 : first_visible(p, position);
                const int64_t to = chosen ? end : least(position + 1, end);
                soften(logits + i * TILE, low, from, to, result.sums + (r + i) * v_width, v_width, result.tops[r + i],
                       result.totals[r + i]);
            }
            float* target = result.sums + r * v_width;
            int64_t c = 0;
            for (; c + COLUMNS * LANES <= v_width; c += COLUMNS * LANES)
                product<ROWS, COLUMNS>(logits, TILE, values + c, v_width, TILE, target + c, v_width, true);
            for (; c < v_width; c += LANES)
                product<ROWS, 1>(logits, TILE, values + c, v_width, TILE, target + c, v_width, true);
        }
    }
}

template <class E>
void write(const Problem& p, const Block& block, Running result) {
    const int64_t width = padded(p.v_dim);
    for (int64_t r = 0; r < block.rows; r++) {
        const int64_t row = block.first + r, token = p.q_starts[block.sequence] + row / p.heads, head = row % p.heads;
        typename E::item* y = static_cast<typename E::item*>(p.out) + (token * p.heads + head) * p.v_dim;
        float m = result.tops[r], total = result.totals[r], factor = 1.0f;
        if (p.sinks && m != MINUS_INFINITY) {
            const float top = m > p.sinks[head] ? m : p.sinks[head];
            factor = shrink(m, top);
            total = total * factor + expf(p.sinks[head] - top);
        }
        const V share = splat(total > 0 ? factor / total : 0.0f);
        for (int64_t c = 0; c < p.v_dim; c += LANES)
            store_upto<E>(y + c, Float32::load(result.sums + r * width + c) * share, p.v_dim - c);
    }
}

INLINE int64_t tall_of(const Block& block) { return ceil_div(block.rows, ROWS) * ROWS; }
INLINE int64_t first_span(const Block& block) { return block.low / SPAN; }
INLINE int64_t spans_of(const Block& block) { return ceil_div(block.high, SPAN) - first_span(block); }

template <class E>
void do_unit(const Problem& p, const Block& block, const Unit& unit, float* partials) {
    const int64_t tall = tall_of(block), k_width = padded(p.pages.k_dim), v_width = padded(p.v_dim);
    const int64_t size = Running::size(tall, v_width);
    const int64_t tiles = TILE * (p.pages.k_dim + v_width + ROWS);
    float* q = scratch.reserve(tall * k_width + tiles + 2 * size + LANES);
    float* buffers = q + tall * k_width;
    load_queries<E>(p, block, tall, q);
    if (!unit.all) {
        Running result(partials + block.partial + (unit.span - first_span(block)) * size, tall, v_width);
        result.clear(tall, v_width);
        return sweep<E>(p, block, unit.span, tall, q, buffers, result);
    }
    Running total(buffers + tiles, tall, v_width), result(buffers + tiles + size, tall, v_width);
    total.clear(tall, v_width);
    for (int64_t span = first_span(block); span * SPAN < block.high; span++) {
        result.clear(tall, v_width);
        sweep<E>(p, block, span, tall, q, buffers, result);
        join(total, result, tall, v_width);
    }
    write<E>(p, block, total);
}

template <class E>
void join_spans(const Problem& p, const Block& block, float* partials) {
    const int64_t tall = tall_of(block), width = padded(p.v_dim), size = Running::size(tall, width);
    Running total(scratch.reserve(size), tall, width);
    total.clear(tall, width);
    for (int64_t i = 0; i < spans_of(block); i++)
        join(total, Running(partials + block.partial + i * size, tall, width), tall, width);
    write<E>(p, block, total);
}

// The blocks of a sequence, late queries first: they see the most keys, so that no thread ends late.
void cut(const Problem& p, int32_t s, std::vector<Block>& blocks) {
    const int64_t queries = queries_of(p, s), offset = p.kv_lens[s] - queries, rows = queries * p.heads;
    const int64_t inside = p.select ? p.heads : rows;  // blocks lie inside so many rows
    for (int64_t begin = rows - inside; begin >= 0; begin -= inside) {
        for (int64_t first = (inside - 1) / BLOCK_ROWS * BLOCK_ROWS; first >= 0; first -= BLOCK_ROWS) {
            Block block{s, begin + first, least(BLOCK_ROWS, inside - first), 0, 0, -1};
            const int64_t query = block.first / p.heads, last = (block.first + block.rows - 1) / p.heads;
            if (p.select) {
                const int32_t* chosen = p.select + (p.q_starts[s] + query) * p.choices;
                while (block.high < p.choices && chosen[block.high] >= 0) block.high++;
            } else {
                block.low = first_visible(p, most(offset + query, 0));
                block.high = offset + last + 1;
            }
            blocks.push_back(block);
        }
    }
}

template <class E>
void run(const Problem& p, int64_t sequences, int64_t tokens, int threads) {
    typedef typename E::item item;
    const int64_t row_items = p.heads * p.v_dim;
    item* out = static_cast<item*>(p.out);
    std::vector<Block> blocks;
    for (int32_t s = 0; s < sequences; s++) {
        const int64_t queries = queries_of(p, s);
        if (queries <= 0) continue;
        if (p.kv_lens[s] <= 0) std::memset(out + p.q_starts[s] * row_items, 0, queries * row_items * sizeof(item));
        else cut(p, s, blocks);
    }
    const int64_t covered = sequences ? p.q_starts[sequences] : 0;
    if (covered < tokens) std::memset(out + covered * row_items, 0, (tokens - covered) * row_items * sizeof(item));
    const bool few = threads > 1 && int64_t(blocks.size()) < 4 * threads;
    std::vector<Unit> units;
    int64_t partial = 0;
    for (int64_t b = 0; b < int64_t(blocks.size()); b++) {
        const int64_t spans = spans_of(blocks[b]);
        const int64_t size = spans * Running::size(tall_of(blocks[b]), padded(p.v_dim));
        if (!few || spans <= 1 || partial + size > MOST_FLOATS) {
            units.push_back({b, 0, true});
            continue;
        }
        blocks[b].partial = partial;
        partial += size;
        for (int64_t i = 0; i < spans; i++) units.push_back({b, first_span(blocks[b]) + i, false});
    }
    float* partials = span_results.reserve(partial);
#pragma omp parallel num_threads(threads) if (threads > 1 && units.size() > 1)
    {
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < int64_t(units.size()); i++) do_unit<E>(p, blocks[units[i].block], units[i], partials);
#pragma omp for schedule(static)
        for (int64_t b = 0; b < int64_t(blocks.size()); b++)
            if (blocks[b].partial >= 0) join_spans<E>(p, blocks[b], partials);
    }
}

}  // namespace

// q [tokens, heads, k_dim] with row stride q_stride (items), out [tokens, heads, v_dim] contiguous, sinks [heads] fp32 or
// null, select [tokens, choices] or null. Everything else as in kernels/paged_latent_attention.py.
extern "C" void treadle_paged_latent_attention(int dtype, const void* q, int64_t q_stride, void* out, void* arena,
                                               const int32_t* page_table, int64_t table_stride,
                                               const int32_t* q_starts, const int32_t* kv_lens,
                                               const int64_t* layer_offset, const float* sinks, const int32_t* select,
                                               int64_t choices, int64_t sequences, int64_t tokens, int64_t heads,
                                               int64_t k_dim, int64_t v_dim, int64_t page_tokens, float scale,
                                               int64_t window, int threads) {
    with_dtype(dtype, [&](auto e) {
        typedef decltype(e) E;
        const Pages pages{static_cast<char*>(arena), page_table, table_stride, *layer_offset, page_tokens,
                          1, k_dim, 0, sizeof(typename E::item)};
        const Problem p{q, q_stride, out, sinks, select, choices, pages, q_starts, kv_lens, heads, v_dim, scale, window};
        run<E>(p, sequences, tokens, threads);
    });
}
