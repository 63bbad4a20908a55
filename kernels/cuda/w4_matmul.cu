// y = x W^T (+ bias) for few tokens and 4-bit weights: each code is read once, and copied several units ahead.
//
// A block owns some pairs of row tiles, for a slice of the features, of which it keeps x in shared memory. Its warps
// share the pairs' units out evenly, each a contiguous run; where a pair is cut, its warps' sums meet in shared memory.
// Where blocks split the features, the last to finish adds up. Always in the same order.
//
// The tensor cores multiply offset + code (`widen_codes`), which takes fewer instructions than code - zero point, on
// top of x times -(offset + zero point).
//
// Macros: IS_BF16; GROUP; ZEROS; TOKEN_TILES (of 8 tokens); STAGES.
#include "gated.cuh"
#include "w4.cuh"

struct Params {
    const u8* codes;    // as in w4.cuh
    const u8* records;
    const u8* x;        // [tokens, in], rows apart
    const u16* bias;    // [outs], or null
    u16* out;           // [tokens, outs], rows apart; half as wide if gated
    float* partial;     // [grid.y, tokens, outs] if grid.y > 1
    u32* finished;      // [grid.z, grid.x] zeros; left as zeros
    i64 x_stride, out_stride;  // elements
    float factor;       // of all scales
    int tokens, in, outs, units, pairs, gated;  // the last: see gated.cuh; no bias then
};

constexpr int TOKENS = TOKEN_TILES * 8;
constexpr int MOST_THREADS = TOKEN_TILES == 4 ? 256 : TOKEN_TILES == 2 && PER == 2 ? 384 : 512;
constexpr int PAIR = 2 * TILE_BYTES, PAIR_RECORDS = 2 * 8 * RECORD, SLOT = PAIR + PAIR_RECORDS;  // bytes
constexpr int HEAD = 2 * TOKEN_TILES * 512;  // bytes of a warp's sums of a pair
static_assert(HEAD <= STAGES * SLOT, "at the end, sums take the place of a ring");

// d = a * b, or d += a * b, of fragments
DEVICE void multiply(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, bool first) {
    if (!first) return mma<IS_BF16>(d, a[0], a[1], a[2], a[3], b0, b1);
#define FIRST(TYPE)                                                                                                 \
    asm("{.reg .f32 z; mov.f32 z, 0f00000000;\n"                                                                    \
        "mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "       \
        "{z,z,z,z};}"                                                                                               \
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])                                                            \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
    if (IS_BF16) FIRST("bf16");
    else FIRST("f16");
}

// offset + code as a fragment: 128 + code, or 1024 + code in row g and 1024 + 16 code in row g + 8.
DEVICE void widen_codes(u32 (&a)[4], u32 w) {
#pragma unroll
    for (int i = 0; i < 4; i++)
        a[i] = IS_BF16 ? pick(w >> 4 * i, 0x000f000fu, 0x43004300u)
                       : pick(i < 2 ? w : w >> 8, i % 2 ? 0x00f000f0u : 0x000f000fu, 0x64006400u);
}

// -(offset + zero point) of rows g and g + 8 as a fragment.
DEVICE void widen_zeros(u32 (&a)[4], Zero zero) {
    a[0] = a[2] = zero.g;
    a[1] = a[3] = IS_BF16 ? zero.g8 : mul_f16x2(zero.g8, 0x4c004c00u);
}

// One warp's run of (pair, unit), and its ring of copies.
struct Run {
    const u8 *codes, *records;  // of the pair to fetch from next, this lane's
    u32 slots, to;              // where the next copy goes
    int unit, left;

    DEVICE void fetch(const Params& p, int slice0, int slice_end) {
        if (left > 0) {
            const u8* from = codes + (i64)unit * PAIR;
            copy_async<16>(to + (threadIdx.x & 31) * 16, from);
            copy_async<16>(to + TILE_BYTES + (threadIdx.x & 31) * 16, from + TILE_BYTES);
            if ((threadIdx.x & 31) < 16)
                copy_async<RECORD>(to + PAIR + (threadIdx.x & 31) * RECORD,
                                   records + (i64)(unit / SPAN) * PAIR_RECORDS);
            left--;
            if (++unit == slice_end) {
                unit = slice0;
                codes += (i64)p.units * PAIR;
                records += (i64)(p.units / SPAN) * PAIR_RECORDS;
            }
        }
        commit_copies();
        to = to == slots + (STAGES - 1) * SLOT ? slots : to + SLOT;
    }
};

