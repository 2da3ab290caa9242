// Backward of one head. With the row sums r and the column sums c of P * dL/dP, the half-steps taken in reverse give
//
//     dL/dC = K * (diag(u_T) dO V^T diag(v_T) + A B^T),
//
// one column of A and of B for each half-step: a row step, -(r u) and v, passes -v K^T (r u) on to c; a column step, u
// and -(c v' / ratio), passes u K (-(c v' / ratio)) on to r. A column step and the row step before it take one pass.
#pragma once

#include "head.h"

template <class F>
class Backward {
    // From this entry of a coupling on, dL/dC is a difference of nearly equal terms: then r and c are taken from the
    // very products that they are subtracted from.
    static constexpr F PEAK = F(0.9);
    Head<F>& x;
    const Call& c;
    const Sizes<F>& s;
    Team<F>& team;
    Member<F>& member;
    const bool odd, dropped, single;  // single: one sweep does it all
    const long last_row, last_column, terms;
    const F *final_u, *final_v;

public:
    explicit Backward(Head<F>& head)
        : x(head), c(head.c), s(head.s), team(head.team), member(head.member), odd(s.T % 2),
          dropped(c.dropout_keep.data), single((s.T == 1 || c.detached) && c.domain[head.h] == BOUNDED),
          last_row((s.T - 1) / 2), last_column(s.T / 2), terms(s.terms(c)), final_u(head.u(last_row)),
          final_v(head.v(last_column)) {}

    void run() {
        x.pack_tokens();
        if (c.domain[x.h] == SHIFTED) x.subtract_maxima();
        x.find_targets();
        x.sync();
        pack_gradients();
        if (!single) {
            first_sweep();
            if (peaked()) take_sums_from_products();
        }
        reverse();
        last_sweep();
        finish();
    }

private:
    static F row_dot(const F* a, const F* b, long count) {
        Vec<F> total = {};
        for (long l = 0; l < count; l += W<F>) total += load(a + l) * load(b + l);
        return sum<F>(total);
    }
    // dO times u_T, V times v_T, and the row sums of P * dL/dP = dO.O.
    void pack_gradients() {
        const Span keys = share(s.m, 1, x.rank, team.size);
        x.pack(team.gradient, s.dvp, c.d_output, s.dv, x.mine, s.n, c.query_mask);
        for (long i = x.mine.first; i < x.mine.last; i++) {
            F* row = team.gradient + i * s.dvp;
            F total = 0;
            if (i < s.n) {
                const F* out = (const F*)c.output + (x.h * s.n + i) * s.dv;
                for (long l = 0; l < s.dv; l++) total += row[l] * out[l];
            }
            const F u = i < s.n && x.row_is_in(i) ? final_u[i] : F(0);
            team.row_sums[i] = u ? total : F(0);
            for (long l = 0; l < s.dvp; l++) row[l] = u ? row[l] * u : F(0);
        }
        x.pack(team.values, s.dvp, c.value, s.dv, keys, s.m, c.key_mask);
        for (long j = keys.first; j < keys.last; j++) {
            F* row = team.values + j * s.dvp;
            for (long l = 0; l < s.dvp; l++) row[l] = final_v[j] ? row[l] * final_v[j] : F(0);
        }
        std::fill(member.sums, member.sums + s.mp, F(0));
        std::fill(member.column_sums, member.column_sums + s.mp, F(0));
        if (x.mine.first == x.mine.last) {
            std::fill(member.d_value, member.d_value + s.m * s.dvp, F(0));
            std::fill(member.d_key, member.d_key + s.m * s.dp, F(0));
        }
        x.sync();
        for (long p = x.my_panels.first; p < x.my_panels.last; p++)
            s.panels.pack_transposed(team.packed_values, depth(), team.values, s.m, s.dvp, s.dv, p);
        x.sync();
    }
    long depth() const { return s.dvp + terms; }

