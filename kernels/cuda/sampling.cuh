// What the sampling kernels share: parts of a row, ranks, weights in fixed point, and what one block does with a row.
//
// A row of logits is cut into parts of 512 ids and groups of 16; `scan_logits.cu` leaves a summary of each part and the
// maximum of each group. Then one block per row, or several (`search.cuh`), read again only what matters. Sums of a
// part have a fixed order, all others are of integers, so that neither the order of atomics nor the batch changes a
// result.
//
// Macros: LOGITS (0 float32, 1 float16, 2 bfloat16); SHARED, bytes, of the kernels with one block per row or several.
#pragma once
#include "common.cuh"

constexpr int PART = 512, PER_LANE = PART / 32;
constexpr int VECTOR = LOGITS == 0 ? 4 : 8;  // elements in 16 bytes
constexpr int SCANNED = 32 / VECTOR;         // vectors of a part's maxima, or of its sample
constexpr int MOST_PARTS = 1024;
constexpr int DROP = LOGITS == 0 ? 0 : LOGITS == 1 ? 13 : 16;  // last bits of a float32 that tell no logits apart
constexpr u32 MINUS_INFINITY = 0x007fffffu >> DROP, INFINITY_ = 0xff800000u >> DROP;  // as order() gives them

constexpr int GROUP = 16;  // consecutive ids
static_assert(GROUP == PER_LANE, "`Sixteen` holds either");

struct Row {
    const u8* logits;
    int vocab, parts;
    const u8* maxima = nullptr;  // [2, parts, 32] logits: of each group, then the sample: one of each lane
};

// Of one part: the best's rank, the sum of weights relative to the best, and of a sample of 32 the least above -inf.
struct __align__(16) Summary { u64 best; float sum; u32 least; };

DEVICE float load_logit(const Row& row, int id) {
    if (LOGITS == 0) return ((const float*)row.logits)[id];
    return widen<LOGITS == 2>(((const u16*)row.logits)[id]);
}

DEVICE int id_of(int part, int j) {
    return part * PART + (j / VECTOR * 32 + (threadIdx.x & 31)) * VECTOR + j % VECTOR;
}

// 16 bytes of logits.
struct Vector {
    u32 word[4];
    Vector() = default;
    DEVICE Vector(const void* logits, int at) {
        const Words4 v = ((const Words4*)logits)[at];
        word[0] = v.x, word[1] = v.y, word[2] = v.z, word[3] = v.w;
    }
    DEVICE float operator[](int j) const {
        const u32 own = word[j * 4 / VECTOR];
        return LOGITS == 0 ? as_float(own) : widen<LOGITS == 2>((u16)(own >> j % 2 * 16));
    }
};

// 16 elements as they are stored, minus infinity beyond the vocabulary: vectors that lie so many ids apart. A lane's
// elements of a part, or, one after another, a group.
struct Sixteen {
    Vector vector[PER_LANE / VECTOR];

    Sixteen() = default;
    DEVICE Sixteen(const Row& row, int first, int apart) {
        const bool aligned = ((u64)row.logits & 15) == 0;
        if (aligned && first + (PER_LANE / VECTOR - 1) * apart + VECTOR <= row.vocab) {
#pragma unroll
            for (int i = 0; i < PER_LANE; i += VECTOR)
                vector[i / VECTOR] = Vector(row.logits, first / VECTOR + i / VECTOR * (apart / VECTOR));
        } else {
            constexpr int PER_WORD = VECTOR / 4;
#pragma unroll
            for (int i = 0; i < PER_LANE; i += PER_WORD) {
                float x[2];
#pragma unroll
                for (int j = 0; j < PER_WORD; j++) {
                    const int id = first + i / VECTOR * apart + i % VECTOR + j;
                    x[j] = id < row.vocab ? load_logit(row, id) : negative_infinity();
                }
                vector[i / VECTOR].word[i % VECTOR / PER_WORD] =
                    LOGITS == 0 ? __float_as_uint(x[0]) : pack<LOGITS == 2>(x[0], x[1]);
            }
        }
    }

    DEVICE float operator[](int j) const { return vector[j / VECTOR][j % VECTOR]; }
};

DEVICE Sixteen own_of_part(const Row& row, int part) { return {row, id_of(part, 0), 32 * VECTOR}; }

// -- ranks -----------------------------------------------------------------------------------------------------------

