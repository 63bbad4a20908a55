// y = x W^T + bias for one row x: a warp per output column reads its row of W once, with several loads in flight.
//
// Bound by the bytes of W. The products of a column are summed in float32, lane by lane, then across the warp.
//
// Macros: IS_BF16.
#include "common.cuh"

constexpr int WARPS = 4, BATCH = 8;  // pieces of 16 bytes that a lane asks for before it uses them

struct Params {
    const u16* x;     // [width]
    const u16* w;     // [columns, width], packed
    const u16* bias;  // [columns], or null
    u16* out;         // [columns]
    int columns, width;
};

DEVICE float add_products(float sum, const Words4& w, const Words4& x) {
    const u32 a[4] = {w.x, w.y, w.z, w.w}, b[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        sum = fmaf(widen<IS_BF16>((u16)a[i]), widen<IS_BF16>((u16)b[i]), sum);
        sum = fmaf(widen<IS_BF16>((u16)(a[i] >> 16)), widen<IS_BF16>((u16)(b[i] >> 16)), sum);
    }
    return sum;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS) one_row(Params p) {
    const int lane = threadIdx.x % 32, column = blockIdx.x * WARPS + threadIdx.x / 32;
    let_next_start();
    if (column >= p.columns) return;
    const Words4 *w = (const Words4*)(p.w + (i64)column * p.width), *x = (const Words4*)p.x;
    const int pieces = p.width / 8;
    float sum = 0;
    for (int first = lane; first < pieces; first += 32 * BATCH) {
        Words4 found[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            const int at = first + 32 * i;
            found[i] = at < pieces ? load_stream4(w + at) : Words4{0, 0, 0, 0};
        }
        if (first == lane) wait_for_previous();
#pragma unroll
        for (int i = 0; i < BATCH; i++) sum = add_products(sum, found[i], x[min(first + 32 * i, pieces - 1)]);
    }
#pragma unroll
    for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(FULL_WARP, sum, step);
    if (lane == 0) p.out[column] = narrow<IS_BF16>(p.bias ? sum + widen<IS_BF16>(p.bias[column]) : sum);
}
