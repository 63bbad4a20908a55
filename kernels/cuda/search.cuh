// The search for a cut in a row, by one block or by several that share the row.
//
// Buckets of the ranks that are in question, and again buckets of the one bucket where the goal is reached, until so few
// are left that they can be sorted. The first buckets are of equal width in x. What an element weighs is summed up as
// a 25-bit integer, relative to its bucket: one atomic addition to shared memory, and rarely one for the carry.
#pragma once
#include "sampling.cuh"

constexpr float QUANTUM = 16777216.0f;  // an element that weighs as much as its bucket's middle

DEVICE u32 load_acquire(const u32* p) {
    u32 x;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
    return x;
}

// L2 only: what another block of the same launch wrote is not in this multiprocessor's L1.
DEVICE void load_pair(u64 (&x)[2], const u64* p) {
    asm volatile("ld.global.cg.v2.u64 {%0, %1}, [%2];" : "=l"(x[0]), "=l"(x[1]) : "l"(p) : "memory");
}

// The blocks that share a row. All of them are resident: the host sees to it.
struct Team {
    u64* scratch = nullptr;   // [rows, blocks, 2, BUCKETS]; none if alone
    u32* counters = nullptr;  // [rows, 2] arrivals, candidates; 0 at first
    int blocks = 1, own = 0;
    int met = 0;  // times; the side of the scratch that was used before may still be read

    DEVICE u64* slot(int block) const {
        return scratch + ((blockIdx.y * gridDim.x + block) * 2 + met % 2) * (i64)BUCKETS;
    }
    DEVICE u32* arrived() const { return counters + blockIdx.y * 2; }
    DEVICE u32* listed() const { return arrived() + 1; }

    DEVICE void meet() {
        __syncthreads();
        if (threadIdx.x == 0) {
            __threadfence();
            atomicAdd(arrived(), 1u);
            while (load_acquire(arrived()) < (met + 1) * blocks) {}
        }
        __syncthreads();
    }

