// Cut a batch into equal pieces of work, on the device, so that a captured graph replays with other lengths.
#include "decode_plan.cuh"

struct Params {
    const int* lengths;      // [batch]
    const int* query_start;  // [batch + 1]
    int* plan;               // header, grid entries, then [batch + 1] tiles of one head before each request
    int batch, heads, grid, window;
};

constexpr int THREADS = 1024;
// A block's reading costs its tiles, the merge costs the number of blocks that share a row block: the best split of n
// tiles goes with sqrt(n). The factor fits measurements on an H200 at n = 512 and 2048.
constexpr float LEAST_SPLIT = 0.7f;

extern "C" __global__ void __launch_bounds__(THREADS) decode_plan(const __grid_constant__ Params p) {
    __shared__ int sums[THREADS / 32], carry, longest;
    int* before = p.plan + PLAN_HEADER + p.grid * (int)(sizeof(PlanEntry) / 4);
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    if (threadIdx.x == 0) carry = 0, longest = 0, before[0] = 0;
    __syncthreads();
    for (int base = 0; base < p.batch; base += THREADS) {
        int request = base + threadIdx.x, tiles = 0;
        if (request < p.batch)
            tiles = tile_range(p.lengths[request], p.query_start[request + 1] - p.query_start[request], p.window).count;
        atomicMax(&longest, tiles);
        for (int step = 1; step < 32; step *= 2) {
            int other = __shfl_up_sync(FULL_WARP, tiles, step);
            if (lane >= step) tiles += other;
        }
        if (lane == 31) sums[warp] = tiles;
        __syncthreads();
        int ahead = carry;
        for (int w = 0; w < warp; w++) ahead += sums[w];
        if (request < p.batch) before[request + 1] = ahead + tiles;
        __syncthreads();
        if (threadIdx.x == THREADS - 1) carry = ahead + tiles;
        __syncthreads();
    }
    int total = carry * p.heads;
    int per_block = max((total + p.grid - 1) / p.grid, (int)ceilf(LEAST_SPLIT * sqrtf(longest)));
    if (threadIdx.x == 0) p.plan[0] = per_block, p.plan[1] = total;
    for (int block = threadIdx.x; block < p.grid; block += THREADS) {
        int position = block * per_block;
        if (position >= total) break;
        int low = 0, high = p.batch;  // before[low] * heads <= position < before[high] * heads
        while (high - low > 1) {
            int middle = (low + high) / 2;
            if (before[middle] * p.heads <= position) low = middle;
            else high = middle;
        }
        int offset = position - before[low] * p.heads, tiles = before[low + 1] - before[low];
        ((PlanEntry*)(p.plan + PLAN_HEADER))[block] = {
            low, offset / tiles, offset % tiles, p.lengths[low], p.query_start[low],
            p.query_start[low + 1] - p.query_start[low]};
    }
}
