// The search for a cut in a row, by one block or by several that share the row.
//
// One logit in 16 tells about where the cut is. If not many elements rank from there on, one block gathers them and
// finds the cut among them, while the others leave. Otherwise each block sums up what is surely kept of its parts and
// lists what is in question; the last block to finish finds the cut among that. If it isn't there, that block searches
// the whole row.
#pragma once
#include "sampling.cuh"

constexpr int SAMPLED = PART / 32;  // one element of so many is in the sample
// So many elements one block gathers and searches sooner than several meet and read each other's lists: some 10,000
// cycles to save, two for each element. The sample's number is a guess, so half of the places are left free; not of those
// for groups, where more than LISTED elements lie each in one of its own: such a row is searched whole.
constexpr int LIGHT = CANDIDATES / 2;

// The blocks that share a row. Each leaves its parts' masses, its candidates and their number in a slot of its own.
struct Team {
    static constexpr int SLOT = MOST_PARTS + CANDIDATES + 1;
    u64* scratch;  // [rows, blocks, SLOT]
    u32* arrived;  // [rows] 0 at first
    int blocks, own;
    bool gathered = false;  // the candidates are all that ranks from the last cut on

    DEVICE u64* slot(int block) const { return scratch + (blockIdx.y * gridDim.x + block) * (i64)SLOT; }

    DEVICE void disband() { blocks = 1, own = 0; }

    // True for the last block to get here; the others have nothing left to do.
    DEVICE bool is_last(Shared& s) const {
        __syncthreads();
        if (threadIdx.x == 0) {
            __threadfence();
            s.chosen = (int)atomicAdd(arrived + blockIdx.y, 1u) + 1;
            __threadfence();
        }
        __syncthreads();
        return s.chosen == blocks;
    }
};

// The least number from low to high of which the claim holds; it holds of high, and above any of which it holds.
template <class Claim> DEVICE u32 first_that(u32 low, u32 high, Claim claim) {
    while (low < high) {
        const u32 step = (high - low) / 32 + 1, base = low, span = high - low;
        const u32 yes = __ballot_sync(FULL_WARP, claim(base + min(lane() * step, span)));
        const u32 first = yes ? __ffs(yes) - 1 : 32;
        if (first < 32) high = base + min(first * step, span);
        if (first) low = base + (first - 1) * step + 1;
    }
    return low;
}

// What ranks from `sure` on is kept, what ranks from `low` on is in question, what ranks below isn't kept. `about` so
// many rank from `low` on.
struct Doubt {
    u64 low, sure;
    int about;
};

