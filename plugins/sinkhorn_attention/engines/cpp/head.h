// One head's tokens, its map K, made block by block of rows, and the team of threads that shares the work.
//
//     K_ij = 2^(log2(e) (scale q_i.k_j + bias_ij) + row_shift_i + column_shift_j)
//
// Shifts are 0, or minus the maxima where these are subtracted, and -inf for what takes no part: such entries are 0.
// Each thread of the team makes and passes its own rows; what is summed over rows is added up between two barriers.
#pragma once

#include <atomic>
#include <cmath>
#include <limits>

#include "call.h"
#include "products.h"

constexpr long ROWS = 48;  // of a sweep's block at most
constexpr double LOG2E = 1.4426950408889634;
constexpr double LARGEST_SCORE = 1e30;  // beyond, a product could overflow

struct Span {
    long first, last;
};
// The part of `count` things, in whole units, that falls to one of a team.
INLINE Span share(long count, long unit, int rank, int size) {
    const long units = (count + unit - 1) / unit;
    return {std::min(count, units * rank / size * unit), std::min(count, units * (rank + 1) / size * unit)};
}

// Waits shortly by spinning, then lets the processor go to others: threads may be more than cores.
class Barrier {
    std::atomic<int> arrived{0}, round{0};

public:
    void wait(int size) {
        if (size == 1) return;
        const int mine = round.load(std::memory_order_acquire);
        if (arrived.fetch_add(1, std::memory_order_acq_rel) == size - 1) {
            arrived.store(0, std::memory_order_relaxed);
            round.fetch_add(1, std::memory_order_acq_rel);
            round.notify_all();
            return;
        }
        for (int spins = 0; spins < 2048; spins++)
            if (round.load(std::memory_order_acquire) != mine) return;
        while (round.load(std::memory_order_acquire) == mine) round.wait(mine, std::memory_order_acquire);
    }
};

// Hands out scratch memory; from a null base it only counts.
template <class F>
struct Arena {
    F* base;
    long used = 0;
    F* take(long count) {
        F* p = base ? base + used : nullptr;
        used += round_up(count, 64 / sizeof(F)) + 128 / sizeof(F);  // whole cache lines, and room to read past the end
        return p;
    }
};

template <class F>
struct Sizes {
    long n, m, d, dv, T, np, mp, dp, dvp, ldk, sweep_rows, pass_rows, tile_columns;
    bool kept, backward, damped;
    Panels<F> panels;
    long group;  // panels of a sweep's block
    explicit Sizes(const Call& c)
        : n(c.n), m(c.m), d(c.d), dv(c.dv), T(c.half_steps), np(round_up(c.n, TILE_ROWS)), mp(round_up(c.m, W<F>)),
          dp(round_up(c.d, W<F>)), dvp(round_up(c.dv, W<F>)), backward(c.backward), damped(c.damping != 1),
          panels(c.m) {
        ldk = odd_vectors(round_up(mp, TILE_ROWS));
        kept = T > 1 && np * ldk * (long)sizeof(F) <= c.keep_bytes;
        sweep_rows = c.block_rows;
        pass_rows = std::clamp<long>(c.pass_bytes / (ldk * (long)sizeof(F)) / TILE_ROWS * TILE_ROWS, TILE_ROWS, ROWS);
        const long groups = std::max<long>(1, mp / c.block_columns);
        group = (panels.count + groups - 1) / groups;
        tile_columns = odd_vectors(std::min(group * TILE_VECTORS * W<F>, ldk) + W<F>);
    }
    // A row stride of an odd number of vectors: rows fall into different sets of the cache.
    static long odd_vectors(long columns) {
        const long vectors = round_up(columns, W<F>) / W<F>;
        return (vectors + (vectors % 2 == 0)) * W<F>;
    }
    long terms(const Call& c) const { return c.detached ? 1 : T; }
};

// Scratch memory of a thread of its own, beside that of the head that a team shares.
template <class F>
struct Member {
    F *block, *work, *result, *sums, *column_sums, *maxima, *bias, *d_value, *d_key;
    F query_norm, key_norm, peak;
    void place(const Sizes<F>& s, const Call& c, Arena<F>& arena) {
        block = arena.take(std::max(s.pass_rows * s.ldk, ROWS * s.tile_columns));
        work = arena.take(s.backward || c.dropout_keep.data ? ROWS * s.tile_columns : 0);
        result = arena.take(ROWS * std::max(s.dp, s.dvp));
        sums = arena.take(s.mp);
        column_sums = arena.take(s.backward ? s.mp : 0);
        maxima = arena.take(s.mp);
        bias = arena.take(c.bias.data ? ROWS * s.ldk : 0);
        const long rows = s.backward ? round_up(s.m, TILE_ROWS) : 0;
        d_value = arena.take(rows * s.dvp);
        d_key = arena.take(rows * s.dp);
    }
};

