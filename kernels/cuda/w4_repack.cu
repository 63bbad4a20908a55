// Codes of a published layout, and scales and zero points of W4Weight, into the layout of w4.cuh.
//
// Macros: IS_BF16; GROUP; ZEROS.
#include "w4.cuh"

struct Params {
    const u32* words;    // nibbles: see `column_words`
    const int* order;    // [in], or null
    const u16* scales;   // [out, groups] float16
    const u8* zeros;     // [out, groups] of ZEROS
    u8* codes;           // as in w4.cuh
    u8* records;
    // Feature f of output o is nibble f % 8 of word f / 8 * column_words + o * row_words or, if `by_output`, nibble
    // (0, 4, 1, 5, 2, 6, 3, 7)[o % 8] of word f * column_words + o / 8 * row_words.
    i64 column_words, row_words;
    int by_output, in, outs, units, groups;
};

DEVICE u32 code(const Params& p, int row, int column) {
    // Outside the matrix: the zero point, so that it counts as nothing.
    if (row >= p.outs || column >= p.in) return ZEROS ? 0 : 8;
    const int f = p.order ? p.order[column] : column;
    const u32 word = p.by_output ? p.words[f * p.column_words + (row >> 3) * p.row_words]
                                 : p.words[(f >> 3) * p.column_words + row * p.row_words];
    const int nibble = p.by_output ? (row & 7) >> 1 | (row & 1) << 2 : f & 7;
    return word >> 4 * nibble & 15;
}

extern "C" __global__ void __launch_bounds__(128) w4_repack(const __grid_constant__ Params p) {
    const int lane = threadIdx.x & 31, unit = blockIdx.x * 4 + (threadIdx.x >> 5), tile = blockIdx.y;
    if (unit >= p.units) return;
    const int row = tile * 16 + (lane >> 2);
    u32 words[4];
#pragma unroll
    for (int s = 0; s < 4; s++) {
        words[s] = 0;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const int column = unit * UNIT + s * 16 + (lane & 3) * 2 + (i & 2) * 4 + (i >> 2);
            words[s] |= code(p, row + (i & 1) * 8, column) << 4 * i;
        }
    }
    ((Words4*)(p.codes + codes_at(tile, unit, p.units)))[lane] = {words[0], words[1], words[2], words[3]};
    if (unit % SPAN || lane & 3) return;
    u16* to = (u16*)(p.records + records_at(tile, unit, p.units) + (lane >> 2) * RECORD);
#pragma unroll
    for (int i = 0; i < PER * 2; i++) {
        const int group = unit * UNIT / GROUP + i / 2, r = row + i % 2 * 8;
        const bool valid = r < p.outs && group < p.groups;
        const i64 from = (i64)r * p.groups + group;
        u16* record = to + i / 2 * (ZEROS ? 4 : 2) + i % 2;
        record[0] = valid ? p.scales[from] : 0;
        if (ZEROS) record[2] = zero_bits(valid ? p.zeros[from] : 0, i % 2);
    }
}
