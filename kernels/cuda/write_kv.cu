// Bias, q and k norm, RoPE, quantisation and the write into block images, in one launch.
//
// One warp takes one token and up to HEADS_PER_WARP of its heads (q heads, then k heads, then v heads). Lane i holds
// elements PAIR * i .. and the same ones of the other half, so a rotation stays inside a lane. Arithmetic is float32;
// what RoPE gives is rounded to the compute dtype before it is quantised, as in the reference.
//
// Macros: HEAD_DIM; K_FORMAT, V_FORMAT; QUERY_BF16.
#include "kv_formats.cuh"

constexpr int WARPS = 4;
constexpr int HALF = HEAD_DIM / 2;
constexpr int PAIR = HEAD_DIM > 128 ? 4 : 2;  // elements of each half in one lane
constexpr int LANES = HALF / PAIR;

struct Params {
    const u16* qkv;              // [tokens, q_heads + 2 kv_heads, HEAD_DIM]
    u16* query_out;              // [tokens, q_heads, HEAD_DIM]
    u8* pool;
    const i64* slots;            // [tokens] block * block_size + slot; negative: nothing is written
    const i64* positions;        // [tokens]
    const float* cos_sin;        // [positions, HEAD_DIM]: cos of each frequency, then sin
    const u16* bias;             // as one row of qkv, or null
    const u16* q_norm;           // [HEAD_DIM], or null
    const u16* k_norm;           // [HEAD_DIM], or null
    i64 qkv_stride, query_stride;  // elements per token
    i64 block_stride, k_offset, v_offset, k_scale_offset, v_scale_offset;  // bytes
    int tokens, q_heads, kv_heads, block_size_log2, heads_per_warp;
    float norm_eps;
};

DEVICE float sum_of_warp(float x) {
#pragma unroll
    for (int step = 16; step; step /= 2) x += __shfl_xor_sync(FULL_WARP, x, step);
    return x;
}

DEVICE float max_of_warp(float x) {
#pragma unroll
    for (int step = 16; step; step /= 2) {  // a NaN must win: it becomes the scale, so that it is seen
        float other = __shfl_xor_sync(FULL_WARP, x, step);
        asm("max.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(other));
    }
    return x;
}

DEVICE void load(float (&x)[2][PAIR], const u16* row, int lane) {
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
        for (int i = 0; i < PAIR; i += 2) {
            u32 w = *(const u32*)(row + h * HALF + lane * PAIR + i);
            x[h][i] = widen<QUERY_BF16>((u16)w);
            x[h][i + 1] = widen<QUERY_BF16>((u16)(w >> 16));
        }
}

DEVICE void store_16bit(u16* row, const float (&x)[2][PAIR], int lane) {
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
        for (int i = 0; i < PAIR; i += 2)
            *(u32*)(row + h * HALF + lane * PAIR + i) = pack<QUERY_BF16>(x[h][i], x[h][i + 1]);
}

// x / scale, correctly rounded from the correctly rounded inverse: one Newton step (no over- or underflow can occur).
DEVICE float divide(float x, float scale, float inverse) {
    float quotient = x * inverse;
    return fmaf(fmaf(-quotient, scale, x), inverse, quotient);
}

template <int FORMAT> DEVICE u32 encode(float x, float scale, float inverse) {
    if constexpr (Format<FORMAT>::HAS_SCALE) x = divide(x, scale, inverse);
    if constexpr (FORMAT == FORMAT_INT8) return (u32)max(-127, min(127, __float2int_rn(x))) & 0xff;
    else return encode_fp8<FORMAT == FORMAT_E5M2>(x);
}

template <int FORMAT>
DEVICE void store(u8* row, u16* scale_at, const float (&x)[2][PAIR], int lane, bool active) {
    if constexpr (Format<FORMAT>::IS_16BIT) {
        if (active) store_16bit((u16*)row, x, lane);
    } else {
        float scale = 1;
        if constexpr (Format<FORMAT>::HAS_SCALE) {
            float top = 0;
            if (active)
#pragma unroll
                for (int h = 0; h < 2; h++)
#pragma unroll
                    for (int i = 0; i < PAIR; i++) {
                        float magnitude = fabsf(x[h][i]);
                        asm("max.NaN.f32 %0, %0, %1;" : "+f"(top) : "f"(magnitude));
                    }
            top = max_of_warp(top) / (FORMAT == FORMAT_INT8 ? 127.0f : 448.0f);
            u16 code = float_to_f16(top > 65504.0f ? 65504.0f : top);
            if (lane == 0) *scale_at = code;
            scale = f16_to_float(code);
        }
        bool zero = Format<FORMAT>::HAS_SCALE && scale == 0;
        float inverse = 1 / scale;
        if (active)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                u32 word = 0;
#pragma unroll
                for (int i = 0; i < PAIR; i++) word |= (zero ? 0 : encode<FORMAT>(x[h][i], scale, inverse)) << (8 * i);
                if constexpr (PAIR == 4) *(u32*)(row + h * HALF + lane * 4) = word;
                else *(u16*)(row + h * HALF + lane * 2) = (u16)word;
            }
    }
}

