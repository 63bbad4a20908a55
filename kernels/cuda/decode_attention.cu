// Paged attention of a few query rows per request, split over the KV length, merged in the same launch.
//
// One warp works on 16 keys at a time, straight from global memory to registers, with no shared memory in the loop:
//   S^T[16 keys x 8 rows] = K Q^T, then O^T[head_dim x 8 rows] += V^T P^T, both as m16n8k16.
// A query row is one (token, head of the group) pair. QK^T sums over head_dim, so the order of its elements is free:
// each thread takes the 16 bytes of K that one load gives and the matching elements of Q. Likewise each thread owns a
// run of head_dim elements of V, for its four keys, and one byte permutation transposes them.
//
// The running maximum only has to keep P in range: it moves when a score passes it by 2^8, which is rare.
//
// Macros: HEAD_DIM; K_FORMAT, V_FORMAT; ROW_TILES (8 query rows each); QUERY_BF16.
#include "kv_formats.cuh"
#include "decode_plan.cuh"

typedef Format<K_FORMAT> KF;
typedef Format<V_FORMAT> VF;

constexpr int WARPS = HEAD_DIM * ROW_TILES > 128 ? 4 : 8;  // as shared memory allows
constexpr int ROWS = 8 * ROW_TILES;
constexpr int STEPS = HEAD_DIM / 16;               // k-steps of QK^T, m-tiles of V^T P^T
constexpr int K_ROW = HEAD_DIM * KF::BYTES;        // bytes
constexpr int V_ROW = HEAD_DIM * VF::BYTES;
constexpr int K_WORDS = K_ROW / 16;                // words of one key in one thread; four threads share a key
constexpr int V_WORDS = V_ROW / 32;                // words of one key in one thread; eight threads share a key
// Blocks per multiprocessor, as registers allow.
constexpr bool NARROW = !KF::IS_16BIT && !VF::IS_16BIT && (HARDWARE_FP8 || K_FORMAT != FORMAT_E4M3_SCALED);
constexpr int LEAST_RESIDENT = HEAD_DIM * ROW_TILES <= 64 || HEAD_DIM * ROW_TILES <= 128 && NARROW ? 2 : 1;
constexpr float LOWEST = -1e30f;                   // stands for minus infinity, without its NaNs
// Both of K and V in flight at once, where the registers allow it.
constexpr bool OVERLAP = 2 * K_WORDS + 4 * V_WORDS + STEPS * ROW_TILES * 6 <= 168;

struct Params {
    const void* query;       // [tokens, kv_heads * group, HEAD_DIM], 16-bit
    void* out;               // as query
    const u8* pool;
    const int* tables;       // [batch, table_stride]
    const int* lengths;      // [batch] keys, those of the request's own queries included
    const int* query_start;  // [batch + 1] first token of each request
    const int* plan;
    Float4* parts;           // [2 * grid][2][FRAGMENTS], EMPTY between launches: a fragment; its maxima and sums
    i64 block_stride, k_offset, v_offset, k_scale_offset, v_scale_offset;  // bytes
    i64 query_stride, out_stride;                                          // elements per token
    int table_stride, kv_heads, group, row_blocks, block_tiles_log2, window;
    float scale;             // softmax scale * log2(e)
    float inverse_group;

    // row / group: half a row's distance to the next whole number is far more than rounding can lose.
    DEVICE int token_of(int row) const { return (int)((row + 0.5f) * inverse_group); }
};

// First byte, in a row of K, of word i of thread c of four.
DEVICE int k_offset_of(int i, int c) {
    constexpr int FULL = K_WORDS / 4 * 4;
    return i < FULL ? i / 4 * 64 + c * 16 + i % 4 * 4 : FULL * 16 + c * 8 + (i - FULL) * 4;
}

// First byte, in a row of V, of word i of thread n of eight.
DEVICE int v_offset_of(int i, int n) {
    constexpr int FULL = V_WORDS / 4 * 4, HALF = V_WORDS / 2 * 2;
    if (i < FULL) return i / 4 * 128 + n * 16 + i % 4 * 4;
    if (i < HALF) return FULL * 32 + n * 8 + (i - FULL) * 4;
    return HALF * 32 + n * 4;
}

