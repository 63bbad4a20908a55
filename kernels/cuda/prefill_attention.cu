// Paged attention of a chunk of a prompt: many query rows per request, causal, over the same block images.
//
// A block takes ROWS query rows of one KV head ((token, head of the group) pairs, so the group shares the keys) and
// walks over tiles of KEYS keys. Tiles stand in shared memory as 16-bit floats: 16-bit KV comes by cp.async, 8-bit KV
// through registers, where it is decoded once for all warps. Two stages, one barrier per tile. Slots without a token
// become zeros on the way in, whatever they hold. A warp takes 32 rows, since reading the tiles from shared memory is
// what limits 16; the queries stand in shared memory too, for want of registers.
//
// Macros: HEAD_DIM; K_FORMAT, V_FORMAT; QUERY_BF16; KEYS.
#include "kv_formats.cuh"

typedef Format<K_FORMAT> KF;
typedef Format<V_FORMAT> VF;

constexpr int WARPS = 4;
constexpr int THREADS = WARPS * 32;
constexpr int ROW_TILES = HEAD_DIM > 128 ? 1 : 2;  // of 16 rows, in one warp
constexpr int ROWS = WARPS * 16 * ROW_TILES;
constexpr int STEPS = HEAD_DIM / 16;
constexpr int PITCH = HEAD_DIM * 2 + 16;  // bytes; an odd number of 16-byte units keeps ldmatrix free of bank conflicts
constexpr int TILE_BYTES = KEYS * PITCH;
constexpr float LOWEST = -1e30f;

struct Params {
    const void* query;       // [tokens, kv_heads * group, HEAD_DIM], 16-bit
    void* out;               // as query
    const u8* pool;
    const int* tables;       // [batch, table_stride]
    const int* lengths;      // [batch] keys, those of the request's own queries included
    const int* query_start;  // [batch + 1] first token of each request
    i64 block_stride, k_offset, v_offset, k_scale_offset, v_scale_offset;  // bytes
    i64 query_stride, out_stride;                                          // elements per token
    int table_stride, kv_heads, group, block_size_log2, window;
    float scale;             // softmax scale * log2(e)
};

DEVICE void copy_async(u32 to, const void* from, bool valid) {
    int bytes = valid ? 16 : 0;  // the rest becomes zeros
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes));
}

DEVICE void store_shared(u32 to, u32 x, u32 y, u32 z, u32 w) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}

DEVICE void load_matrix(u32 (&r)[4], u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(from) : "memory");
}

DEVICE void load_matrix_transposed(u32 (&r)[4], u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(from) : "memory");
}

struct Keys { int low, high; };  // that any row of this block sees

// Which 16-byte pieces of a tile a thread loads, for elements of BYTES, and in which blocks they are.
template <int BYTES> struct Pieces {
    static constexpr int PER_ROW = HEAD_DIM * BYTES / 16;
    static constexpr int ROUNDS = (KEYS * PER_ROW + THREADS - 1) / THREADS;
    int ids[ROUNDS];  // blocks of the tile to load next; negative: nobody sees that key

    DEVICE static int row(int round) { return (threadIdx.x + round * THREADS) / PER_ROW; }
    DEVICE static int piece(int round) { return (threadIdx.x + round * THREADS) % PER_ROW; }
    DEVICE static bool mine(int round) { return KEYS * PER_ROW % THREADS == 0 || row(round) < KEYS; }

    DEVICE void fetch(const Params& p, const int* table, Keys keys, int tile) {
#pragma unroll
        for (int i = 0; i < ROUNDS; i++) {
            int key = tile * KEYS + row(i);
            ids[i] = mine(i) && key >= keys.low && key < keys.high ? __ldg(table + (key >> p.block_size_log2)) : -1;
        }
    }
};

