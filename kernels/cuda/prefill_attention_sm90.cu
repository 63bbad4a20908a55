// Prefill attention with Hopper's warpgroup matrix instructions. See prefill_attention.cu for what is computed.
//
// Warpgroups of 64 query rows each: while some are in their softmax, others keep the tensor cores busy. Tiles stand
// in rows of 128 bytes (64 elements), with the hardware's 128-byte swizzle: a long head takes several such columns, one
// after the other.
//
// Macros: HEAD_DIM (64 or 128); K_FORMAT, V_FORMAT; QUERY_BF16; KEYS (64); WARPS (8 or 16). For sm_90a only.
constexpr int ROW_TILES = 1;
constexpr int TILE_BYTES = KEYS * HEAD_DIM * 2, QUERY_BYTES = WARPS * 16 * HEAD_DIM * 2;
#include "hopper.cuh"
#include "prefill.cuh"

DEVICE u32 place(int rows, int row, int piece) {
    return (piece >> 3) * (rows * 128) + row * 128 + ((piece & 7 ^ row & 7) << 4);
}

// d[64 x 64] = or += a * b^T: both of 64 rows with 16 elements, in shared memory.
#define SCORES(TYPE)                                                                                        \
    asm volatile("{.reg .pred p; setp.ne.b32 p, %34, 0;\n"                                                 \
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " {" R32 "}, %32, %33, p, 1, 1, 0, 0;}" \
                 : SIXTEEN(0), SIXTEEN(4) : "l"(a), "l"(b), "r"((int)add))
DEVICE void multiply_scores(float (&d)[8][4], u64 a, u64 b, bool add) {
    if constexpr (KF::BF16_MMA) SCORES("bf16");
    else SCORES("f16");
}

// d[64 x HEAD_DIM] += a[64 x 16] * b: a in registers, b 16 rows of HEAD_DIM elements in shared memory.
#define OUTPUT64(TYPE)                                                                                    \
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " {" R32 "}"                  \
                 ", {%32,%33,%34,%35}, %36, 1, 1, 1, 1;"                                                  \
                 : SIXTEEN(0), SIXTEEN(4) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
#define OUTPUT128(TYPE)                                                                                   \
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " {" R64 "}"                 \
                 ", {%64,%65,%66,%67}, %68, 1, 1, 1, 1;"                                                  \
                 : SIXTEEN(0), SIXTEEN(4), SIXTEEN(8), SIXTEEN(12)                                        \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
DEVICE void multiply_output(float (&d)[2 * STEPS][4], const u32 (&a)[4], u64 b) {
    if constexpr (HEAD_DIM == 64) {
        if constexpr (VF::BF16_MMA) OUTPUT64("bf16");
        else OUTPUT64("f16");
    } else {
        if constexpr (VF::BF16_MMA) OUTPUT128("bf16");
        else OUTPUT128("f16");
    }
}

DEVICE void start_scores(float (&s)[8][4], u32 query, u32 k_tile) {
#pragma unroll
    for (int i = 0; i < STEPS; i++)
        multiply_scores(s, descriptor(query + i / 4 * (ROWS * 128) + i % 4 * 32),
                        descriptor(k_tile + i / 4 * (KEYS * 128) + i % 4 * 32), i > 0);
    matrix_commit();
}

// Tiles are decoded while the tensor cores add up the output; where K or V needs no decoding, there are too few registers.
constexpr bool DECODES_LATE = !KF::IS_16BIT && !VF::IS_16BIT;

extern "C" __global__ void __launch_bounds__(THREADS, 1) prefill_attention_sm90(const __grid_constant__ Params p) {
    extern __shared__ u8 shared[];
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    int request, block_row, head = blockIdx.y;
    if (!find_rows(p, request, block_row)) return;
    int token0 = p.query_start[request], tokens = p.query_start[request + 1] - token0, length = p.lengths[request];
    int rows = tokens * p.group;
    int first_limit = length - tokens + 1;  // keys that the first token sees end here
    int last_token = min(block_row + ROWS - 1, rows - 1) / p.group, first_token = block_row / p.group;
    int low = p.window ? max(0, first_limit + first_token - p.window) : 0, high = first_limit + last_token;
    if (threadIdx.x == 0)
        source = {p.tables + (i64)request * p.table_stride, low, high, head << p.block_size_log2, first_limit,
                  block_row, rows, token0};
    __syncthreads();
    int first_row = block_row + warp * 16;
    __shared__ int limits[WARPS][2];  // first keys that the warp's first and last row don't see
    limits[warp][0] = first_limit + first_row / p.group, limits[warp][1] = first_limit + (first_row + 15) / p.group;

    Tiles kv;
    kv.stages = (u32)__cvta_generic_to_shared(shared) + 1023 & ~1023u;
    int queries = kv.stages + 2 * Tiles::STAGE;
    stage_query(queries, p, head, block_row, token0, rows);
    queries += (warp >> 2) * (64 * 128);
    int first_tile = low / KEYS;
    kv.start(p, first_tile);
    State st;
    st.m[0][0] = st.m[0][1] = LOWEST, st.l[0][0] = st.l[0][1] = 0;
#pragma unroll
    for (int i = 0; i < 2 * STEPS; i++) st.o[0][i][0] = st.o[0][i][1] = st.o[0][i][2] = st.o[0][i][3] = 0;
    for (int tile = first_tile; tile * KEYS < source.high; tile++) {
        int odd = (tile - first_tile & 1) * Tiles::STAGE, now = kv.stages + odd;
        u32 next = kv.stages + Tiles::STAGE - odd;
        if (!DECODES_LATE) asm volatile("cp.async.wait_all;" ::: "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncthreads();
        constexpr bool DECODES = KF::IS_16BIT != VF::IS_16BIT;  // for which there are no registers beside the scores
        float s[1][KEYS / 8][4];
        if (DECODES && (tile + 1) * KEYS < source.high) kv.advance(p, tile, next);
        hide(queries), hide(now);
        matrix_fence();
        start_scores(s[0], queries, now);
        if (!DECODES && !DECODES_LATE && (tile + 1) * KEYS < source.high) kv.advance(p, tile, next);
        matrix_wait<0>();
        pin(s[0]);
        hide(warp);
        bool whole = tile * KEYS + KEYS <= limits[warp][0] && (p.window == 0 || tile * KEYS >= limits[warp][1] - p.window);
        u32 probabilities[1][KEYS / 16][4];
        softmax(st, s, probabilities, p, tile, whole, source.block_row + warp * 16, lane);
        pin(st.o[0]);
        hide(now);
        matrix_fence();
#pragma unroll
        for (int i = 0; i < KEYS / 16; i++)
            multiply_output(st.o[0], probabilities[0][i], descriptor(now + TILE_BYTES + i * 16 * 128, KEYS * 128));
        matrix_commit();
        if (DECODES_LATE && (tile + 1) * KEYS < source.high) {
            asm volatile("cp.async.wait_all;" ::: "memory");
            kv.advance(p, tile, next);
        }
        matrix_wait<0>();
        pin(st.o[0]);
    }
    write_out(st, p, blockIdx.y, source.block_row + warp * 16, source.token0, source.rows, lane >> 2, lane & 3);
}
