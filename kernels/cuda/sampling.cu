// One token per row, after `scan_logits.cu`: finds the cut of min_p, top_k and top_p, and draws.
//
// With a small top_k, what can survive the filters lies in a few parts, and one block sorts it in shared memory.
// Otherwise one of the row's blocks gathers what can survive, or, if that is too much, they go over it together and the
// last of them draws.
//
// Macros: LOGITS, SHARED.
#define ROW_THREADS 512
#include "search.cuh"

struct Params {
    const u8* logits;          // [rows, vocab]
    const Summary* summary;    // [rows, parts], as scan_logits leaves them
    const u8* maxima;          // [rows, 2, parts, 32] logits, as in `Row`
    const float* temperature;  // columns [rows]; null: all greedy, and no other column is read
    const i64* top_k;
    const float* top_p;
    const float* min_p;
    const double* uniform;     // [rows], or null: drawn from the next three
    const i64* seed;
    const i64* choice;
    const i64* position;
    i64* out;                  // [rows]
    double* drawn;             // [rows] the uniform numbers used, or null
    u64* scratch;              // [rows, blocks, Team::SLOT], if a row has several blocks
    u32* arrived;              // [rows] zeros
    i64 row_stride;            // bytes
    int vocab, parts;
};

// Philox4x32-10 keyed by the seed, counting positions and choices; 53 bits. Salmon et al., SC11.
DEVICE double draw_uniform(u64 seed, u64 choice, u64 position) {
    u32 c0 = (u32)position, c1 = (u32)(position >> 32), c2 = (u32)choice, c3 = (u32)(choice >> 32);
    u32 k0 = (u32)seed, k1 = (u32)(seed >> 32);
#pragma unroll
    for (int i = 0; i < 10; i++) {
        u64 a = (u64)c0 * 0xD2511F53u, b = (u64)c2 * 0xCD9E8D57u;
        c0 = (u32)(b >> 32) ^ c1 ^ k0;
        c2 = (u32)(a >> 32) ^ c3 ^ k1;
        c1 = (u32)b;
        c3 = (u32)a;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return (double)((u64)(c0 >> 5) << 26 | c1 >> 6) * 1.1102230246251565e-16;
}

// The rank of min_p's last survivor or lower, but above every other element's.
DEVICE u64 cut_of_weight(const Weight& weight, u64 peak, float least) {
    return first_rank(first_that(MINUS_INFINITY + 1, order_of_rank(peak), [&](u32 ordered) {
        return weight(value(ordered)) >= least;
    }));
}

struct Filters {
    int k;         // 0: off
    float share;   // top_p; 1: off
    float min_p;   // 0: off
};

DEVICE bool are_few(const Row& row, const Filters& f) {
    return row.vocab <= SORTED || (f.k && f.k <= row.parts);
}

// Brings what survives the filters into the candidates; returns how many, 0 if they are too many.
DEVICE int collect(Shared& s, const Row& row, const Weight& weight, u64 floor, u64 peak, const Filters& f) {
    const int n = gather(s, row, row.vocab > SORTED ? max(floor, bound_of(s, row.parts, f.k, peak)) : floor);
    if (n > SORTED) return 0;
    if (f.k || f.share < 1) sort(s, n);
    const int most = f.k ? min(f.k, n) : n;
    return f.share < 1 ? reach(s, weight, most, f.share) : most;
}

DEVICE u64 target_of(double uniform, u64 total) { return min(total - 1, (u64)(uniform * (double)total)); }

// Draws from the first n candidates, in the order of ids.
DEVICE void draw(Shared& s, const Weight& weight, int n, i64* out) {
    constexpr int OWN = SORTED / ROW_THREADS;
    for (int i = threadIdx.x; i < n; i += ROW_THREADS)
        s.candidate[i] = (s.candidate[i] & MOST_ID) << 32 | order_of_rank(s.candidate[i]);
    sort(s, n);
    u64 own[OWN], mine = 0, total;
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        int at = threadIdx.x * OWN + i;
        mine += own[i] = at < n ? fixed(weight(value((u32)s.candidate[at]))) : 0;
    }
    u64 before = exclusive_scan(s, mine, total);
    const u64 target = target_of(s.uniform, total);
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        if (before <= target && target < before + own[i])
            *out = id_of_rank(s.candidate[threadIdx.x * OWN + i] >> 32);
        before += own[i];
    }
}

