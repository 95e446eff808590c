// Where keys and values lie in the arena (kernels/cache_write.py has the formula).
#pragma once

#include <cstdint>

constexpr int64_t UNIT_BYTES = 256;

struct Pages {
    char* arena;
    const int32_t* table;   // [sequences, table_stride], offsets in units
    int64_t table_stride;
    int64_t layer_offset;   // bytes inside a page
    int64_t page_tokens;
    int64_t kv_heads, k_dim, v_dim;
    int64_t item_bytes;

    char* layer(int64_t sequence, int64_t page) const {
        return arena + int64_t(table[sequence * table_stride + page]) * UNIT_BYTES + layer_offset;
    }
    char* key(int64_t sequence, int64_t head, int64_t position) const {
        const int64_t page = position / page_tokens, row = position % page_tokens;
        return layer(sequence, page) + (head * page_tokens + row) * k_dim * item_bytes;
    }
    char* value(int64_t sequence, int64_t head, int64_t position) const {
        const int64_t page = position / page_tokens, row = position % page_tokens;
        return layer(sequence, page) +
               (kv_heads * page_tokens * k_dim + (head * page_tokens + row) * v_dim) * item_bytes;
    }
    // How many tokens from `position` on lie in its page, up to `end`.
    int64_t run(int64_t position, int64_t end) const {
        const int64_t left = page_tokens - position % page_tokens;
        return left < end - position ? left : end - position;
    }
};