template <class F>
struct Team {
    Barrier barrier;
    int size = 1;
    Member<F>* members = nullptr;
    F *map, *packed_keys, *queries, *keys, *values, *row_shift, *column_shift, *column, *row_target, *column_target;
    F *packed_values, *gradient, *left, *row_sums, *flow;  // backward
    void place(const Sizes<F>& s, const Call& c, Arena<F>& arena) {
        map = arena.take(s.kept ? s.np * s.ldk : 0);
        packed_keys = arena.take(s.dp * s.mp);
        queries = arena.take(s.np * s.dp);
        keys = arena.take(s.m * s.dp);
        values = arena.take(s.m * s.dvp);
        row_shift = arena.take(s.np);
        row_target = arena.take(s.np);
        column_shift = arena.take(s.mp);
        column_target = arena.take(s.mp);
        column = arena.take(s.mp);
        if (!s.backward) return;
        packed_values = arena.take((s.dvp + s.terms(c)) * s.mp);
        gradient = arena.take(s.np * s.dvp);
        left = arena.take(s.np * s.terms(c));
        row_sums = arena.take(s.np);
        flow = arena.take(s.mp);
    }
};

// One thread's view of the head that its team works on.
template <class F>
class Head {
public:
    const Call& c;
    const Sizes<F>& s;
    Team<F>& team;
    Member<F>& member;
    const int rank, thread;
    const long h;
    const Span mine, my_panels, my_columns;  // rows, panels of the map, columns in these
    F ratio = 1;                              // n_valid / m_valid
    bool filled = false;                      // whether my rows of the kept map hold K

    Head(const Call& call, const Sizes<F>& sizes, Team<F>& of, int rank_, int thread_, long head)
        : c(call), s(sizes), team(of), member(of.members[rank_]), rank(rank_), thread(thread_), h(head),
          mine(share(sizes.np, TILE_ROWS, rank_, of.size)), my_panels(share(sizes.panels.count, 1, rank_, of.size)),
          my_columns{sizes.panels.begin(my_panels.first), sizes.panels.begin(my_panels.last)} {}

    void sync() { team.barrier.wait(team.size); }
    F* u(long i) const { return (F*)c.rows + (i * c.heads + h) * s.n; }
    // The columns' scaling before row step i.
    F* v(long i) const { return (F*)c.columns + ((s.damped ? 2 * i : i) * c.heads + h) * s.m; }
    // With damping, 1 / sums of column step i.
    F* inverse_sums(long i) const { return (F*)c.columns + ((2 * i + 1) * c.heads + h) * s.m; }
    bool row_is_in(long i) const { return team.row_target[i] != 0; }

    // ------------------------------------------------------------------------------------------------ packing

    // Rows (length, width) of tokens in the arithmetic's dtype, padded by zeros, zero where masked; gives their largest
    // sum of squares or a little more, NaN if any number is not finite.
    F pack(F* out, long ld, const Operand& tokens, long width, Span rows, long length, const Operand& mask) {
        const int64_t at = offset_of(c, tokens, h), mask_at = offset_of(c, mask, h);
        F most = 0, total = 0;
        for (long i = rows.first; i < rows.last; i++) {
            F* to = out + i * ld;
            const bool hidden = i >= length || !is_on(mask, mask_at, i);
            if (!hidden) read_numbers<F>(to, tokens, at + i * tokens.row_stride, 1, width, 1);
            std::fill(to + (hidden ? 0 : width), to + ld, F(0));
            Vec<F> squares = {};
            for (long k = 0; k < ld; k += W<F>) squares += load(to + k) * load(to + k);
            const F norm = sum<F>(squares);
            most = std::max(most, norm);
            total += norm;
        }
        // A square below the smallest normal number was taken for 0.
        return total - total == 0 ? most + ld * std::numeric_limits<F>::min() : NAN;
    }

    // Packs queries and keys; shifts become 0 or, where a token takes no part, -inf.
    void pack_tokens() {
        const Span keys = share(s.m, 1, rank, team.size);
        member.query_norm = pack(team.queries, s.dp, c.query, s.d, mine, s.n, c.query_mask);
        member.key_norm = pack(team.keys, s.dp, c.key, s.d, keys, s.m, c.key_mask);
        put_shifts(team.row_shift, mine, s.n, c.query_mask);
        put_shifts(team.column_shift, my_columns, s.m, c.key_mask);
        sync();
        const F factor = F(c.scale * LOG2E);
        for (long p = my_panels.first; p < my_panels.last; p++) {
            s.panels.pack_transposed(team.packed_keys, s.dp, team.keys, s.m, s.dp, s.d, p);
            F* panel = team.packed_keys + s.panels.begin(p) * s.dp;
            for (long k = 0; k < s.d * s.panels.width(p); k += W<F>) store(panel + k, load(panel + k) * factor);
        }
        sync();
    }
    void put_shifts(F* shift, Span part, long length, const Operand& mask) {
        const int64_t at = offset_of(c, mask, h);
        for (long i = part.first; i < part.last; i++) {
            shift[i] = i < length && is_on(mask, at, i) ? F(0) : F(-INFINITY);
        }
    }

