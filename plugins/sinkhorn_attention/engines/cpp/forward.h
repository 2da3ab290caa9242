// Forward of one head: pairs of half-steps, each in one pass over K, then the last row step and the product with the
// values in one sweep.
//
//     s_i = <K_i, v>,  u_i = 1 / s_i,  sums += u_i K_i,     then    v = (ratio / sums)^damping
#pragma once

#include "head.h"

template <class F>
static void forward_head(Head<F>& x) {
    const Call& c = x.c;
    const Sizes<F>& s = x.s;
    Team<F>& team = x.team;
    Member<F>& member = x.member;
    x.pack_tokens();
    const Domain domain = x.find_domain();
    if (x.rank == 0) c.domain[x.h] = domain;
    if (domain == LOG_DOMAIN) return x.sync();
    if (domain == SHIFTED) x.subtract_maxima();
    x.find_targets();
    const auto save_column = [&](long i) {
        std::copy(team.column + x.my_columns.first, team.column + std::min(x.my_columns.last, s.m),
                  x.v(i) + x.my_columns.first);
    };
    if (x.my_columns.first < s.m) save_column(0);
    std::fill(member.sums, member.sums + s.mp, F(0));
    x.sync();
    for (long i = 0; i < s.T / 2; i++) {
        F* u = x.u(i);
        x.each_block(x.mine, [&](F* k, long first, long rows) {
            pass<F>(k, s.ldk, rows, s.mp, team.column, member.sums, [&](long r, F total) {
                const F scaling = x.row_is_in(first + r) ? 1 / total : F(0);
                if (first + r < s.n) u[first + r] = scaling;
                return scaling;
            });
        });
        x.filled = s.kept;
        x.sync();
        for (long j = x.my_columns.first; j < x.my_columns.last; j++) {
            F total = 0;
            for (int t = 0; t < team.size; t++) total += team.members[t].sums[j];
            F scaling = team.column_target[j] ? team.column_target[j] / total : F(0);
            if (s.damped) {
                if (j < s.m) x.inverse_sums(i)[j] = scaling / x.ratio;
                if (scaling)
                    scaling = std::pow(scaling, F(c.damping)) *
                              std::exp2(F(c.damping - 1) * team.column_shift[j]);
            }
            team.column[j] = scaling;
        }
        if (x.my_columns.first < s.m) save_column(i + 1);
        x.sync();
        std::fill(member.sums, member.sums + s.mp, F(0));
    }
    // Values times the columns' scaling.
    const Span keys = share(s.m, 1, x.rank, team.size);
    x.pack(team.values, s.dvp, c.value, s.dv, keys, s.m, c.key_mask);
    for (long j = keys.first; j < keys.last; j++)
        for (long l = 0; l < s.dvp; l += W<F>) store(team.values + j * s.dvp + l, load(team.values + j * s.dvp + l) * team.column[j]);
    x.sync();
    const bool odd = s.T % 2;
    F* u = x.u((s.T - 1) / 2);
    F totals[ROWS];
    x.sweep([&](long, long) { std::fill(totals, totals + ROWS, F(0)); },
            [&](F* k, long ld, long first, long rows, long p0, long p1) {
                const long j0 = s.panels.begin(p0), j1 = s.panels.begin(p1);
                if (odd)
                    pass<F>(k, ld, rows, j1 - j0, team.column + j0, nullptr, [&](long r, F total) { return totals[r] += total; });
                if (c.dropout_keep.data) x.drop(k, ld, k, ld, first, rows, p0, p1);
                product<F, false>(member.result, s.dvp, k, ld, team.values + j0 * s.dvp, s.dvp, rows, s.dvp,
                                  std::min(j1, s.m) - j0, p0 > 0);
            },
            [&](long first, long rows) {
                for (long i = first; i < std::min(first + rows, s.n); i++) {
                    if (odd) u[i] = x.row_is_in(i) ? 1 / totals[i - first] : F(0);
                    const F* from = member.result + (i - first) * s.dvp;
                    F* to = (F*)c.output + (x.h * s.n + i) * s.dv;
                    for (long l = 0; l < s.dv; l++) to[l] = u[i] ? from[l] * u[i] : F(0);  // whatever the values hold
                }
            });
    x.sync();
}