// Unsigned integers in the order of floats; both zeros are one, NaN is above all.
DEVICE u32 order(float x) {
    u32 bits = __float_as_uint(x + 0.0f);
    return (x != x ? ~0u : bits ^ ((u32)((int)bits >> 31) | 0x80000000u)) >> DROP;
}

DEVICE float value(u32 ordered) {
    const u32 bits = ordered << DROP;
    return as_float((bits & 0x80000000u ? bits ^ 0x80000000u : ~bits) & ~((1u << DROP) - 1));
}

// No two elements of a row have the same rank; of equal logits the first id is the higher.
constexpr int ID_BITS = 19;
constexpr u32 MOST_ID = (1u << ID_BITS) - 1;
static_assert(MOST_PARTS * PART == MOST_ID + 1, "an id fits");
DEVICE u64 first_rank(u32 ordered) { return (u64)ordered << ID_BITS; }  // the least of an equal logit
DEVICE u64 rank_of(float x, u32 id) { return first_rank(order(x)) + (MOST_ID - id); }
DEVICE int id_of_rank(u64 rank) { return (int)(MOST_ID - (u32)rank & MOST_ID); }
DEVICE u32 order_of_rank(u64 rank) { return (u32)(rank >> ID_BITS); }
DEVICE float value_of_rank(u64 rank) { return value(order_of_rank(rank)); }
DEVICE bool is_finite(u64 rank) { return order_of_rank(rank) > MINUS_INFINITY && order_of_rank(rank) < INFINITY_; }
constexpr u64 LEAST_FINITE = (u64)(MINUS_INFINITY + 1) << ID_BITS;

// -- weights ---------------------------------------------------------------------------------------------------------

// exp((x - peak) / temperature)
struct Weight {
    float peak, high;
    DEVICE Weight(float peak, float temperature)
        : peak(fmaxf(peak, -3e38f)), high(fmaxf(__fdiv_rn(1.44269502f, temperature), 1e-37f)) {}
    DEVICE float operator()(float x) const { return exp2_approx((x - peak) * high); }
};

constexpr float ONE = 17592186044416.0f;  // 2^44: more than 2^18 weights fit in 63 bits
DEVICE u64 fixed(float weight) { return __float2ull_rn(weight * ONE); }

// -- one block per row -----------------------------------------------------------------------------------------------

#ifdef ROW_THREADS
constexpr int WARPS = ROW_THREADS / 32, EACH = MOST_PARTS / ROW_THREADS;
constexpr int SORTED = 2048;      // of the candidates, if they are sorted
constexpr int CANDIDATES = 8192;  // else
constexpr int BUCKETS = 1024;
constexpr int LISTED = BUCKETS * sizeof(u64) / sizeof(u16);  // groups that gather() can list in the buckets' place

struct Shared {
    u64 best[MOST_PARTS], mass[MOST_PARTS];  // of each part; at first its sum as it is in Summary
    u64 candidate[CANDIDATES], bucket[BUCKETS];
    u16 list[32];
    u64 warp[WARPS], few[32], ahead, own;
    double uniform;
    float temperature;
    int listed, gathered, chosen;
    u32 least;
};

DEVICE Shared& shared_memory() {
    extern __shared__ __align__(16) u8 memory[];
    static_assert(sizeof(Shared) <= SHARED, "as the host says");
    return *(Shared*)memory;
}

DEVICE int lane() { return threadIdx.x & 31; }
DEVICE int warp() { return threadIdx.x >> 5; }

template <class T> DEVICE T inclusive_scan_of_warp(T x) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const T other = __shfl_up_sync(FULL_WARP, x, step);
        if (lane() >= step) x += other;
    }
    return x;
}

// Counts up for all lanes together; the first of this lane's places.
DEVICE int reserve(int* counter, int count) {
    const int up_to = inclusive_scan_of_warp(count);
    int place = 0;
    if (lane() == 31) place = atomicAdd(counter, up_to);
    return __shfl_sync(FULL_WARP, place, 31) + up_to - count;
}

// The sum of the threads before this one; `total` is that of all.
template <class T> DEVICE T exclusive_scan(Shared& s, T x, T& total) {
    T *const sums = (T*)s.warp, inside = inclusive_scan_of_warp(x), before = 0;
    total = 0;
    __syncthreads();
    if (lane() == 31) sums[warp()] = inside;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < WARPS; i++) {
        const T sum = sums[i];
        if (i < warp()) before += sum;
        total += sum;
    }
    return before + inside - x;
}

