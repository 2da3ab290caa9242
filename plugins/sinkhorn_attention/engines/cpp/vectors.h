// Vectors of W numbers, by the extension that GCC and Clang share: no intrinsics, any processor.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#define INLINE static inline __attribute__((always_inline))

#if defined(__AVX512F__)
constexpr int VECTOR_BYTES = 64, TILE_VECTORS = 4;
#elif defined(__AVX2__)
constexpr int VECTOR_BYTES = 32, TILE_VECTORS = 2;
#else
constexpr int VECTOR_BYTES = 16, TILE_VECTORS = 4;
#endif
constexpr long TILE_ROWS = 6;  // 6 x 2 sums, two vectors and a factor fill 16 registers; 6 x 4 fill 32

template <class F>
struct Lanes {
    typedef F Vector __attribute__((vector_size(VECTOR_BYTES)));
    typedef F Unaligned __attribute__((vector_size(VECTOR_BYTES), aligned(alignof(F)), may_alias));
    typedef std::conditional_t<sizeof(F) == 4, int32_t, int64_t> Integer;
    typedef Integer Integers __attribute__((vector_size(VECTOR_BYTES)));
    static constexpr long W = VECTOR_BYTES / sizeof(F);
};
template <class F>
using Vec = typename Lanes<F>::Vector;
template <class F>
constexpr long W = Lanes<F>::W;

template <class F>
INLINE Vec<F> load(const F* p) {
    return *(const typename Lanes<F>::Unaligned*)p;
}
template <class F>
INLINE void store(F* p, Vec<F> x) {
    *(typename Lanes<F>::Unaligned*)p = x;
}
template <class F>
INLINE Vec<F> all(F x) {
    return x - Vec<F>{};
}
template <class F>
INLINE F sum(Vec<F> x) {
    F parts[W<F>];
    std::memcpy(parts, &x, sizeof x);
    for (long half = W<F> / 2; half > 0; half /= 2)
        for (long i = 0; i < half; i++) parts[i] += parts[i + half];
    return parts[0];
}
template <class F>
INLINE F largest(Vec<F> x) {
    F most = x[0];
    for (long l = 1; l < W<F>; l++) most = x[l] > most ? x[l] : most;
    return most;
}
template <class V>
INLINE V larger(V a, V b) {
    return a > b ? a : b;
}
INLINE long round_up(long count, long unit) { return (count + unit - 1) / unit * unit; }

// log2 below which 2^x is exactly 0: subnormal numbers would make what follows many times slower.
template <class F>
constexpr F FLUSH_LOG2 = sizeof(F) == 4 ? F(-126) : F(-1022);

// 2^x for x below 128 (1024), 0 below FLUSH_LOG2; relative error 1e-7 (3e-16). x = i + f with |f| <= 1/2: 2^f by a
// polynomial, 2^i by adding i to the exponent's bits. NaN gives 0, too: who calls has none.
template <class F>
INLINE Vec<F> exp2_of(Vec<F> x) {
    using Integers = typename Lanes<F>::Integers;
    constexpr bool single = sizeof(F) == 4;
    const Vec<F> magic = all<F>(single ? F(12582912.0) : F(6755399441055744.0));  // 1.5 * 2^23, 1.5 * 2^52
    const Vec<F> t = x + magic, f = x - (t - magic);
    Vec<F> p;
    if constexpr (single) {  // minimax
        p = all<F>(1.535336188319500e-4f);
        for (F c : {1.339887440266574e-3f, 9.618437357674640e-3f, 5.550332471162809e-2f, 2.402264791363012e-1f,
                    6.931472028550421e-1f, 1.0f})
            p = p * f + c;
    } else {  // Taylor's: the next term, (ln(2) / 2)^14 / 14!, is 4e-18
        p = all<F>(1.3691488853904128e-12);
        for (F c : {2.5678435993488202e-11, 4.4455382718708116e-10, 7.0549116208011231e-9, 1.0178086009239699e-7,
                    1.3215486790144307e-6, 1.5252733804059841e-5, 1.5403530393381608e-4, 1.3333558146428443e-3,
                    9.6181291076284769e-3, 5.5504108664821580e-2, 2.4022650695910072e-1, 6.9314718055994531e-1, 1.0})
            p = p * f + c;
    }
    const Integers bits = (Integers)p + ((Integers)t << (single ? 23 : 52));
    return (Vec<F>)(bits & (Integers)(x >= FLUSH_LOG2<F>));
}

// Transposes W x W numbers: each stage interleaves the first half of the rows with the second.
template <class F>
INLINE void transpose(Vec<F> (&x)[W<F>]) {
    typename Lanes<F>::Integers low, high;
    for (long l = 0; l < W<F>; l++) {
        low[l] = l / 2 + l % 2 * W<F>;
        high[l] = low[l] + W<F> / 2;
    }
#pragma GCC unroll 4
    for (long stage = 1; stage < W<F>; stage *= 2) {
        Vec<F> y[W<F>];
#pragma GCC unroll 8
        for (long i = 0; i < W<F> / 2; i++) {
            y[2 * i] = __builtin_shuffle(x[i], x[i + W<F> / 2], low);
            y[2 * i + 1] = __builtin_shuffle(x[i], x[i + W<F> / 2], high);
        }
#pragma GCC unroll 16
        for (long i = 0; i < W<F>; i++) x[i] = y[i];
    }
}