// Where the cut is, but for one row in some thousands: at the count-th element, or, if count is 0, where what is below
// it weighs `rest`. Of what ranks from low on; its last elements may be left out if they weigh next to nothing.
DEVICE Doubt guess(Shared& s, const Row& row, const Weight& weight, u64 low, u64 peak, int count, float rest) {
    constexpr int OWN = BUCKETS / ROW_THREADS;
    u32* const counts = (u32*)s.bucket;
    float least = value_of_rank(low);
    if (!count) least = fmaxf(least, weight.peak + log2_approx(rest / (256.0f * row.vocab)) / weight.high);
    __syncthreads();
    for (int i = threadIdx.x; i < BUCKETS; i += ROW_THREADS) counts[i] = 0;
    if (threadIdx.x == 0) s.chosen = -1, s.listed = BUCKETS, s.gathered = 0;
    __syncthreads();
    const float bottom = s.least == ~0u ? least : fmaxf(least, value(s.least));
    const float width = fmaxf((weight.peak - bottom) / (BUCKETS - 1), 1e-30f), scale = 1 / width;
    constexpr int AT_ONCE = 3;  // they hide each other's latency; 196k logits of 16 bits take one round
    const int vectors = row.parts * SCANNED;
    for (int i = threadIdx.x; i < vectors; i += AT_ONCE * ROW_THREADS) {
        Vector x[AT_ONCE];
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++)
            if (i + k * ROW_THREADS < vectors) x[k] = Vector(row.maxima, vectors + i + k * ROW_THREADS);
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            if (i + k * ROW_THREADS >= vectors) break;
#pragma unroll
            for (int j = 0; j < VECTOR; j++)
                if (x[k][j] >= bottom) atomicAdd(counts + min((int)((weight.peak - x[k][j]) * scale), BUCKETS - 1), 1u);
        }
    }
    __syncthreads();
    float own[OWN], each[OWN], mine = 0, total;  // from the last bucket on
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        const int b = BUCKETS - 1 - (threadIdx.x * OWN + i);
        each[i] = count ? 1.0f : weight(weight.peak - (b + 0.5f) * width);
        mine += own[i] = SAMPLED * (float)counts[b] * each[i];
    }
    float below = exclusive_scan(s, mine, total);
    auto margin = [&](float mass, float each) {  // four standard deviations, or what no sample has to be of
        return 4 * sqrtf(SAMPLED * fmaxf(mass * (each - mass / row.vocab), 0.0f)) + 8 * SAMPLED * each;
    };
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        const int b = BUCKETS - 1 - (threadIdx.x * OWN + i);
        const float before = below, above = total - below - own[i];
        below += own[i];
        if (count ? above - margin(above, 1) > count : below + margin(below, each[i]) < 0.99f * rest)
            atomicMin(&s.listed, b);
        else if (!count && before - margin(before, each[i]) > rest) atomicMax(&s.chosen, b);
    }
    __syncthreads();
    u32 found = 0;
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        const int b = BUCKETS - 1 - (threadIdx.x * OWN + i);
        found += b <= s.listed ? counts[b] : 0;
    }
    found = __reduce_add_sync(FULL_WARP, found);
    if (lane() == 0) atomicAdd(&s.gathered, (int)found);
    __syncthreads();
    // By half a bucket less is sure: what lies at an edge may have been counted beyond it.
    const u64 from = first_rank(order(s.listed < BUCKETS ? weight.peak - (s.listed + 0.5f) * width : least));
    const u64 sure = s.chosen < 0 ? peak + 1 : first_rank(order(weight.peak - (s.chosen + 0.5f) * width));
    low = max(low, from);
    return {low, max(low, sure), SAMPLED * s.gathered};
}

// Each part's mass of what ranks from `sure` on; lists what is in question and counts it in Shared::gathered.
DEVICE void split(Shared& s, const Row& row, const Weight& weight, const Team& team, Doubt doubt, u64* mass,
                  u64* candidate) {
    const float least = value_of_rank(doubt.low), most = value_of_rank(doubt.sure - 1);  // above, all is kept
    const int step = team.blocks * WARPS;
    for (int first = team.own + warp() * team.blocks; first < row.parts; first += 2 * step) {
        Sixteen x[2];
        bool any[2];
        float sum[2] = {0, 0};
        u32 doubtful = 0;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int part = first + half * step;
            any[half] = part < row.parts && s.best[part] >= doubt.low;
            if (any[half]) x[half] = own_of_part(row, part);
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            if (!any[half]) continue;
#pragma unroll
            for (int j = 0; j < PER_LANE; j++) {
                const float own = x[half][j];
                if (own > most) sum[half] += weight(own);
                else doubtful |= (u32)(own >= least) << (half * PER_LANE + j);
            }
        }
        if (__any_sync(FULL_WARP, doubtful)) {
            int place = reserve(&s.gathered, __popc(doubtful));
            for (; doubtful; doubtful &= doubtful - 1, place++) {
                const int j = __ffs(doubtful) - 1, half = j / PER_LANE, id = id_of(first + half * step, j % PER_LANE);
                const float own = load_logit(row, id);
                const u64 rank = rank_of(own, id);
                const float kept = rank >= doubt.sure ? weight(own) : 0;
                sum[0] += half ? 0 : kept, sum[1] += half ? kept : 0;
                if (place < CANDIDATES) candidate[place] = rank < doubt.sure ? rank : 0;  // 0: below all that counts
            }
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
#pragma unroll
            for (int to = 16; to; to /= 2) sum[half] += __shfl_xor_sync(FULL_WARP, sum[half], to);
            if (lane() == 0 && first + half * step < row.parts) mass[first + half * step] = fixed(sum[half]);
        }
    }
    __syncthreads();
}