    // True for the last block to get here; the others have nothing left to do.
    DEVICE bool is_last(Shared& s) const {
        __syncthreads();
        if (threadIdx.x == 0) {
            __threadfence();
            s.chosen = (int)atomicAdd(arrived(), 1u) + 1;
            __threadfence();
        }
        __syncthreads();
        return s.chosen == (met + 1) * blocks;
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

// The number of the bucket of equal width that is nearest, over that of bucket 0.
constexpr float BUCKET_0 = 12582912.0f;
DEVICE float bucket_of(float distance, float scale) { return fminf(distance * scale, BUCKETS - 1.0f) + BUCKET_0; }

// Adds to shared memory unless it is 0, without a branch; returns what was there.
DEVICE u32 add_shared(u32 address, u32 own) {
    u32 before = 0;
    asm volatile("{.reg .pred p; setp.ne.u32 p, %2, 0; @p atom.shared.add.u32 %0, [%1], %2;}"
                 : "+r"(before) : "r"(address), "r"(own) : "memory");
    return before;
}

DEVICE void count_shared_if_less(u32 address, u32 a, u32 b) {
    asm volatile("{.reg .pred p; setp.lt.u32 p, %1, %2; @p red.shared.add.u32 [%0], 1;}"
                 :: "r"(address), "r"(a), "r"(b) : "memory");
}

// True if one of a warp's four elements from x[at] on is not below `least`.
DEVICE bool any_of_four(const Part& x, int at, float least) {
    return __any_sync(FULL_WARP, fmaxf(fmaxf(x[at], x[at + 1]), fmaxf(x[at + 2], x[at + 3])) >= least);
}

// Adds up what ranks from low to high: in buckets of `width` from the best on, or, if that is 0, of 2^shift ranks each.
DEVICE void fill_buckets(Shared& s, const Row& row, const Weight& weight, const Team& team, u64 low, u64 high,
                         float width, int shift, bool counting) {
    __syncthreads();
    for (int i = threadIdx.x; i < sizeof(s.bucket) / 16; i += ROW_THREADS) ((Words4*)&s.bucket)[i] = {0, 0, 0, 0};
    __syncthreads();
    const bool values = width > 0 && !counting && (u32)low == 0;  // alone say what is in question; ids don't matter
    const float least = least_from(low), top = value_of_rank(high), scale = 1 / width, rate = -weight.high;
    constexpr u32 FIRST = 0x4b400000u;  // BUCKET_0
    const u32 sums = (u32)__cvta_generic_to_shared(s.bucket.low + lane() % COPIES) - FIRST * 4 * COPIES;
    const u32 carries = (u32)__cvta_generic_to_shared(s.bucket.high) - FIRST * 4;
    for (int part = team.own + warp() * team.blocks; part < row.parts; part += team.blocks * WARPS) {
        if (s.best[part] < low) continue;
        const Part x(row, part);
#pragma unroll
        for (int at = 0; at < PER_LANE; at += 4) {
            if (!any_of_four(x, at, least)) continue;
            if (values) {
                u32 own[4], bucket[4], sum[4];
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    float distance = top - x[at + j], number = bucket_of(distance, scale);
                    distance -= __fmul_rn(number - BUCKET_0, width);
                    own[j] = x[at + j] >= least ? __float2uint_rn(exp2_approx(distance * rate) * QUANTUM) : 0;
                    bucket[j] = __float_as_uint(number);
                }
#pragma unroll
                for (int j = 0; j < 4; j++) sum[j] = add_shared(sums + bucket[j] * 4 * COPIES, own[j]) + own[j];
#pragma unroll
                for (int j = 0; j < 4; j++) count_shared_if_less(carries + bucket[j] * 4, sum[j], own[j]);
                continue;
            }
#pragma unroll 1
            for (int j = 0; j < 4; j++) {
                const int id = id_of(part, at + j);
                if (id >= row.vocab) break;
                const float again = load_logit(row, id);
                const u64 rank = rank_of(again, id);
                if (rank < low || rank > high) continue;
                float distance = top - again, number = bucket_of(distance, scale);
                if (width > 0) distance -= __fmul_rn(number - BUCKET_0, width);
                const u32 own = __float2uint_rn((counting ? 1.0f : exp2_approx(distance * rate)) * QUANTUM);
                const u32 bucket = width > 0 ? __float_as_uint(number) : (u32)(high - rank >> shift) + FIRST;
                count_shared_if_less(carries + bucket * 4, add_shared(sums + bucket * 4 * COPIES, own) + own, own);
            }
        }
    }
    __syncthreads();
}

// What ranks above `high` is in, what ranks from low to high is in question, until its mass and that above reach the goal.
struct Cut { u64 low, high, goal; };

// Finds the last of the first `count` that rank from low on, which is then Cut::low, with nothing in question; low
// itself if there are no more than count. If count is 0, the last of the fewest that reach the goal; a goal of 0 is
// Shared::share of what ranks from low on, otherwise what lies below low is not needed to reach it.
DEVICE Cut search(Shared& s, const Row& row, const Weight& weight, Team& team, u64 low, int count, u64 goal) {
    constexpr int OWN = BUCKETS / ROW_THREADS;
    static_assert(OWN == 2 && COPIES == 4, "pairs of sums, of four copies");
    const float octaves = count ? 32.0f : fmaxf((weight.peak - least_from(low)) * weight.high, 1e-3f);
    float width = fminf(fminf(octaves, 150.0f) / (weight.high * (BUCKETS - 1)), 1e30f);
    const u32 best = order(weight.peak);
    u64 high = (u64)best << 32 | ~0u;
    if (count) goal = count;
    if (threadIdx.x == 0) s.ahead = 0;
#pragma unroll 1
    for (int shift = 0;; width = 0) {
        fill_buckets(s, row, weight, team, low, high, width, shift, count > 0);
        u64 inside[OWN], own[OWN], mine = 0, total;
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            const int b = threadIdx.x * OWN + i;
            const Words4 copies = ((const Words4*)s.bucket.low)[b];
            inside[i] = ((u64)s.bucket.high[b] << 32) + copies.x + copies.y + copies.z + copies.w;
        }
        if (team.blocks > 1) {
            for (int i = 0; i < OWN; i++) team.slot(team.own)[threadIdx.x * OWN + i] = inside[i];
            team.meet();
            inside[0] = inside[1] = 0;
#pragma unroll 4
            for (int block = 0; block < team.blocks; block++) {
                u64 theirs[OWN];
                load_pair(theirs, team.slot(block) + threadIdx.x * OWN);
                inside[0] += theirs[0], inside[1] += theirs[1];
            }
            team.met++;
        }
        const float top = value_of_rank(high);
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            const float middle = width > 0 ? weight.at(-__fmul_rn(threadIdx.x * OWN + i, width)) : weight(top);
            own[i] = count ? inside[i] >> 24 : __double2ull_rn((double)inside[i] * (middle * (ONE / QUANTUM)));
            mine += own[i];
        }
        const u64 ahead = s.ahead;
        if (threadIdx.x == 0) s.chosen = 0, s.own = 0;  // if nothing in question weighs anything
        u64 before = ahead + exclusive_scan(s, mine, total);
        if (count && width > 0 && total <= count) return {low, low - 1, 0};
        goal = min(goal ? goal : goal_of(s.share, total), ahead + total);
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            if (before < goal && goal <= before + own[i]) {
                s.chosen = threadIdx.x * OWN + i;
                s.ahead = before;
                s.own = count ? before + own[i] : inside[i] / 15'000'000 + 1;  // no element has less than that
            }
            before += own[i];
        }
        __syncthreads();
        const u32 bucket = s.chosen;
        if (width > 0) {
            const float scale = 1 / width;
            auto edge = [&](float last) {  // of the least x in this bucket or a higher one
                return (u64)first_that(MINUS_INFINITY, best, [&](u32 ordered) {
                    return bucket_of(weight.peak - value(ordered), scale) <= last;
                }) << 32;
            };
            low = max(low, edge(BUCKET_0 + bucket));
            if (bucket) high = min(high, edge(BUCKET_0 + bucket - 1) - 1);
        } else {
            high -= (u64)bucket << shift;
            const u64 span = (1ull << shift) - 1;
            if (high - low > span) low = high - span;
        }
        if (low >> 32 == high >> 32) low = max(low, low >> 32 << 32 | (u32)~(row.vocab - 1));
        if (count && s.own == goal) return {low, low - 1, 0};
        if (!count && s.own <= BUCKETS) return {low, high, goal};
        shift = max(0, 64 - __clzll(high - low) - 10);
    }
}