    // Which domain the scores need, from norms: |q.k| <= |q| |k|.
    Domain find_domain() const {
        double queries = 0, keys = 0, bias = 0;
        for (int t = 0; t < team.size; t++) {
            const double q = team.members[t].query_norm, k = team.members[t].key_norm;
            if (q != q || k != k) return LOG_DOMAIN;
            queries = std::max(queries, q), keys = std::max(keys, k);
        }
        if (c.bias.data) {
            const int64_t at = offset_of(c, c.bias_bound, h);
            bias = ((const F*)c.bias_bound.data)[at];
        }
        // Keys are packed times the scale: neither it nor they may overflow, however small the queries are.
        const double scaled_keys = std::sqrt(keys) * std::abs(c.scale) * LOG2E, bound = std::sqrt(queries) * scaled_keys;
        const double largest = std::max({bound, scaled_keys, std::abs(c.scale)});
        if (!(largest < LARGEST_SCORE) || bias != bias) return LOG_DOMAIN;
        return bound + bias * LOG2E <= c.bounded_log2 ? BOUNDED : SHIFTED;
    }

    // ------------------------------------------------------------------------------------------------ the map

    // Makes rows [i0, i0 + rows) and panels [p0, p1) of K, or of the scores before shifts; out's column 0 is that of p0.
    template <bool EXPONENTIAL>
    void make(F* out, long ld, long i0, long rows, long p0, long p1) {
        const bool biased = c.bias.data;
        const long j0 = s.panels.begin(p0), bias_ld = s.ldk;
        if (biased) read_bias(i0, rows, j0, std::min(s.m, s.panels.begin(p1)));
        for (long p = p0; p < p1; p++)
            with_width(s.panels.width(p) / W<F>, [&]<int N>() {
                const long first = s.panels.begin(p);
                const F *panel = team.packed_keys + first * s.dp, *bias = member.bias + first - j0;
                Vec<F> shift[N];
                for (int l = 0; l < N; l++) shift[l] = load(team.column_shift + first + l * W<F>);
                for (long i = 0; i < rows; i += TILE_ROWS) {
                    Tile<F, N> x = {};
                    multiply<F, N, false>(x, team.queries + (i0 + i) * s.dp, s.dp, panel, N * W<F>, s.d);
#pragma GCC unroll 6
                    for (int r = 0; r < TILE_ROWS; r++) {
                        const Vec<F> row_shift = all(team.row_shift[i0 + i + r]);
#pragma GCC unroll 4
                        for (int l = 0; l < N; l++) {
                            Vec<F> y = x[r][l];
                            if (biased) y += load(bias + (i + r) * bias_ld + l * W<F>);
                            y = (y + row_shift) + shift[l];
                            store(out + (i + r) * ld + first - j0 + l * W<F>, EXPONENTIAL ? exp2_of<F>(y) : y);
                        }
                    }
                }
            });
    }
    // A block of the bias times log2(e), in member.bias; 0 beyond the last row and column.
    void read_bias(long i0, long rows, long j0, long j1) {
        const int64_t at = offset_of(c, c.bias, h) + j0 * c.bias.column_stride;
        for (long i = 0; i < rows; i++) {
            F* to = member.bias + i * s.ldk;
            const long columns = i0 + i < s.n ? j1 - j0 : 0;
            read_numbers<F>(to, c.bias, at + (i0 + i) * c.bias.row_stride, c.bias.column_stride, columns, F(LOG2E));
            std::fill(to + columns, to + round_up(j1 - j0, W<F>), F(0));
        }
    }

