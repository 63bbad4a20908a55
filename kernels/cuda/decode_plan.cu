// Cut a batch into equal pieces of work, on the device, so that a captured graph replays with other lengths.
#include "decode_plan.cuh"

struct Params {
    const int* lengths;      // [batch]
    const int* query_start;  // [batch + 1]
    int* plan;               // header, grid entries, then [batch + 1] tiles of one head before each request
    int batch, heads, grid, multiprocessors, warps, window;  // warps: of an attention block
};

constexpr int THREADS = 1024;
constexpr int MULTIPLE = 8;  // tiles: the warps of an attention block take one each in turn
// Where a block has no more, what a second one on its multiprocessor costs is more than it saves.
constexpr int MOST_ALONE = 4 * MULTIPLE;
// Where a pair has no more, a merge with other blocks costs more than it saves. Of n that share a block each has 1 / n of
// the warps and so takes n times the rounds. One after the other they are n segments, which take about as long.
constexpr int MOST_UNCUT = 8 * MULTIPLE;

DEVICE void write_entry(const Params& p, int block, int request, int head, int tile, int first_block, int parts) {
    const int length = p.lengths[request], token0 = p.query_start[request], end = p.query_start[request + 1];
    const int tokens = length ? end - token0 : 0;
    ((PlanEntry*)(p.plan + PLAN_HEADER))[block] = {request, head, tile, length, token0, tokens, first_block, parts};
}

extern "C" __global__ void __launch_bounds__(THREADS) decode_plan(const __grid_constant__ Params p) {
    __shared__ int sums[THREADS / 32], carry, longest, busy;  // busy: requests up to the last that is not idle
    int* before = p.plan + PLAN_HEADER + p.grid * (int)(sizeof(PlanEntry) / 4);
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    if (threadIdx.x == 0) carry = longest = busy = before[0] = 0;
    __syncthreads();
    for (int base = 0; base < p.batch; base += THREADS) {
        int request = base + threadIdx.x, tiles = 0;
        if (request < p.batch && p.lengths[request])
            tiles = tile_range(p.lengths[request], p.query_start[request + 1] - p.query_start[request], p.window).count;
        const int most = __reduce_max_sync(FULL_WARP, tiles), last = __reduce_max_sync(FULL_WARP, tiles ? request + 1 : 0);
        if (lane == 0) atomicMax(&longest, most), atomicMax(&busy, last);
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
    // Short pairs are not cut: a block takes several side by side, each by a share of its warps. The longest pair then
    // decides how long that takes.
    const int pairs = busy * p.heads, blocks = min(pairs, p.grid), most = (pairs - 1) / p.grid + 1;  // of a block
    const int sharing = p.warps / most;
    if (longest * p.warps <= MOST_UNCUT * most * sharing) {
        if (threadIdx.x == 0) p.plan[0] = 1, p.plan[1] = blocks, p.plan[2] = true;
        for (int block = threadIdx.x; block < blocks; block += THREADS) {
            const int pair = block * pairs / blocks, next = (block + 1) * pairs / blocks;
            write_entry(p, block, pair / p.heads, pair % p.heads, 0, block, next - pair);
        }
        return;
    }
    int total = carry * p.heads;
    int grid = total > p.multiprocessors * MOST_ALONE ? p.grid : min(p.grid, p.multiprocessors);
    int per_block = (total + grid * MULTIPLE - 1) / (grid * MULTIPLE) * MULTIPLE;
    if (threadIdx.x == 0) p.plan[0] = per_block, p.plan[1] = total, p.plan[2] = false;
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
        write_entry(p, block, low, offset / tiles, tile, first_block, last_block - first_block + 1);
    }
}
