// y = x W^T (+ bias) for 4-bit weights and tens to hundreds of tokens, with Hopper's warpgroup matrix instructions.
//
// Weights are the operand in registers: each warp dequantises its 16 outputs of a unit while the tensor cores work on
// the unit before. For small matrices, K_GROUPS sets of warpgroups take the steps of the same outputs in turn. One more
// warpgroup, which leaves them its registers, has everything copied ahead, a stage per step of two units. The blocks
// share all (tile, step) pairs out evenly; a tile that several work on is added up by the first of them, always in the
// same order.
//
// Macros: IS_BF16; GROUP; ZEROS; TOKENS (of a tile: 16, 32, 64, 128 or 256); ROW_GROUPS (warpgroups, of 64 outputs each);
// K_GROUPS. For sm_90a only.
#include "gated.cuh"
#include "hopper.cuh"
#include "w4.cuh"

struct Params {
    TensorMap x;        // [tokens, in], boxes of TOKENS by UNIT, 128-byte swizzle
    const u8* codes;    // as in w4.cuh
    const u8* records;
    const u16* bias;    // [outs], or null
    u16* out;           // [tokens, outs], outs even, rows an even number apart; half as wide if gated
    Float4* partial;    // [grid, TOKENS / 8, ROW_THREADS]
    u32* finished;      // [grid, ROW_WARPS] zeros; left as zeros
    i64 out_stride;     // elements
    float factor;       // of all scales
    int tokens, outs, steps, row_pairs, row_blocks, token_blocks, gated;  // the last: see gated.cuh; no bias then
};

constexpr int ROW_WARPS = ROW_GROUPS * 4, ROW_THREADS = ROW_GROUPS * 128, PAIRS = ROW_GROUPS * 2, ACC = TOKENS / 8;
// Few tokens have few sums, which are then what to multiply by the scales. A step's units are one group.
constexpr bool SUMS_ARE_SCALED = GROUP == 128 && TOKENS <= 32;
constexpr int THREADS = K_GROUPS * ROW_THREADS;
constexpr int ALL = THREADS + 128, COPIER_REGISTERS = 32;
constexpr int SHARE = (65536 / ALL / 8 * 8 * ALL - 128 * COPIER_REGISTERS) / THREADS / 8 * 8;
constexpr int REGISTERS = SHARE < 240 ? SHARE : 240;  // of those who work
constexpr int CODES = 4 * TILE_BYTES, RECORDS = 2 / SPAN * 16 * RECORD;  // bytes of a pair of row tiles, a step
constexpr int X = 2 * TOKENS * 128, STAGE = (X + PAIRS * (CODES + RECORDS) + 1023) / 1024 * 1024;
constexpr int SUMS = (K_GROUPS - 1) * ACC * ROW_THREADS * 16;  // bytes
constexpr int FIT = (224 * 1024 - SUMS) / STAGE, STAGES = FIT < 12 ? FIT : 12;

// -- matrix instructions ---------------------------------------------------------------------------------------------

#define WGMMA(N, D, A, ADD, ...)                                                                             \
    asm volatile("{.reg .pred p; setp.ne.b32 p, " ADD ", 0;\n"                                               \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16" TYPES " {" D "}, " A ", p, 1, 1, 0;}"          \
                 : __VA_ARGS__ : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)add))

// d[64 x TOKENS] = or += a[64 x 16] * b^T: a in registers, b TOKENS rows of 16 elements in shared memory.
template <int N> DEVICE void multiply(float (&d)[N][4], const u32 (&a)[4], u64 b, bool add) {
    if constexpr (N == 2) WGMMA(16, R8, "{%8,%9,%10,%11}, %12", "%13", FOUR(0), FOUR(1));
    else if constexpr (N == 4) WGMMA(32, R16, "{%16,%17,%18,%19}, %20", "%21", SIXTEEN(0));
    else if constexpr (N == 8) WGMMA(64, R32, "{%32,%33,%34,%35}, %36", "%37", SIXTEEN(0), SIXTEEN(4));
    else if constexpr (N == 16) WGMMA(128, R64, "{%64,%65,%66,%67}, %68", "%69", SIXTY4(0));
    else WGMMA(256, R128, "{%128,%129,%130,%131}, %132", "%133", SIXTY4(0), SIXTY4(16));
}

// -- copying ahead, and working ---------------------------------------------------------------------------------------