    // Fills a row of B, over all panels of this thread; value(j) gives a vector.
    template <class G>
    void put_right(long term, G&& value) {
        for (long p = x.my_panels.first; p < x.my_panels.last; p++) {
            const long first = s.panels.begin(p), width = s.panels.width(p);
            F* to = team.packed_values + first * depth() + (s.dv + term) * width;
            for (long j = 0; j < width; j += W<F>) store(to + j, value(first + j));
        }
    }
    // A vector of a state of m numbers, 0 beyond its end.
    Vec<F> load_columns(const F* p, long j) const {
        if (j + W<F> <= s.m) return load(p + j);
        Vec<F> y = {};
        for (long l = 0; j + l < s.m; l++) y[l] = p[j + l];
        return y;
    }

    void add_value_gradient(const F* k, long ld, long i, long rows, long p0, long p1) {
        const long j0 = s.panels.begin(p0);
        if (dropped) {
            x.drop(member.work, s.tile_columns, k, ld, i, rows, p0, p1);
            k = member.work, ld = s.tile_columns;
        }
        product<F, true>(member.d_value + j0 * s.dvp, s.dvp, k, ld, team.gradient + i * s.dvp, s.dvp,
                         std::min(s.m, s.panels.begin(p1)) - j0, s.dvp, rows, i > x.mine.first);
    }
    // out = K * (dO V^T + A B^T), or without A B^T, of a block; out may be K.
    void gradient_block(F* out, long out_ld, const F* k, long ld, long i0, long rows, long p0, long p1, bool correct) {
        const long j0 = s.panels.begin(p0);
        for (long p = p0; p < p1; p++)
            with_width(s.panels.width(p) / W<F>, [&]<int N>() {
                const long first = s.panels.begin(p);
                const F* b = team.packed_values + first * depth();
                for (long i = 0; i < rows; i += TILE_ROWS) {
                    Tile<F, N> y = {};
                    multiply<F, N, false>(y, team.gradient + (i0 + i) * s.dvp, s.dvp, b, N * W<F>, s.dv);
                    if (dropped) drop_tile<N>(y, i0 + i, first);
                    if (correct)
                        multiply<F, N, false>(y, team.left + (i0 + i) * terms, terms, b + s.dv * N * W<F>, N * W<F>, terms);
#pragma GCC unroll 6
                    for (int r = 0; r < TILE_ROWS; r++)
#pragma GCC unroll 4
                        for (int l = 0; l < N; l++) {
                            const long j = first - j0 + l * W<F>;
                            store(out + (i + r) * out_ld + j, load(k + (i + r) * ld + j) * y[r][l]);
                        }
                }
            });
    }
    template <int N>
    inline __attribute__((always_inline)) void drop_tile(Tile<F, N>& y, long i0, long j0) const {
        const int64_t at = offset_of(c, c.dropout_keep, x.h);
        for (int r = 0; r < TILE_ROWS; r++)
            for (int l = 0; l < N; l++) {
                Vec<F> factor = {};
                if (i0 + r < s.n) {
                    const uint8_t* keep = (const uint8_t*)c.dropout_keep.data + at + (i0 + r) * c.dropout_keep.row_stride;
                    for (long w = 0; w < std::min(W<F>, s.m - j0 - l * W<F>); w++)
                        factor[w] = keep[j0 + l * W<F> + w] ? F(c.keep_factor) : F(0);
                }
                y[r][l] *= factor;
            }
    }