DEVICE void load_k(u32 (&k)[2][K_WORDS], const u8* base, int n, int c) {
    constexpr int FULL = K_WORDS / 4 * 4;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const u8* row = base + (n + 8 * r) * K_ROW;
#pragma unroll
        for (int i = 0; i < FULL; i += 4) {
            Words4 w = load_stream4(row + k_offset_of(i, c));
            k[r][i] = w.x, k[r][i + 1] = w.y, k[r][i + 2] = w.z, k[r][i + 3] = w.w;
        }
        if constexpr (K_WORDS % 4 == 2) load_stream2(row + k_offset_of(FULL, c), k[r][FULL], k[r][FULL + 1]);
    }
}

// Keys 2c, 2c + 1, 2c + 8, 2c + 9.
DEVICE void load_v(u32 (&v)[4][V_WORDS], const u8* base, int n, int c) {
    constexpr int FULL = V_WORDS / 4 * 4, HALF = V_WORDS / 2 * 2;
#pragma unroll
    for (int r = 0; r < 4; r++) {
        const u8* row = base + (2 * c + (r & 1) + (r >> 1) * 8) * V_ROW;
#pragma unroll
        for (int i = 0; i < FULL; i += 4) {
            Words4 w = load_stream4(row + v_offset_of(i, n));
            v[r][i] = w.x, v[r][i + 1] = w.y, v[r][i + 2] = w.z, v[r][i + 3] = w.w;
        }
        if constexpr (V_WORDS % 4 >= 2) load_stream2(row + v_offset_of(FULL, n), v[r][FULL], v[r][FULL + 1]);
        if constexpr (V_WORDS % 2) v[r][HALF] = load_stream1(row + v_offset_of(HALF, n));
    }
}

// The query rows of one row block, as B operands.
DEVICE void load_query(u32 (&q)[ROW_TILES][STEPS][2], const Params& p, int head, int first_row, int token0, int rows,
                       int n, int c) {
#pragma unroll
    for (int nt = 0; nt < ROW_TILES; nt++) {
        int row = first_row + nt * 8 + n;
        bool valid = row < rows;
        int token = p.token_of(row), member = row - token * p.group;
        const u16* at = (const u16*)p.query + (token0 + token) * p.query_stride + (head * p.group + member) * HEAD_DIM;
#pragma unroll
        for (int s = 0; s < STEPS; s++) {
            int d = k_offset_of(KF::IS_16BIT ? 2 * s : s, c) / KF::BYTES;
            Words2 w = {0, 0};
            if (valid) w = *(const Words2*)(at + d);
            if constexpr (QUERY_BF16 && !KF::BF16_MMA) {
                w.x = pack_f16(as_float(w.x << 16), as_float(w.x & 0xffff0000u));
                w.y = pack_f16(as_float(w.y << 16), as_float(w.y & 0xffff0000u));
            }
            q[nt][s][0] = w.x, q[nt][s][1] = w.y;
        }
    }
}

DEVICE void scores(float (&s)[ROW_TILES][4], const u32 (&k)[2][K_WORDS], const u32 (&q)[ROW_TILES][STEPS][2]) {
#pragma unroll
    for (int nt = 0; nt < ROW_TILES; nt++)
#pragma unroll
        for (int e = 0; e < 4; e++) s[nt][e] = 0;
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
        u32 a0, a1, a2, a3;
        if constexpr (KF::IS_16BIT) {
            a0 = k[0][2 * i], a1 = k[1][2 * i], a2 = k[0][2 * i + 1], a3 = k[1][2 * i + 1];
        } else {
            decode4<K_FORMAT>(k[0][i], a0, a2);
            decode4<K_FORMAT>(k[1][i], a1, a3);
        }
#pragma unroll
        for (int nt = 0; nt < ROW_TILES; nt++) mma<KF::BF16_MMA>(s[nt], a0, a1, a2, a3, q[nt][i][0], q[nt][i][1]);
    }
}