struct Pipe {
    u32 stages, full, empty;  // addresses
    u32 stage = 0, phase = 0;

    DEVICE void advance(int steps) {
        if ((stage += steps) >= STAGES) stage -= STAGES, phase ^= 1;
    }
};

// Where a block's share of the (tile, step) pairs begins.
DEVICE int begin_of(const Params& p, int block) {
    return p.row_blocks * p.token_blocks * p.steps * block / (int)gridDim.x;
}

// One lane of each of the four warps: x by the first, and a fourth of the pairs of row tiles.
DEVICE void copy_ahead(const Params& p, Pipe pipe) {
    const int begin = begin_of(p, blockIdx.x), end = begin_of(p, blockIdx.x + 1);
    const int part = (threadIdx.x - THREADS) >> 5;
    int tile = begin / p.steps, step = begin - tile * p.steps;
    int row_block = tile / p.token_blocks, token_block = tile - row_block * p.token_blocks;
    pipe.phase = 1;  // all stages are empty
    if (part == 0) wait_for_previous();  // x is its own; the others copy nothing that this step writes
#pragma unroll 1
    for (int i = begin; i < end; i++) {
        const u32 to = pipe.stages + pipe.stage * STAGE, full = pipe.full + pipe.stage * 8;
        wait_barrier(pipe.empty + pipe.stage * 8, pipe.phase);
        if (part == 0) {
            expect(full, X + PAIRS * (CODES + RECORDS));
            load_box(to, p.x, step * 2 * UNIT, token_block * TOKENS, full);
            load_box(to + X / 2, p.x, step * 2 * UNIT + UNIT, token_block * TOKENS, full);
        }
        for (int k = part; k < PAIRS; k += 4) {
            const i64 pair = min(row_block * PAIRS + k, p.row_pairs - 1), at = pair * p.steps + step;
            copy_bulk(to + X + k * CODES, p.codes + at * CODES, CODES, full);
            copy_bulk(to + X + PAIRS * CODES + k * RECORDS, p.records + at * RECORDS, RECORDS, full);
        }
        pipe.advance(1);
        if (++step == p.steps) {
            step = 0;
            if (++token_block == p.token_blocks) token_block = 0, row_block++;
        }
    }
}

DEVICE u32 multiply_x2(u32 a, u32 b) { return IS_BF16 ? fma_x2(a, b, 0x80008000u) : mul_f16x2(a, b); }

// A float16, twice in a word, in the type of the weights.
DEVICE u32 twice(u32 half) {
    if (!IS_BF16) return permute(half, 0, 0x1010);
    const float f = f16_to_float((u16)half);
    return pack_bf16(f, f);
}

// One unit as operands, with their scales if not SUMS_ARE_SCALED.
DEVICE void dequantize_unit(u32 (&a)[4][4], u32 codes, u32 record) {
    const Words4 words = load_shared4(codes);
    Zero zero = symmetric();
    u32 g, g8;
#pragma unroll
    for (int s = 0; s < 4; s++) {
        if (s * PER % 4 == 0) {  // a group begins
            const u32 at = record + s * PER / 4 * (RECORD / PER);
            if (!SUMS_ARE_SCALED) {
                const u32 scales = load_shared(at);
                g = twice(scales), g8 = twice(scales >> 16);
            }
            if (ZEROS) zero = zero_of(load_shared(at + 4));
        }
        dequantize(a[s], s == 0 ? words.x : s == 1 ? words.y : s == 2 ? words.z : words.w, zero);
        if (SUMS_ARE_SCALED) continue;
        a[s][0] = multiply_x2(a[s][0], g), a[s][1] = multiply_x2(a[s][1], g8);
        a[s][2] = multiply_x2(a[s][2], g), a[s][3] = multiply_x2(a[s][3], g8);
    }
}

// Start a unit's products.
DEVICE void multiply_unit(float (&d)[ACC][4], const u32 (&a)[4][4], u32 x, bool add) {
    matrix_fence();
    const u64 b = descriptor(x);
#pragma unroll
    for (int s = 0; s < 4; s++) multiply(d, a[s], b + s * 2, add || s);
    matrix_commit();
}

// The pending sums of one group, which a record's scales are for.
struct Group {
    float sums[ACC][4], g, g8;

