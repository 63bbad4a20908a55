// y = x W^T + bias for up to TOKENS rows x, with Hopper's warpgroup matrix instructions: W is read once, and that is all
// the time it should take.
//
// W's rows are the rows of the products, x's rows their columns. One thread has tiles of W and x copied ahead, 64 columns a
// stage, the first of W's before the kernel ahead has ended. A warpgroup adds up 64 rows of a tile, or what there is of
// them. `slices` blocks may share a tile, each a slice of its columns, and leave it to the next kernel to add up their sums.
//
// Macros: IS_BF16; TOKENS (16 to 128); GATED (gated.cuh). For sm_90a only.
#include "gated.cuh"
#include "hopper.cuh"

struct Params {
    TensorMap w;      // [outs, width], boxes of tile_rows by 64
    TensorMap x;      // [rows, width], boxes of x_rows by 64
    const u16* bias;  // [outs], or null
    u16* out;         // [rows, outs], outs even, half as wide if GATED; or null
    float* sums;      // [slices, rows, outs], if `out` is null
    int rows, outs, steps, slices, tiles, tile_rows, stages;  // steps: of 64 columns; tile_rows: a multiple of 8
    int x_rows;       // `rows`, rounded up to a multiple of 8
};

constexpr int ROW_GROUPS = 3, ACC = TOKENS / 8;  // the first: at most
constexpr int MOST_STAGES = 24, X = TOKENS * 128;  // bytes of a stage; what x doesn't fill gives sums that nobody stores

#define WGMMA(N, D, A, B, ADD, ...)                                                                                \
    asm volatile("{.reg .pred p; setp.ne.b32 p, " ADD ", 0;\n"                                                     \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16" TYPES " {" D "}, " A ", " B ", p, 1, 1, 0, 0;}"      \
                 : __VA_ARGS__ : "l"(w), "l"(x), "r"((int)add))

// d[64 x TOKENS] = or += w * x^T: 16 columns of both, in shared memory.
template <int N> DEVICE void multiply(float (&d)[N][4], u64 w, u64 x, bool add) {
    if constexpr (N == 2) WGMMA(16, R8, "%8", "%9", "%10", FOUR(0), FOUR(1));
    else if constexpr (N == 4) WGMMA(32, R16, "%16", "%17", "%18", SIXTEEN(0));
    else if constexpr (N == 8) WGMMA(64, R32, "%32", "%33", "%34", SIXTEEN(0), SIXTEEN(4));
    else WGMMA(128, R64, "%64", "%65", "%66", SIXTY4(0));
}

struct Pipe {
    u32 base, stage_bytes, full, empty;  // addresses
    int stages, stage = 0, phase = 0;

    DEVICE u32 at() const { return base + stage * stage_bytes; }
    DEVICE u32 x() const { return at() + stage_bytes - X; }
    DEVICE void advance() {
        if (++stage == stages) stage = 0, phase ^= 1;
    }
};

struct Share {
    int block, group, groups, step0, steps;

    DEVICE Share(const Params& p) {
        block = blockIdx.x % p.slices, group = blockIdx.x / p.slices, groups = gridDim.x / p.slices;
        step0 = p.steps * block / p.slices, steps = p.steps * (block + 1) / p.slices - step0;
    }
};

// Where in W a block's next step is.
struct Cursor {
    int row, step = 0;

    DEVICE void advance(const Params& p, const Share& share) {
        if (++step == share.steps) step = 0, row += share.groups * p.tile_rows;
    }
};

// One thread's work: what stages there are of W, and once x is there, x and the rest of both.
struct Copies {
    const Params& p;
    const Share& share;
    Pipe pipe;
    Cursor w;
    int count, ready;

    DEVICE Copies(const Params& p, const Share& share, const Pipe& pipe) : p(p), share(share), pipe(pipe) {
        count = (p.tiles - share.group + share.groups - 1) / share.groups * share.steps;
        ready = min(p.stages, count), w.row = share.group * p.tile_rows;
    }
    DEVICE void copy_w() {
        expect(pipe.full + pipe.stage * 8, (p.tile_rows + p.x_rows) * 128);
        load_box(pipe.at(), p.w, (share.step0 + w.step) * 64, w.row, pipe.full + pipe.stage * 8);
    }
    DEVICE void copy_x(int step) {
        load_box(pipe.x(), p.x, (share.step0 + step) * 64, 0, pipe.full + pipe.stage * 8);
    }
    DEVICE void start() {
        prefetch_map(p.x);
        for (int i = 0; i < ready; i++, pipe.advance(), w.advance(p, share)) copy_w();
    }
    DEVICE void go_on() {
        pipe.stage = pipe.phase = 0;
        Cursor x = {0};
        for (int i = 0; i < ready; i++, pipe.advance(), x.advance(p, share)) copy_x(x.step);
        for (int i = ready; i < count; i++, pipe.advance(), w.advance(p, share)) {
            wait_barrier(pipe.empty + pipe.stage * 8, pipe.phase ^ 1);
            copy_w(), copy_x(w.step);
        }
    }
};