DEVICE void accumulate(float (&o)[ROW_TILES][STEPS][4], const u32 (&v)[4][V_WORDS], const u32 (&p)[ROW_TILES][2]) {
#pragma unroll
    for (int i = 0; i < V_WORDS; i++) {
        if constexpr (VF::IS_16BIT) {
            u32 a0 = permute(v[0][i], v[1][i], 0x5410), a1 = permute(v[0][i], v[1][i], 0x7632);
            u32 a2 = permute(v[2][i], v[3][i], 0x5410), a3 = permute(v[2][i], v[3][i], 0x7632);
#pragma unroll
            for (int nt = 0; nt < ROW_TILES; nt++) mma<VF::BF16_MMA>(o[nt][i], a0, a1, a2, a3, p[nt][0], p[nt][1]);
        } else {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                u32 a0, a1, a2, a3;
                decode4<V_FORMAT>(permute(v[0][i], v[1][i], h ? 0x7362 : 0x5140), a0, a1);
                decode4<V_FORMAT>(permute(v[2][i], v[3][i], h ? 0x7362 : 0x5140), a2, a3);
#pragma unroll
                for (int nt = 0; nt < ROW_TILES; nt++)
                    mma<false>(o[nt][2 * i + h], a0, a1, a2, a3, p[nt][0], p[nt][1]);
            }
        }
    }
}

DEVICE float max_over_keys(float x) {
    x = fmaxf(x, __shfl_xor_sync(FULL_WARP, x, 4));
    x = fmaxf(x, __shfl_xor_sync(FULL_WARP, x, 8));
    return fmaxf(x, __shfl_xor_sync(FULL_WARP, x, 16));
}

DEVICE float sum_over_keys(float x) {
    x += __shfl_xor_sync(FULL_WARP, x, 4);
    x += __shfl_xor_sync(FULL_WARP, x, 8);
    return x + __shfl_xor_sync(FULL_WARP, x, 16);
}

// What one warp, then one block, then one request's row block has seen. Thread (n, c) holds rows 2c and 2c + 1 of each
// row tile, and of V the elements of thread n.
struct State {
    float o[ROW_TILES][STEPS][4];  // [..][half * 2 + row]
    float m[ROW_TILES][2];         // in powers of two
    float l[ROW_TILES][2];
};

DEVICE void rescale(State& st, int nt, int h, float alpha) {
    st.l[nt][h] *= alpha;
#pragma unroll
    for (int i = 0; i < STEPS; i++) st.o[nt][i][h] *= alpha, st.o[nt][i][2 + h] *= alpha;
}

// Where one request's keys may be read by which row.
struct Visible {
    int length;       // keys of the request
    int first_limit;  // keys that the request's first token sees end here
    int window;       // 0: none
    int first_row;

    DEVICE bool operator()(const Params& p, int key, int row_in_block) const {
        int limit = min(first_limit + p.token_of(first_row + row_in_block), length);
        return key < limit && (window == 0 || key >= limit - window);
    }
    DEVICE bool stored(int key) const { return key < length && (window == 0 || key >= first_limit - window); }
    DEVICE bool whole(int tile) const {
        return tile * 16 + 16 <= first_limit && (window == 0 || tile * 16 >= length - window);
    }
};

struct Scales { u16 k[2], v[2]; };  // of keys n, n + 8

