// A program that holds the native engine against the definition in double precision, without Python: for processors that
// are only emulated here. Values, and the gradient along a random direction by differences. Exits with 1 if one is off.
#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

#include "call.h"

extern "C" int64_t sinkhorn_scratch_bytes(const Call*);
extern "C" void sinkhorn_run(const Call*);

using Numbers = std::vector<double>;

// Attention of one head after T half-steps; rows and columns that are masked take no part.
static Numbers definition(const Numbers& q, const Numbers& k, const Numbers& v, const std::vector<uint8_t>& in, long n,
                          long m, long d, long dv, long T, double scale) {
    Numbers p(n * m), out(n * dv);
    double columns = 0;
    for (long j = 0; j < m; j++) columns += in[j];
    for (long i = 0; i < n; i++)
        for (long j = 0; j < m; j++) {
            double s = 0;
            for (long l = 0; l < d; l++) s += q[i * d + l] * k[j * d + l];
            p[i * m + j] = in[j] ? std::exp(scale * s) : 0;
        }
    for (long t = 0; t < T; t++)
        for (long a = 0; a < (t % 2 ? m : n); a++) {
            double sum = 0;
            for (long b = 0; b < (t % 2 ? n : m); b++) sum += t % 2 ? p[b * m + a] : p[a * m + b];
            const double factor = sum > 0 ? (t % 2 ? n / columns : 1) / sum : 0;
            for (long b = 0; b < (t % 2 ? n : m); b++) (t % 2 ? p[b * m + a] : p[a * m + b]) *= factor;
        }
    for (long i = 0; i < n; i++)
        for (long j = 0; j < m; j++)
            for (long l = 0; l < dv; l++) out[i * dv + l] += p[i * m + j] * v[j * dv + l];
    return out;
}

template <class F>
static Operand operand(std::vector<F>& x, long rows, long columns, int64_t dtype) {
    Operand o{};
    o.data = x.data(), o.dtype = dtype, o.stride[0] = rows * columns, o.row_stride = columns, o.column_stride = 1;
    return o;
}

template <class F>
static bool check(long n, long m, long d, long dv, long T, double std, long threads, long keep, double tolerance) {
    const long heads = 3, dtype = sizeof(F) == 4 ? FLOAT32 : FLOAT64;
    const double scale = 1 / std::sqrt((double)d);
    std::mt19937 random(n * m + T);
    std::normal_distribution<double> normal;
    const auto draw = [&](long count, double size) {
        std::vector<F> x(count);
        for (F& y : x) y = (F)(normal(random) * size);
        return x;
    };
    std::vector<F> q = draw(heads * n * d, std), k = draw(heads * m * d, 1), v = draw(heads * m * dv, 1);
    std::vector<F> arriving = draw(heads * n * dv, 1), out(heads * n * dv), dq(q.size()), dk(k.size()), d_v(v.size());
    std::vector<F> rows((T + 1) / 2 * heads * n), columns((T / 2 + 1) * heads * m);
    std::vector<uint8_t> domain(heads), in(heads * m);
    for (long j = 0; j < heads * m; j++) in[j] = j % 5 != 3;
    Call c{};
    c.dims = 1, c.lead[0] = heads, c.heads = heads, c.n = n, c.m = m, c.d = d, c.dv = dv, c.half_steps = T;
    c.threads = threads, c.keep_bytes = keep, c.share_bytes = 1 << 20, c.block_rows = 12, c.block_columns = 32;
    c.is_double = sizeof(F) == 8, c.scale = scale, c.damping = 1, c.keep_factor = 1, c.bounded_log2 = 28;
    c.query = operand(q, n, d, dtype), c.key = operand(k, m, d, dtype), c.value = operand(v, m, dv, dtype);
    c.key_mask = operand(in, 1, m, BOOL);
    c.d_output = operand(arriving, n, dv, dtype), c.d_query = operand(dq, n, d, dtype);
    c.d_key = operand(dk, m, d, dtype), c.d_value = operand(d_v, m, dv, dtype);
    c.output = out.data(), c.rows = rows.data(), c.columns = columns.data(), c.domain = domain.data();
    for (c.backward = 0; c.backward < 2; c.backward++) {
        std::vector<char> scratch(sinkhorn_scratch_bytes(&c));
        c.scratch = scratch.data();
        sinkhorn_run(&c);
    }
    double error = 0, size = 0, along = 0, differences = 0;
    const double step = 1e-5;
    for (long h = 0; h < heads; h++) {
        Numbers x[3], up[3], down[3];
        const std::vector<F>*inputs[] = {&q, &k, &v}, *gradients[] = {&dq, &dk, &d_v};
        const long counts[] = {n * d, m * d, m * dv};
        for (int a = 0; a < 3; a++)
            for (long i = 0; i < counts[a]; i++) {
                const double at = (*inputs[a])[h * counts[a] + i], direction = normal(random);
                x[a].push_back(at), up[a].push_back(at + step * direction), down[a].push_back(at - step * direction);
                along += direction * (*gradients[a])[h * counts[a] + i];
            }
        const std::vector<uint8_t> mask(in.begin() + h * m, in.begin() + (h + 1) * m);
        const auto run = [&](Numbers(&y)[3]) { return definition(y[0], y[1], y[2], mask, n, m, d, dv, T, scale); };
        const Numbers want = run(x), above = run(up), below = run(down);
        for (long i = 0; i < n * dv; i++) {
            error += std::pow(out[h * n * dv + i] - want[i], 2), size += want[i] * want[i];
            differences += arriving[h * n * dv + i] * (above[i] - below[i]) / (2 * step);
        }
    }
    error = std::sqrt(error / size);
    const double off = std::abs(along - differences) / (1 + std::abs(differences));
    const bool right = error < tolerance && off < 50 * tolerance;
    std::printf("%s n=%ld m=%ld d=%ld T=%ld std=%g threads=%ld: values %.1e, gradient %.1e\n", right ? "right" : "WRONG",
                n, m, d, T, std, threads, error, off);
    return right;
}

int main() {
    bool right = true;
    for (long T : {1, 2, 3, 6, 21})
        for (double std : {1.0, 6.0})
            for (long threads : {1, 2})
                for (long keep : {0, 1 << 28}) {
                    right &= check<float>(17, 40, 20, 9, T, std, threads, keep, 1e-5);
                    right &= check<double>(50, 13, 5, 16, T, std, threads, keep, 1e-8);
                }
    return !right;
}