DEVICE u64 sum_of_block(Shared& s, u64 x) {
    u64 total;
    exclusive_scan(s, x, total);
    return total;
}

// Adds to shared memory, 64 bits in two halves; sums are right once all is added.
DEVICE void add_shared(u64* to, u64 x) {
    const u32 low = (u32)x, high = (u32)(x >> 32) + (atomicAdd((u32*)to, low) + low < low);
    if (high) atomicAdd((u32*)to + 1, high);
}

// Reads the parts' summaries; returns the row's best.
DEVICE u64 load_summaries(Shared& s, const Summary* summary, int parts) {
    u64 peak = 0;
    u32 least = ~0u;
    if (threadIdx.x == 0) s.least = ~0u;
    for (int part = threadIdx.x; part < parts; part += ROW_THREADS) {
        const Words4 own = ((const Words4*)summary)[part];
        const u64 best = (u64)own.y << 32 | own.x;
        s.best[part] = best, s.mass[part] = own.z;
        peak = max(peak, best), least = min(least, own.w);
    }
    const u32 high = __reduce_max_sync(FULL_WARP, (u32)(peak >> 32));
    const u32 low = __reduce_max_sync(FULL_WARP, peak >> 32 == high ? (u32)peak : 0);
    if (lane() == 0) s.warp[warp()] = (u64)high << 32 | low;
    least = __reduce_min_sync(FULL_WARP, least);
    __syncthreads();
    if (lane() == 0) atomicMin(&s.least, least);
#pragma unroll
    for (int i = 0; i < WARPS; i++) peak = max(peak, s.warp[i]);
    return peak;
}

// Turns the parts' sums, each relative to the part's own best, into masses; returns their sum.
DEVICE u64 load_masses(Shared& s, int parts, const Weight& weight) {
    u64 mine = 0;
    for (int part = threadIdx.x; part < parts; part += ROW_THREADS) {
        const float scale = weight(value_of_rank(s.best[part])) * ONE;
        mine += s.mass[part] = __double2ull_rn((double)as_float((u32)s.mass[part]) * scale);
    }
    return sum_of_block(s, mine);
}

DEVICE u64 mass_of_row(Shared& s, int parts) {
    u64 mine = 0;
    for (int part = threadIdx.x; part < parts; part += ROW_THREADS) mine += s.mass[part];
    return sum_of_block(s, mine);
}

// A rank from which on at least `count` parts have their best, so that the row's count-th best is not below it; not
// many more parts do. 1 <= count <= parts.
DEVICE u64 bound_of(Shared& s, int parts, int count, u64 peak) {
    u32 own[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        int part = threadIdx.x + i * ROW_THREADS;
        own[i] = part < parts ? order_of_rank(s.best[part]) : 0;
    }
    u32 low = MINUS_INFINITY, high = order_of_rank(peak);  // the bound lies in low .. high
    while (low < high) {
        u32 middle = high - (high - low) / 2;
        int found = 0;
#pragma unroll
        for (int i = 0; i < EACH; i++)
            if (i * ROW_THREADS < parts) found += __syncthreads_count(own[i] >= middle);
        if (found >= count) {
            low = middle;
            if (found <= count + count / 8) break;
        } else {
            high = middle - 1;
        }
    }
    return first_rank(low);
}

// A float that nothing from this rank on is below.
DEVICE float least_from(u64 rank) {
    return order_of_rank(rank) > MINUS_INFINITY ? value_of_rank(rank) : negative_infinity();
}