// Scores to probabilities, as B operands.
DEVICE void softmax(State& st, float (&s)[ROW_TILES][4], u32 (&packed)[ROW_TILES][2], const Params& p, const Scales& sc,
                    const Visible& visible, int tile, bool whole, int n, int c) {
    float k_scale[2] = {p.scale * KF::FACTOR, p.scale * KF::FACTOR}, v_scale[2] = {1, 1}, v_log[2] = {0, 0};
#pragma unroll
    for (int r = 0; r < 2; r++) {
        if constexpr (KF::HAS_SCALE) k_scale[r] *= f16_to_float(sc.k[r]);
        if constexpr (VF::HAS_SCALE) {
            v_scale[r] = f16_to_float(sc.v[r]);
            v_scale[r] = whole || visible.stored(tile * 16 + n + 8 * r) ? v_scale[r] : 0;
            v_log[r] = log2_approx(fmaxf(v_scale[r], 1e-8f));
        }
    }
#pragma unroll
    for (int nt = 0; nt < ROW_TILES; nt++)
#pragma unroll
        for (int e = 0; e < 4; e++) s[nt][e] *= k_scale[e >> 1];
    if (!whole)
#pragma unroll
        for (int nt = 0; nt < ROW_TILES; nt++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                if (!visible(p, tile * 16 + n + 8 * (e >> 1), nt * 8 + 2 * c + (e & 1))) s[nt][e] = negative_infinity();
    // P times the scale of V is what has to stay in range: the maximum is that of s + log2(scale).
    bool over = false;
#pragma unroll
    for (int nt = 0; nt < ROW_TILES; nt++)
#pragma unroll
        for (int e = 0; e < 4; e++) over |= s[nt][e] + v_log[e >> 1] > st.m[nt][e & 1] + 8;
    if (__any_sync(FULL_WARP, over)) {
#pragma unroll
        for (int nt = 0; nt < ROW_TILES; nt++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float top = max_over_keys(fmaxf(s[nt][h] + v_log[0], s[nt][2 + h] + v_log[1]));
                float m = fmaxf(st.m[nt][h], top);
                rescale(st, nt, h, exp2_approx(st.m[nt][h] - m));
                st.m[nt][h] = m;
            }
    }
#pragma unroll
    for (int nt = 0; nt < ROW_TILES; nt++) {
        float e[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            e[i] = exp2_approx(s[nt][i] - st.m[nt][i & 1]);
            st.l[nt][i & 1] += e[i];
            if constexpr (VF::HAS_SCALE) e[i] *= v_scale[i >> 1];
        }
        packed[nt][0] = transpose_8x8(pack<VF::BF16_MMA>(e[0], e[1]));
        packed[nt][1] = transpose_8x8(pack<VF::BF16_MMA>(e[2], e[3]));
    }
}

// What unused slots hold may be NaN, and 0 * NaN is NaN.
DEVICE void drop_unstored(u32 (&v)[4][V_WORDS], const Visible& visible, int tile, int c) {
#pragma unroll
    for (int r = 0; r < 4; r++)
        if (!visible.stored(tile * 16 + 2 * c + (r & 1) + (r >> 1) * 8))
#pragma unroll
            for (int i = 0; i < V_WORDS; i++) v[r][i] = 0;
}

// Of a tile's first key, among all KV heads of its block.
DEVICE int slot_of(const Params& p, int head, int tile) {
    const int tiles = 1 << p.block_tiles_log2;
    return (head * tiles + (tile & (tiles - 1))) * 16;
}

// One warp's tiles of a segment: each `stride`-th below last.
struct TileReader {
    const Params& p;
    const int* table;
    int head, tile, last, stride, lane;
    int ids, next_ids, index;

    DEVICE int fetch_ids(int ahead) const {
        int at = tile + (ahead + lane) * stride;
        return at < last ? __ldg(table + (at >> p.block_tiles_log2)) : 0;
    }
    DEVICE void start() {
        index = 0;
        ids = fetch_ids(0);
        next_ids = fetch_ids(32);
    }
    DEVICE bool more() const { return tile < last; }
    DEVICE void advance() {
        index++, tile += stride;
        if ((index & 31) == 0) {
            ids = next_ids;
            next_ids = fetch_ids(32);
        }
    }
    DEVICE const u8* block() const { return p.pool + __shfl_sync(FULL_WARP, ids, index & 31) * p.block_stride; }
    DEVICE int slot() const { return slot_of(p, head, tile); }
};

DEVICE void load_scales(Scales& sc, const Params& p, const u8* block, int slot, int n) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        if constexpr (KF::HAS_SCALE) sc.k[r] = load_stream_u16(block + p.k_scale_offset + (slot + n + 8 * r) * 2);
        if constexpr (VF::HAS_SCALE) sc.v[r] = load_stream_u16(block + p.v_scale_offset + (slot + n + 8 * r) * 2);
    }
}

