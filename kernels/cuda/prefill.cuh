// What the prefill kernels share: how tiles get into shared memory, the softmax, the output.
//
// The including file defines WARPS, ROW_TILES (of 16 query rows in one warp), TILE_BYTES, QUERY_BYTES
// and `place`.
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
    int batch, table_stride, kv_heads, group, block_size_log2, window;
    float scale;             // softmax scale * log2(e)
};

DEVICE void copy_async(u32 to, const void* from, bool valid) {
    int bytes = valid ? 16 : 0;  // the rest becomes zeros, and nothing is read
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes));
}

DEVICE void store_shared(u32 to, u32 x, u32 y, u32 z, u32 w) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}

// What a block reads, in shared memory for want of registers.
struct Source {
    const int* table;  // of the request
    int low, high;     // keys that any row of this block sees
    int row0;          // the head's first row in a block image
    int first_limit;   // keys that the request's first token sees end here
    int block_row;     // the block's first query row, of `rows` of this request and head, which begin at token0
    int rows, token0;
};

__shared__ Source source;

// Find what is this block's share: blocks of ROWS query rows, request after request, the longest of each first.
DEVICE bool find_rows(const Params& p, int& request, int& block_row) {
    int left = blockIdx.x, start = p.query_start[0];
    for (request = 0; request < p.batch; request++) {
        int end = p.query_start[request + 1], blocks = ((end - start) * p.group + ROWS - 1) / ROWS;
        if (left < blocks) {
            block_row = (blocks - 1 - left) * ROWS;
            return true;
        }
        left -= blocks, start = end;
    }
    return false;
}

// Keep what follows from x from being computed before the loop: it would be spilled.
DEVICE void hide(int& x) { asm volatile("" : "+r"(x)); }

// The blocks that a warp is about to load from: those of 512 keys, 16 keys in each lane.
struct Window {
    static constexpr int SIZE = 32 * 16;
    int ids;

    DEVICE void fetch(const Params& p, int first) {
        int key = first / SIZE * SIZE + (threadIdx.x & 31) * 16;
        ids = key < source.high && key + 16 > source.low ? __ldg(source.table + (key >> p.block_size_log2)) : 0;
    }
    DEVICE void leave(const Params& p, int tile) {  // as early as its last tile allows
        if ((tile + 1) * KEYS % SIZE == 0) fetch(p, (tile + 1) * KEYS);
    }
    DEVICE i64 block(const Params& p, int key) const {  // bytes from the pool's start
        return (u64)(u32)__shfl_sync(FULL_WARP, ids, (key & SIZE - 1) >> 4) * (u32)p.block_stride;
    }
};

