// Bias, q and k norm, RoPE, quantisation and the write into block images, in one launch.
//
// One warp takes one token, and of its heads (q heads, then k heads, then v heads) HEADS at once. A lane holds 16 bytes of
// each half of a head, so a rotation stays inside a lane. Arithmetic is float32; what RoPE gives is rounded to the
// compute dtype before it is quantised, as in the reference.
//
// Macros: HEAD_DIM; K_FORMAT, V_FORMAT; QUERY_BF16.
#include "kv_formats.cuh"

constexpr int WARPS = 4;
constexpr int HALF = HEAD_DIM / 2;
constexpr int LANES = HEAD_DIM <= 64 ? 4 : HEAD_DIM <= 128 ? 8 : 16;  // of a head; of 96, only six of them
constexpr int HEADS = 32 / LANES;
constexpr int EACH = 8;  // elements of each half in one lane
constexpr int RESIDENT = HEAD_DIM == 96 || K_FORMAT != V_FORMAT ? 5 : 6;  // blocks per multiprocessor, as registers allow

struct Params {
    const void* qkv;             // [tokens, q_heads + 2 kv_heads, HEAD_DIM]; or float32, in parts that are to be added up
    u16* query_out;              // [tokens, q_heads, HEAD_DIM]
    u8* pool;
    const i64* slots;            // [tokens] block * block_size + slot; negative: nothing is written
    const i64* positions;        // [tokens]
    const float* cos_sin;        // [positions, HEAD_DIM]: cos of each frequency, then sin
    const u16* bias;             // as one row of qkv, or null
    const u16* q_norm;           // [HEAD_DIM], or null
    const u16* k_norm;           // [HEAD_DIM], or null
    i64 qkv_stride, part_stride, query_stride;  // elements per token, of qkv per part
    i64 block_stride, k_offset, v_offset, k_scale_offset, v_scale_offset;  // bytes
    int tokens, q_heads, kv_heads, block_size_log2, groups_per_warp, parts;  // groups of HEADS heads; no parts: 16 bits
    float norm_eps;
};

DEVICE float sum_of_head(float x) {
#pragma unroll
    for (int step = LANES / 2; step; step /= 2) x += __shfl_xor_sync(FULL_WARP, x, step);
    return x;
}

DEVICE float max_nan(float a, float b) {  // a NaN must win: it becomes the scale, so that it is seen
    asm("max.NaN.f32 %0, %0, %1;" : "+f"(a) : "f"(b));
    return a;
}

DEVICE float max_of_head(float x) {
#pragma unroll
    for (int step = LANES / 2; step; step /= 2) x = max_nan(x, __shfl_xor_sync(FULL_WARP, x, step));
    return x;
}

// What a lane holds of a row of 16-bit elements.
struct Raw { Words4 half[2]; };

DEVICE Raw load(const u16* row, int at) { return {*(const Words4*)(row + at), *(const Words4*)(row + HALF + at)}; }

DEVICE void unpack(float (&x)[2][EACH], const Raw& raw) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const u32 words[4] = {raw.half[h].x, raw.half[h].y, raw.half[h].z, raw.half[h].w};
#pragma unroll
        for (int i = 0; i < EACH; i++) x[h][i] = widen<QUERY_BF16>((u16)(words[i / 2] >> i % 2 * 16));
    }
}

DEVICE Raw round_to_16bit(const float (&x)[2][EACH]) {
    u32 words[2][EACH / 2];
#pragma unroll
    for (int i = 0; i < EACH; i++) words[i / 4][i % 4] = pack<QUERY_BF16>(x[i / 4][i % 4 * 2], x[i / 4][i % 4 * 2 + 1]);
    return {{{words[0][0], words[0][1], words[0][2], words[0][3]}, {words[1][0], words[1][1], words[1][2], words[1][3]}}};
}

// The sum of all parts, rounded: they come straight from the products.
DEVICE Raw sum_parts(const float* head, i64 part_stride, int parts, int at) {
    float sum[2][EACH] = {};
#pragma unroll 2
    for (int part = 0; part < parts; part++, head += part_stride)
#pragma unroll
        for (int i = 0; i < 2 * EACH; i += 4) {
            const Float4 x = *(const Float4*)(head + i / EACH * HALF + at + i % EACH);
            float* const to = &sum[i / EACH][i % EACH];
            to[0] += x.x, to[1] += x.y, to[2] += x.z, to[3] += x.w;
        }
    return round_to_16bit(sum);
}