DEVICE void attend(State& st, const Params& p, const u32 (&q)[ROW_TILES][STEPS][2], TileReader tiles,
                   const Visible& visible) {
    int n = tiles.lane >> 2, c = tiles.lane & 3;
    u32 k[2][K_WORDS], v[4][V_WORDS];
    Scales sc;
    if (!tiles.more()) return;
    const u8* block = tiles.block();
    int slot = tiles.slot();
    load_k(k, block + p.k_offset + slot * K_ROW, n, c);
    load_scales(sc, p, block, slot, n);
    if constexpr (OVERLAP) load_v(v, block + p.v_offset + slot * V_ROW, n, c);
    while (true) {
        int tile = tiles.tile;
        bool whole = visible.whole(tile);
        float s[ROW_TILES][4];
        u32 packed[ROW_TILES][2];
        scores(s, k, q);
        if constexpr (!OVERLAP) load_v(v, block + p.v_offset + slot * V_ROW, n, c);
        tiles.advance();
        bool more = tiles.more();
        if (more) {
            block = tiles.block();
            slot = tiles.slot();
            if constexpr (OVERLAP) load_k(k, block + p.k_offset + slot * K_ROW, n, c);
        }
        softmax(st, s, packed, p, sc, visible, tile, whole, n, c);
        if (more) load_scales(sc, p, block, slot, n);
        if (!whole) drop_unstored(v, visible, tile, c);
        accumulate(st.o, v, packed);
        if (!more) break;
        if constexpr (!OVERLAP) load_k(k, block + p.k_offset + slot * K_ROW, n, c);
        else load_v(v, block + p.v_offset + slot * V_ROW, n, c);
    }
}

__shared__ Float4 shared_out[WARPS][ROW_TILES][STEPS][32];
__shared__ Float4 shared_max_sum[WARPS][ROW_TILES][4];  // max, sum of row 2c; of row 2c + 1

DEVICE void share(const State& st, int warp, int lane) {
    int n = lane >> 2, c = lane & 3;
#pragma unroll
    for (int nt = 0; nt < ROW_TILES; nt++) {
        float l[2] = {sum_over_keys(st.l[nt][0]), sum_over_keys(st.l[nt][1])};
        if (n == 0) shared_max_sum[warp][nt][c] = {st.m[nt][0], l[0], st.m[nt][1], l[1]};
#pragma unroll
        for (int i = 0; i < STEPS; i++)
            shared_out[warp][nt][i][lane] = {st.o[nt][i][0], st.o[nt][i][1], st.o[nt][i][2], st.o[nt][i][3]};
    }
    __syncthreads();
}

// How the warps that share a pair become one, for rows 2c and 2c + 1 of a row tile: the maxima and sums of all, and the
// factors of each one's output.
struct Weights { float m[2], l[2], of[WARPS][2]; };

// All of them are unrolled, and those that aren't there left out: registers have no index.
DEVICE Weights weigh(int first, int warps, int nt, int c) {
    Weights all = {{LOWEST, LOWEST}, {0, 0}};
    Float4 parts[WARPS];
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
        parts[w] = {LOWEST, 0, LOWEST, 0};
        if (w < warps) parts[w] = shared_max_sum[first + w][nt][c];
        all.m[0] = fmaxf(all.m[0], parts[w].x), all.m[1] = fmaxf(all.m[1], parts[w].z);
    }
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
        all.of[w][0] = exp2_approx(parts[w].x - all.m[0]), all.of[w][1] = exp2_approx(parts[w].z - all.m[1]);
        all.l[0] += parts[w].y * all.of[w][0], all.l[1] += parts[w].w * all.of[w][1];
    }
    return all;
}

// Fragment i of a row tile.
DEVICE Float4 merge_warps(const Weights& all, int first, int warps, int nt, int i, int lane) {
    Float4 sum = {0, 0, 0, 0};
#pragma unroll
    for (int w = 0; w < WARPS; w++)
        if (w < warps) {
            Float4 o = shared_out[first + w][nt][i][lane];
            float a = all.of[w][0], b = all.of[w][1];
            sum.x += o.x * a, sum.y += o.y * b, sum.z += o.z * a, sum.w += o.w * b;
        }
    return sum;
}

