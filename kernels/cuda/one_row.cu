// y = x W^T + bias for one row x: a warp per output column reads its row of W once, with several loads in flight.
//
// Bound by the bytes of W. The products of a column are summed in float32, lane by lane, then across the warp.
//
// Macros: IS_BF16; GATED: of two rows of W each (gated.cuh).
#include "gated.cuh"

constexpr int WARPS = 4, ROWS = GATED ? 2 : 1;  // of W, for a column of the output
constexpr int BATCH = 8 / ROWS;                 // pieces of 16 bytes of each that a lane asks for before it uses them

struct Params {
    const u16* x;     // [width]
    const u16* w;     // [ROWS * columns, width], packed
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
    const Words4 *w = (const Words4*)(p.w + (i64)column * ROWS * p.width), *x = (const Words4*)p.x;
    const int pieces = p.width / 8;
    float sum[ROWS] = {};
    for (int first = lane; first < pieces; first += 32 * BATCH) {
        Words4 found[BATCH][ROWS];
#pragma unroll
        for (int i = 0; i < BATCH; i++)
#pragma unroll
            for (int row = 0; row < ROWS; row++) {
                const int at = first + 32 * i;
                found[i][row] = at < pieces ? load_stream4(w + row * pieces + at) : Words4{0, 0, 0, 0};
            }
        if (first == lane) wait_for_previous();
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            const Words4 own = x[min(first + 32 * i, pieces - 1)];
#pragma unroll
            for (int row = 0; row < ROWS; row++) sum[row] = add_products(sum[row], found[i][row], own);
        }
    }
#pragma unroll
    for (int row = 0; row < ROWS; row++)
#pragma unroll
        for (int step = 16; step; step /= 2) sum[row] += __shfl_xor_sync(FULL_WARP, sum[row], step);
    if (lane) return;
    if (GATED) p.out[column] = narrow<IS_BF16>(silu(sum[0]) * sum[ROWS - 1]);
    else p.out[column] = narrow<IS_BF16>(p.bias ? sum[0] + widen<IS_BF16>(p.bias[column]) : sum[0]);
}