// One thread's share of the tiles of K or of V.
template <int FORMAT, bool IS_K> struct Operand {
    typedef Format<FORMAT> F;
    typedef Pieces<F::BYTES> P;
    static constexpr int ROUNDS = P::ROUNDS;
    Words4 raw[F::IS_16BIT ? 1 : ROUNDS];
    u16 scale[F::HAS_SCALE ? ROUNDS : 1];

    // Start the loads of a tile; `to` is only used by 16-bit formats. row0: the head's first row in a block.
    DEVICE void load(const Params& p, const P& at, int row0, int tile, u32 to) {
#pragma unroll
        for (int i = 0; i < ROUNDS; i++) {
            int slot = row0 + ((tile * KEYS + P::row(i)) & ((1 << p.block_size_log2) - 1));
            bool valid = at.ids[i] >= 0;
            const u8* block = p.pool + max(at.ids[i], 0) * p.block_stride;
            const u8* from = block + (IS_K ? p.k_offset : p.v_offset) + slot * (HEAD_DIM * F::BYTES) + P::piece(i) * 16;
            if constexpr (F::IS_16BIT) {
                if (P::mine(i)) copy_async(to + P::row(i) * PITCH + P::piece(i) * 16, from, valid);
            } else {
                raw[i] = {0, 0, 0, 0};
                if constexpr (F::HAS_SCALE) scale[i] = 0;
                if (valid) {
                    raw[i] = load_stream4(from);
                    if constexpr (F::HAS_SCALE)
                        scale[i] = load_stream_u16(block + (IS_K ? p.k_scale_offset : p.v_scale_offset) + slot * 2);
                }
            }
        }
    }

    // Decode what was loaded into shared memory.
    DEVICE void finish(u32 to) {
        if constexpr (!F::IS_16BIT)
#pragma unroll
            for (int i = 0; i < ROUNDS; i++) {
                if (!P::mine(i)) continue;
                u32 words[4] = {raw[i].x, raw[i].y, raw[i].z, raw[i].w}, out[8];
#pragma unroll
                for (int w = 0; w < 4; w++) decode4<FORMAT>(words[w], out[2 * w], out[2 * w + 1]);
                if constexpr (F::HAS_SCALE || F::FACTOR != 1) {
                    float factor = F::FACTOR;
                    if constexpr (F::HAS_SCALE) factor *= f16_to_float(scale[i]);
                    u32 both = pack_f16(factor, factor);
#pragma unroll
                    for (int w = 0; w < 8; w++) out[w] = mul_f16x2(out[w], both);
                }
                u32 at = to + P::row(i) * PITCH + P::piece(i) * 32;
                store_shared(at, out[0], out[1], out[2], out[3]);
                store_shared(at + 16, out[4], out[5], out[6], out[7]);
            }
    }
};

// The block's query rows into shared memory, in the type that K is multiplied in; zeros past the last row.
DEVICE void stage_query(u32 to, const Params& p, int head, int block_row, int token0, int rows) {
    constexpr int PIECES = HEAD_DIM / 8;
    for (int i = threadIdx.x; i < ROWS * PIECES; i += THREADS) {
        int row = block_row + i / PIECES, piece = i % PIECES;
        u32 w[4] = {0, 0, 0, 0};
        if (row < rows) {
            i64 token = token0 + row / p.group;
            const u32* at = (const u32*)((const u16*)p.query + token * p.query_stride +
                                         (head * p.group + row % p.group) * HEAD_DIM + piece * 8);
#pragma unroll
            for (int e = 0; e < 4; e++) {
                w[e] = at[e];
                if constexpr (QUERY_BF16 && !KF::BF16_MMA)
                    w[e] = pack_f16(as_float(w[e] << 16), as_float(w[e] & 0xffff0000u));
            }
        }
        store_shared(to + i / PIECES * PITCH + piece * 16, w[0], w[1], w[2], w[3]);
    }
}

struct State {
    float o[ROW_TILES][2 * STEPS][4];
    float m[ROW_TILES][2], l[ROW_TILES][2];  // of rows n and n + 8; the maximum in powers of two
};