    DEVICE void clear() {
        g = g8 = 0;
#pragma unroll
        for (int j = 0; j < ACC; j++) sums[j][0] = sums[j][1] = sums[j][2] = sums[j][3] = 0;
    }
    DEVICE void take_scales(u32 record) {
        const u32 scales = load_shared(record);
        g = f16_to_float((u16)scales), g8 = f16_to_float((u16)(scales >> 16));
    }
    DEVICE void add_to(float (&acc)[ACC][4]) {
        matrix_wait<0>();
        pin(sums);
#pragma unroll
        for (int j = 0; j < ACC; j++) {
            acc[j][0] += sums[j][0] * g, acc[j][1] += sums[j][1] * g;
            acc[j][2] += sums[j][2] * g8, acc[j][3] += sums[j][3] * g8;
        }
    }
};

// -- what becomes of the sums ----------------------------------------------------------------------------------------

DEVICE void store(const Params& p, const float (&acc)[ACC][4], int tile) {
    const int lane = threadIdx.x & 31;
    const int row_block = tile / p.token_blocks, token_block = tile - row_block * p.token_blocks;
    const int row0 = (row_block * ROW_WARPS + (int)(threadIdx.x >> 5)) * 16;
    if (p.gated) {
#pragma unroll
        for (int j = 0; j < ACC; j++) {
            const float(&v)[4] = acc[j];
            const Gated found({v[0] * p.factor, v[1] * p.factor, v[2] * p.factor, v[3] * p.factor});
            const int first = row0 / 2 + found.output, token = token_block * TOKENS + j * 8 + found.token;
            if (token < p.tokens && first < p.outs / 2) *(u32*)(p.out + token * p.out_stride + first) = found.both;
        }
        return;
    }
    float bias[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < 2; i++)
        if (p.bias && row0 + (lane >> 2) + i * 8 < p.outs) bias[i] = widen<IS_BF16>(p.bias[row0 + (lane >> 2) + i * 8]);
    const int token0 = token_block * TOKENS + (lane >> 2), row = row0 + (lane & 3) * 2;
    u16* to = p.out + token0 * p.out_stride + row;
#pragma unroll
    for (int j = 0; j < ACC; j++, to += 8 * p.out_stride)
#pragma unroll
        for (int i = 0; i < 2; i++) {  // transposed, a lane has two outputs of one token
            const u32 both = transpose_8x8(
                pack<IS_BF16>(acc[j][2 * i] * p.factor + bias[i], acc[j][2 * i + 1] * p.factor + bias[i]));
            if (token0 + j * 8 < p.tokens && row + i * 8 < p.outs) *(u32*)(to + i * 8) = both;
        }
}

// A tile's sums are complete in the block that begins it, which comes to it last: the blocks after it have left theirs by
// then, as a rule. Blocks so wait for each other: all are resident at once. Returns whether this block has the whole.
DEVICE bool merge(const Params& p, float (&acc)[ACC][4], int tile, bool begins) {
    const bool leads = (threadIdx.x & 31) == 0;
    u32* flag = p.finished + blockIdx.x * ROW_WARPS + (threadIdx.x >> 5);
    Float4* part = p.partial + (i64)blockIdx.x * ACC * ROW_THREADS + threadIdx.x;
    if (!begins) {
#pragma unroll
        for (int j = 0; j < ACC; j++) part[j * ROW_THREADS] = {acc[j][0], acc[j][1], acc[j][2], acc[j][3]};
        __syncwarp();
        if (leads) asm volatile("st.release.gpu.u32 [%0], 1;" ::"l"(flag) : "memory");
        return false;
    }
    for (int block = blockIdx.x + 1; begin_of(p, block) < (tile + 1) * p.steps; block++) {
        flag += ROW_WARPS, part += ACC * ROW_THREADS;
        u32 there;
        do asm volatile("ld.acquire.gpu.u32 %0, [%1];" : "=r"(there) : "l"(flag) : "memory");
        while (!there);
        __syncwarp();
        if (leads) *flag = 0;
#pragma unroll
        for (int j = 0; j < ACC; j++) {
            const Float4 v = load_l2(part + j * ROW_THREADS);
            acc[j][0] += v.x, acc[j][1] += v.y, acc[j][2] += v.z, acc[j][3] += v.w;
        }
    }
    return true;
}