// One thread's share of the tiles of K or of V: 16-byte pieces of stored rows. 16-bit formats go straight to their place;
// 8-bit formats wait in shared memory of the thread's own (`raw`) until it decodes them.
template <int FORMAT, bool IS_K> struct Operand {
    typedef Format<FORMAT> F;
    static constexpr int AHEAD = F::IS_16BIT ? 1 : 2;  // tiles
    static constexpr int ROW_BYTES = HEAD_DIM * F::BYTES, PER_ROW = ROW_BYTES / 16;
    static constexpr int ROUNDS = (KEYS * PER_ROW + THREADS - 1) / THREADS;
    static constexpr int RAW_BYTES = F::IS_16BIT ? 0 : ROUNDS * THREADS * 16;
    // A thread's rows are STEP apart. Where STEP and 16 divide each other, what depends on the thread is computed once.
    static constexpr int STEP = THREADS / PER_ROW;
    static constexpr bool REGULAR = THREADS % PER_ROW == 0 && (STEP % 16 == 0 || 16 % STEP == 0);
    u16 scale[F::HAS_SCALE ? ROUNDS : 1];

    DEVICE static int row(int thread, int round) { return (thread + round * THREADS) / PER_ROW; }
    DEVICE static int piece(int thread, int round) { return (thread + round * THREADS) % PER_ROW; }
    DEVICE static bool mine(int thread, int round) {
        return KEYS * PER_ROW % THREADS == 0 || row(thread, round) < KEYS;
    }
    DEVICE static u32 slot(u32 raw, int thread, int round) { return raw + (round * THREADS + thread) * 16; }
    // Where a piece of 16-bit elements goes in a tile: of the pieces that one stored piece gives, PART of SIZE.
    template <int SIZE, int PART> DEVICE static u32 spot(int thread, int round) {
        if constexpr (REGULAR) return place(KEYS, row(thread, 0), SIZE * piece(thread, 0) + PART) + place(KEYS, round * STEP, 0);
        else return place(KEYS, row(thread, round), SIZE * piece(thread, round) + PART);
    }

    // Start the loads of a tile.
    DEVICE void load(const Params& p, const Window& window, int tile, u32 to, u32 raw) {
        int first = tile * KEYS;
        if (first >= source.low && first + KEYS <= source.high) load_rows<true>(p, window, first, to, raw);
        else load_rows<false>(p, window, first, to, raw);
    }

    template <bool WHOLE> DEVICE void load_rows(const Params& p, const Window& window, int first, u32 to, u32 raw) {
        int mask = (1 << p.block_size_log2) - 1, row0 = source.row0, thread = threadIdx.x;
        hide(thread);
        const u8* base = p.pool + (IS_K ? p.k_offset : p.v_offset) + row0 * ROW_BYTES;
        if constexpr (REGULAR) base += row(thread, 0) % 16 * ROW_BYTES + piece(thread, 0) * 16;
#pragma unroll
        for (int i = 0; i < ROUNDS; i++) {
            int key = first + row(thread, i);
            int group = REGULAR ? first + i * STEP / 16 * 16 + (STEP > 16 ? row(thread, 0) / 16 * 16 : 0) : key;  // of 16 keys
            i64 block = window.block(p, group);
            bool valid = WHOLE || (key >= source.low && key < source.high);
            const u8* from = base + block;
            if constexpr (REGULAR) from += ((group & mask) + i * STEP % 16) * ROW_BYTES;
            else from += (key & mask) * ROW_BYTES + piece(thread, i) * 16;
            if (mine(thread, i)) copy_async(F::IS_16BIT ? to + spot<1, 0>(thread, i) : slot(raw, thread, i), from, valid);
            if constexpr (F::HAS_SCALE) {
                scale[i] = 0;
                if (valid && mine(thread, i))
                    scale[i] = load_stream_u16(p.pool + block + (IS_K ? p.k_scale_offset : p.v_scale_offset) +
                                               (row0 + (key & mask)) * 2);
            }
        }
    }

    // Decode what has arrived.
    DEVICE void finish(u32 to, u32 raw) {
        int thread = threadIdx.x;
        hide(thread);
        if constexpr (!F::IS_16BIT)
#pragma unroll
            for (int i = 0; i < ROUNDS; i++) {
                if (!mine(thread, i)) continue;
                u32 words[4], out[8];
                asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                             : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3]) : "r"(slot(raw, thread, i)) : "memory");
#pragma unroll
                for (int w = 0; w < 4; w++) decode4<FORMAT>(words[w], out[2 * w], out[2 * w + 1]);
                if constexpr (F::HAS_SCALE || F::FACTOR != 1) {
                    constexpr u32 FACTORS = F::FACTOR == 1 ? 0x3c003c00u : 0x5c005c00u;  // float16, twice
                    u32 both = F::HAS_SCALE ? permute(scale[i], 0, 0x1010) : FACTORS;
                    if (F::HAS_SCALE && F::FACTOR != 1) both = mul_f16x2(both, FACTORS);
#pragma unroll
                    for (int w = 0; w < 8; w++) out[w] = mul_f16x2(out[w], both);
                }
                store_shared(to + spot<2, 0>(thread, i), out[0], out[1], out[2], out[3]);
                store_shared(to + spot<2, 1>(thread, i), out[4], out[5], out[6], out[7]);
            }
    }
};