typedef float Sums[2][TOKEN_TILES][4];

// acc += one unit of features. `x`: this lane's rows for ldmatrix.
DEVICE void add_unit(Sums& acc, u32 slot, const u32 (&x)[TOKEN_TILES]) {
    const int lane = threadIdx.x & 31;
    u32 b[TOKEN_TILES][8];
#pragma unroll
    for (int j = 0; j < TOKEN_TILES; j++) load_matrices(b[j], x[j]), load_matrices(b[j] + 4, x[j] + 64);
    Words4 codes[2];
#pragma unroll
    for (int r = 0; r < 2; r++) codes[r] = load_shared4(slot + r * TILE_BYTES + lane * 16);
    // Chains of products that depend on each other: two even of one group where registers allow it.
    constexpr int CHAINS = TOKEN_TILES == 1 ? 2 : PER, STEPS = 4 / CHAINS;
#pragma unroll
    for (int chain = 0; chain < CHAINS; chain++) {
        const u32 group = (PER == 2 ? chain : 0) * (RECORD / PER);
        Sums part;
#pragma unroll
        for (int r = 0; r < (ZEROS ? 2 : 1); r++) {
            u32 a[4];
            widen_zeros(a, ZEROS ? zero_of(load_shared(slot + PAIR + (r * 8 + (lane >> 2)) * RECORD + group + 4))
                                 : symmetric());
#pragma unroll
            for (int s = 0; s < STEPS; s++)
#pragma unroll
                for (int j = 0; j < TOKEN_TILES; j++) {
                    const u32* k = b[j] + (chain * STEPS + s) * 2;
                    multiply(part[r][j], a, k[0], k[1], s == 0);
                }
        }
        if (!ZEROS)
#pragma unroll
            for (int j = 0; j < TOKEN_TILES; j++)
#pragma unroll
                for (int i = 0; i < 4; i++) part[1][j][i] = part[0][j][i];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const u32 words[4] = {codes[r].x, codes[r].y, codes[r].z, codes[r].w};
            const u32 scales = load_shared(slot + PAIR + (r * 8 + (lane >> 2)) * RECORD + group);
            const float g = f16_to_float((u16)scales);
            const float g8 = f16_to_float((u16)(scales >> 16)) * (IS_BF16 ? 1.0f : 0.0625f);
#pragma unroll
            for (int s = 0; s < STEPS; s++) {
                u32 a[4];
                widen_codes(a, words[chain * STEPS + s]);
#pragma unroll
                for (int j = 0; j < TOKEN_TILES; j++) {
                    const u32* k = b[j] + (chain * STEPS + s) * 2;
                    multiply(part[r][j], a, k[0], k[1], false);
                }
            }
#pragma unroll
            for (int j = 0; j < TOKEN_TILES; j++) {
                acc[r][j][0] += part[r][j][0] * g, acc[r][j][1] += part[r][j][1] * g;
                acc[r][j][2] += part[r][j][2] * g8, acc[r][j][3] += part[r][j][3] * g8;
            }
        }
    }
}

DEVICE void store(const Params& p, int token, int row, float sum) {
    if (token >= p.tokens || row >= p.outs) return;
    if (gridDim.y > 1) {
        p.partial[((i64)blockIdx.y * p.tokens + token) * p.outs + row] = sum;
        return;
    }
    sum = sum * p.factor + (p.bias ? widen<IS_BF16>(p.bias[row]) : 0.0f);
    p.out[token * p.out_stride + row] = narrow<IS_BF16>(sum);
}

// Fragment i (row tile, token tile) of a pair, this lane's part.
DEVICE void store_fragment(const Params& p, int pair, int i, Float4 v) {
    const int lane = threadIdx.x & 31, row = (pair * 2 + i / TOKEN_TILES) * 16 + (lane >> 2);
    const int token = blockIdx.z * TOKENS + i % TOKEN_TILES * 8 + (lane & 3) * 2;
    if (p.gated && gridDim.y == 1) {
        const Gated found({v.x * p.factor, v.y * p.factor, v.z * p.factor, v.w * p.factor});
        const int first = (pair * 2 + i / TOKEN_TILES) * 8 + found.output, own = token - (lane & 3) * 2 + found.token;
        if (own < p.tokens && first < p.outs / 2) *(u32*)(p.out + own * p.out_stride + first) = found.both;
        return;
    }
    store(p, token, row, v.x), store(p, token + 1, row, v.y);
    store(p, token, row + 8, v.z), store(p, token + 1, row + 8, v.w);
}

