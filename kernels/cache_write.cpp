// Stores keys and values into pages; with a table of angles, rotates queries and keys on the way.
#include "pages.h"
#include "vector.h"

namespace {

constexpr int64_t PARALLEL_ITEMS = 1 << 16;

enum Layout { HALF = 0, INTERLEAVED = 1, HALF_NEG = 2 };

// One head: the pairs of `rotated` channels from `start` on turn by the angles of `row`, the others are copied.
template <class E>
INLINE void rotate(const typename E::item* x, typename E::item* y, const float* row, int64_t dim, int64_t rotated,
                   int64_t start, int layout) {
    const int64_t half = rotated / 2;
    const float* cosine = row;
    const float* sine = row + half;
    if (start) memcpy(y, x, start * sizeof *x);
    const int64_t rest = start + rotated;
    if (rest < dim) memcpy(y + rest, x + rest, (dim - rest) * sizeof *x);
    x += start;
    y += start;
    if (layout == INTERLEAVED) {
        for (int64_t i = 0; i < half; i++) {
            const float a = E::get(x[2 * i]), b = E::get(x[2 * i + 1]);
            y[2 * i] = E::put(a * cosine[i] - b * sine[i]);
            y[2 * i + 1] = E::put(b * cosine[i] + a * sine[i]);
        }
        return;
    }
    for (int64_t i = 0; i < half; i += LANES) {
        const int64_t left = half - i;
        const V a = load_upto<E>(x + i, left), b = load_upto<E>(x + half + i, left);
        const V c = load_upto<Float32>(cosine + i, left);
        V s = load_upto<Float32>(sine + i, left);
        if (layout == HALF_NEG) s = -s;
        store_upto<E>(y + i, a * c - b * s, left);
        store_upto<E>(y + half + i, b * c + a * s, left);
    }
}

}  // namespace

// k [tokens, kv_heads, k_dim] and v [tokens, kv_heads, v_dim] with the row strides given (in items), heads and channels
// contiguous. Bytes are copied, so any element type will do.
extern "C" void treadle_cache_write(const void* k, int64_t k_stride, const void* v, int64_t v_stride, void* arena,
                                    const int32_t* page_table, int64_t table_stride, const int32_t* seq_ids,
                                    const int64_t* positions, const int64_t* layer_offset, int64_t page_tokens,
                                    int64_t tokens, int64_t kv_heads, int64_t k_dim, int64_t v_dim,
                                    int64_t item_bytes, int threads) {
    const Pages pages{static_cast<char*>(arena), page_table, table_stride, *layer_offset, page_tokens,
                      kv_heads, k_dim, v_dim, item_bytes};
#pragma omp parallel for num_threads(threads) if (threads > 1 && tokens * kv_heads * (k_dim + v_dim) > PARALLEL_ITEMS)
    for (int64_t t = 0; t < tokens; t++) {
        if (positions[t] < 0) continue;
        const char* key = static_cast<const char*>(k) + t * k_stride * item_bytes;
        const char* value = static_cast<const char*>(v) + t * v_stride * item_bytes;
        for (int64_t h = 0; h < kv_heads; h++) {
            memcpy(pages.key(seq_ids[t], h, positions[t]), key + h * k_dim * item_bytes, k_dim * item_bytes);
            memcpy(pages.value(seq_ids[t], h, positions[t]), value + h * v_dim * item_bytes, v_dim * item_bytes);
        }
    }
}

// The same with rotated keys; out [tokens, heads, k_dim] contiguous receives the rotated queries, those of position -1
// turned by row 0. table [length, rotated] fp32 contiguous; the rotated channels start at `start`.
extern "C" void treadle_rope_cache_write(int dtype, const void* q, int64_t q_stride, void* out, const void* k,
                                         int64_t k_stride, const void* v, int64_t v_stride, const float* table,
                                         int64_t rotated, int64_t start, int layout, void* arena,
                                         const int32_t* page_table, int64_t table_stride, const int32_t* seq_ids,
                                         const int64_t* positions, const int64_t* layer_offset, int64_t page_tokens,
                                         int64_t tokens, int64_t heads, int64_t kv_heads, int64_t k_dim,
                                         int64_t v_dim, int threads) {
    with_dtype(dtype, [&](auto e) {
        typedef decltype(e) E;
        typedef typename E::item item;
        const Pages pages{static_cast<char*>(arena), page_table, table_stride, *layer_offset, page_tokens,
                          kv_heads, k_dim, v_dim, sizeof(item)};
        const int64_t items = tokens * (heads * k_dim + kv_heads * (k_dim + v_dim));
#pragma omp parallel for num_threads(threads) if (threads > 1 && items > PARALLEL_ITEMS)
        for (int64_t t = 0; t < tokens; t++) {
            const int64_t position = positions[t];
            const float* row = table + (position < 0 ? 0 : position) * rotated;
            const item* query = static_cast<const item*>(q) + t * q_stride;
            item* result = static_cast<item*>(out) + t * heads * k_dim;
            for (int64_t h = 0; h < heads; h++)
                rotate<E>(query + h * k_dim, result + h * k_dim, row, k_dim, rotated, start, layout);
            if (position < 0) continue;
            const item* key = static_cast<const item*>(k) + t * k_stride;
            const item* value = static_cast<const item*>(v) + t * v_stride;
            for (int64_t h = 0; h < kv_heads; h++) {
                item* place = reinterpret_cast<item*>(pages.key(seq_ids[t], h, position));
                rotate<E>(key + h * k_dim, place, row, k_dim, rotated, start, layout);
                memcpy(pages.value(seq_ids[t], h, position), value + h * v_dim, v_dim * sizeof(item));
            }
        }
    });
}
