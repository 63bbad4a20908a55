// 4-bit weights as the tensor cores want them: how they lie in memory, and how they become 16-bit floats.
//
// Codes: tiles of 16 outputs by 64 input features, 512 bytes each: [pair of row tiles][unit][2][lane][4 words]. A
// lane's word s is its fragment of the 16 x 16 operand of mma.m16n8k16 (and of its rows of wgmma's 64 x 16) for the
// features 16 s to 16 s + 15: nibbles i and 4 + i are the low and the high half of fragment register i. Lane 4 g + t so
// holds rows g and g + 8.
// Scales: records [pair of row tiles][unit / SPAN][2][g], of PER groups each: scales of rows g and g + 8 (float16, to
// be multiplied by one factor for the whole weight), then, if ZEROS, what dequantising adds to both rows, from
// `zero_bits`. The number of units is even.
//
// Macros: IS_BF16; GROUP (32, 64, 128); ZEROS.
#pragma once
#include "common.cuh"

constexpr int UNIT = 64, TILE_BYTES = 512;
constexpr int SPAN = GROUP > UNIT ? GROUP / UNIT : 1;  // units that share a record
constexpr int PER = GROUP < UNIT ? UNIT / GROUP : 1;   // groups of a unit
constexpr int RECORD = PER * (ZEROS ? 8 : 4);          // bytes

// Where a row tile's part of a unit begins.
DEVICE i64 codes_at(int tile, int unit, int units) {
    return (((i64)(tile >> 1) * units + unit) * 2 + (tile & 1)) * TILE_BYTES;
}

DEVICE i64 records_at(int tile, int unit, int units) {
    return (((i64)(tile >> 1) * (units / SPAN) + unit / SPAN) * 2 + (tile & 1)) * (8 * RECORD);
}

// A nibble q in the low bits of a float's mantissa is 1024 + q (float16) or 128 + q (bfloat16); in the next bits of a
// float16, 1024 + 16 q. The 16-bit float that takes the constant and the zero point away, as row g or g + 8 needs it:
DEVICE u32 zero_bits(int zero, bool upper_row) {
    return IS_BF16 ? 0xc300u + zero : upper_row ? 0xd400u + 16 * zero : 0xe400u + zero;
}

DEVICE u32 fma_x2(u32 a, u32 b, u32 c) {
    u32 d;
    if (IS_BF16) asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    else asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

// (a & mask) | bits
DEVICE u32 pick(u32 a, u32 mask, u32 bits) {
    u32 d;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(a), "r"(mask), "r"(bits));
    return d;
}

// What is added to the rows g and g + 8, twice in a word each.
struct Zero { u32 g, g8; };
DEVICE Zero symmetric() { return {zero_bits(8, false) * 0x10001u, zero_bits(8, true) * 0x10001u}; }
DEVICE Zero zero_of(u32 both) { return {permute(both, 0, 0x1010), permute(both, 0, 0x3232)}; }

// code - zero, exactly, as a fragment.
DEVICE void dequantize(u32 (&a)[4], u32 w, Zero zero) {
    if (IS_BF16) {
        const u32 one = 0x3f803f80u;
        a[0] = fma_x2(pick(w, 0x000f000fu, 0x43004300u), one, zero.g);
        a[1] = fma_x2(pick(w >> 4, 0x000f000fu, 0x43004300u), one, zero.g8);
        a[2] = fma_x2(pick(w >> 8, 0x000f000fu, 0x43004300u), one, zero.g);
        a[3] = fma_x2(pick(w >> 12, 0x000f000fu, 0x43004300u), one, zero.g8);
    } else {
        const u32 sixteenth = 0x2c002c00u, v = w >> 8;
        a[0] = add_f16x2(pick(w, 0x000f000fu, 0x64006400u), zero.g);
        a[1] = fma_x2(pick(w, 0x00f000f0u, 0x64006400u), sixteenth, zero.g8);
        a[2] = add_f16x2(pick(v, 0x000f000fu, 0x64006400u), zero.g);
        a[3] = fma_x2(pick(v, 0x00f000f0u, 0x64006400u), sixteenth, zero.g8);
    }
}

// -- copies to shared memory -----------------------------------------------------------------------------------------

template <int BYTES> DEVICE void copy_async(u32 to, const void* from) {
    if constexpr (BYTES == 16)
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(BYTES) : "memory");
}

// Zeros if not valid.
DEVICE void copy_async_or_zero(u32 to, const void* from, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0) : "memory");
}

DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> DEVICE void wait_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

DEVICE Words4 load_shared4(u32 at) {
    Words4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
    return v;
}

DEVICE u32 load_shared(u32 at) {
    u32 v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at) : "memory");
    return v;
}

// Four 8x8 matrices, whose rows' addresses are in the lanes.
DEVICE void load_matrices(u32* m, u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(at) : "memory");
}
