// The whole weight as 16-bit floats, for a dense product with many tokens.
//
// Macros: IS_BF16; GROUP; ZEROS.
#include "w4.cuh"

struct Params {
    const u8* codes;
    const u8* records;
    u8* out;  // [outs, in]
    float factor;
    int in, outs, units;
};

constexpr int WARPS = 4, PITCH = UNIT * 2 + 16;

extern "C" __global__ void __launch_bounds__(WARPS * 32) w4_dequantize(const __grid_constant__ Params p) {
    __shared__ __align__(16) u8 staged[WARPS][16 * PITCH];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const int unit = blockIdx.x * WARPS + warp, tile = blockIdx.y;
    if (unit >= p.units) return;
    const Words4 w = load_stream4(p.codes + codes_at(tile, unit, p.units) + lane * 16);
    const u32* record = (const u32*)(p.records + records_at(tile, unit, p.units) + g * RECORD);
    const u32 words[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
    for (int s = 0; s < 4; s++) {
        const int group = s * PER / 4;
        const u32 scales = record[group * (ZEROS ? 2 : 1)];
        const float scale[2] = {f16_to_float(scales) * p.factor, f16_to_float(scales >> 16) * p.factor};
        u32 a[4];
        dequantize(a, words[s], ZEROS ? zero_of(record[group * 2 + 1]) : symmetric());
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float low = widen<IS_BF16>((u16)a[i]), high = widen<IS_BF16>((u16)(a[i] >> 16));
            u8* to = staged[warp] + (g + i % 2 * 8) * PITCH + (s * 16 + t * 2 + i / 2 * 8) * 2;
            *(u32*)to = pack<IS_BF16>(low * scale[i % 2], high * scale[i % 2]);
        }
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int row = tile * 16 + i * 4 + lane / 8, column = unit * UNIT + lane % 8 * 8;
        if (row >= p.outs || column >= p.in) continue;
        const Words4 v = *(const Words4*)(staged[warp] + (i * 4 + lane / 8) * PITCH + lane % 8 * 16);
        *(Words4*)(p.out + ((i64)row * p.in + column) * 2) = v;
    }
}
