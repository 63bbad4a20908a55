// How KV elements are stored, and how they become 16-bit floats for the tensor cores.
#pragma once
#include "common.cuh"

#define FORMAT_F16 0
#define FORMAT_BF16 1
#define FORMAT_INT8 2       // int8 and a f16 scale per token, KV head and K or V
#define FORMAT_E4M3 3
#define FORMAT_E5M2 4
#define FORMAT_E4M3_SCALED 5

// 8-bit floats in hardware: conversions exist from compute capability 8.9. The software path can be forced for tests.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890 && !defined(SOFTWARE_FP8)
#define HARDWARE_FP8 1
#else
#define HARDWARE_FP8 0
#endif

template <int FORMAT> struct Format {
    static constexpr bool IS_16BIT = FORMAT == FORMAT_F16 || FORMAT == FORMAT_BF16;
    static constexpr int BYTES = IS_16BIT ? 2 : 1;
    static constexpr bool BF16_MMA = FORMAT == FORMAT_BF16;  // everything else is multiplied as f16
    static constexpr bool HAS_SCALE = FORMAT == FORMAT_INT8 || FORMAT == FORMAT_E4M3_SCALED;
    static constexpr bool IS_E4M3 = FORMAT == FORMAT_E4M3 || FORMAT == FORMAT_E4M3_SCALED;
    // The software decode of e4m3 only moves bits: exponents come out 8 too small.
    static constexpr float FACTOR = IS_E4M3 && !HARDWARE_FP8 ? 256.0f : 1.0f;
};

// Four bytes of an 8-bit format to two f16 pairs, in order; times FACTOR they are the stored values.
// In software a NaN of e4m3 reads as +-480.
template <int FORMAT> DEVICE void decode4(u32 word, u32& low, u32& high) {
    if constexpr (FORMAT == FORMAT_INT8) {
        // 0x64XX is 1024 + XX in f16, and XX is the value + 128.
        u32 biased = word ^ 0x80808080u;
        low = add_f16x2(permute(biased, 0x64646464u, 0x4140), 0xe480e480u);
        high = add_f16x2(permute(biased, 0x64646464u, 0x4342), 0xe480e480u);
    } else if constexpr (FORMAT == FORMAT_E5M2) {
        low = permute(word, 0, 0x1404);
        high = permute(word, 0, 0x3424);
    } else {
#if HARDWARE_FP8
        asm("{.reg .b16 a, b; mov.b32 {a, b}, %2; cvt.rn.f16x2.e4m3x2 %0, a; cvt.rn.f16x2.e4m3x2 %1, b;}"
            : "=r"(low), "=r"(high) : "r"(word));
#else
        u32 a = permute(word, 0, 0x1404), b = permute(word, 0, 0x3424);
        low = (a & 0x80008000u) | ((a & 0x7f007f00u) >> 1);
        high = (b & 0x80008000u) | ((b & 0x7f007f00u) >> 1);
#endif
    }
}

// Floats to e4m3 or e5m2, to nearest even, saturating; NaN stays NaN.
template <bool E5M2> DEVICE u32 encode_fp8(float x) {
    constexpr int MANTISSA = E5M2 ? 2 : 3, BIAS = E5M2 ? 15 : 7;
    constexpr u32 SMALLEST_NORMAL = (u32)(127 + 1 - BIAS) << 23;
    constexpr u32 DENORMAL = (u32)(127 - BIAS + (23 - MANTISSA) + 1) << 23;
    u32 sign = __float_as_uint(x) >> 24 & 0x80u;
    u32 u = __float_as_uint(x) & 0x7fffffffu;
    if (u > 0x7f800000u) return sign | 0x7fu;
    u = min(u, __float_as_uint(E5M2 ? 57344.0f : 448.0f));
    if (u < SMALLEST_NORMAL)  // the sum's last bits are the code: float addition does the rounding
        return sign | (__float_as_uint(as_float(u) + as_float(DENORMAL)) - DENORMAL);
    u32 odd = u >> (23 - MANTISSA) & 1;
    return sign | ((u - ((u32)(127 - BIAS) << 23) + ((1u << (22 - MANTISSA)) - 1) + odd) >> (23 - MANTISSA));
}

template <bool E5M2> DEVICE u32 encode_fp8_pair(float low, float high) {
#if HARDWARE_FP8
    u16 pair;
    if constexpr (E5M2) asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    else asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
#else
    return encode_fp8<E5M2>(low) | encode_fp8<E5M2>(high) << 8;
#endif
}