DEVICE void add_up(float (&acc)[ACC][4], Pipe& pipe, int steps, int group) {
    u32 before = 0;  // barrier of the stage that is still in use
    const bool leads = (threadIdx.x & 31) == 0;
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
        wait_barrier(pipe.full + pipe.stage * 8, pipe.phase);
        const u64 w = descriptor(pipe.at() + group * (64 * 128)), x = descriptor(pipe.x());
        matrix_fence();
#pragma unroll
        for (int i = 0; i < 4; i++) multiply(acc, w + i * 2, x + i * 2, step || i);
        matrix_commit();
        matrix_wait<1>();
        if (before && leads) arrive(before);
        before = pipe.empty + pipe.stage * 8;
        pipe.advance();
    }
    matrix_wait<0>();
    pin(acc);
    if (before && leads) arrive(before);
}

// A warp's 16 rows of a tile.
DEVICE void store(const Params& p, const Share& share, const float (&acc)[ACC][4], int tile) {
    const int lane = threadIdx.x & 31, row0 = tile * p.tile_rows + threadIdx.x / 32 * 16;
    const int last = min(p.outs, (tile + 1) * p.tile_rows);
#if GATED
#pragma unroll
    for (int j = 0; j < ACC; j++) {
        const Gated found(acc[j]);
        const int first = row0 / 2 + found.output, token = found.token + j * 8;
        if (token < p.rows && first < last / 2) *(u32*)(p.out + (i64)token * (p.outs / 2) + first) = found.both;
    }
#else
    float bias[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int row = row0 + (lane >> 2) + i * 8;
        if (p.bias && share.block == 0 && row < last) bias[i] = widen<IS_BF16>(p.bias[row]);
    }
    if (p.out) {
        const int token = lane >> 2, row = row0 + (lane & 3) * 2;
        u16* to = p.out + (i64)token * p.outs + row;
#pragma unroll
        for (int j = 0; j < ACC; j++, to += 8 * p.outs)
#pragma unroll
            for (int i = 0; i < 2; i++) {  // transposed, a lane has two outputs of one token
                const u32 both = transpose_8x8(pack<IS_BF16>(acc[j][2 * i] + bias[i], acc[j][2 * i + 1] + bias[i]));
                if (token + j * 8 < p.rows && row + i * 8 < last) *(u32*)(to + i * 8) = both;
            }
    } else {
        const int token = (lane & 3) * 2, row = row0 + (lane >> 2);
        float* to = p.sums + ((i64)share.block * p.rows + token) * p.outs + row;
#pragma unroll
        for (int j = 0; j < ACC; j++, to += 8 * p.outs)
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (token + j * 8 + i % 2 < p.rows && row + i / 2 * 8 < last)
                    to[i % 2 * p.outs + i / 2 * 8] = acc[j][i] + bias[i / 2];
    }
#endif
}

extern "C" __global__ void __launch_bounds__(ROW_GROUPS * 128 + 32, 1) dense_sm90(const __grid_constant__ Params p) {
    extern __shared__ u8 shared[];
    __shared__ __align__(8) u64 barriers[2 * MOST_STAGES];
    let_next_start();
    const Share share(p);
    const int row_groups = (p.tile_rows + 63) / 64, group = threadIdx.x >> 7;
    Pipe pipe;
    pipe.base = (u32)__cvta_generic_to_shared(shared) + 1023 & ~1023u;
    pipe.stages = p.stages, pipe.stage_bytes = p.tile_rows * 128 + X;
    pipe.full = (u32)__cvta_generic_to_shared(barriers), pipe.empty = pipe.full + MOST_STAGES * 8;
    const bool copies = threadIdx.x == blockDim.x - 32;
    if (copies) {
        for (int i = 0; i < p.stages; i++) {
            init_barrier(pipe.full + i * 8, 1);
            init_barrier(pipe.empty + i * 8, row_groups * 4);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    Copies ahead(p, share, pipe);
    if (copies) ahead.start();
    wait_for_previous();
    if (copies) ahead.go_on();
    if (group == row_groups) return;
    float acc[ACC][4];
    for (int tile = share.group; tile < p.tiles; tile += share.groups) {
        add_up(acc, pipe, share.steps, group);
        store(p, share, acc, tile);
    }
}