DEVICE Raw load_head(const Params& p, int token, int head, int at) {
    const i64 first = token * p.qkv_stride + head * HEAD_DIM;
    return p.parts ? sum_parts((const float*)p.qkv + first, p.part_stride, p.parts, at) : load((const u16*)p.qkv + first, at);
}

DEVICE void store_16bit(u16* row, const float (&x)[2][EACH], int at) {
    const Raw raw = round_to_16bit(x);
    *(Words4*)(row + at) = raw.half[0];
    *(Words4*)(row + HALF + at) = raw.half[1];
}

// x / scale, correctly rounded from the correctly rounded inverse: one Newton step (no over- or underflow can occur).
DEVICE float divide(float x, float scale, float inverse) {
    float quotient = x * inverse;
    return fmaf(fmaf(-quotient, scale, x), inverse, quotient);
}

// Two bytes.
template <int FORMAT> DEVICE u32 encode_pair(float low, float high) {
    if constexpr (FORMAT == FORMAT_INT8) {  // the last byte of the sum is the code
        low = fmaxf(fminf(low, 127.0f), -127.0f) + 12582912.0f;
        high = fmaxf(fminf(high, 127.0f), -127.0f) + 12582912.0f;
        return permute(__float_as_uint(low), __float_as_uint(high), 0x3340) & 0xffff;
    } else {
        return encode_fp8_pair<FORMAT == FORMAT_E5M2>(low, high);
    }
}