// Collects what ranks from low on, of the groups whose maxima do; returns how many there are, of which up to CANDIDATES
// are kept, in any order. More than that, too, if they lie in more than LISTED groups.
DEVICE int gather(Shared& s, const Row& row, u64 low) {
    u16* const list = (u16*)s.bucket;
    __syncthreads();
    if (threadIdx.x == 0) s.listed = s.gathered = 0;
    __syncthreads();
    constexpr int READ = 3, AT_ONCE = 2;  // they hide each other's latency
    for (int first = 0; first < row.parts * SCANNED; first += READ * ROW_THREADS) {
        Vector x[READ];
        bool any[READ];
        u32 found = 0;
#pragma unroll
        for (int k = 0; k < READ; k++) {
            const int i = first + k * ROW_THREADS + threadIdx.x;
            any[k] = i < row.parts * SCANNED && s.best[i / SCANNED] >= low;
            if (any[k]) x[k] = Vector(row.maxima, i);
        }
#pragma unroll
        for (int k = 0; k < READ; k++) {
            if (!any[k]) continue;
            // What is equal and comes later ranks lower: not all of many ties are listed in vain.
            const float least = least_from(low + (first + k * ROW_THREADS + threadIdx.x) * VECTOR * GROUP);
#pragma unroll
            for (int j = 0; j < VECTOR; j++) found |= (u32)(x[k][j] >= least) << (k * VECTOR + j);
        }
        int place = reserve(&s.listed, __popc(found));
        for (; found; found &= found - 1, place++) {
            const int j = __ffs(found) - 1, i = first + j / VECTOR * ROW_THREADS + threadIdx.x;
            if (place < LISTED) list[place] = i * VECTOR + j % VECTOR;
        }
    }
    __syncthreads();
    const int listed = s.listed;
    if (listed > LISTED && threadIdx.x == 0) s.gathered = CANDIDATES + 1;
    const float least = least_from(low);
    for (int i = threadIdx.x; listed <= LISTED && i < listed; i += AT_ONCE * ROW_THREADS) {
        int id[AT_ONCE];
        Sixteen x[AT_ONCE];
        u32 found = 0;
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            id[k] = i + k * ROW_THREADS < listed ? list[i + k * ROW_THREADS] * GROUP : row.vocab;
            if (id[k] < row.vocab) x[k] = Sixteen(row, id[k], VECTOR);
        }
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            if (id[k] >= row.vocab) continue;
#pragma unroll
            for (int j = 0; j < GROUP; j++) found |= (u32)(x[k][j] >= least) << (k * GROUP + j);
        }
        for (; found; found &= found - 1) {
            const int j = __ffs(found) - 1, own = (j < GROUP ? id[0] : id[1]) + j % GROUP;
            if (own >= row.vocab) continue;
            const u64 rank = rank_of(load_logit(row, own), own);
            if (rank < low) continue;
            const int at = atomicAdd(&s.gathered, 1);
            if (at < CANDIDATES) s.candidate[at] = rank;
        }
    }
    __syncthreads();
    return s.gathered;
}

// Sorts n candidates, the highest first: few by counting, more by a bitonic network.
DEVICE void sort(Shared& s, int n) {
    if (n <= 256) {
        const u64 own = threadIdx.x < n ? s.candidate[threadIdx.x] : 0;
        int higher = 0;
        __syncthreads();
        if (threadIdx.x < n)
#pragma unroll 8
            for (int i = 0; i < n; i++) higher += s.candidate[i] > own;
        __syncthreads();
        if (threadIdx.x < n) s.candidate[higher] = own;
        __syncthreads();
        return;
    }
    int size = 64;
    while (size < n) size *= 2;
    for (int i = n + threadIdx.x; i < size; i += ROW_THREADS) s.candidate[i] = 0;
    __syncthreads();
    for (int run = 2; run <= size; run *= 2)
        for (int step = run / 2; step; step /= 2) {
            for (int t = threadIdx.x; t < size / 2; t += ROW_THREADS) {
                int at = 2 * t - (t & (step - 1));
                u64 a = s.candidate[at], b = s.candidate[at + step];
                if ((a < b) == ((at & run) == 0)) s.candidate[at] = b, s.candidate[at + step] = a;
            }
            // Up to 32 apart, a warp stays inside the same 64 places.
            if (step >= 64 || (step == 1 && run >= 64)) __syncthreads();
            else __syncwarp();
        }
    __syncthreads();
}

DEVICE u64 goal_of(double share, u64 total) {
    return min(total, max(1ull, __double2ull_ru(share * (double)total)));
}

// How many of the first n sorted candidates it takes until their mass reaches `share` of that of the n.
DEVICE int reach(Shared& s, const Weight& weight, int n, double share) {
    constexpr int OWN = SORTED / ROW_THREADS;
    u64 own[OWN], mine = 0, total;
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        int at = threadIdx.x * OWN + i;
        mine += own[i] = at < n ? fixed(weight(value_of_rank(s.candidate[at]))) : 0;
    }
    u64 before = exclusive_scan(s, mine, total);
    const u64 goal = goal_of(share, total);
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        if (before < goal && goal <= before + own[i]) s.chosen = threadIdx.x * OWN + i + 1;
        before += own[i];
    }
    __syncthreads();
    return s.chosen;
}
#endif
