// Paged attention of a chunk of a prompt: many query rows per request, causal, over the same block images.
//
// A block takes ROWS query rows of one KV head ((token, head of the group) pairs, so the group shares the keys) and
// walks over tiles of KEYS keys. Tiles stand in shared memory as 16-bit floats: 16-bit KV comes by cp.async, 8-bit KV
// through registers, where it is decoded once for all warps. Two stages, one barrier per tile. Slots without a token
// become zeros on the way in, whatever they hold.
//
// Macros: HEAD_DIM; K_FORMAT, V_FORMAT; QUERY_BF16.
#include "kv_formats.cuh"

typedef Format<K_FORMAT> KF;
typedef Format<V_FORMAT> VF;

constexpr int WARPS = 8;
constexpr int THREADS = WARPS * 32;
constexpr int ROWS = WARPS * 16;
constexpr int KEYS = HEAD_DIM > 128 ? 32 : 64;
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

// One thread's share of the tiles of K or of V: 16-byte pieces of stored rows.
template <int FORMAT> struct Operand {
    typedef Format<FORMAT> F;
    static constexpr int PIECES = HEAD_DIM * F::BYTES / 16;
    static constexpr int ROUNDS = (KEYS * PIECES + THREADS - 1) / THREADS;
    const u8* data;      // pool, moved to this layer, K or V, and head
    const u8* scales;
    int ids[ROUNDS];     // blocks of the tile to load next
    Words4 raw[F::IS_16BIT ? 1 : ROUNDS];
    u16 scale[F::HAS_SCALE ? ROUNDS : 1];

    DEVICE static int row(int round) { return (threadIdx.x + round * THREADS) / PIECES; }
    DEVICE static int piece(int round) { return (threadIdx.x + round * THREADS) % PIECES; }
    DEVICE static bool mine(int round) { return KEYS * PIECES % THREADS == 0 || row(round) < KEYS; }

    DEVICE void fetch_ids(const Params& p, const int* table, Keys keys, int tile) {
#pragma unroll
        for (int i = 0; i < ROUNDS; i++) {
            int key = tile * KEYS + row(i);
            ids[i] = mine(i) && key >= keys.low && key < keys.high ? __ldg(table + (key >> p.block_size_log2)) : -1;
        }
    }

    // Start the loads of the tile whose ids were fetched; `to` is only used by 16-bit formats.
    DEVICE void load(const Params& p, int tile, u32 to) {
#pragma unroll
        for (int i = 0; i < ROUNDS; i++) {
            int slot = (tile * KEYS + row(i)) & ((1 << p.block_size_log2) - 1);
            bool valid = ids[i] >= 0;
            const u8* block = data + max(ids[i], 0) * p.block_stride;
            const u8* from = block + slot * (HEAD_DIM * F::BYTES) + piece(i) * 16;
            if constexpr (F::IS_16BIT) {
                if (mine(i)) copy_async(to + row(i) * PITCH + piece(i) * 16, from, valid);
            } else {
                raw[i] = {0, 0, 0, 0};
                if constexpr (F::HAS_SCALE) scale[i] = 0;
                if (valid) {
                    raw[i] = load_stream4(from);
                    if constexpr (F::HAS_SCALE)
                        scale[i] = load_stream_u16(scales + max(ids[i], 0) * p.block_stride + slot * 2);
                }
            }
        }
    }

    // Decode what was loaded into shared memory.
    DEVICE void finish(u32 to) {
        if constexpr (!F::IS_16BIT)
#pragma unroll
            for (int i = 0; i < ROUNDS; i++) {
                if (!mine(i)) continue;
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
                u32 at = to + row(i) * PITCH + piece(i) * 32;
                store_shared(at, out[0], out[1], out[2], out[3]);
                store_shared(at + 16, out[4], out[5], out[6], out[7]);
            }
    }

    // 8-bit formats are a tile further ahead: one tile in registers, one in shared memory.
    DEVICE void load_ahead(const Params& p, const int* table, Keys keys, int tile) {
        if constexpr (!F::IS_16BIT) {
            load(p, tile, 0);
            fetch_ids(p, table, keys, tile + 1);
        }
    }
    DEVICE void stage(const Params& p, const int* table, Keys keys, int tile, u32 to) {
        if constexpr (F::IS_16BIT) {
            load(p, tile, to);
            fetch_ids(p, table, keys, tile + 1);
        } else {
            finish(to);
            load_ahead(p, table, keys, tile + 1);
        }
    }
};