// One tile: scores, probabilities, output. first_limit: keys that the request's first token sees end here.
DEVICE void attend(State& st, u32 query, u32 k_tile, u32 v_tile, const Params& p, int tile, bool whole, int first_limit,
                   int first_row, int lane) {
    int c = lane & 3;
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
    float top[ROW_TILES][2];
    bool over = false;
#pragma unroll
    for (int t = 0; t < ROW_TILES; t++) {
        top[t][0] = top[t][1] = negative_infinity();
#pragma unroll
        for (int j = 0; j < KEYS / 8; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                float& x = s[t][j][e];
                x *= p.scale;
                if (!whole) {
                    int key = tile * KEYS + j * 8 + 2 * c + (e & 1);
                    int end = first_limit + (first_row + t * 16 + (lane >> 2) + 8 * (e >> 1)) / p.group;
                    if (key >= end || (p.window && key < end - p.window)) x = negative_infinity();
                }
                top[t][e >> 1] = fmaxf(top[t][e >> 1], x);
            }
        over |= top[t][0] > st.m[t][0] + 8 || top[t][1] > st.m[t][1] + 8;
    }
    if (__any_sync(FULL_WARP, over)) {
#pragma unroll
        for (int t = 0; t < ROW_TILES; t++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                float& m = st.m[t][r];
                top[t][r] = fmaxf(top[t][r], __shfl_xor_sync(FULL_WARP, top[t][r], 1));
                top[t][r] = fmaxf(top[t][r], __shfl_xor_sync(FULL_WARP, top[t][r], 2));
                float next = fmaxf(m, top[t][r]), alpha = exp2_approx(m - next);
                m = next;
                st.l[t][r] *= alpha;
#pragma unroll
                for (int i = 0; i < 2 * STEPS; i++) st.o[t][i][2 * r] *= alpha, st.o[t][i][2 * r + 1] *= alpha;
            }
    }
    u32 probabilities[ROW_TILES][KEYS / 16][4];
#pragma unroll
    for (int t = 0; t < ROW_TILES; t++)
#pragma unroll
        for (int j = 0; j < KEYS / 8; j++) {
            float(&x)[4] = s[t][j];
#pragma unroll
            for (int e = 0; e < 4; e++) {
                x[e] = exp2_approx(x[e] - st.m[t][e >> 1]);
                st.l[t][e >> 1] += x[e];
            }
            probabilities[t][j / 2][j % 2 * 2] = pack<VF::BF16_MMA>(x[0], x[1]);
            probabilities[t][j / 2][j % 2 * 2 + 1] = pack<VF::BF16_MMA>(x[2], x[3]);
        }
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

DEVICE void write_out(State& st, const Params& p, int head, int first_row, int token0, int rows, int n, int c) {
#pragma unroll
    for (int t = 0; t < ROW_TILES; t++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float l = st.l[t][r];
            l += __shfl_xor_sync(FULL_WARP, l, 1);
            l += __shfl_xor_sync(FULL_WARP, l, 2);
            int row = first_row + t * 16 + n + 8 * r;
            if (row >= rows) continue;
            float inverse = l == 0 ? 0 : 1 / l;
            i64 token = token0 + row / p.group;
            u16* at = (u16*)p.out + token * p.out_stride + (head * p.group + row % p.group) * HEAD_DIM;
#pragma unroll
            for (int i = 0; i < 2 * STEPS; i++)
                *(u32*)(at + i * 8 + 2 * c) =
                    pack<QUERY_BF16>(st.o[t][i][2 * r] * inverse, st.o[t][i][2 * r + 1] * inverse);
        }
}

template <bool FIRST, class A, class B> DEVICE auto& choose(A& a, B& b) {
    if constexpr (FIRST) return a;
    else return b;
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) prefill_attention(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) u8 shared[];
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, n = lane >> 2, c = lane & 3;
    int request = blockIdx.z, head = blockIdx.y;
    int token0 = p.query_start[request], tokens = p.query_start[request + 1] - token0, length = p.lengths[request];
    int rows = tokens * p.group;
    int block_row = ((int)gridDim.x - 1 - (int)blockIdx.x) * ROWS;  // the longest first
    if (block_row >= rows) return;
    int first_limit = length - tokens + 1;  // keys that the first token sees end here
    int last_token = min(block_row + ROWS - 1, rows - 1) / p.group, first_token = block_row / p.group;
    Keys keys = {p.window ? max(0, first_limit + first_token - p.window) : 0, first_limit + last_token};
    int first_tile = keys.low / KEYS, tiles = (keys.high + KEYS - 1) / KEYS;

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

    u32 stages = (u32)__cvta_generic_to_shared(shared);  // [2][K, V][TILE_BYTES]
    u32 queries = stages + 4 * TILE_BYTES;                    // [ROWS][PITCH]
    stage_query(queries, p, head, block_row, token0, rows);
    const int* table = p.tables + (i64)request * p.table_stride;
    int row0 = head << p.block_size_log2;
    Operand<K_FORMAT, true> k;
    Operand<V_FORMAT, false> v;
    Pieces<KF::BYTES> k_at;
    Pieces<VF::BYTES> other_v_at;  // K and V of one size are loaded alike
    constexpr bool ALIKE = KF::BYTES == VF::BYTES;
    auto& v_at = choose<ALIKE>(k_at, other_v_at);

    // 16-bit formats are one tile ahead, in shared memory; 8-bit formats another one, in registers.
    k_at.fetch(p, table, keys, first_tile);
    if (!ALIKE) v_at.fetch(p, table, keys, first_tile);
    k.load(p, k_at, row0, first_tile, stages), v.load(p, v_at, row0, first_tile, stages + TILE_BYTES);
    k.finish(stages), v.finish(stages + TILE_BYTES);
    k_at.fetch(p, table, keys, first_tile + 1);
    if (!ALIKE) v_at.fetch(p, table, keys, first_tile + 1);
    if (!KF::IS_16BIT) k.load(p, k_at, row0, first_tile + 1, 0);
    if (!VF::IS_16BIT) v.load(p, v_at, row0, first_tile + 1, 0);
    if (!KF::IS_16BIT) k_at.fetch(p, table, keys, first_tile + 2);
    if (!ALIKE && !VF::IS_16BIT) v_at.fetch(p, table, keys, first_tile + 2);
    for (int tile = first_tile; tile < tiles; tile++) {
        u32 now = stages + (tile - first_tile & 1) * 2 * TILE_BYTES, next = stages + (tile - first_tile + 1 & 1) * 2 * TILE_BYTES;
        asm volatile("cp.async.wait_all;" ::: "memory");
        __syncthreads();
        if (tile + 1 < tiles) {
            constexpr int K_AHEAD = KF::IS_16BIT ? 1 : 2, V_AHEAD = VF::IS_16BIT ? 1 : 2;
            k.finish(next), v.finish(next + TILE_BYTES);
            k.load(p, k_at, row0, tile + K_AHEAD, next), v.load(p, v_at, row0, tile + V_AHEAD, next + TILE_BYTES);
            k_at.fetch(p, table, keys, tile + K_AHEAD + 1);
            if (!ALIKE) v_at.fetch(p, table, keys, tile + V_AHEAD + 1);
        }
        bool seen = tile * KEYS < most_limit && (p.window == 0 || tile * KEYS + KEYS > least_limit - p.window);
        bool whole = tile * KEYS + KEYS <= least_limit && (p.window == 0 || tile * KEYS >= most_limit - p.window);
        if (seen) attend(st, queries + warp * 16 * ROW_TILES * PITCH, now, now + TILE_BYTES, p, tile, whole,
                         first_limit, first_row, lane);
    }
    write_out(st, p, head, first_row, token0, rows, n, c);
}