    // Makes K, the gradient of the values and, where the last half-step is one of rows, K^T (-(r u)).
    void first_sweep() {
        member.peak = 0;
        x.sweep([](long, long) {},
                [&](F* k, long ld, long i, long rows, long p0, long p1) {
                    const long j0 = s.panels.begin(p0), j1 = s.panels.begin(p1);
                    for (long r = 0; r < rows; r++) {
                        Vec<F> top = {};
                        for (long j = j0; j < j1; j += W<F>) top = larger(load(k + r * ld + j - j0) * load_columns(final_v, j), top);
                        const F u = i + r < s.n ? final_u[i + r] : F(0);
                        member.peak = std::max(member.peak, largest<F>(top) * u);
                    }
                    if (odd) add_rows<F>(k, ld, rows, j1 - j0, member.sums + j0, [&](long r) { return passed_weight(i + r); });
                    add_value_gradient(k, ld, i, rows, p0, p1);
                },
                [](long, long) {});
        x.filled = s.kept;
        for (long j = 0; j < s.m; j++)  // V.dV, of the share of dV that my rows have
            member.column_sums[j] = row_dot(team.values + j * s.dvp, member.d_value + j * s.dvp, s.dvp);
        x.sync();
    }
    F passed_weight(long i) const { return i < s.n ? -team.row_sums[i] * final_u[i] : F(0); }
    bool peaked() const {
        F most = 0;
        for (int t = 0; t < team.size; t++) most = std::max(most, team.members[t].peak);
        return c.domain[x.h] == SHIFTED || most > PEAK;
    }
    void take_sums_from_products() {
        x.sync();
        std::fill(member.column_sums, member.column_sums + s.mp, F(0));
        F totals[ROWS];
        x.sweep([&](long, long) { std::fill(totals, totals + ROWS, F(0)); },
                [&](F* k, long ld, long i, long rows, long p0, long p1) {
                    const long j0 = s.panels.begin(p0), columns = s.panels.begin(p1) - j0;
                    gradient_block(member.work, s.tile_columns, k, ld, i, rows, p0, p1, false);
                    F* sums = member.column_sums + j0;
                    for (long r = 0; r < rows; r++) {
                        Vec<F> total = {};
                        for (long j = 0; j < columns; j += W<F>) {
                            const Vec<F> y = load(member.work + r * s.tile_columns + j);
                            total += y;
                            store(sums + j, load(sums + j) + y);
                        }
                        totals[r] += sum<F>(total);
                    }
                },
                [&](long i, long rows) { std::copy(totals, totals + rows, team.row_sums + i); });
        if (odd) {
            std::fill(member.sums, member.sums + s.mp, F(0));
            x.each_block(x.mine, [&](F* k, long i, long rows) {
                add_rows<F>(k, s.ldk, rows, s.mp, member.sums, [&](long r) { return passed_weight(i + r); });
            });
        }
    }

    // The half-steps in reverse, but for the row step of the first pair, which last_sweep makes.
    void reverse() {
        long term = 0;
        if (odd || c.detached) {
            const long i = odd ? last_row : last_column - 1;
            const F* u = x.u(i);
            for (long r = x.mine.first; r < x.mine.last; r++)
                team.left[r * terms] = r < s.n ? -team.row_sums[r] * u[r] : F(0);
            put_right(0, [&](long j) { return load_columns(x.v(i), j); });
            term = 1;
        }
        first_pair = !odd;
        for (long i = last_column - 1; !c.detached && i >= 0; i--, term += 2) {
            x.sync();
            for (long j = x.my_columns.first; j < x.my_columns.last; j += W<F>) {
                Vec<F> passed = {}, sums = {};
                for (int t = 0; t < team.size; t++) {
                    passed += load(team.members[t].sums + j);
                    sums += load(team.members[t].column_sums + j);
                }
                const Vec<F> after = load_columns(x.v(i + 1), j);
                Vec<F> weight = passed * after;
                if (i == last_column - 1) weight += sums;
                weight = s.damped ? weight * load_columns(x.inverse_sums(i), j) * F(-c.damping)
                                  : weight * after * (-1 / x.ratio);
                store(team.flow + j, weight);
            }
            put_right(term, [&](long j) { return load(team.flow + j); });
            put_right(term + 1, [&](long j) { return load_columns(x.v(i), j); });
            x.sync();
            std::fill(member.sums, member.sums + s.mp, F(0));
            if (i == 0) break;
            x.each_block(x.mine, [&](F* k, long first, long rows) {
                pass<F>(k, s.ldk, rows, s.mp, team.flow, member.sums,
                        [&](long r, F total) { return weigh(i, term, first + r, total); });
            });
            first_pair = false;
        }
        last_term = term;
        x.sync();
    }
    bool first_pair = false;
    long last_term = 0;
    // The terms of A of column step i and row step i, for one row, and what the latter passes on.
    F weigh(long i, long term, long row, F total) {
        F* left = team.left + row * terms + term;
        const F u = row < s.n ? x.u(i)[row] : F(0);
        const F weight = -(total * u + (first_pair ? team.row_sums[row] : F(0))) * u;
        left[0] = u;
        left[1] = weight;
        return weight;
    }