DEVICE void synchronize() { asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory"); }  // those who work

// The first set's sums become those of all sets.
DEVICE void add_sets(float (&acc)[ACC][4], Float4* sums, int set) {
    const int thread = threadIdx.x % ROW_THREADS;
    if (set)
#pragma unroll
        for (int j = 0; j < ACC; j++)
            sums[((set - 1) * ACC + j) * ROW_THREADS + thread] = {acc[j][0], acc[j][1], acc[j][2], acc[j][3]};
    synchronize();
    if (!set)
#pragma unroll
        for (int i = 0; i < (K_GROUPS - 1) * ACC; i++) {
            const Float4 v = sums[i * ROW_THREADS + threadIdx.x];
            float* to = acc[i % ACC];
            to[0] += v.x, to[1] += v.y, to[2] += v.z, to[3] += v.w;
        }
    synchronize();
}

DEVICE void work(const Params& p, Pipe pipe, Float4* sums) {
    const int begin = begin_of(p, blockIdx.x), end = begin_of(p, blockIdx.x + 1);
    const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) % ROW_WARPS, set = threadIdx.x / ROW_THREADS;
    const u32 codes = X + (warp >> 1) * CODES + (warp & 1) * TILE_BYTES + lane * 16;
    const u32 records = X + PAIRS * CODES + (warp >> 1) * RECORDS + ((warp & 1) * 8 + (lane >> 2)) * RECORD;
    u32 a[2][4][4];
    float acc[ACC][4];
    pipe.advance(set);
    int at = begin + set;  // every K_GROUPS-th step
#pragma unroll 1
    for (int start = begin; start < end;) {
        const int tile = start / p.steps, stop = min(end, (tile + 1) * p.steps);
#pragma unroll
        for (int j = 0; j < ACC; j++) acc[j][0] = acc[j][1] = acc[j][2] = acc[j][3] = 0;
        u32 before = 0;  // barrier of the stage that is still in use
        Group group;
        if (SUMS_ARE_SCALED) group.clear();
#pragma unroll 1
        for (; at < stop; at += K_GROUPS) {
            const u32 stage = pipe.stages + pipe.stage * STAGE;
            wait_barrier(pipe.full + pipe.stage * 8, pipe.phase);
            const u32 first = stage + records, second = first + (2 / SPAN - 1) * 16 * RECORD;
            dequantize_unit(a[0], stage + codes, first);
            if (SUMS_ARE_SCALED) group.add_to(acc);
            else multiply_unit(acc, a[0], stage, true), matrix_wait<1>();
            if (before && lane == 0) arrive(before);
            if (SUMS_ARE_SCALED) multiply_unit(group.sums, a[0], stage, false);
            dequantize_unit(a[1], stage + codes + 2 * TILE_BYTES, second);
            multiply_unit(SUMS_ARE_SCALED ? group.sums : acc, a[1], stage + X / 2, true);
            if (SUMS_ARE_SCALED) group.take_scales(first);
            matrix_wait<1>();
            before = pipe.empty + pipe.stage * 8;
            pipe.advance(K_GROUPS);
        }
        if (SUMS_ARE_SCALED) group.add_to(acc);
        matrix_wait<0>();
        pin(acc);
        if (before && lane == 0) arrive(before);
        if (K_GROUPS > 1) add_sets(acc, sums, set);
        const bool whole = start == tile * p.steps && stop == start + p.steps;
        if (!set && (whole || merge(p, acc, tile, start == tile * p.steps))) store(p, acc, tile);
        start = stop;
    }
}

extern "C" __global__ void __launch_bounds__(ALL, 1) w4_matmul_sm90(const __grid_constant__ Params p) {
    extern __shared__ u8 shared[];
    __shared__ __align__(8) u64 barriers[2 * STAGES];
    let_next_start();
    Pipe pipe;
    pipe.stages = (u32)__cvta_generic_to_shared(shared) + 1023 & ~1023u;
    pipe.full = (u32)__cvta_generic_to_shared(barriers), pipe.empty = pipe.full + STAGES * 8;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            init_barrier(pipe.full + i * 8, 1);
            init_barrier(pipe.empty + i * 8, ROW_WARPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster; fence.proxy.async;" ::: "memory");
    }
    __syncthreads();
    if (threadIdx.x >= THREADS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COPIER_REGISTERS));
        if ((threadIdx.x & 31) == 0) copy_ahead(p, pipe);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
        work(p, pipe, (Float4*)(shared + (pipe.stages - (u32)__cvta_generic_to_shared(shared)) + STAGES * STAGE));
    }
}