// The sum over the slices, by the last block of those that have the same outputs.
DEVICE void merge(const Params& p, int first_row, int last_row, int token0) {
    __shared__ bool is_last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0)
        is_last = atomicInc(&p.finished[blockIdx.z * gridDim.x + blockIdx.x], gridDim.y - 1) == gridDim.y - 1;
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    const int rows = min(last_row, p.outs) - first_row, tokens = min(TOKENS, p.tokens - token0);
    auto sum_of = [&](int token, int row) {
        float sum = 0;
        for (int y = 0; y < gridDim.y; y++) sum += __ldcg(p.partial + ((i64)y * p.tokens + token) * p.outs + row);
        return sum * p.factor + (p.bias ? widen<IS_BF16>(p.bias[row]) : 0.0f);
    };
    const int each = p.gated ? 2 : 1, outs = rows / each;
    for (int i = threadIdx.x; i < outs * tokens; i += blockDim.x) {
        const int token = token0 + i / outs, row = first_row + i % outs * each;
        const float sum = sum_of(token, row);
        p.out[token * p.out_stride + row / each] = narrow<IS_BF16>(p.gated ? silu(sum) * sum_of(token, row + 1) : sum);
    }
}

// Copies a block's part of x, rows `pitch` bytes apart, beside what each thread copies of the weights.
#if __CUDA_ARCH__ >= 900
__shared__ __align__(8) u64 x_barrier;

DEVICE void start_x(const Params& p, u32 x, int pitch, int slice0, int slice, int token0, int tokens) {
    const u32 barrier = (u32)__cvta_generic_to_shared(&x_barrier);
    const int bytes = max(0, min(p.in, (slice0 + slice) * UNIT) - slice0 * UNIT) * 2;
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                     ::"r"(barrier), "r"(tokens * bytes) : "memory");
        for (int row = 0; bytes && row < tokens; row++)
            asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                         ::"r"(x + row * pitch), "l"(p.x + ((token0 + row) * p.x_stride + slice0 * UNIT) * 2),
                           "r"(bytes), "r"(barrier) : "memory");
    }
    const int rest = slice * UNIT * 2 - bytes;
    for (int i = threadIdx.x * 16; i < tokens * rest; i += blockDim.x * 16)
        asm volatile("st.shared.v4.u32 [%0], {0, 0, 0, 0};" ::"r"(x + i / rest * pitch + bytes + i % rest) : "memory");
}

DEVICE void wait_for_x() {
    __syncthreads();
    asm volatile(
        "{.reg .pred p;\n"
        "again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], 0;\n"
        "@!p bra again;}" ::"r"((u32)__cvta_generic_to_shared(&x_barrier)) : "memory");
}
#else
DEVICE void start_x(const Params& p, u32 x, int pitch, int slice0, int slice, int token0, int tokens) {
    for (int row = 0; row < tokens; row++) {
        const u8* from = p.x + ((token0 + row) * p.x_stride + slice0 * UNIT) * 2;
        for (int i = threadIdx.x; i < slice * 8; i += blockDim.x)
            copy_async_or_zero(x + row * pitch + i * 16, from + i * 16, slice0 * UNIT + i * 8 < p.in);
    }
    commit_copies();
}

DEVICE void wait_for_x() {
    wait_copies<STAGES - 1>();
    __syncthreads();
}
#endif