// Leaves each part's mass of what is surely kept, and what is in question, to the last of the row's blocks, which is
// then alone; false for the others.
DEVICE bool weigh(Shared& s, const Row& row, const Weight& weight, Team& team, Doubt doubt) {
    __syncthreads();
    if (threadIdx.x == 0) s.gathered = 0;
    __syncthreads();
    const bool alone = team.blocks == 1;
    u64* const slot = alone ? nullptr : team.slot(team.own);
    split(s, row, weight, team, doubt, alone ? s.mass : slot, alone ? s.candidate : slot + MOST_PARTS);
    if (alone) return true;
    if (threadIdx.x == 0) slot[MOST_PARTS + CANDIDATES] = s.gathered;
    if (!team.is_last(s)) return false;
    for (int part = threadIdx.x; part < row.parts; part += ROW_THREADS)
        s.mass[part] = load_l2(team.slot(part % team.blocks) + part);
    if (threadIdx.x < team.blocks)
        s.list[threadIdx.x] = min(load_l2(team.slot(threadIdx.x) + MOST_PARTS + CANDIDATES), CANDIDATES + 1ull);
    __syncthreads();
    int listed = 0;
    for (int block = 0; block < team.blocks; block++) listed += s.list[block];
    constexpr int AT_ONCE = VECTOR / 2;  // more of float32 would spill
    for (int i = threadIdx.x; i < min(listed, CANDIDATES); i += AT_ONCE * ROW_THREADS) {
        u64 rank[AT_ONCE];
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            int block = 0, at = i + j * ROW_THREADS;
            if (at >= min(listed, CANDIDATES)) break;
            while (at >= s.list[block]) at -= s.list[block++];
            rank[j] = load_l2(team.slot(block) + MOST_PARTS + at);
        }
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++)
            if (i + j * ROW_THREADS < CANDIDATES) s.candidate[i + j * ROW_THREADS] = rank[j];
    }
    if (threadIdx.x == 0) s.gathered = listed;
    __syncthreads();
    team.disband();
    return true;
}

// The rank of the last of those that rank from high down and have together the mass `goal`; low or higher, otherwise 0.
// each(take) calls take(rank) for all elements there are, shared out among the threads.
template <class Each, class Mass> DEVICE u64 find_cut(Shared& s, u64 low, u64 high, u64 goal, Mass mass, Each each) {
    constexpr int OWN = BUCKETS / ROW_THREADS;
#pragma unroll 1
    while (true) {
        const int shift = max(0, 64 - __clzll(high - low) - 10);
        __syncthreads();
        for (int i = threadIdx.x; i < BUCKETS; i += ROW_THREADS) s.bucket[i] = 0;
        if (threadIdx.x == 0) s.chosen = -1, s.listed = 0;
        __syncthreads();
        each([&](u64 rank) {
            if (rank >= low && rank <= high) add_shared(s.bucket + (high - rank >> shift), mass(rank));
        });
        __syncthreads();
        u64 own[OWN], mine = 0, total;
#pragma unroll
        for (int i = 0; i < OWN; i++) mine += own[i] = s.bucket[threadIdx.x * OWN + i];
        u64 before = exclusive_scan(s, mine, total);
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            if (before < goal && goal <= before + own[i]) s.chosen = threadIdx.x * OWN + i, s.ahead = before;
            before += own[i];
        }
        __syncthreads();
        if (s.chosen < 0) return 0;
        goal -= s.ahead;
        high -= (u64)s.chosen << shift;
        if (!shift) return high;
        low = max(low, high - min(high, (1ull << shift) - 1));
        each([&](u64 rank) {
            if (rank < low || rank > high) return;
            const int at = atomicAdd(&s.listed, 1);
            if (at < 32) s.few[at] = rank;
        });
        __syncthreads();
        if (s.listed > 32) continue;
        const u64 rank = lane() < s.listed ? s.few[lane()] : 0, weight = lane() < s.listed ? mass(rank) : 0;
        u64 up_to = 0;
        for (int i = 0; i < s.listed; i++) {
            const u64 other = __shfl_sync(FULL_WARP, rank, i), its = __shfl_sync(FULL_WARP, weight, i);
            if (other >= rank) up_to += its;
        }
        const u32 is = __ballot_sync(FULL_WARP, lane() < s.listed && up_to - weight < goal && goal <= up_to);
        return __shfl_sync(FULL_WARP, rank, __ffs(is) - 1);
    }
}