// One fragment of a row tile's output, its rows 2c and 2c + 1.
DEVICE void write_out(const Params& p, const Float4& o, const float (&l)[2], int i, int nt, int head, int first_row,
                      const PlanEntry& at, int n, int c) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
        int row = first_row + nt * 8 + 2 * c + h, token = p.token_of(row);
        if (row >= at.tokens * p.group) continue;
        float inverse = l[h] == 0 ? 0 : VF::FACTOR * reciprocal_approx(l[h]);
        u16* to = (u16*)p.out + (at.token0 + token) * p.out_stride + (head * p.group + row - token * p.group) * HEAD_DIM;
        // Elements 2i and 2i + 1 of thread n.
        int element = VF::IS_16BIT ? v_offset_of(i, n) / 2 : v_offset_of(i / 2, n) + i % 2 * 2;
        *(u32*)(to + element) = pack<QUERY_BF16>((h ? o.y : o.x) * inverse, (h ? o.w : o.z) * inverse);
    }
}

// -- the merge of what several blocks have of a row block --------------------------------------------------------------
// Each leaves its fragments, every one with its maxima and sums beside it, in places of which all words are EMPTY, a NaN
// that no instruction makes. All but the first wait for their share of all parts, word by word, add it up, and leave the
// places EMPTY. So blocks wait for each other: the grid must be no larger than what is resident at once.

constexpr u32 EMPTY = 0xffffffffu;
constexpr int FRAGMENTS = ROW_TILES * STEPS * 32;  // of a part, one lane each

DEVICE void leave(Float4* to, const Float4& v) {
    asm volatile("st.relaxed.gpu.global.v4.f32 [%0], {%1, %2, %3, %4};"
                 ::"l"(to), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}

DEVICE Float4 look(const Float4* from) {
    Float4 v;
    asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(from) : "memory");
    return v;
}

DEVICE bool is_empty(const Float4& v) {
    return max(max(__float_as_uint(v.x), __float_as_uint(v.y)), max(__float_as_uint(v.z), __float_as_uint(v.w))) == EMPTY;
}

struct Sum {
    Float4 o;
    float m[2], l[2];

    DEVICE void raise(const float (&top)[2]) {
        float a = exp2_approx(m[0] - top[0]), b = exp2_approx(m[1] - top[1]);
        m[0] = top[0], m[1] = top[1];
        l[0] *= a, l[1] *= b;
        o.x *= a, o.y *= b, o.z *= a, o.w *= b;
    }
    DEVICE void add(const Float4& other, const Float4& max_sum) {
        float a = exp2_approx(max_sum.x - m[0]), b = exp2_approx(max_sum.z - m[1]);
        l[0] += max_sum.y * a, l[1] += max_sum.w * b;
        o.x += other.x * a, o.y += other.y * b, o.z += other.z * a, o.w += other.w * b;
    }
};

DEVICE void add_from(float& x, int step) { x += __shfl_xor_sync(FULL_WARP, x, step); }

// The share of this block, the `worker`-th of parts - 1. Several lanes may share a fragment's parts. Always in the same
// order.
DEVICE void merge_parts(const Params& p, const PlanEntry& at) {
    constexpr int AT_ONCE = 4, MOST_LANES_LOG2 = 4;
    int parts = at.parts, worker = blockIdx.x - at.first_block - 1;
    int begin = FRAGMENTS * worker / (parts - 1), end = FRAGMENTS * (worker + 1) / (parts - 1), log2_lanes = 0;
    while (log2_lanes < MOST_LANES_LOG2 && 1 << log2_lanes < parts && end - begin << log2_lanes <= WARPS * 16) log2_lanes++;
    int lanes = 1 << log2_lanes, lane = threadIdx.x & lanes - 1;
    for (int base = begin; base < end; base += WARPS * 32 >> log2_lanes) {
        int fragment = base + (threadIdx.x >> log2_lanes);
        Sum sum = {{0, 0, 0, 0}, {LOWEST, LOWEST}, {0, 0}};
        for (int part = fragment < end ? lane : parts; part < parts; part += AT_ONCE * lanes) {
            Float4 v[AT_ONCE][2];
            Float4* place[AT_ONCE];
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++) {
                int own = part + j * lanes;
                place[j] = p.parts + (2 * (i64)(at.first_block + own) + (own < parts - 1)) * (2 * FRAGMENTS) + fragment;
                v[j][0] = {own < parts ? as_float(EMPTY) : 0, 0, 0, 0};
                v[j][1] = {own < parts ? as_float(EMPTY) : LOWEST, 0, LOWEST, 0};
            }
            bool waits = true;
            for (int tries = 0; waits; tries++) {
                if (tries == 1 << 24) asm volatile("trap;");  // seconds: an error is better than a hang
#pragma unroll
                for (int j = 0; j < AT_ONCE; j++)
#pragma unroll
                    for (int h = 0; h < 2; h++)
                        if (is_empty(v[j][h])) v[j][h] = look(place[j] + h * FRAGMENTS);
                waits = false;
#pragma unroll
                for (int j = 0; j < AT_ONCE; j++)
#pragma unroll
                    for (int h = 0; h < 2; h++) waits |= is_empty(v[j][h]);
            }
            float top[2] = {sum.m[0], sum.m[1]};
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++) top[0] = fmaxf(top[0], v[j][1].x), top[1] = fmaxf(top[1], v[j][1].z);
            sum.raise(top);
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++) {
                sum.add(v[j][0], v[j][1]);
                float empty = as_float(EMPTY);
                if (part + j * lanes < parts)
#pragma unroll
                    for (int h = 0; h < 2; h++) leave(place[j] + h * FRAGMENTS, {empty, empty, empty, empty});
            }
        }
        float top[2] = {sum.m[0], sum.m[1]};
        for (int step = lanes / 2; step; step /= 2)