// Query rows n and n + 8 of a warp, as A operands. With long heads they don't fit in registers beside the output, and
// each use reads them again, from L1.
struct Query {
    static constexpr bool RESIDENT = HEAD_DIM <= 128;
    const u16* at[2];  // null for a row past the last
    u32 words[RESIDENT ? STEPS : 1][4];

    DEVICE void read(u32 (&q)[4], int step) const {
#pragma unroll
        for (int e = 0; e < 4; e++) {
            u32 w = at[e & 1] ? *(const u32*)(at[e & 1] + step * 16 + (e >> 1) * 8) : 0;
            if constexpr (QUERY_BF16 && !KF::BF16_MMA) w = pack_f16(as_float(w << 16), as_float(w & 0xffff0000u));
            q[e] = w;
        }
    }
    DEVICE void start(const Params& p, int head, int first_row, int token0, int rows, int n, int c) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            int row = first_row + n + 8 * r;
            i64 offset = (token0 + row / p.group) * p.query_stride + (head * p.group + row % p.group) * HEAD_DIM + 2 * c;
            at[r] = row < rows ? (const u16*)p.query + offset : nullptr;
        }
        if constexpr (RESIDENT)
#pragma unroll
            for (int step = 0; step < STEPS; step++) read(words[step], step);
    }
};

DEVICE void attend(float (&o)[2 * STEPS][4], float (&m)[2], float (&l)[2], const Query& query, u32 k_tile, u32 v_tile,
                   const Params& p, int tile, bool whole, const int (&limit)[2], int lane) {
    int c = lane & 3;
    float s[KEYS / 8][4] = {};
    u32 k_at = k_tile + ((lane & 7) + (lane >> 4) * 8) * PITCH + (lane >> 3 & 1) * 16;
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        u32 q[4];
        if constexpr (Query::RESIDENT)
#pragma unroll
            for (int e = 0; e < 4; e++) q[e] = query.words[step][e];
        else query.read(q, step);
#pragma unroll
        for (int j = 0; j < KEYS / 16; j++) {
            u32 b[4];
            load_matrix(b, k_at + j * 16 * PITCH + step * 32);
            mma<KF::BF16_MMA>(s[2 * j], q[0], q[1], q[2], q[3], b[0], b[1]);
            mma<KF::BF16_MMA>(s[2 * j + 1], q[0], q[1], q[2], q[3], b[2], b[3]);
        }
    }
    float top[2] = {negative_infinity(), negative_infinity()};
#pragma unroll
    for (int j = 0; j < KEYS / 8; j++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            s[j][e] *= p.scale;
            if (!whole) {
                int key = tile * KEYS + j * 8 + 2 * c + (e & 1);
                if (key >= limit[e >> 1] || (p.window && key < limit[e >> 1] - p.window)) s[j][e] = negative_infinity();
            }
            top[e >> 1] = fmaxf(top[e >> 1], s[j][e]);
        }
    if (__any_sync(FULL_WARP, top[0] > m[0] + 8 || top[1] > m[1] + 8)) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            top[r] = fmaxf(top[r], __shfl_xor_sync(FULL_WARP, top[r], 1));
            top[r] = fmaxf(top[r], __shfl_xor_sync(FULL_WARP, top[r], 2));
            float next = fmaxf(m[r], top[r]), alpha = exp2_approx(m[r] - next);
            m[r] = next;
            l[r] *= alpha;
#pragma unroll
            for (int i = 0; i < 2 * STEPS; i++) o[i][2 * r] *= alpha, o[i][2 * r + 1] *= alpha;
        }
    }
    u32 probabilities[KEYS / 16][4];
