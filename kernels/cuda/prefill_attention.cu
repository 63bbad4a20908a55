// Paged attention of a chunk of a prompt: many query rows per request, causal, over the same block images.
//
// A block takes ROWS query rows of one KV head ((token, head of the group) pairs, so the group shares the keys) and
// walks over tiles of KEYS keys. Tiles stand in shared memory as 16-bit floats: 16-bit KV comes by cp.async, 8-bit KV
// through registers, where it is decoded once for all warps. Two stages, one barrier per tile. Slots without a token
// become zeros on the way in, whatever they hold. A warp takes 32 rows, since reading the tiles from shared memory is
// what limits 16; the queries stand in shared memory too, for want of registers.
//
// Macros: HEAD_DIM; K_FORMAT, V_FORMAT; QUERY_BF16; KEYS.

constexpr int PITCH = HEAD_DIM * 2 + 16;  // bytes; an odd number of 16-byte units keeps ldmatrix free of bank conflicts
constexpr int WARPS = 4;
constexpr int ROW_TILES = HEAD_DIM > 128 ? 1 : 2;
constexpr int TILE_BYTES = KEYS * PITCH, QUERY_BYTES = WARPS * 16 * ROW_TILES * PITCH;
#include "prefill.cuh"

DEVICE u32 place(int rows, int row, int piece) { return row * PITCH + piece * 16; }

DEVICE void load_matrix(u32 (&r)[4], u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(from) : "memory");
}

DEVICE void load_matrix_transposed(u32 (&r)[4], u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(from) : "memory");
}

// One tile: scores, probabilities, output.
DEVICE void attend(State& st, u32 query, u32 k_tile, u32 v_tile, const Params& p, int tile, bool whole, int first_row,
                   int lane) {
    float s[ROW_TILES][KEYS / 8][4] = {};
    u32 q_at = query + (lane & 15) * PITCH + (lane >> 4) * 16;
    u32 k_at = k_tile + ((lane & 7) + (lane >> 4) * 8) * PITCH + (lane >> 3 & 1) * 16;
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        u32 a[ROW_TILES][4];
#pragma unroll
        for (int t = 0; t < ROW_TILES; t++) load_matrix(a[t], q_at + t * 16 * PITCH + step * 32);
#pragma unroll
        for (int j = 0; j < KEYS / 16; j++) {
            u32 b[4];
            load_matrix(b, k_at + j * 16 * PITCH + step * 32);
#pragma unroll
            for (int t = 0; t < ROW_TILES; t++) {
                mma<KF::BF16_MMA>(s[t][2 * j], a[t][0], a[t][1], a[t][2], a[t][3], b[0], b[1]);
                mma<KF::BF16_MMA>(s[t][2 * j + 1], a[t][0], a[t][1], a[t][2], a[t][3], b[2], b[3]);
            }
        }
    }
    u32 probabilities[ROW_TILES][KEYS / 16][4];
    softmax(st, s, probabilities, p, tile, whole, first_row, lane);
    u32 v_at = v_tile + (lane & 15) * PITCH + (lane >> 4) * 16;
#pragma unroll
    for (int j = 0; j < KEYS / 16; j++)
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
            u32 b[4];
            load_matrix_transposed(b, v_at + j * 16 * PITCH + i * 32);
#pragma unroll
            for (int t = 0; t < ROW_TILES; t++) {
                u32(&a)[4] = probabilities[t][j];
                mma<VF::BF16_MMA>(st.o[t][2 * i], a[0], a[1], a[2], a[3], b[0], b[1]);
                mma<VF::BF16_MMA>(st.o[t][2 * i + 1], a[0], a[1], a[2], a[3], b[2], b[3]);
            }
        }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) prefill_attention(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) u8 shared[];
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, n = lane >> 2, c = lane & 3;
    int request, block_row, head = blockIdx.y;
    if (!find_rows(p, request, block_row)) return;
    int token0 = p.query_start[request], tokens = p.query_start[request + 1] - token0, length = p.lengths[request];
    int rows = tokens * p.group;
    int first_limit = length - tokens + 1;  // keys that the first token sees end here
    int last_token = min(block_row + ROWS - 1, rows - 1) / p.group, first_token = block_row / p.group;
    int low = p.window ? max(0, first_limit + first_token - p.window) : 0, high = first_limit + last_token;
    int first_tile = low / KEYS, tiles = (high + KEYS - 1) / KEYS;
    if (threadIdx.x == 0)
        source = {p.tables + (i64)request * p.table_stride, low, high, head << p.block_size_log2, first_limit,
                  block_row, rows, token0};
    __syncthreads();

    int first_row = block_row + warp * 16 * ROW_TILES;
    int least_limit = first_limit + first_row / p.group;
    int most_limit = first_limit + (first_row + 16 * ROW_TILES - 1) / p.group;
    State st;
#pragma unroll
    for (int t = 0; t < ROW_TILES; t++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            st.m[t][r] = LOWEST, st.l[t][r] = 0;
#pragma unroll
            for (int i = 0; i < 2 * STEPS; i++) st.o[t][i][2 * r] = st.o[t][i][2 * r + 1] = 0;
        }

    Tiles kv;
    kv.stages = (u32)__cvta_generic_to_shared(shared);
    u32 queries = kv.stages + 2 * Tiles::STAGE;  // [ROWS][PITCH]
    stage_query(queries, p, head, block_row, token0, rows);
    queries += warp * 16 * ROW_TILES * PITCH;
    kv.start(p, first_tile);
    for (int tile = first_tile; tile < tiles; tile++) {
        int odd = tile - first_tile & 1;
        u32 now = kv.stages + odd * Tiles::STAGE, next = kv.stages + (odd ^ 1) * Tiles::STAGE;
        asm volatile("cp.async.wait_all;" ::: "memory");
        __syncthreads();
        if (tile + 1 < tiles) kv.advance(p, tile, next);
        bool seen = tile * KEYS < most_limit && (p.window == 0 || tile * KEYS + KEYS > least_limit - p.window);
        bool whole = tile * KEYS + KEYS <= least_limit && (p.window == 0 || tile * KEYS >= most_limit - p.window);
        if (seen) attend(st, queries, now, now + TILE_BYTES, p, tile, whole, first_row, lane);
    }
    write_out(st, p, head, first_row, token0, rows, n, c);
}
