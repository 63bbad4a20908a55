// RMSNorm (with the residual sum before it), SiLU times up, and the embedding's gather: one memory-bound pass each.
//
// Arithmetic is float32; the residual sum is rounded to the compute dtype before the norm, as it is kept.
//
// Macros: OP (0 RMSNorm, 1 with residual, 2 SiLU, 3 gather, 4 as 1 for x in float32 parts that are to be added up, 5 SiLU of
// pairs); IS_BF16; VECTORS, pieces of 16 bytes per thread (norms only).
#include "gated.cuh"

#if OP == 4  // few rows come in parts: no thread is to wait for them twice, and registers count, not blocks
constexpr int THREADS = 512;
#define BOUNDS __launch_bounds__(THREADS, 1)
#else
constexpr int THREADS = 128;
#define BOUNDS __launch_bounds__(THREADS)
#endif

struct Params {
    const u16* x;       // rows of the input; of the table for the gather; float32 [slices, rows, width] of OP 4
    u16* residual;      // [rows, width], read and written
    const void* other;  // weights of the norm, 16-bit [width]; ids of the gather, int64 [rows]
    u16* out;           // [rows, width]
    i64 x_stride, residual_stride, out_stride;  // elements per row
    i64 table_rows;
    int width, slices;  // of the output; of OP 4
    float eps;
};

DEVICE u32 word(const Words4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

DEVICE void unpack(float (&f)[8], const Words4& v) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        f[2 * i] = widen<IS_BF16>((u16)word(v, i));
        f[2 * i + 1] = widen<IS_BF16>((u16)(word(v, i) >> 16));
    }
}

DEVICE Words4 repack(const float (&f)[8]) {
    return {pack<IS_BF16>(f[0], f[1]), pack<IS_BF16>(f[2], f[3]), pack<IS_BF16>(f[4], f[5]), pack<IS_BF16>(f[6], f[7])};
}

#if OP < 2 || OP == 4
DEVICE float sum_of_block(float x) {
    __shared__ float parts[THREADS / 32];
#pragma unroll
    for (int step = 16; step; step /= 2) x += __shfl_xor_sync(FULL_WARP, x, step);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
    __syncthreads();
    x = 0;
#pragma unroll
    for (int i = 0; i < THREADS / 32; i++) x += parts[i];
    return x;
}

// Eight elements of a row of x, of all slices.
DEVICE void add_slices(float (&f)[8], const Params& p, i64 row, int at, int pieces) {
    const Float4* x = (const Float4*)((const float*)p.x + row * p.width) + at * 2;
#pragma unroll
    for (int j = 0; j < 8; j++) f[j] = 0;
    if (at >= pieces) return;
#pragma unroll 4
    for (int slice = 0; slice < p.slices; slice++, x += gridDim.x * (i64)p.width / 4) {
        const Float4 a = x[0], b = x[1];
        f[0] += a.x, f[1] += a.y, f[2] += a.z, f[3] += a.w, f[4] += b.x, f[5] += b.y, f[6] += b.z, f[7] += b.w;
    }
}

extern "C" __global__ void BOUNDS elementwise(Params p) {
    let_next_start();
    const i64 row = blockIdx.x;
    const Words4 *weight = (const Words4*)p.other, *x = (const Words4*)(p.x + row * p.x_stride);
    Words4* residual = (Words4*)(p.residual + row * p.residual_stride);
    const int pieces = p.width / 8;
    for (int at = threadIdx.x * 8; at < pieces; at += THREADS * 8) prefetch_l2(weight + at);  // a line of 128 bytes each
    wait_for_previous();
    Words4 kept[VECTORS];
    float f[8], sum = 0;
#if OP != 4
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        int at = i * THREADS + threadIdx.x;
        kept[i] = at < pieces ? x[at] : Words4{0, 0, 0, 0};
    }
#endif
#if OP != 0
    Words4 old[VECTORS];
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        int at = i * THREADS + threadIdx.x;
        old[i] = at < pieces ? residual[at] : Words4{0, 0, 0, 0};
    }
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        int at = i * THREADS + threadIdx.x;
        float g[8];
#if OP == 4
        add_slices(f, p, row, at, pieces);
#else
        unpack(f, kept[i]);
#endif
        unpack(g, old[i]);
#pragma unroll
        for (int j = 0; j < 8; j++) f[j] += g[j];
        kept[i] = repack(f);
        if (at < pieces) residual[at] = kept[i];
    }
#endif
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        unpack(f, kept[i]);
#pragma unroll
        for (int j = 0; j < 8; j++) sum = fmaf(f[j], f[j], sum);
    }
    float factor = 1.0f / sqrtf(sum_of_block(sum) / p.width + p.eps);
    Words4* out = (Words4*)(p.out + row * p.out_stride);
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        int at = i * THREADS + threadIdx.x;
        if (at >= pieces) break;
        float w[8];
        unpack(f, kept[i]);
        unpack(w, weight[at]);
#pragma unroll
        for (int j = 0; j < 8; j++) f[j] = f[j] * factor * w[j];
        out[at] = repack(f);
    }
}
#else
extern "C" __global__ void BOUNDS elementwise(Params p) {
    let_next_start();
    wait_for_previous();
    const i64 row = blockIdx.x;
    const int at = blockIdx.y * THREADS + threadIdx.x;
    if (at >= p.width / 8) return;
    Words4* out = (Words4*)(p.out + row * p.out_stride) + at;
#if OP == 5
    const Words4* x = (const Words4*)(p.x + row * p.x_stride) + at * 2;
    float f[8], pairs[2][8];
    unpack(pairs[0], x[0]);
    unpack(pairs[1], x[1]);
#pragma unroll
    for (int j = 0; j < 8; j++) f[j] = silu(pairs[j / 4][j % 4 * 2]) * pairs[j / 4][j % 4 * 2 + 1];
    *out = repack(f);
#elif OP == 2
    const u16* x = p.x + row * p.x_stride;
    Words4 gate = ((const Words4*)x)[at], up = ((const Words4*)(x + p.width))[at];
    float f[8], g[8];
    unpack(f, gate);
    unpack(g, up);
#pragma unroll
    for (int j = 0; j < 8; j++) f[j] = silu(f[j]) * g[j];
    *out = repack(f);
#else
    i64 id = ((const i64*)p.other)[row];
    // No error can be raised here: NaN makes an id outside the table show in the logits of its request.
    *out = id >= 0 && id < p.table_rows ? ((const Words4*)(p.x + id * p.x_stride))[at] : Words4{~0u, ~0u, ~0u, ~0u};
#endif
}
#endif
