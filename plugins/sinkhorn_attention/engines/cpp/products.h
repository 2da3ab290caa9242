// Products of matrices and passes over their rows.
//
// A tile is TILE_ROWS rows and up to TILE_VECTORS vectors of a result, held in registers. Matrices that are multiplied
// from the left have their rows padded to a multiple of TILE_ROWS, those from the right to whole vectors.
#pragma once

#include <algorithm>

#include "vectors.h"

template <class F, int N>
using Tile = Vec<F>[TILE_ROWS][N];

// tile += A B; A (rows, depth), or its transpose, with row stride lda; B (depth, N vectors) with row stride ldb.
template <class F, int N, bool TRANSPOSED>
INLINE void multiply(Tile<F, N>& tile, const F* a, long lda, const F* b, long ldb, long depth) {
    for (long k = 0; k < depth; k++) {
        Vec<F> row[N];
#pragma GCC unroll 4
        for (int j = 0; j < N; j++) row[j] = load(b + k * ldb + j * W<F>);
#pragma GCC unroll 6
        for (int i = 0; i < TILE_ROWS; i++) {
            const Vec<F> factor = all(TRANSPOSED ? a[k * lda + i] : a[i * lda + k]);
#pragma GCC unroll 4
            for (int j = 0; j < N; j++) tile[i][j] += factor * row[j];
        }
    }
}

// Calls g.operator()<N>() for a number of vectors that is known when the program runs.
template <class G>
INLINE void with_width(long vectors, G&& g) {
    switch (vectors) {
        case 1: return g.template operator()<1>();
        case 2: return g.template operator()<2>();
#if !defined(__AVX2__) || defined(__AVX512F__)
        case 3: return g.template operator()<3>();
        case 4: return g.template operator()<4>();
#endif
    }
}

// One tile of `product`.
template <class F, int N, bool TRANSPOSED>
INLINE void product_tile(F* c, long ldc, const F* a, long lda, const F* b, long ldb, long depth, bool add) {
    Tile<F, N> tile;
#pragma GCC unroll 6
    for (int r = 0; r < TILE_ROWS; r++)
#pragma GCC unroll 4
        for (int l = 0; l < N; l++) tile[r][l] = add ? load(c + r * ldc + l * W<F>) : Vec<F>{};
    multiply<F, N, TRANSPOSED>(tile, a, lda, b, ldb, depth);
#pragma GCC unroll 6
    for (int r = 0; r < TILE_ROWS; r++)
#pragma GCC unroll 4
        for (int l = 0; l < N; l++) store(c + r * ldc + l * W<F>, tile[r][l]);
}

// Depth of a product's inner blocks: so many rows of B stay in the first-level cache.
constexpr long DEPTH = 128;

// C = A B, or C += A B: C (rows, width) with row stride ldc, width a multiple of W. A is read up to whole tiles.
template <class F, bool TRANSPOSED>
static void product(F* c, long ldc, const F* a, long lda, const F* b, long ldb, long rows, long width, long depth,
                    bool add) {
    if (depth == 0 && !add)
        for (long i = 0; i < rows; i++) std::fill(c + i * ldc, c + i * ldc + width, F(0));
    for (long k = 0; k < depth; k += DEPTH, add = true)
        for (long j = 0; j < width; j += TILE_VECTORS * W<F>)
            with_width(std::min<long>(TILE_VECTORS, (width - j) / W<F>), [&]<int N>() {
                for (long i = 0; i < rows; i += TILE_ROWS) {
                    const long part = std::min(DEPTH, depth - k);
                    F* at = c + i * ldc + j;
                    if (i + TILE_ROWS <= rows) {
                        product_tile<F, N, TRANSPOSED>(at, ldc, TRANSPOSED ? a + k * lda + i : a + i * lda + k, lda,
                                                       b + k * ldb + j, ldb, part, add);
                        continue;
                    }
                    F last[TILE_ROWS * N * W<F>];  // the tile hangs over the end
                    const long left = rows - i, width_bytes = N * W<F> * sizeof(F);
                    for (long r = 0; r < left; r++) std::memcpy(last + r * N * W<F>, at + r * ldc, width_bytes);
                    product_tile<F, N, TRANSPOSED>(last, N * W<F>, TRANSPOSED ? a + k * lda + i : a + i * lda + k, lda,
                                                   b + k * ldb + j, ldb, part, add);
                    for (long r = 0; r < left; r++) std::memcpy(at + r * ldc, last + r * N * W<F>, width_bytes);
                }
            });
}

