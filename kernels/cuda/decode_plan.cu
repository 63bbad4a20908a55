// Cut a batch into equal pieces of work, on the device, so that a captured graph replays with other lengths.
#include "decode_plan.cuh"

struct Params {
    const int* lengths;      // [batch]
    const int* query_start;  // [batch + 1]
    int* plan;               // header, grid entries, then [batch + 1] places of one head before each request
    int batch, heads, grid, multiprocessors, window;
};

constexpr int THREADS = 1024;
constexpr int MULTIPLE = 8;  // tiles: the warps of an attention block take one each in turn
// Where a block has no more, what a second one on its multiprocessor or a merge with others costs is more than it saves.
constexpr int MOST_ALONE = 4 * MULTIPLE;

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
        const int most = __reduce_max_sync(FULL_WARP, tiles);
        if (lane == 0) atomicMax(&longest, most);
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
    const bool whole = longest <= MOST_ALONE && p.batch * p.heads <= p.multiprocessors;
    if (whole) {
        for (int request = threadIdx.x; request <= p.batch; request += THREADS) before[request] = request * longest;
        __syncthreads();
    }
    int total = (whole ? p.batch * longest : carry) * p.heads;
    int grid = total > p.multiprocessors * MOST_ALONE ? p.grid : min(p.grid, p.multiprocessors);
    int per_block = whole ? longest : (total + grid * MULTIPLE - 1) / (grid * MULTIPLE) * MULTIPLE;
    if (threadIdx.x == 0) p.plan[0] = per_block, p.plan[1] = total, p.plan[2] = whole;
    for (int block = threadIdx.x; block < p.grid; block += THREADS) {
        int position = block * per_block;
        if (position >= total) break;
        int low = 0, high = p.batch;  // before[low] * heads <= position < before[high] * heads
        while (high - low > 1) {
            int middle = (low + high) / 2;
            if (before[middle] * p.heads <= position) low = middle;
            else high = middle;
        }
        int tiles = before[low + 1] - before[low], offset = position - before[low] * p.heads, tile = offset % tiles;
        int first_block = (position - tile) / per_block, last_block = (position - tile + tiles - 1) / per_block;
        ((PlanEntry*)(p.plan + PLAN_HEADER))[block] = {
            low, offset / tiles, tile, p.lengths[low], p.query_start[low],
            p.query_start[low + 1] - p.query_start[low], first_block, last_block - first_block + 1};
    }
}