struct ElementsOf {
    const Row& row;
    template <class Take> DEVICE void operator()(Take take) const {
#pragma unroll 4
        for (int id = threadIdx.x; id < row.vocab; id += ROW_THREADS) take(rank_of(load_logit(row, id), id));
    }
};

struct Candidates {
    const Shared& s;
    int count;
    template <class Take> DEVICE void operator()(Take take) const {
        for (int i = threadIdx.x; i < count; i += ROW_THREADS) take(s.candidate[i]);
    }
};

// Cuts what ranks from low on at its count-th element, or, if count is 0, at the fewest that have `share` of the mass
// `total`, or, if share is 1, nowhere. Gives the last kept element's rank, and leaves each part's mass of what is kept,
// to one of the row's blocks; 0 to the others.
DEVICE u64 cut_at(Shared& s, const Row& row, const Weight& weight, Team& team, u64 low, int count, double share,
                  u64 total) {
    const u64 goal = count ? count : goal_of(share, total), peak = first_rank(order(weight.peak)) + MOST_ID;  // or more
    const bool all = !count && share >= 1;
    Doubt doubt = {low, low};
    u64 above = 0;
    if (!all && !team.gathered) {
        doubt = guess(s, row, weight, low, peak, count, (float)((1 - share) * (double)total) / ONE);
        if (doubt.about <= LIGHT) {  // the row alone decides, so that a result doesn't depend on how many blocks it has
            if (team.own) return 0;
            gather(s, row, doubt.low);
            team.disband();
            team.gathered = true;
        }
    }
    if (team.gathered) {
        for (int part = threadIdx.x; part < row.parts; part += ROW_THREADS) s.mass[part] = 0;
        doubt.sure = peak + 1;
    } else {
        if (!weigh(s, row, weight, team, doubt)) return 0;
        if (all) return low;
        above = mass_of_row(s, row.parts);
    }
    const int n = s.gathered;
    u64 cut = 0;
    auto mass = [&](u64 rank) { return count ? 1 : fixed(weight(value_of_rank(rank))); };
    const Candidates candidates{s, n};
    if (n <= CANDIDATES && above < goal) {
        cut = find_cut(s, doubt.low, doubt.sure - 1, goal - above, mass, candidates);
        if (!cut && doubt.low == low) cut = low;  // there are no more than count
    }
    if (cut) {
        candidates([&](u64 rank) {
            if (rank >= cut) add_shared(s.mass + id_of_rank(rank) / PART, fixed(weight(value_of_rank(rank))));
        });
        __syncthreads();
        return cut;
    }
    team.gathered = false;
    cut = max(low, find_cut(s, low, peak, goal, mass, ElementsOf{row}));
    weigh(s, row, weight, team, {cut, cut});
    return cut;
}
