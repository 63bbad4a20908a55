// What the prefill kernels share: how tiles get into shared memory, the softmax, the output.
//
// The including file defines WARPS, ROW_TILES (of 16 query rows in one warp), KEYS (of a tile), and `place`.
#pragma once
#include "kv_formats.cuh"

typedef Format<K_FORMAT> KF;
typedef Format<V_FORMAT> VF;

constexpr int THREADS = WARPS * 32;
constexpr int ROWS = WARPS * 16 * ROW_TILES;  // query rows of a block
constexpr int STEPS = HEAD_DIM / 16;
constexpr float LOWEST = -1e30f;  // stands for minus infinity, without its NaNs

// Byte, in a tile of so many rows in shared memory, of a 16-byte piece (8 elements) of a row.
DEVICE u32 place(int rows, int row, int piece);

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
                if (P::mine(i)) copy_async(to + place(KEYS, P::row(i), P::piece(i)), from, valid);
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
                int row = P::row(i), piece = 2 * P::piece(i);
                store_shared(to + place(KEYS, row, piece), out[0], out[1], out[2], out[3]);
                store_shared(to + place(KEYS, row, piece + 1), out[4], out[5], out[6], out[7]);
            }
    }
};

// The block's query rows into shared memory, in the type that K is multiplied in; zeros past the last row.
DEVICE void stage_query(u32 to, const Params& p, int head, int block_row, int token0, int rows) {
    constexpr int PIECES = HEAD_DIM / 8;
    for (int i = threadIdx.x; i < ROWS * PIECES; i += THREADS) {
        int row = block_row + i / PIECES, piece = i % PIECES;
        Words4 w = {0, 0, 0, 0};
        if (row < rows) {
            i64 token = token0 + row / p.group;
            w = *(const Words4*)((const u16*)p.query + token * p.query_stride +
                                 (head * p.group + row % p.group) * HEAD_DIM + piece * 8);
        }
        if constexpr (QUERY_BF16 && !KF::BF16_MMA) {
            w.x = pack_f16(as_float(w.x << 16), as_float(w.x & 0xffff0000u));
            w.y = pack_f16(as_float(w.y << 16), as_float(w.y & 0xffff0000u));
            w.z = pack_f16(as_float(w.z << 16), as_float(w.z & 0xffff0000u));
            w.w = pack_f16(as_float(w.w << 16), as_float(w.w & 0xffff0000u));
        }
        store_shared(to + place(ROWS, i / PIECES, piece), w.x, w.y, w.z, w.w);
    }
}

struct State {
    float o[ROW_TILES][2 * STEPS][4];
    float m[ROW_TILES][2], l[ROW_TILES][2];  // of rows n and n + 8; the maximum in powers of two
};

// Scores of one tile to probabilities, as A operands. first_limit: keys that the request's first token sees end here.
DEVICE void softmax(State& st, float (&s)[ROW_TILES][KEYS / 8][4], u32 (&probabilities)[ROW_TILES][KEYS / 16][4],
                    const Params& p, int tile, bool whole, int first_limit, int first_row, int lane) {
    int c = lane & 3;
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
                if (!whole) {
                    int key = tile * KEYS + j * 8 + 2 * c + (e & 1);
                    int end = first_limit + (first_row + t * 16 + (lane >> 2) + 8 * (e >> 1)) / p.group;
                    if (key >= end || (p.window && key < end - p.window)) x = negative_infinity();
                }
                top[t][e >> 1] = fmaxf(top[t][e >> 1], x);
            }
        top[t][0] *= p.scale, top[t][1] *= p.scale;
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
#pragma unroll
    for (int t = 0; t < ROW_TILES; t++)
#pragma unroll
        for (int j = 0; j < KEYS / 8; j++) {
            float(&x)[4] = s[t][j];
#pragma unroll
            for (int e = 0; e < 4; e++) {
                x[e] = exp2_approx(fmaf(x[e], p.scale, -st.m[t][e >> 1]));
                st.l[t][e >> 1] += x[e];
            }
            probabilities[t][j / 2][j % 2 * 2] = pack<VF::BF16_MMA>(x[0], x[1]);
            probabilities[t][j / 2][j % 2 * 2 + 1] = pack<VF::BF16_MMA>(x[2], x[3]);
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
