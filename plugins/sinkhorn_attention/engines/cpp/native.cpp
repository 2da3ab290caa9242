// Exact Sinkhorn attention on a CPU: one call forward, one call backward, without torch's headers or Python's.
//
//     vectors.h    vectors of numbers and 2^x           call.h      what a call is given
//     products.h   products and passes in registers     head.h      one head's map, shared by a team of threads
//     forward.h    half-steps and the result            backward.h  the half-steps in reverse and the gradients
//
// Heads are dealt out to the threads of one parallel region. Heads that are left over, or whose map is so large that
// one for each thread would be too much memory, are shared by teams, which split the rows.

#include <omp.h>

#include <utility>
#include <vector>

#include "backward.h"
#include "forward.h"

// Numbers below 2^-126 become 0 while this lives: in sums they make no difference, and cost hundreds of cycles each.
struct FlushSubnormals {
#if defined(__SSE2__)
    unsigned saved = __builtin_ia32_stmxcsr();
    FlushSubnormals() { __builtin_ia32_ldmxcsr(saved | 0x8000); }
    ~FlushSubnormals() { __builtin_ia32_ldmxcsr(saved); }
#endif
};

template <class F>
static void run_head(const Call& c, const Sizes<F>& s, Team<F>& team, int rank, int thread, long h) {
    Head<F> head(c, s, team, rank, thread, h);
    if (!c.backward)
        forward_head(head);
    else if (c.domain[h] != LOG_DOMAIN)
        Backward<F>(head).run();
}

// How many heads are worked on at a time at most.
static long most_teams(const Call& c) { return std::min(c.threads, c.heads); }

template <class F>
static void run(const Call& c) {
    const Sizes<F> s(c);
    const bool shared = s.kept && s.np * s.ldk * (long)sizeof(F) >= c.share_bytes;
    std::vector<Team<F>> teams(most_teams(c));
    std::vector<Member<F>> members(c.threads);
    Arena<F> arena{(F*)c.scratch};
    for (auto& team : teams) team.place(s, c, arena);
    for (auto& member : members) member.place(s, c, arena);
    std::atomic<long> next{0};
#pragma omp parallel num_threads(c.threads) if (c.threads > 1)
    {
        const FlushSubnormals flushed;
        // As many as were granted, which may be fewer than were asked for.
        const int threads = omp_get_num_threads(), thread = omp_get_thread_num();
        const long alone = shared ? 0 : c.heads / threads * threads, rest = c.heads - alone;
        if (alone) {
            teams[thread].members = &members[thread];
            // Sums over heads that share a bias are made in an order that doesn't depend on who is first.
            long turn = thread;
            const auto take = [&] { return c.bias_copy ? std::exchange(turn, turn + threads) : next.fetch_add(1); };
            for (long h; (h = take()) < alone;) run_head(c, s, teams[thread], 0, thread, h);
        }
        const long count = shared ? 1 : rest;  // of teams for the others
        const int size = count ? threads / count : 0;
#pragma omp barrier
#pragma omp single
        for (long t = 0; t < count; t++) {
            teams[t].size = size;
            teams[t].members = &members[t * size];
        }
        if (count && thread < count * size)
            for (long h = alone + thread / size; h < c.heads; h += count)
                run_head(c, s, teams[thread / size], thread % size, thread, h);
    }
}

template <class F>
static int64_t scratch_bytes(const Call& c) {
    const Sizes<F> s(c);
    Arena<F> head{nullptr}, own{nullptr};
    Team<F>().place(s, c, head);
    Member<F>().place(s, c, own);
    return (head.used * most_teams(c) + own.used * c.threads) * (int64_t)sizeof(F);
}

extern "C" int64_t sinkhorn_scratch_bytes(const Call* c) {
    return c->is_double ? scratch_bytes<double>(*c) : scratch_bytes<float>(*c);
}
extern "C" void sinkhorn_run(const Call* c) { c->is_double ? run<double>(*c) : run<float>(*c); }
// What OpenMP would take by itself: torch's number of threads, if it is torch's OpenMP.
extern "C" int sinkhorn_max_threads() { return omp_get_max_threads(); }
