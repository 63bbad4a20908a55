// The one full pass over the logits: a summary of each part, the maximum of each 16 ids, and one logit in 16 as it is.
//
// Macros: LOGITS; LOGPROBS (1: temperature 1, count what is above the chosen token, no sample).
#include "sampling.cuh"

struct Params {
    const u8* logits;          // [rows, vocab]
    const float* temperature;  // [rows], or null: the best alone
    const i64* token;          // [rows] of LOGPROBS
    Summary* summary;          // [rows, parts]
    u8* maxima;                // [rows, 2, parts, 32] logits, as in `Row`; no sample of LOGPROBS
    u32* above;                // [rows, parts] of LOGPROBS
    u32* arrived;              // [rows] to be zeroed for `sampling.cu`; not of LOGPROBS
    i64 row_stride;            // bytes
    int vocab, parts;
};

DEVICE float max_or_nan(float a, float b) {
    asm("max.NaN.f32 %0, %0, %1;" : "+f"(a) : "f"(b));
    return a;
}

DEVICE void store_logit(const Params& p, i64 at, float x) {
    if (LOGITS == 0) ((float*)p.maxima)[at] = x;
    else ((u16*)p.maxima)[at] = narrow<LOGITS == 2>(x);
}

DEVICE void scan_part(const Params& p, const Row& row, const Sixteen& x, int part, float temperature) {
    constexpr int VECTORS = PER_LANE / VECTOR;
    const int lane = threadIdx.x % 32;
    float most[VECTORS];  // of each vector
#pragma unroll
    for (int j = 0; j < PER_LANE; j++) most[j / VECTOR] = j % VECTOR ? max_or_nan(most[j / VECTOR], x[j]) : x[j];
    float top = most[0];
#pragma unroll
    for (int i = 1; i < VECTORS; i++) top = max_or_nan(top, most[i]);
    const u32 best = __reduce_max_sync(FULL_WARP, order(top));
    u32 id = MOST_ID;
    if (order(top) == best) {
#pragma unroll
        for (int j = PER_LANE - 1; j >= 0; j--)
            if (x[j] == top) id = id_of(part, j);
    }
    id = __reduce_min_sync(FULL_WARP, id);
    const i64 index = (i64)blockIdx.y * p.parts + part;
    Summary found = {first_rank(best) + (MOST_ID - id), 0.0f, ~0u};
    if (temperature >= 1e-5f) {
        const Weight weight(value(best), temperature);
#pragma unroll
        for (int j = 0; j < PER_LANE; j++) found.sum += weight(x[j]);
#pragma unroll
        for (int step = 16; step; step /= 2) found.sum += __shfl_xor_sync(FULL_WARP, found.sum, step);
        // A group is a vector of each of `VECTORS` lanes, which swap until each lane has the maximum of one.
#pragma unroll
        for (int n = VECTORS / 2; n; n /= 2)
#pragma unroll
            for (int i = 0; i < n; i++) {
                const float other = __shfl_xor_sync(FULL_WARP, lane & n ? most[i] : most[i + n], n);
                most[i] = fmaxf(lane & n ? most[i + n] : most[i], other);
            }
        const i64 place = (index + (i64)blockIdx.y * p.parts) * 32;
        store_logit(p, place + lane % VECTORS * (32 / VECTORS) + lane / VECTORS, most[0]);
#if !LOGPROBS
        const float some = part % 2 ? x[PER_LANE / 2] : x[0];
        store_logit(p, place + p.parts * 32 + lane, some);
        found.least = __reduce_min_sync(FULL_WARP, order(some) > MINUS_INFINITY ? order(some) : ~0u);
#endif
    }
#if LOGPROBS
    const float own = load_logit(row, (int)min(max(p.token[blockIdx.y], 0ll), (i64)p.vocab - 1));
    u32 above = 0;
#pragma unroll
    for (int j = 0; j < PER_LANE; j++) above += x[j] > own;
    above = __reduce_add_sync(FULL_WARP, above);
    if (lane == 0) p.above[index] = above;
#endif
    if (lane == 0) p.summary[index] = found;
}

extern "C" __global__ void __launch_bounds__(128) scan_logits(Params p) {
    wait_for_previous();
    let_next_start();
    const int part = (blockIdx.x * 4 + threadIdx.x / 32) * 2, at = blockIdx.y;
    if (part >= p.parts) return;
    const Row row = {p.logits + at * p.row_stride, p.vocab, p.parts};
    const float temperature = LOGPROBS ? 1.0f : p.temperature ? p.temperature[at] : 0.0f;
    Sixteen x[2];  // they hide each other's latency
    x[0] = own_of_part(row, part);
    if (part + 1 < p.parts) x[1] = own_of_part(row, part + 1);
#if !LOGPROBS
    if (part == 0 && threadIdx.x == 0) p.arrived[at] = 0;
#endif
    scan_part(p, row, x[0], part, temperature);
    if (part + 1 < p.parts) scan_part(p, row, x[1], part + 1, temperature);
}
