// One token per row, after `scan_logits.cu`: finds the cut of min_p, top_k and top_p, and draws.
//
// With a small top_k, what can survive the filters lies in a few parts, and one block sorts it in shared memory.
// Otherwise the row's blocks search together, once more go over what survives, and the last of them draws.
//
// Macros: LOGITS.
#define ROW_THREADS 512
#include "search.cuh"

struct Params {
    const u8* logits;          // [rows, vocab]
    const u64* best;           // [rows, parts], as scan_logits leaves them
    const float* sums;         // [rows, parts]
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
    u64* scratch;              // [rows, blocks, 2, BUCKETS], if a row has several blocks
    u32* counters;             // [rows, 2] zeros: arrivals of blocks, candidates
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
    return (u64)first_that(MINUS_INFINITY, (u32)(peak >> 32), [&](u32 ordered) {
        return weight(value(ordered)) >= least;
    }) << 32;
}

struct Filters {
    int k;         // 0: off
    float share;   // top_p; 1: off
    float min_p;   // 0: off
    u64 floor;     // the rank of min_p; 0: off
};

DEVICE bool are_few(const Row& row, const Filters& f) {
    return row.vocab <= CANDIDATES || (f.k && f.k <= row.parts);
}

// Brings what survives the filters into the candidates; returns how many, 0 if they are too many.
DEVICE int collect(Shared& s, const Row& row, const Weight& weight, u64 peak, const Filters& f) {
    u64 low = f.floor;
    if (row.vocab > CANDIDATES) low = max(low, bound_of(s, row.parts, f.k, peak));
    int n = gather(s, row, low);
    if (n > CANDIDATES) return 0;
    if (f.k || f.share < 1) sort(s, n);
    if (f.k) n = min(f.k, n);
    return f.share < 1 ? reach(s, weight, n, ~0ull, f.share) : n;
}

// The cut of all filters, where what survives may be much.
DEVICE Cut cut_of_row(Shared& s, const Row& row, const float* sums, const Weight& weight, Team& team,
                      const Filters& f) {
    Cut cut = {max(f.floor, 1ull), max(f.floor, 1ull) - 1, 0};
    if (!f.k && f.share < 1 && !f.floor) {  // all below this together weigh less than what the nucleus leaves out
        const u64 mass = load_mass(s, sums, row.parts, weight);
        const float most = (float)((1.0 - f.share) * (double)mass) / (2 * ONE * row.vocab);
        cut.low = (u64)order(weight.peak + log2_approx(most) / weight.high) << 32;
        cut.goal = goal_of(f.share, mass);
    }
#pragma unroll 1
    for (int step = f.k ? 0 : 1; step < (f.share < 1 ? 2 : 1); step++)  // top_k, then top_p
        cut = search(s, row, weight, team, cut.low, step ? 0 : f.k, cut.goal);
    return cut;
}

DEVICE u64 target_of(double uniform, u64 total) { return min(total - 1, (u64)(uniform * (double)total)); }

// Draws from the first n candidates, in the order of ids.
DEVICE void draw(Shared& s, const Weight& weight, int n, i64* out) {
    constexpr int OWN = CANDIDATES / ROW_THREADS;
    for (int i = threadIdx.x; i < n; i += ROW_THREADS) s.candidate[i] = s.candidate[i] << 32 | s.candidate[i] >> 32;
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
            *out = (int)~(u32)(s.candidate[threadIdx.x * OWN + i] >> 32);
        before += own[i];
    }
}

// Leaves each part's mass of what survives the filters, to the last of the row's blocks, which alone gets its cut's rank.
DEVICE u64 weigh(Shared& s, const Row& row, const Weight& weight, const Team& team, const Cut& cut) {
    const bool alone = team.blocks == 1;
    u64 *const mass = alone ? s.mass : team.slot(1), *const candidate = alone ? s.candidate : team.slot(0);
    if (threadIdx.x == 0) s.gathered = 0;
    __syncthreads();
    split(s, row, weight, team, cut, mass, candidate, alone ? (u32*)&s.gathered : team.listed());
    __syncthreads();
    if (!alone) {
        if (!team.is_last(s)) return 0;
        for (int i = threadIdx.x; i < row.parts; i += ROW_THREADS) s.mass[i] = load_l2(mass + i);
    }
    const int n = min(alone ? s.gathered : (int)load_acquire(team.listed()), BUCKETS);
    if (n == 0) return cut.low;
    if (!alone)
        for (int i = threadIdx.x; i < n; i += ROW_THREADS) s.candidate[i] = load_l2(candidate + i);
    __syncthreads();
    u64 mine = 0;
    for (int i = threadIdx.x; i < row.parts; i += ROW_THREADS) mine += s.mass[i];
    const u64 above = sum_of_block(s, mine);
    sort(s, n);
    const int kept = reach(s, weight, n, cut.goal > above ? cut.goal - above : 1, 1);
    for (int i = threadIdx.x; i < kept; i += ROW_THREADS)
        atomicAdd(&s.mass[id_of_rank(s.candidate[i]) / PART], fixed(weight(value_of_rank(s.candidate[i]))));
    return s.candidate[kept - 1];
}