template <int FORMAT>
DEVICE void store(u8* row, u16* scale_at, const float (&x)[2][EACH], int at, bool active) {
    if constexpr (Format<FORMAT>::IS_16BIT) {
        if (active) store_16bit((u16*)row, x, at);
    } else {
        float scale = 1;
        if constexpr (Format<FORMAT>::HAS_SCALE) {
            float top = 0;
#pragma unroll
            for (int i = 0; i < 2 * EACH; i++) top = max_nan(top, fabsf(x[i / EACH][i % EACH]));
            top = max_of_head(top) / (FORMAT == FORMAT_INT8 ? 127.0f : 448.0f);
            u16 code = float_to_f16(top > 65504.0f ? 65504.0f : top);
            if (active && at == 0) *scale_at = code;
            scale = f16_to_float(code);
        }
        const float inverse = 1 / scale;
        if (!active) return;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            u32 words[2] = {};
#pragma unroll
            for (int i = 0; i < EACH; i += 2) {
                float a = x[h][i], b = x[h][i + 1];
                if constexpr (Format<FORMAT>::HAS_SCALE) a = divide(a, scale, inverse), b = divide(b, scale, inverse);
                words[i / 4] |= encode_pair<FORMAT>(a, b) << i % 4 * 8;
            }
            if (scale == 0) words[0] = words[1] = 0;
            *(Words2*)(row + h * HALF + at) = {words[0], words[1]};
        }
    }
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, RESIDENT) write_kv(const __grid_constant__ Params p) {
    let_next_start();
    const int token = blockIdx.x * WARPS + (threadIdx.x >> 5), lane = threadIdx.x & 31;
    if (token >= p.tokens) return;
    const i64 slot = load_l2(p.slots + token), position = load_l2(p.positions + token);  // there since the step began
    prefetch_l2(p.cos_sin + position * HEAD_DIM + lane % (HEAD_DIM / 32) * 32);
    const int at = lane % LANES * EACH, all_heads = p.q_heads + 2 * p.kv_heads;
    const int first = blockIdx.y * p.groups_per_warp * HEADS, last = min(first + p.groups_per_warp * HEADS, all_heads);
    int head = first + lane / LANES;
    bool active = at < HALF && head < last;
    if (p.bias && active) prefetch_l2(p.bias + head * HEAD_DIM + at);
    wait_for_previous();
    Raw next = {};
    if (active) next = load_head(p, token, head, at);
    float cosine[EACH] = {}, sine[EACH] = {};  // idle lanes must not bring in a NaN
    if (at < HALF && first < p.q_heads + p.kv_heads) {
        const Float4* from = (const Float4*)(p.cos_sin + position * HEAD_DIM + at);
        const Float4 four[4] = {from[0], from[1], from[HALF / 4], from[HALF / 4 + 1]};
#pragma unroll
        for (int i = 0; i < 2; i++) {
            cosine[4 * i] = four[i].x, cosine[4 * i + 1] = four[i].y;
            cosine[4 * i + 2] = four[i].z, cosine[4 * i + 3] = four[i].w;
            sine[4 * i] = four[i + 2].x, sine[4 * i + 1] = four[i + 2].y;
            sine[4 * i + 2] = four[i + 2].z, sine[4 * i + 3] = four[i + 2].w;
        }
    }
    u8* const block = p.pool + (slot >> p.block_size_log2) * p.block_stride;
    const int in_block = (int)(slot & ((1 << p.block_size_log2) - 1));
    for (int group = first; group < last; group += HEADS) {
        const int own = head;
        const bool is_v = own >= p.q_heads + p.kv_heads, is_q = own < p.q_heads, writes = active;
        float x[2][EACH];
        unpack(x, next);
        head += HEADS;
        active = at < HALF && head < last;
        if (active) next = load_head(p, token, head, at);
        if (p.bias && writes) {
            float bias[2][EACH];
            unpack(bias, load(p.bias + own * HEAD_DIM, at));
#pragma unroll
            for (int i = 0; i < 2 * EACH; i++) x[i / EACH][i % EACH] += bias[i / EACH][i % EACH];
            unpack(x, round_to_16bit(x));
        }
        if (p.q_norm || p.k_norm) {
            const u16* norm = is_v ? nullptr : is_q ? p.q_norm : p.k_norm;
            float squares = 0;
#pragma unroll
            for (int i = 0; i < EACH; i++) squares += x[0][i] * x[0][i] + x[1][i] * x[1][i];
            const float inverse = rsqrtf(sum_of_head(squares) / HEAD_DIM + p.norm_eps);
            if (norm && writes) {
                float weight[2][EACH];
                unpack(weight, load(norm, at));
#pragma unroll
                for (int i = 0; i < 2 * EACH; i++) x[i / EACH][i % EACH] *= inverse;
                unpack(x, round_to_16bit(x));
#pragma unroll
                for (int i = 0; i < 2 * EACH; i++) x[i / EACH][i % EACH] *= weight[i / EACH][i % EACH];
                unpack(x, round_to_16bit(x));
            }
        }
        if (!is_v) {
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                const float a = x[0][i], b = x[1][i];
                x[0][i] = a * cosine[i] - b * sine[i];
                x[1][i] = b * cosine[i] + a * sine[i];
            }
            unpack(x, round_to_16bit(x));
        }
        if (is_q && writes) store_16bit(p.query_out + token * p.query_stride + own * HEAD_DIM, x, at);
        if (group + HEADS <= p.q_heads || slot < 0) continue;
        const bool stores = writes && !is_q;
        const i64 row = ((i64)(own - p.q_heads - (is_v ? p.kv_heads : 0)) << p.block_size_log2) + in_block;
        u8* const v_row = block + p.v_offset + row * HEAD_DIM * Format<V_FORMAT>::BYTES;
        u8* const k_row = block + p.k_offset + row * HEAD_DIM * Format<K_FORMAT>::BYTES;
        u16* const v_scale = (u16*)(block + p.v_scale_offset) + row;
        u16* const k_scale = (u16*)(block + p.k_scale_offset) + row;
        if constexpr (K_FORMAT == V_FORMAT) {
            store<K_FORMAT>(is_v ? v_row : k_row, is_v ? v_scale : k_scale, x, at, stores);
        } else {
            if (group < p.q_heads + p.kv_heads) store<K_FORMAT>(k_row, k_scale, x, at, stores && !is_v);
            if (group + HEADS > p.q_heads + p.kv_heads) store<V_FORMAT>(v_row, v_scale, x, at, stores && is_v);
        }
    }
}