    // The gradients of queries, keys, bias and, if this is the only sweep, values.
    void last_sweep() {
        const bool rows_left = !c.detached && s.T > 1;
        x.sweep(
            [&](long i, long rows) {
                if (!rows_left) return;
                x.each_block({i, i + rows}, [&](F* k, long first, long count) {
                    pass<F>(k, s.ldk, count, s.mp, team.flow, nullptr,
                            [&](long r, F total) { return weigh(0, last_term, first + r, total); });
                });
            },
            [&](F* k, long ld, long i, long rows, long p0, long p1) {
                const long j0 = s.panels.begin(p0), columns = std::min(s.m, s.panels.begin(p1)) - j0;
                if (single) add_value_gradient(k, ld, i, rows, p0, p1);
                gradient_block(k, ld, k, ld, i, rows, p0, p1, true);
                product<F, false>(member.result, s.dp, k, ld, team.keys + j0 * s.dp, s.dp, rows, s.dp, columns, p0 > 0);
                product<F, true>(member.d_key + j0 * s.dp, s.dp, k, ld, team.queries + i * s.dp, s.dp, columns, s.dp, rows,
                                 i > x.mine.first);
                if (c.d_bias.data) add_bias_gradient(k, ld, i, rows, j0, columns);
            },
            [&](long i, long rows) {
                const int64_t at = offset_of(c, c.d_query, x.h);
                for (long r = 0; r < std::min(rows, s.n - i); r++) {
                    F* row = member.result + r * s.dp;
                    if (!x.row_is_in(i + r)) std::fill(row, row + s.d, F(0));
                    write_numbers<F>(c.d_query, at + (i + r) * s.d, row, s.d, F(c.scale));
                }
            });
        x.sync();
    }
    // Into this thread's copy, or the only one where heads and rows write to different places.
    void add_bias_gradient(const F* k, long ld, long i, long rows, long j0, long columns) {
        const Operand& o = c.d_bias;
        F* to = (F*)o.data + x.thread * c.bias_copy + offset_of(c, o, x.h) + j0 * o.column_stride;
        for (long r = 0; r < std::min(rows, s.n - i); r++)
            for (long j = 0; j < columns; j++) to[(i + r) * o.row_stride + j * o.column_stride] += k[r * ld + j];
    }
    void finish() {
        const Span keys = share(s.m, 1, x.rank, team.size);
        const int64_t value_at = offset_of(c, c.d_value, x.h), key_at = offset_of(c, c.d_key, x.h);
        F* total = member.result;
        const auto write = [&](const Operand& o, int64_t at, F* Member<F>::*part, long ld, long width, long j, F factor) {
            const F* from = member.*part + j * ld;
            const bool in = team.column_target[j] != 0;  // otherwise 0, whatever the arriving gradient holds
            if (team.size > 1 || !in) {
                std::fill(total, total + width, F(0));
                for (int t = 0; in && t < team.size; t++)
                    for (long l = 0; l < width; l++) total[l] += (team.members[t].*part)[j * ld + l];
                from = total;
            }
            write_numbers<F>(o, at + j * width, from, width, factor);
        };
        for (long j = keys.first; j < keys.last; j++) {
            write(c.d_value, value_at, &Member<F>::d_value, s.dvp, s.dv, j, final_v[j]);
            write(c.d_key, key_at, &Member<F>::d_key, s.dp, s.d, j, F(c.scale));
        }
        x.sync();
    }
};