#pragma unroll
            for (int h = 0; h < 2; h++) top[h] = fmaxf(top[h], __shfl_xor_sync(FULL_WARP, top[h], step));
        sum.raise(top);
        for (int step = lanes / 2; step; step /= 2) {
            add_from(sum.l[0], step), add_from(sum.l[1], step);
            add_from(sum.o.x, step), add_from(sum.o.y, step), add_from(sum.o.z, step), add_from(sum.o.w, step);
        }
        if (fragment < end && lane == 0)
            write_out(p, sum.o, sum.l, fragment / 32 % STEPS, fragment / 32 / STEPS, at.head / p.row_blocks,
                      at.head % p.row_blocks * ROWS, at, fragment % 32 / 4, fragment % 4);
    }
}

DEVICE void clear(State& st) {
#pragma unroll
    for (int nt = 0; nt < ROW_TILES; nt++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            st.m[nt][h] = LOWEST, st.l[nt][h] = 0;
#pragma unroll
            for (int i = 0; i < STEPS; i++) st.o[nt][i][h] = st.o[nt][i][2 + h] = 0;
        }
}

// Asks L2 for a warp's first two tiles of a segment: all but the newest keys are there since earlier steps.
DEVICE void prefetch_tiles(const Params& p, const PlanEntry& at, int tile, int last, int stride) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int i = 0; i < 2; i++, tile += stride) {
        if (tile >= last) return;
        const int* id = p.tables + (i64)at.request * p.table_stride + (tile >> p.block_tiles_log2);
        const u8* block = p.pool + __ldcg(id) * p.block_stride;
        const int slot = slot_of(p, at.head / p.row_blocks, tile);
        for (int line = lane; line < K_ROW / 8; line += 32) prefetch_l2(block + p.k_offset + slot * K_ROW + line * 128);
        for (int line = lane; line < V_ROW / 8; line += 32) prefetch_l2(block + p.v_offset + slot * V_ROW + line * 128);
    }
}

// From the first of the pairs that a block takes side by side to one `ahead` of it, if there is. Before
// wait_for_previous(), so not through L1: a request's numbers were uploaded before the step, not before this launch.
DEVICE void go_to_pair(const Params& p, PlanEntry& at, int ahead, int heads) {
    if (ahead >= at.parts) at.length = at.tokens = 0;
    else if (ahead > 0) {
        for (at.head += ahead; at.head >= heads; at.head -= heads) at.request++;
        at.length = __ldcg(p.lengths + at.request), at.token0 = __ldcg(p.query_start + at.request);
        at.tokens = at.length ? __ldcg(p.query_start + at.request + 1) - at.token0 : 0;
    }
}

__shared__ volatile int kept[WARPS][12];  // of each warp, while a segment is read, for want of registers

