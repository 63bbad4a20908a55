// One token per row, after `scan_logits.cu`: one block finds the cut of min_p, top_k and top_p, and draws.
//
// Nearly always what can survive the filters lies in a few parts, and is sorted in shared memory; where it doesn't (flat
// rows), `search` goes over the row a few times more.
//
// Macros: LOGITS.
#define ROW_THREADS 512
#include "sampling.cuh"

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
    u32 low = MINUS_INFINITY, high = (u32)(peak >> 32);
    while (low < high) {
        u32 middle = low + (high - low) / 2;
        if (weight(value(middle)) >= least) high = middle;
        else low = middle + 1;
    }
    return (u64)low << 32;
}

struct Filters {
    int k;         // 0: off
    double share;  // top_p; 1: off
    float min_p;   // 0: off
    u64 floor;     // the rank of min_p; 0: off
};

// Brings what survives the filters into the candidates; returns how many there are, 0 if that is not known to be all.
DEVICE int collect(Shared& s, const Row& row, const float* sums, const Weight& weight, u64 peak, const Filters& f) {
    const bool guess = f.share < 1 && !f.k && !f.floor;  // that the nucleus lies in the best parts
    const u64 goal = guess ? goal_of(f.share, load_mass(s, sums, row.parts, weight)) : 0;
#pragma unroll 1
    for (bool last = !guess;; last = true) {
        const int most = !guess ? f.k : last ? row.parts - row.parts / 32 : max(1, row.parts / 7);
        u64 low = f.floor;
        if (most && most <= row.parts && row.vocab > CANDIDATES) low = max(low, bound_of(s, row.parts, most, peak));
        if (!low && row.vocab > CANDIDATES) return 0;
        int n = gather(s, row, low, peak);
        if (n > CANDIDATES) return 0;
        if (f.k || f.share < 1) {
            sort(s, n);
            n = f.k ? min(f.k, n) : n;
            if (f.share < 1) n = reach(s, weight, n, goal, f.share);
        }
        if (n || last) return n;
    }
}

// The rank from which on elements survive, where they are too many to be candidates.
DEVICE u64 cut_of_row(Shared& s, const Row& row, const Weight& weight, u64 peak, const Filters& f) {
    u64 low = f.floor;
#pragma unroll 1
    for (int step = f.k ? 0 : 1; step < (f.share < 1 ? 2 : 1); step++)  // top_k, then top_p
        low = search(s, row, weight, peak, low, step ? 0 : f.k, f.share);
    return low;
}

DEVICE u64 target_of(double uniform, u64 total) { return min(total - 1, (u64)(uniform * (double)total)); }

// Draws from the first n candidates, in the order of ids.
DEVICE void draw(Shared& s, const Weight& weight, int n, double uniform, i64* out) {
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
    const u64 target = target_of(uniform, total);
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        if (before <= target && target < before + own[i])
            *out = (int)~(u32)(s.candidate[threadIdx.x * OWN + i] >> 32);
        before += own[i];
    }
}

// Parts' masses of what ranks from the cut on; returns their sum.
DEVICE u64 mass_from(Shared& s, const Row& row, const Weight& weight, u64 cut) {
    const float least = least_from(cut);
    u64 mine = 0;
    for (int part = warp(); part < row.parts; part += WARPS) {
        u64 mass = 0;
        if (s.best[part] >= cut) {
            float x[PER_LANE];
            load_part(x, row, part);
#pragma unroll
            for (int j = 0; j < PER_LANE; j++)
                if (x[j] >= least && rank_of(x[j], id_of(part, j)) >= cut) mass += fixed(weight(x[j]));
            mass = __shfl_sync(FULL_WARP, inclusive_scan_of_warp(mass), 31);
        }
        if (lane() == 0) {
            s.mass[part] = mass;
            mine += mass;
        }
    }
    return sum_of_block(s, mine);
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

extern "C" __global__ void __launch_bounds__(ROW_THREADS, 1) sampling(Params p) {
    __shared__ Shared s;
    const int at = blockIdx.x;
    const Row row = {p.logits + at * p.row_stride, p.vocab, p.parts};
    float temperature = 0;
    double uniform = 0;
    Filters f = {0, 1.0, 0, 0};
    if (p.temperature) {
        const i64 k = p.top_k[at];
        temperature = p.temperature[at];
        f = {k > 0 && k < p.vocab ? (int)k : 0, fminf(p.top_p[at], 1.0f), p.min_p[at], 0};
        uniform = p.uniform ? p.uniform[at] : draw_uniform(p.seed[at], p.choice[at], p.position[at]);
        if (p.drawn && threadIdx.x == 0) p.drawn[at] = uniform;
    }
    const u64 peak = load_best(s, p.best + (i64)at * p.parts, p.parts);
    if (!is_finite(peak) || temperature < 1e-5f) {
        if (threadIdx.x == 0) p.out[at] = is_finite(peak) ? id_of_rank(peak) : -1;
        return;
    }
    const Weight weight(value_of_rank(peak), temperature);
    const float* sums = p.sums + (i64)at * p.parts;
    const bool filtered = f.k || f.share < 1 || f.min_p > 0;
    u64 cut = 0;
    if (filtered) {
        if (f.min_p > 0) f.floor = cut_of_weight(weight, peak, f.min_p);
        int n = collect(s, row, sums, weight, peak, f);
        if (n) {
            draw(s, weight, n, uniform, p.out + at);
            return;
        }
        cut = cut_of_row(s, row, weight, peak, f);
    }
    __syncthreads();
    const u64 total = filtered ? mass_from(s, row, weight, cut) : load_mass(s, sums, p.parts, weight);
    const u64 target = target_of(uniform, total);
    u64 own[EACH], mine = 0, unused;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        int part = threadIdx.x * EACH + i;
        mine += own[i] = part < p.parts ? s.mass[part] : 0;
    }
    u64 before = exclusive_scan(s, mine, unused);
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
    // Without filters the part's mass comes from its own best, and so do the weights that share it out.
    const Weight inside(filtered ? weight.peak : value_of_rank(s.best[s.chosen]), temperature);
    pick(row, inside, cut, s.chosen, s.ahead, s.own, p.out + at);
}