// Each part's mass of what is above the cut's `high`; lists what is in question, BUCKETS at most, in any order.
DEVICE void split(Shared& s, const Row& row, const Weight& weight, const Team& team, const Cut& cut, u64* mass,
                  u64* candidate, u32* listed) {
    const float least = least_from(cut.low), most = value_of_rank(cut.high);
    for (int part = team.own + warp() * team.blocks; part < row.parts; part += team.blocks * WARPS) {
        float sum = 0;
        if (s.best[part] >= cut.low) {
            const Part x(row, part);
#pragma unroll
            for (int at = 0; at < PER_LANE; at += 4) {
                if (!any_of_four(x, at, least)) continue;
                u32 doubtful = 0;
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const float own = weight.at(x[at + j] - weight.peak);
                    sum += x[at + j] > most ? own : 0.0f;
                    doubtful |= (x[at + j] >= least && x[at + j] <= most) << j;
                }
                for (; doubtful; doubtful &= doubtful - 1) {
                    const int id = id_of(part, at + __ffs(doubtful) - 1);
                    if (id >= row.vocab) break;
                    const float again = load_logit(row, id);
                    const u64 rank = rank_of(again, id);
                    if (rank > cut.high) {
                        sum += weight(again);
                    } else if (rank >= cut.low) {
                        const u32 place = atomicAdd(listed, 1u);
                        if (place < BUCKETS) candidate[place] = rank;
                    }
                }
            }
#pragma unroll
            for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(FULL_WARP, sum, step);
        }
        if (lane() == 0) mass[part] = __double2ull_rn((double)sum * ONE);
    }
}
