// y = x W^T + bias for a few rows x: W streams through registers, x stands in shared memory.
//
// Bound by the bytes of W. A cluster of SLICES blocks has a range of W's rows, each block a slice of their columns: x
// may be too wide for one. A warp takes tiles of 16 rows of W, or shares them with others, each with a part of the slice.
// Its loads run ahead of its products, the first of them before the kernel before this one has ended. Sums meet in the
// cluster's shared memory, always in the same order.
//
// A step is 32 columns: a lane has 8 neighbouring ones of two rows of W, and the same of a row of x. These are operands
// of two matrix instructions, which then add up the columns in another order, the same for both.
//
// Macros: IS_BF16; SLICES; GATED (gated.cuh). For sm_90.
#include "gated.cuh"

constexpr int WARPS = 16, AHEAD = 8, ROWS = 8;

struct Params {
    const u8* x;      // [rows, width]
    const u8* w;      // [outs, width], packed
    const u16* bias;  // [outs], or null
    u16* out;         // [rows, outs]; half as wide if GATED
    i64 x_stride;     // bytes
    int rows, outs, width, parts;  // parts: warps that share a tile
};

struct Piece { Words4 above, below; };  // of rows n and n + 8 of a tile

struct Stream {
    const u8 *above, *below;
    int tile, tiles_apart, steps, left_here, left;  // steps of a tile; of this tile, and of all, still to be loaded
    i64 offset;

    DEVICE void open(const Params& p) {
        const int row = tile * 16 + (threadIdx.x >> 2 & 7);
        above = p.w + (i64)min(row, p.outs - 1) * p.width * 2 + offset;
        below = p.w + (i64)min(row + 8, p.outs - 1) * p.width * 2 + offset;
        left_here = steps;
    }
    DEVICE void load(const Params& p, Piece& to) {
        if (!left) return;
        to.above = load_stream4(above), to.below = load_stream4(below);
        above += 64, below += 64, left--;
        if (--left_here == 0) tile += tiles_apart, open(p);
    }
};

DEVICE void store(const Params& p, int tile, int lane, const Float4& sum) {
#if GATED
    const Gated found({sum.x, sum.y, sum.z, sum.w});
    const int first = tile * 8 + found.output, width = p.outs / 2;
    if (first < width && found.token < p.rows) *(u32*)(p.out + (i64)found.token * width + first) = found.both;
#else
    const int out = tile * 16 + (lane >> 2), row = (lane & 3) * 2;
    const float v[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int o = out + i / 2 * 8, r = row + i % 2;
        if (o >= p.outs || r >= p.rows) continue;
        p.out[(i64)r * p.outs + o] = narrow<IS_BF16>(p.bias ? v[i] + widen<IS_BF16>(p.bias[o]) : v[i]);
    }
#endif
}

DEVICE void meet() {
#if SLICES > 1
    asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
    __syncthreads();
#endif
}

DEVICE Float4 load_of_block(u32 address, int block) {
    Float4 v;
#if SLICES > 1
    asm volatile("{.reg .u32 there; mapa.shared::cluster.u32 there, %4, %5;\n"
                 "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [there];}"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(address), "r"(block) : "memory");
#else
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(address) : "memory");
#endif
    return v;
}

#if SLICES > 1
#define CLUSTER __cluster_dims__(SLICES, 1, 1)
#else
#define CLUSTER
#endif

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1) CLUSTER few_rows(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) u8 shared[];
    let_next_start();
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int block = blockIdx.x % SLICES, group = blockIdx.x / SLICES, groups = gridDim.x / SLICES;
    const int all = (p.outs + 15) / 16, first = (i64)all * group / groups, last = (i64)all * (group + 1) / groups;
    const int steps = p.width / 32, step0 = steps * block / SLICES, slice = steps * (block + 1) / SLICES - step0;
    const int part = warp % p.parts, at_once = WARPS / p.parts, tile0 = first + warp / p.parts;
    const int begin = slice * part / p.parts, count = slice * (part + 1) / p.parts - begin;
    const int mine = warp < at_once * p.parts && tile0 < last ? (last - tile0 + at_once - 1) / at_once : 0;
    const i64 offset = (i64)(step0 + begin) * 64 + (lane & 3) * 16;
    Stream stream = {nullptr, nullptr, tile0, at_once, count, 0, mine * count, offset};
    stream.open(p);
    Piece pieces[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; i++) stream.load(p, pieces[i]);

    wait_for_previous();
    const u32 base = (u32)__cvta_generic_to_shared(shared);
    const int pitch = (slice | 1) * 64, widest = ((steps + SLICES - 1) / SLICES | 1) * 64;  // odd: no bank conflicts
    for (int row = warp; row < p.rows; row += WARPS) {
        const u8* from = p.x + row * p.x_stride + step0 * 64;
        for (int i = lane * 16; i < slice * 64; i += 512)
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(base + row * pitch + i), "l"(from + i)
                         : "memory");
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();

    const bool is_whole = SLICES == 1 && p.parts == 1;
    const u32 sums = base + ROWS * widest + lane * 16;
    const u32 my_x = base + (lane >> 2) * pitch + begin * 64 + (lane & 3) * 16;
    const int total = mine * count;
    int tile = tile0, left = count;
    u32 x = my_x;
    float acc[4] = {};
    for (int done = 0; done < total; done += AHEAD) {
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            if (done + i >= total) break;
            const Words4 a = pieces[i].above, b = pieces[i].below;
            Words4 v;  // what is beyond the rows goes into sums that nobody stores
            asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(x) : "memory");
            mma<IS_BF16>(acc, a.x, b.x, a.y, b.y, v.x, v.y);
            mma<IS_BF16>(acc, a.z, b.z, a.w, b.w, v.z, v.w);
            stream.load(p, pieces[i]);
            x += 64;
            if (--left) continue;
            if (is_whole) store(p, tile, lane, {acc[0], acc[1], acc[2], acc[3]});
            else
                asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(
                                 sums + ((tile - first) * p.parts + part) * 512),
                             "f"(acc[0]), "f"(acc[1]), "f"(acc[2]), "f"(acc[3]) : "memory");
            acc[0] = acc[1] = acc[2] = acc[3] = 0;
            tile += at_once, left = count, x = my_x;
        }
    }
    if (is_whole) return;
    meet();
    for (int local = warp * SLICES + block; local < last - first; local += WARPS * SLICES) {
        Float4 sum = {0, 0, 0, 0};
        for (int other = 0; other < SLICES; other++)
            for (int j = 0; j < p.parts; j++) {
                const Float4 v = load_of_block(sums + (local * p.parts + j) * 512, other);
                sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
            }
        store(p, first + local, lane, sum);
    }
    if (SLICES > 1) meet();  // nobody leaves while others read its sums
}