#pragma unroll
    for (int j = 0; j < KEYS / 8; j++) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
            s[j][e] = exp2_approx(s[j][e] - m[e >> 1]);
            l[e >> 1] += s[j][e];
        }
        probabilities[j / 2][j % 2 * 2] = pack<VF::BF16_MMA>(s[j][0], s[j][1]);
        probabilities[j / 2][j % 2 * 2 + 1] = pack<VF::BF16_MMA>(s[j][2], s[j][3]);
    }
    u32 v_at = v_tile + (lane & 15) * PITCH + (lane >> 4) * 16;
#pragma unroll
    for (int j = 0; j < KEYS / 16; j++)
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
            u32 b[4], (&a)[4] = probabilities[j];
            load_matrix_transposed(b, v_at + j * 16 * PITCH + i * 32);
            mma<VF::BF16_MMA>(o[2 * i], a[0], a[1], a[2], a[3], b[0], b[1]);
            mma<VF::BF16_MMA>(o[2 * i + 1], a[0], a[1], a[2], a[3], b[2], b[3]);
        }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) prefill_attention(const __grid_constant__ Params p) {
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

    int first_row = block_row + warp * 16;
    int limit[2] = {first_limit + (first_row + n) / p.group, first_limit + (first_row + n + 8) / p.group};
    int least_limit = first_limit + first_row / p.group, most_limit = first_limit + (first_row + 15) / p.group;
    Query query;
    query.start(p, head, first_row, token0, rows, n, c);
    float o[2 * STEPS][4] = {}, m[2] = {LOWEST, LOWEST}, l[2] = {0, 0};

    u32 stages = (u32)__cvta_generic_to_shared(shared);  // [2][K, V][TILE_BYTES]
    const int* table = p.tables + (i64)request * p.table_stride;
    i64 row0 = (i64)head << p.block_size_log2;
    Operand<K_FORMAT> k;
    Operand<V_FORMAT> v;
    k.data = p.pool + p.k_offset + row0 * (HEAD_DIM * KF::BYTES), k.scales = p.pool + p.k_scale_offset + row0 * 2;
    v.data = p.pool + p.v_offset + row0 * (HEAD_DIM * VF::BYTES), v.scales = p.pool + p.v_scale_offset + row0 * 2;

    k.fetch_ids(p, table, keys, first_tile), v.fetch_ids(p, table, keys, first_tile);
    k.load(p, first_tile, stages), v.load(p, first_tile, stages + TILE_BYTES);
    k.fetch_ids(p, table, keys, first_tile + 1), v.fetch_ids(p, table, keys, first_tile + 1);
    k.finish(stages), v.finish(stages + TILE_BYTES);
    k.load_ahead(p, table, keys, first_tile + 1), v.load_ahead(p, table, keys, first_tile + 1);
    for (int tile = first_tile; tile < tiles; tile++) {
        u32 now = stages + (tile - first_tile & 1) * 2 * TILE_BYTES, next = stages + (tile - first_tile + 1 & 1) * 2 * TILE_BYTES;
        asm volatile("cp.async.wait_all;" ::: "memory");
        __syncthreads();
        if (tile + 1 < tiles) {
            k.stage(p, table, keys, tile + 1, next), v.stage(p, table, keys, tile + 1, next + TILE_BYTES);
        }
        bool seen = tile * KEYS < most_limit && (p.window == 0 || tile * KEYS + KEYS > least_limit - p.window);
        bool whole = tile * KEYS + KEYS <= least_limit && (p.window == 0 || tile * KEYS >= most_limit - p.window);
        if (seen) attend(o, m, l, query, now, now + TILE_BYTES, p, tile, whole, limit, lane);
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        l[r] += __shfl_xor_sync(FULL_WARP, l[r], 1);
        l[r] += __shfl_xor_sync(FULL_WARP, l[r], 2);
        int row = first_row + n + 8 * r;
        if (row >= rows) continue;
        float inverse = l[r] == 0 ? 0 : 1 / l[r];
        u16* at = (u16*)p.out + (token0 + row / p.group) * p.out_stride + (head * p.group + row % p.group) * HEAD_DIM;
#pragma unroll
        for (int i = 0; i < 2 * STEPS; i++)
            *(u32*)(at + i * 8 + 2 * c) = pack<QUERY_BF16>(o[i][2 * r] * inverse, o[i][2 * r + 1] * inverse);
    }
}