extern "C" __global__ void __launch_bounds__(WARPS * 32) write_kv(const __grid_constant__ Params p) {
    let_next_start();
    wait_for_previous();
    int token = blockIdx.x * WARPS + (threadIdx.x >> 5), lane = threadIdx.x & 31;
    if (token >= p.tokens) return;
    bool active = lane < LANES;
    int first = blockIdx.y * p.heads_per_warp;
    int last = min(first + p.heads_per_warp, p.q_heads + 2 * p.kv_heads);
    float cosine[PAIR], sine[PAIR];
    if (active && first < p.q_heads + p.kv_heads) {
        const float* at = p.cos_sin + p.positions[token] * HEAD_DIM + lane * PAIR;
#pragma unroll
        for (int i = 0; i < PAIR; i++) cosine[i] = at[i], sine[i] = at[HALF + i];
    }
    i64 slot = p.slots[token];
    u8* block = p.pool + (slot >> p.block_size_log2) * p.block_stride;
    int in_block = (int)(slot & ((1 << p.block_size_log2) - 1));
    for (int head = first; head < last; head++) {
        bool is_v = head >= p.q_heads + p.kv_heads, is_q = head < p.q_heads;
        float x[2][PAIR] = {};
        if (active) {
            load(x, p.qkv + token * p.qkv_stride + head * HEAD_DIM, lane);
            if (p.bias) {
                float bias[2][PAIR];
                load(bias, p.bias + head * HEAD_DIM, lane);
#pragma unroll
                for (int i = 0; i < PAIR; i++)
                    x[0][i] = widen<QUERY_BF16>(narrow<QUERY_BF16>(x[0][i] + bias[0][i])),
                    x[1][i] = widen<QUERY_BF16>(narrow<QUERY_BF16>(x[1][i] + bias[1][i]));
            }
        }
        const u16* norm = is_q ? p.q_norm : p.k_norm;
        if (!is_v && norm) {
            float squares = 0;
#pragma unroll
            for (int i = 0; i < PAIR; i++) squares += x[0][i] * x[0][i] + x[1][i] * x[1][i];
            float inverse = rsqrtf(sum_of_warp(squares) / HEAD_DIM + p.norm_eps);
            float weight[2][PAIR];
            if (active) load(weight, norm, lane);
#pragma unroll
            for (int h = 0; h < 2; h++)
#pragma unroll
                for (int i = 0; i < PAIR; i++)
                    x[h][i] = widen<QUERY_BF16>(
                        narrow<QUERY_BF16>(widen<QUERY_BF16>(narrow<QUERY_BF16>(x[h][i] * inverse)) * weight[h][i]));
        }
        if (!is_v)
#pragma unroll
            for (int i = 0; i < PAIR; i++) {
                float a = x[0][i], b = x[1][i];
                x[0][i] = widen<QUERY_BF16>(narrow<QUERY_BF16>(a * cosine[i] - b * sine[i]));
                x[1][i] = widen<QUERY_BF16>(narrow<QUERY_BF16>(b * cosine[i] + a * sine[i]));
            }
        if (is_q) {
            if (active) store_16bit(p.query_out + token * p.query_stride + head * HEAD_DIM, x, lane);
        } else if (slot >= 0) {
            int kv_head = is_v ? head - p.q_heads - p.kv_heads : head - p.q_heads;
            i64 row = ((i64)kv_head << p.block_size_log2) + in_block;
            if (is_v)
                store<V_FORMAT>(block + p.v_offset + row * HEAD_DIM * Format<V_FORMAT>::BYTES,
                                (u16*)(block + p.v_scale_offset) + row, x, lane, active);
            else
                store<K_FORMAT>(block + p.k_offset + row * HEAD_DIM * Format<K_FORMAT>::BYTES,
                                (u16*)(block + p.k_scale_offset) + row, x, lane, active);
        }
    }
}