// A matrix (depth, columns) cut into panels of up to TILE_VECTORS vectors, one after another: what `multiply` reads then
// lies in one piece.
template <class F>
struct Panels {
    long vectors, count;
    explicit Panels(long columns)
        : vectors(round_up(columns, W<F>) / W<F>), count((vectors + TILE_VECTORS - 1) / TILE_VECTORS) {}
    long begin(long p) const { return vectors * p / count * W<F>; }
    long width(long p) const { return begin(p + 1) - begin(p); }
    // The transpose of rows (count, stride ld), of which the first `depth` numbers are taken; 0 beyond the last row.
    void pack_transposed(F* out, long out_depth, const F* rows, long count_rows, long ld, long depth, long p) const {
        F* panel = out + begin(p) * out_depth;
        for (long j = 0; j < width(p); j += W<F>)
            for (long k = 0; k < depth; k += W<F>) {
                Vec<F> x[W<F>];
                for (long l = 0; l < W<F>; l++) {
                    const long row = begin(p) + j + l;
                    x[l] = row < count_rows ? load(rows + row * ld + k) : Vec<F>{};
                }
                transpose<F>(x);
                for (long l = 0; l < W<F>; l++) store(panel + (k + l) * width(p) + j, x[l]);
            }
    }
};

// ---------------------------------------------------------------------------------------------------- passes over rows

// s_r = <K_r, v>, w_r = weight(r, s_r) and, where there is `sums`, sums += w_r K_r: R rows, which stay in the
// first-level cache between the two.
template <class F, int R, class G>
INLINE void pass_rows(const F* k, long ldk, long columns, const F* v, F* sums, G&& weight) {
    Vec<F> s[R][2] = {};
    long j = 0;
    for (; j + 2 * W<F> <= columns; j += 2 * W<F>) {
        const Vec<F> v0 = load(v + j), v1 = load(v + j + W<F>);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            s[r][0] += load(k + r * ldk + j) * v0;
            s[r][1] += load(k + r * ldk + j + W<F>) * v1;
        }
    }
    for (; j < columns; j += W<F>)
        for (int r = 0; r < R; r++) s[r][0] += load(k + r * ldk + j) * load(v + j);
    Vec<F> w[R];
    for (int r = 0; r < R; r++) w[r] = all(weight(r, sum<F>(s[r][0] + s[r][1])));
    if (!sums) return;
    for (j = 0; j < columns; j += W<F>) {
        Vec<F> x = load(sums + j);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            x += w[r] * load(k + r * ldk + j);
            if (VECTOR_BYTES == 64) __builtin_prefetch(k + (R + r) * ldk + j);
        }
        store(sums + j, x);
    }
}

// The same for an even number of rows.
template <class F, class G>
static void pass(const F* k, long ldk, long rows, long columns, const F* v, F* sums, G&& weight) {
    long i = 0;
    for (; i + 4 <= rows; i += 4)
        pass_rows<F, 4>(k + i * ldk, ldk, columns, v, sums, [&](int r, F s) { return weight(i + r, s); });
    for (; i < rows; i += 2)
        pass_rows<F, 2>(k + i * ldk, ldk, columns, v, sums, [&](int r, F s) { return weight(i + r, s); });
}

// sums += sum over an even number of rows of weight(i) K_i
template <class F, class G>
static void add_rows(const F* k, long ldk, long rows, long columns, F* sums, G&& weight) {
    for (long i = 0; i < rows; i += 2) {
        const Vec<F> w0 = all<F>(weight(i)), w1 = all<F>(weight(i + 1));
        const F *k0 = k + i * ldk, *k1 = k0 + ldk;
        for (long j = 0; j < columns; j += W<F>) store(sums + j, load(sums + j) + w0 * load(k0 + j) + w1 * load(k1 + j));
    }
}
