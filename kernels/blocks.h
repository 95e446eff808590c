// Where the sequences of a step keep a fixed-size part of their state, and which tokens are theirs (kernels/blocks.py).
#pragma once

#include <cstdint>

struct Blocks {
    char* memory;
    int64_t row_bytes;  // of a matrix with a row a sequence; 0: an arena, in which `blocks` says where
    const int32_t* blocks;
    const int64_t* offset;  // bytes, in an arena
    const int32_t* q_starts;
    const int64_t* positions;
    const int32_t* kv_lens;

    float* floats(int64_t s) const { return reinterpret_cast<float*>(bytes(s)); }
    char* bytes(int64_t s) const {
        return memory + (row_bytes ? s * row_bytes : int64_t(blocks[s]) * 256 + *offset);
    }
    int64_t first(int64_t s) const { return q_starts[s]; }
    // The tokens of a sequence in this step; none if it has ended.
    int64_t tokens(int64_t s) const { return kv_lens[s] > 0 ? q_starts[s + 1] - q_starts[s] : 0; }
    // Whether its state is zero, whatever memory holds.
    bool fresh(int64_t s) const { return positions[q_starts[s]] == 0; }
};

// Zeros in the rows of `out` [rows, items] that no live sequence owns.
template <class T>
inline void clear_dead_rows(const Blocks& b, T* out, int64_t sequences, int64_t rows, int64_t items) {
    int64_t next = 0;
    const auto clear = [&](int64_t from, int64_t to) {
        for (T *p = out + from * items, *end = out + to * items; p < end; p++) *p = 0;
    };
    for (int64_t s = 0; s < sequences; s++) {
        if (b.tokens(s) <= 0) continue;
        if (next < b.first(s)) clear(next, b.first(s));
        next = b.first(s) + b.tokens(s);
    }
    if (next < rows) clear(next, rows);
}