// The id, in one part, where the mass of what ranks from the cut on exceeds `rest` of `own`. One warp.
DEVICE void pick(const Row& row, const Weight& weight, u64 cut, int part, u64 rest, u64 own, i64* out) {
    const int first = part * PART + lane() * PER_LANE;
    float kept[PER_LANE];
    u64 mine = 0;
#pragma unroll
    for (int j = 0; j < PER_LANE; j++) {
        float x = first + j < row.vocab ? load_logit(row, first + j) : negative_infinity();
        kept[j] = rank_of(x, first + j) >= cut ? weight(x) : 0.0f;
        mine += fixed(kept[j]);
    }
    u64 after = inclusive_scan_of_warp(mine), all = __shfl_sync(FULL_WARP, after, 31);
    if (all != own) rest = min(all - 1, (u64)((double)rest / (double)own * (double)all));
    u64 before = after - mine;
#pragma unroll
    for (int j = 0; j < PER_LANE; j++) {
        u64 mass = fixed(kept[j]);
        if (before <= rest && rest < before + mass) *out = first + j;
        before += mass;
    }
}

extern "C" __global__ void __launch_bounds__(ROW_THREADS, LOGITS == 0 ? 1 : 2) sampling(Params p) {
    __shared__ __align__(16) Shared s;
    const int at = blockIdx.y;
    const Row row = {p.logits + at * p.row_stride, p.vocab, p.parts};
    float temperature = 0;
    Filters f = {0, 1, 0, 0};
    if (p.temperature) {
        const i64 k = p.top_k[at];
        temperature = p.temperature[at];
        f = {k > 0 && k < p.vocab ? (int)k : 0, fminf(p.top_p[at], 1.0f), p.min_p[at], 0};
    }
    const bool filtered = f.k || f.share < 1 || f.min_p > 0, few = are_few(row, f);
    if (blockIdx.x && (!filtered || few || temperature < 1e-5f)) return;
    if (p.temperature && threadIdx.x == 0) {
        s.temperature = temperature, s.share = f.share;
        s.uniform = p.uniform ? p.uniform[at] : draw_uniform(p.seed[at], p.choice[at], p.position[at]);
        if (p.drawn && blockIdx.x == 0) p.drawn[at] = s.uniform;
    }
    const u64 peak = load_best(s, p.best + (i64)at * p.parts, p.parts);
    if (!is_finite(peak) || temperature < 1e-5f) {
        if (threadIdx.x == 0) p.out[at] = is_finite(peak) ? id_of_rank(peak) : -1;
        return;
    }
    const Weight weight(value_of_rank(peak), temperature);
    const float* sums = p.sums + (i64)at * p.parts;
    u64 cut = 0;
    if (filtered) {
        if (f.min_p > 0) f.floor = cut_of_weight(weight, peak, f.min_p);
        const int n = few ? collect(s, row, weight, peak, f) : 0;
        if (n) {
            draw(s, weight, n, p.out + at);
            return;
        }
        Team team = {p.scratch, p.counters, few ? 1 : (int)gridDim.x, (int)blockIdx.x};
        cut = weigh(s, row, weight, team, cut_of_row(s, row, sums, weight, team, f));
        if (!cut) return;
    }
    __syncthreads();
    if (!filtered) load_mass(s, sums, p.parts, weight);
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
    if (warp()) return;
    // A part's own best gives its elements weights that don't vanish; they share out what it has of the row's mass.
    const Weight inside(value_of_rank(s.best[s.chosen]), s.temperature);
    pick(row, inside, cut, s.chosen, s.ahead, s.own, p.out + at);
}