// K and V of one request and head, tile by tile. In shared memory: two stages of K and V, the queries, what is raw.
struct Tiles {
    static constexpr int STAGE = 2 * TILE_BYTES;
    Operand<K_FORMAT, true> k;
    Operand<V_FORMAT, false> v;
    Window k_window, v_window;  // one and the same if K and V are equally far ahead
    u32 stages;

    static constexpr int K_AHEAD = Operand<K_FORMAT, true>::AHEAD, V_AHEAD = Operand<V_FORMAT, false>::AHEAD;
    static constexpr bool TOGETHER = K_AHEAD == V_AHEAD;
    DEVICE u32 raw_k() const { return stages + 2 * STAGE + QUERY_BYTES; }
    DEVICE u32 raw_v() const { return raw_k() + Operand<K_FORMAT, true>::RAW_BYTES; }

    DEVICE void load_k(const Params& p, int tile, u32 to) {
        k.load(p, k_window, tile, to, raw_k());
        if (!TOGETHER) k_window.leave(p, tile);
    }
    DEVICE void load_v(const Params& p, int tile, u32 to) {
        v.load(p, TOGETHER ? k_window : v_window, tile, to + TILE_BYTES, raw_v());
        if (TOGETHER) k_window.leave(p, tile);
        else v_window.leave(p, tile);
    }
    DEVICE void start(const Params& p, int tile) {
        k_window.fetch(p, tile * KEYS);
        if (!TOGETHER) v_window.fetch(p, tile * KEYS);
        load_k(p, tile, stages), load_v(p, tile, stages);
        if (!KF::IS_16BIT || !VF::IS_16BIT) asm volatile("cp.async.wait_all;" ::: "memory");
        k.finish(stages, raw_k()), v.finish(stages + TILE_BYTES, raw_v());
        if (!KF::IS_16BIT) load_k(p, tile + 1, 0);
        if (!VF::IS_16BIT) load_v(p, tile + 1, 0);
    }
    // While `tile` is computed on: fill the stage of the next one, and load further ahead.
    DEVICE void advance(const Params& p, int tile, u32 next) {
        k.finish(next, raw_k()), v.finish(next + TILE_BYTES, raw_v());
        load_k(p, tile + K_AHEAD, next), load_v(p, tile + V_AHEAD, next);
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

// Scores of one tile to probabilities, as A operands.
DEVICE void softmax(State& st, float (&s)[ROW_TILES][KEYS / 8][4], u32 (&probabilities)[ROW_TILES][KEYS / 16][4],
                    const Params& p, int tile, bool whole, int first_row, int lane) {
    int c = lane & 3;
    if (!whole) {
        hide(first_row);
#pragma unroll
        for (int t = 0; t < ROW_TILES; t++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                // In this thread's count of keys: the first that the row does not see, and the first that it sees.
                int end = source.first_limit + (first_row + t * 16 + (lane >> 2) + 8 * r) / p.group - tile * KEYS - 2 * c;
                int begin = p.window ? end - p.window : -KEYS;
#pragma unroll
                for (int j = 0; j < KEYS / 8; j++)
#pragma unroll
                    for (int e = 0; e < 2; e++)
                        if (j * 8 + e >= end || j * 8 + e < begin) s[t][j][2 * r + e] = negative_infinity();
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
            for (int r = 0; r < 2; r++) top[t][r] = fmaxf(top[t][r], fmaxf(s[t][j][2 * r], s[t][j][2 * r + 1]));
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
            for (int e = 0; e < 4; e++) x[e] = exp2_approx(fmaf(x[e], p.scale, -st.m[t][e >> 1]));
            st.l[t][0] += x[0] + x[1], st.l[t][1] += x[2] + x[3];
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
