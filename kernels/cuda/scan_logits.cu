// The one full pass over the logits: the best of each part, and if asked its sum of weights.
//
// Macros: LOGITS; LOGPROBS (1: temperature 1, and count what is above the chosen token).
#include "sampling.cuh"

struct Params {
    const u8* logits;          // [rows, vocab]
    const float* temperature;  // [rows], or null: no sums
    const i64* token;          // [rows] of LOGPROBS
    u64* best;                 // [rows, parts] ranks
    float* sums;               // [rows, parts] relative to the part's best
    u32* above;                // [rows, parts] of LOGPROBS
    u32* counters;             // [rows, 2] to be zeroed for `sampling.cu`; not of LOGPROBS
    i64 row_stride;            // bytes
    int vocab, parts;
};

extern "C" __global__ void __launch_bounds__(128) scan_logits(Params p) {
    const int part = blockIdx.x * 4 + threadIdx.x / 32, at = blockIdx.y;
    if (part >= p.parts) return;
    const Row row = {p.logits + at * p.row_stride, p.vocab, p.parts};
    const float temperature = LOGPROBS ? 1.0f : p.temperature ? p.temperature[at] : 0.0f;
    const Part x(row, part);
    float top = x[0];
#pragma unroll
    for (int j = 1; j < PER_LANE; j++) asm("max.NaN.f32 %0, %0, %1;" : "+f"(top) : "f"(x[j]));
    const u32 best = __reduce_max_sync(FULL_WARP, order(top));
    u32 id = ~0u;
    if (order(top) == best) {
#pragma unroll
        for (int j = PER_LANE - 1; j >= 0; j--)
            if (x[j] == top) id = id_of(part, j);
    }
    id = __reduce_min_sync(FULL_WARP, id);
    const i64 index = (i64)at * p.parts + part;
    const bool first = threadIdx.x % 32 == 0;
    if (first) p.best[index] = (u64)best << 32 | ~id;
#if !LOGPROBS
    if (part == 0 && threadIdx.x < 2) p.counters[at * 2 + threadIdx.x] = 0;
#else
    const float own = load_logit(row, (int)min(max(p.token[at], 0ll), (i64)p.vocab - 1));
    u32 above = 0;
#pragma unroll
    for (int j = 0; j < PER_LANE; j++) above += x[j] > own;
    above = __reduce_add_sync(FULL_WARP, above);
    if (first) p.above[index] = above;
#endif
    if (temperature < 1e-5f) return;
    const Weight weight(value(best), temperature);
    float sum = 0;
#pragma unroll
    for (int j = 0; j < PER_LANE; j++) sum += weight(x[j]);
#pragma unroll
    for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(FULL_WARP, sum, step);
    if (first) p.sums[index] = sum;
}
