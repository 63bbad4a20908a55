// The epilogue of a layer whose rows are a gate's and what it lets through, in turn: silu(gate) * up.
#pragma once
#include "common.cuh"

DEVICE float silu(float x) { return __fdividef(x, 1.0f + exp2_approx(x * -1.4426950408889634f)); }

// Of the sums of 16 rows, 8 outputs, by 8 tokens, a lane has those of one token that begin with `output`, two.
struct Gated {
    int output, token;
    u32 both;

    DEVICE Gated(const float (&sums)[4]) {
        const int lane = threadIdx.x & 31, row = lane >> 2;  // its first; the other is 8 below
        const bool is_up = row & 1, is_low = row >> 1 & 1;
        float own[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {  // a gate's lane takes the first of its tokens, the other lane the second
            const float first = sums[2 * i], second = sums[2 * i + 1];
            const float other = __shfl_xor_sync(FULL_WARP, is_up ? first : second, 4);
            own[i] = is_up ? silu(other) * second : silu(first) * other;
        }
        const float other = __shfl_xor_sync(FULL_WARP, is_low ? own[0] : own[1], 8);
        both = is_low ? pack<IS_BF16>(other, own[1]) : pack<IS_BF16>(own[0], other);
        token = (lane & 3) * 2 + is_up, output = (row >> 2) * 2 + is_low * 4;
    }
};