    // Calls g(pointer, first row, rows) for blocks of whole rows of K: the kept ones, or made in scratch memory.
    template <class G>
    void each_block(Span rows, G&& g) {
        for (long i = rows.first; i < rows.last; i += s.pass_rows) {
            const long count = std::min(s.pass_rows, rows.last - i);
            F* k = s.kept ? team.map + i * s.ldk : member.block;
            if (!s.kept || !filled) make<true>(k, s.ldk, i, count, 0, s.panels.count);
            g(k, i, count);
        }
    }
    // Calls g(pointer, row stride, first row, rows, p0, p1) for K in blocks of some rows and a group of panels, the
    // groups of one block of rows one after the other; `before` is called before these, `after` after them.
    template <class B, class G, class A>
    void sweep(B&& before, G&& g, A&& after) {
        for (long i = mine.first; i < mine.last; i += s.sweep_rows) {
            const long rows = std::min(s.sweep_rows, mine.last - i);
            before(i, rows);
            for (long p0 = 0; p0 < s.panels.count; p0 += s.group) {
                const long p1 = std::min(s.panels.count, p0 + s.group);
                F* k = s.kept ? team.map + i * s.ldk + s.panels.begin(p0) : member.block;
                const long ld = s.kept ? s.ldk : s.tile_columns;
                if (!s.kept || !filled) make<true>(k, ld, i, rows, p0, p1);
                g(k, ld, i, rows, p0, p1);
            }
            after(i, rows);
        }
    }

    // Subtracts the row maximum, then the column maximum: then a 1 stands in every row and column of K.
    void subtract_maxima() {
        F* highest = member.maxima;
        std::fill(highest, highest + s.mp, F(-INFINITY));
        for (long i0 = mine.first; i0 < mine.last; i0 += s.pass_rows) {
            const long rows = std::min(s.pass_rows, mine.last - i0);
            F* scores = s.kept ? team.map + i0 * s.ldk : member.block;
            make<false>(scores, s.ldk, i0, rows, 0, s.panels.count);
            for (long i = 0; i < rows; i++) {
                const F* row = scores + i * s.ldk;
                Vec<F> top = all(F(-INFINITY));
                for (long j = 0; j < s.mp; j += W<F>) top = larger(load(row + j), top);
                const F most = largest<F>(top);
                team.row_shift[i0 + i] = -most;
                if (most == F(-INFINITY)) {
                    team.row_shift[i0 + i] = most;
                    continue;
                }
                for (long j = 0; j < s.mp; j += W<F>) store(highest + j, larger(load(row + j) - most, load(highest + j)));
            }
        }
        sync();
        for (long j = my_columns.first; j < my_columns.last; j++) {
            F most = -INFINITY;
            for (int t = 0; t < team.size; t++) most = std::max(most, team.members[t].maxima[j]);
            team.column_shift[j] = most == F(-INFINITY) ? most : -most;
        }
        sync();
        if (!s.kept) return;
        for (long i = mine.first; i < mine.last; i++) {  // the scores are there already
            const Vec<F> row_shift = all(team.row_shift[i]);
            F* row = team.map + i * s.ldk;
            for (long j = 0; j < s.mp; j += W<F>)
                store(row + j, exp2_of<F>((load(row + j) + row_shift) + load(team.column_shift + j)));
        }
        filled = true;
    }

    // What rows and columns should sum to, and the columns' scaling to begin with.
    void find_targets() {
        long n_valid = 0, m_valid = 0;
        for (long i = 0; i < s.n; i++) n_valid += team.row_shift[i] != F(-INFINITY);
        for (long j = 0; j < s.m; j++) m_valid += team.column_shift[j] != F(-INFINITY);
        const bool empty = n_valid == 0 || m_valid == 0;
        ratio = empty ? F(1) : F(n_valid) / F(m_valid);
        for (long i = mine.first; i < mine.last; i++)
            team.row_target[i] = !empty && team.row_shift[i] != F(-INFINITY);
        for (long j = my_columns.first; j < my_columns.last; j++) {
            const bool in = team.column_shift[j] != F(-INFINITY);
            team.column_target[j] = in && !empty ? ratio : F(0);
            team.column[j] = in ? std::exp2(-team.column_shift[j]) : F(0);
        }
    }

    // out = K * the dropout's factors, of a block; out may be K itself.
    void drop(F* out, long out_ld, const F* k, long ld, long i0, long rows, long p0, long p1) const {
        const int64_t at = offset_of(c, c.dropout_keep, h);
        const long j0 = s.panels.begin(p0), columns = std::min(s.m, s.panels.begin(p1)) - j0;
        const F factor = F(c.keep_factor);
        for (long i = 0; i < std::min(rows, s.n - i0); i++) {
            const uint8_t* keep = (const uint8_t*)c.dropout_keep.data + at + (i0 + i) * c.dropout_keep.row_stride + j0;
            for (long j = 0; j < columns; j++) out[i * out_ld + j] = keep[j] ? k[i * ld + j] * factor : F(0);
        }
        if (out == k) return;
        for (long i = 0; i < rows; i++)  // padding
            for (long j = i0 + i < s.n ? columns : 0; j < round_up(columns, W<F>); j++) out[i * out_ld + j] = 0;
    }
};