extern "C" __global__ void __launch_bounds__(MOST_THREADS, 1) w4_matmul(const __grid_constant__ Params p) {
    extern __shared__ __align__(128) u8 shared[];
    __shared__ int begins[MOST_THREADS / 32 + 1];
    let_next_start();
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    const int first = (u32)p.pairs * blockIdx.x / gridDim.x, last = (u32)p.pairs * (blockIdx.x + 1) / gridDim.x;
    const int slice0 = gridDim.y == 1 ? 0 : (u32)p.units * blockIdx.y / gridDim.y;
    const int slice_end = gridDim.y == 1 ? p.units : (u32)p.units * (blockIdx.y + 1) / gridDim.y;
    const int slice = slice_end - slice0, all = (last - first) * slice;
    const int token0 = blockIdx.z * TOKENS, tokens = min(TOKENS, p.tokens - token0), pitch = slice * UNIT * 2 + 16;
    // Shared memory: each warp's ring, which at the end takes its sums of its last pair; those of its first; x.
    const u32 base = (u32)__cvta_generic_to_shared(shared);
    const u32 x = base + warps * (STAGES * SLOT + HEAD);
#if __CUDA_ARCH__ < 900  // the oldest copies, so that waiting for them waits for no others
    start_x(p, x, pitch, slice0, slice, token0, tokens);
#endif
    const int begin = (u32)(all * warp) / warps, end = (u32)(all * (warp + 1)) / warps, whole = (u32)begin / slice;
    int pair = first + whole, unit = slice0 + begin - whole * slice;
    const u32 ring = base + warp * STAGES * SLOT;
    Run run = {p.codes + codes_at(2 * pair, 0, p.units) + lane * 16,
               p.records + records_at(2 * pair, 0, p.units) + lane * RECORD, ring, ring, unit, end - begin};
#pragma unroll 1
    for (int i = 0; i < STAGES - 1; i++) run.fetch(p, slice0, slice_end);
    wait_for_previous();
#if __CUDA_ARCH__ >= 900
    start_x(p, x, pitch, slice0, slice, token0, tokens);
#endif
    wait_for_x();

    u32 at_x[TOKEN_TILES];  // a row beyond the tokens gives a column that nobody stores
#pragma unroll
    for (int j = 0; j < TOKEN_TILES; j++) at_x[j] = x + min(j * 8 + (lane & 7), tokens - 1) * pitch + (lane >> 3) * 16;
    Float4* const head = (Float4*)(shared + warps * STAGES * SLOT);
    u32 slot = run.slots;
    bool cut = unit != slice0;  // the pair began with another warp
#pragma unroll 1
    for (int left = end - begin; left > 0; pair++, unit = slice0) {
        const int stop = min(slice_end, unit + left);
        left -= stop - unit;
        Sums acc = {};
#pragma unroll 1
        for (; unit < stop; unit++) {
            wait_copies<STAGES - 2>();
            __syncwarp();
            run.fetch(p, slice0, slice_end);
            u32 columns[TOKEN_TILES];
#pragma unroll
            for (int j = 0; j < TOKEN_TILES; j++) columns[j] = at_x[j] + (unit - slice0) * (UNIT * 2);
            add_unit(acc, slot, columns);
            slot = slot == run.slots + (STAGES - 1) * SLOT ? run.slots : slot + SLOT;
        }
        const bool is_whole = !cut && stop == slice_end;
        Float4* to = cut ? head + warp * (HEAD / 16) : (Float4*)(shared + warp * STAGES * SLOT);
        if (!is_whole && !cut) wait_copies<0>(), __syncwarp();
#pragma unroll
        for (int i = 0; i < 2 * TOKEN_TILES; i++) {
            const float(&v)[4] = acc[i / TOKEN_TILES][i % TOKEN_TILES];
            const Float4 f = {v[0], v[1], v[2], v[3]};
            if (is_whole) store_fragment(p, pair, i, f);
            else to[i * 32 + lane] = f;
        }
        cut = false;
    }
    if (lane == 0) begins[warp] = begin;
    if (threadIdx.x == 0) begins[warps] = all;
    __syncthreads();
    // Fragments of pairs that several warps had.
    for (int i = warp; i < (last - first) * 2 * TOKEN_TILES; i += warps) {
        const int at = i / (2 * TOKEN_TILES), fragment = i % (2 * TOKEN_TILES), from = at * slice, to = from + slice;
        const int mine = lane < warps ? begins[lane] : all, next = lane < warps ? begins[lane + 1] : all;
        u32 parts = __ballot_sync(FULL_WARP, mine < to && next > from && mine < next);
        if (!(parts & parts - 1)) continue;  // stored already
        Float4 sum = {0, 0, 0, 0};
        while (parts) {
            const int w = __ffs(parts) - 1;
            parts &= parts - 1;
            const bool is_head = begins[w] > from;
            const Float4* part = is_head ? head + w * (HEAD / 16) : (Float4*)(shared + w * STAGES * SLOT);
            const Float4 v = part[fragment * 32 + lane];
            sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
        }
        store_fragment(p, first + at, fragment, sum);
    }
    if (gridDim.y > 1) merge(p, first * 32, last * 32, token0);
}