// The id, in the chosen part, where the mass of what ranks from the cut on exceeds `ahead` of `own`.
DEVICE void pick(Shared& s, const Row& row, const Weight& weight, u64 cut, i64* out) {
    static_assert(PART == ROW_THREADS, "an id for each thread");
    const int id = s.chosen * PART + threadIdx.x;
    const float x = id < row.vocab ? load_logit(row, id) : negative_infinity();
    const u64 mass = rank_of(x, id) >= cut ? fixed(weight(x)) : 0;
    u64 all, before = exclusive_scan(s, mass, all), rest = s.ahead;
    if (all != s.own) rest = min(all - 1, (u64)((double)rest / (double)s.own * (double)all));
    if (before <= rest && rest < before + mass) *out = id;
}

extern "C" __global__ void __launch_bounds__(ROW_THREADS, 1) sampling(Params p) {
    Shared& s = shared_memory();
    const int at = blockIdx.y;
    const Row row = {p.logits + at * p.row_stride, p.vocab, p.parts, p.maxima + (i64)at * p.parts * (32 * SCANNED)};
    float temperature = 0;
    Filters f = {0, 1, 0};
    if (p.temperature) {
        const i64 k = __ldcg(p.top_k + at);  // uploaded: not through L1, as this is before the wait
        temperature = __ldcg(p.temperature + at);
        f = {k > 0 && k < p.vocab ? (int)k : 0, fminf(__ldcg(p.top_p + at), 1.0f), __ldcg(p.min_p + at)};
    }
    const bool filtered = f.k || f.share < 1 || f.min_p > 0, few = are_few(row, f);
    if (blockIdx.x && (!filtered || few || temperature < 1e-5f)) return;
    if (p.temperature && threadIdx.x == 0) {
        s.temperature = temperature;
        s.uniform = p.uniform ? __ldcg(p.uniform + at)
                              : draw_uniform(__ldcg(p.seed + at), __ldcg(p.choice + at), __ldcg(p.position + at));
    }
    wait_for_previous();
    if (p.drawn && p.temperature && blockIdx.x == 0 && threadIdx.x == 0) p.drawn[at] = s.uniform;
    const u64 peak = load_summaries(s, p.summary + (i64)at * p.parts, p.parts);
    if (!is_finite(peak) || temperature < 1e-5f) {
        if (threadIdx.x == 0) p.out[at] = is_finite(peak) ? id_of_rank(peak) : -1;
        return;
    }
    const Weight weight(value_of_rank(peak), temperature);
    u64 cut = LEAST_FINITE;
    if (f.min_p > 0) cut = cut_of_weight(weight, peak, f.min_p);
    if (filtered) {
        const int n = few ? collect(s, row, weight, cut, peak, f) : 0;
        if (n) {
            draw(s, weight, n, p.out + at);
            return;
        }
        if (f.k) cut = max(cut, first_rank(order(weight.peak - 64 / weight.high)));  // others weigh 0 in fixed point
        Team team = {p.scratch, p.arrived, few ? 1 : (int)gridDim.x, (int)blockIdx.x};
        const bool twice = f.k || f.min_p > 0;
#pragma unroll 1
        for (int step = twice ? 0 : 1; step < (f.share < 1 ? 2 : 1); step++) {  // top_k or min_p alone, then top_p
            const u64 total = step == 0 ? 0 : twice ? mass_of_row(s, p.parts) : load_masses(s, p.parts, weight);
            cut = cut_at(s, row, weight, team, cut, step ? 0 : f.k, step ? f.share : 1.0f, total);
            if (!cut) return;
        }
    } else {
        load_masses(s, p.parts, weight);
    }
    u64 own[EACH], mine = 0, total;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        int part = threadIdx.x * EACH + i;
        mine += own[i] = part < p.parts ? s.mass[part] : 0;
    }
    u64 before = exclusive_scan(s, mine, total);
    const u64 target = target_of(s.uniform, total);
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        if (before <= target && target < before + own[i]) {
            s.chosen = threadIdx.x * EACH + i;
            s.ahead = target - before;
            s.own = own[i];
        }
        before += own[i];
    }
    __syncthreads();
    // A part's own best gives its elements weights that don't vanish; they share out what it has of the row's mass.
    pick(s, row, Weight(value_of_rank(s.best[s.chosen]), s.temperature), cut, p.out + at);
}