extern "C" __global__ void __launch_bounds__(WARPS * 32, LEAST_RESIDENT)
    decode_attention(const __grid_constant__ Params p) {
    let_next_start();
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, n = lane >> 2, c = lane & 3;
    const PlanEntry* own = (const PlanEntry*)(p.plan + PLAN_HEADER) + blockIdx.x;  // there since the step began
    PlanEntry at = *own;
    int per_block = p.plan[0], total = p.plan[1], heads = p.kv_heads * p.row_blocks;
    int sharing = WARPS;  // warps that share a (request, head) pair: a power of two
    int position = blockIdx.x * per_block, end = min(position + per_block, total);
    if (position < end) {
        const bool side_by_side = p.plan[2];
        if (side_by_side) {
            const int halvings = 32 - __clz(at.parts - 1);
            sharing = WARPS >> halvings;
            go_to_pair(p, at, (warp << halvings) / WARPS, heads);
        }
        const TileRange range = tile_range(at.length, at.tokens, p.window);
        if (side_by_side) end = position + range.count;
        const int take = min(range.count - at.tile, end - position), first = range.first + at.tile;
        if (at.length > 0) prefetch_tiles(p, at, first + (warp & sharing - 1), first + take, sharing);
    }
    wait_for_previous();
    while (position < end) {
        TileRange range = tile_range(at.length, at.tokens, p.window);
        int take = min(range.count - at.tile, end - position), first = range.first + at.tile;
        int head = at.head / p.row_blocks, first_row = at.head % p.row_blocks * ROWS, rows = at.tokens * p.group;
        TileReader tiles = {p, p.tables + (i64)at.request * p.table_stride, head, first + (warp & sharing - 1),
                            first + take, sharing, lane, 0, 0, 0};
        volatile int* keep = kept[warp];
        keep[0] = sharing, keep[1] = position, keep[2] = end, keep[3] = per_block, keep[4] = total;
        keep[5] = at.request, keep[6] = at.token0, keep[7] = at.head, keep[8] = take;
        keep[9] = at.tile, keep[10] = range.count, keep[11] = at.tokens;
        State st;
        clear(st);
        if (at.length > 0 && first_row < rows) {
            Visible visible = {at.length, at.length - at.tokens + 1, p.window, first_row};
            tiles.start();
            u32 q[ROW_TILES][STEPS][2];
            load_query(q, p, head, first_row, at.token0, rows, n, c);
            attend(st, p, q, tiles, visible);
        }
        share(st, warp, lane);

        sharing = keep[0], position = keep[1], end = keep[2], per_block = keep[3], total = keep[4];
        at.request = keep[5], at.token0 = keep[6], at.head = keep[7], take = keep[8];
        at.tile = keep[9], range.count = keep[10], at.tokens = keep[11];
        head = at.head / p.row_blocks, first_row = at.head % p.row_blocks * ROWS;
        bool split = at.tile > 0 || take < range.count;
        Float4* part = p.parts + (2 * (i64)blockIdx.x + (at.tile + take < range.count)) * FRAGMENTS * 2;
        const int member = warp & sharing - 1;
#pragma unroll
        for (int nt = 0; nt < ROW_TILES; nt++) {
            const Weights all = weigh(warp - member, sharing, nt, c);
            for (int i = member; i < STEPS; i += sharing) {
                const Float4 o = merge_warps(all, warp - member, sharing, nt, i, lane);
                Float4* to = part + (nt * STEPS + i) * 32 + lane;
                if (split) leave(to, o), leave(to + FRAGMENTS, {all.m[0], all.l[0], all.m[1], all.l[1]});
                else write_out(p, o, all.l, i, nt, head, first_row, at, n, c);
            }
        }
        __syncthreads();  // shared memory is free again
        position += take;
        at.tile = 0;
        if (++at.head == heads && position < end) {
            at.head = 0;
            do at.length = p.lengths[++at.request];
            while (!at.length);
            at.token0 = p.query_start[at.request];
            at.tokens = p.query_start[at.request + 1] - at.token0;
        }
    }
    asm volatile("" : "+l"(own));  // read anew, rather than kept in registers
    if (blockIdx.x * per_block < total && own->tile > 0) merge_parts(p, *own);
}
