// What a call is given, as native.py lays it out, and how numbers of any dtype and stride are read and written.
#pragma once

#include <cstdint>
#include <cstring>

constexpr int MAX_LEAD = 8;
#if defined(__aarch64__)
typedef __fp16 Half;  // g++ knows no _Float16 there before its version 13
#else
typedef _Float16 Half;
#endif

enum Dtype : int64_t { FLOAT32, FLOAT64, BFLOAT16, FLOAT16, BOOL };
enum Domain : uint8_t { BOUNDED, SHIFTED, LOG_DOMAIN };  // as domains.py has them

// A tensor (lead..., rows, columns) of any strides, those of broadcast dimensions being 0; data is null if it's absent.
// A mask (lead..., length) has its length as columns.
extern "C" struct Operand {
    void* data;
    int64_t dtype;
    int64_t stride[MAX_LEAD];
    int64_t row_stride, column_stride;
};

extern "C" struct Call {
    int64_t dims, lead[MAX_LEAD];  // leading dimensions
    int64_t heads, n, m, d, dv, half_steps, threads;
    int64_t keep_bytes;   // the largest map that is kept between passes
    int64_t share_bytes;  // the smallest map that all threads work on together
    int64_t block_rows, block_columns;  // of a sweep's blocks: rows in whole tiles, ROWS at most; columns about
    int64_t pass_bytes;   // of a block of whole rows, about
    int64_t detached, backward, is_double;
    int64_t bias_copy;  // elements of a copy of d_bias, of which each thread has one; 0 if there is one copy for all
    double scale, damping, keep_factor;
    double bounded_log2;  // see domains.py
    // column_stride is 1 for tokens
    Operand query, key, value, bias, bias_bound, query_mask, key_mask, dropout_keep, d_output;
    Operand d_query, d_key, d_value, d_bias;
    void* output;    // (heads, n, dv)
    void* rows;      // row scalings (ceil(T/2), heads, n)
    void* columns;   // column scalings (T/2 + 1, heads, m); with damping 1 / sums stand between them
    uint8_t* domain;  // of each head
    void* scratch;
};

// Where a head's matrix begins, in elements.
static inline int64_t offset_of(const Call& c, const Operand& o, int64_t head) {
    int64_t offset = 0;
    for (int i = (int)c.dims - 1; i >= 0; i--) {
        offset += head % c.lead[i] * o.stride[i];
        head /= c.lead[i];
    }
    return offset;
}

static inline bool is_on(const Operand& mask, int64_t at, int64_t i) {
    return !mask.data || ((const uint8_t*)mask.data)[at + i * mask.column_stride];
}

static inline float from_bfloat16(uint16_t x) {
    const uint32_t bits = (uint32_t)x << 16;
    float y;
    std::memcpy(&y, &bits, 4);
    return y;
}
static inline uint16_t to_bfloat16(float x) {  // to nearest, ties to even
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if (x != x) return 0x7fc0;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

// out[i] = factor * p[i * stride] for any dtype
template <class F>
static void read_numbers(F* out, const Operand& o, int64_t at, int64_t stride, int64_t count, F factor) {
    switch (o.dtype) {
        case FLOAT32:
            for (int64_t i = 0; i < count; i++) out[i] = (F)((const float*)o.data)[at + i * stride] * factor;
            break;
        case FLOAT64:
            for (int64_t i = 0; i < count; i++) out[i] = (F)((const double*)o.data)[at + i * stride] * factor;
            break;
        case BFLOAT16:
            for (int64_t i = 0; i < count; i++)
                out[i] = (F)from_bfloat16(((const uint16_t*)o.data)[at + i * stride]) * factor;
            break;
        case FLOAT16:
            for (int64_t i = 0; i < count; i++) out[i] = (F)((const Half*)o.data)[at + i * stride] * factor;
            break;
    }
}

// p[i] = factor * from[i], neighbours, for any dtype
template <class F>
static void write_numbers(const Operand& o, int64_t at, const F* from, int64_t count, F factor) {
    switch (o.dtype) {
        case FLOAT32:
            for (int64_t i = 0; i < count; i++) ((float*)o.data)[at + i] = (float)(from[i] * factor);
            break;
        case FLOAT64:
            for (int64_t i = 0; i < count; i++) ((double*)o.data)[at + i] = (double)(from[i] * factor);
            break;
        case BFLOAT16:
            for (int64_t i = 0; i < count; i++) ((uint16_t*)o.data)[at + i] = to_bfloat16((float)(from[i] * factor));
            break;
        case FLOAT16:
            for (int64_t i = 0; i < count; i++) ((Half*)o.data)[at + i] = (Half)(from[i] * factor);
            break;
    }
}
