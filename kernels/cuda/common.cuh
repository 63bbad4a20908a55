// Types and PTX wrappers that every kernel needs. No toolkit header is included anywhere: NVRTC alone is enough.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

struct __align__(8) Words2 { u32 x, y; };
struct __align__(16) Words4 { u32 x, y, z, w; };
struct __align__(16) Float4 { float x, y, z, w; };

#define DEVICE __device__ __forceinline__
#pragma nv_diag_suppress 177  // a kernel does not use all of this
#define FULL_WARP 0xffffffffu

// For kernels that are launched early (launcher.py): they start while the one before them ends, and the next one does the
// same with them. Before wait_for_previous() they may read what has been there since the step began, such as weights, and
// write nothing.
DEVICE void let_next_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

DEVICE void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

DEVICE float as_float(u32 bits) { return __uint_as_float(bits); }
DEVICE float negative_infinity() { return __uint_as_float(0xff800000u); }

DEVICE float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

DEVICE float log2_approx(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

DEVICE float reciprocal_approx(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

DEVICE u32 permute(u32 a, u32 b, u32 selector) { return __byte_perm(a, b, selector); }

// -- 16-bit floats ---------------------------------------------------------------------------------------------------

DEVICE float f16_to_float(u16 h) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
    return f;
}

DEVICE float bf16_to_float(u16 h) { return __uint_as_float((u32)h << 16); }

DEVICE u16 float_to_f16(float f) {
    u16 h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
    return h;
}

DEVICE u16 float_to_bf16(float f) {
    u16 h;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(f));
    return h;
}

DEVICE u32 pack_f16(float low, float high) {
    u32 d;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
}

DEVICE u32 pack_bf16(float low, float high) {
    u32 d;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
}

template <bool BF16> DEVICE float widen(u16 h) { return BF16 ? bf16_to_float(h) : f16_to_float(h); }
template <bool BF16> DEVICE u16 narrow(float f) { return BF16 ? float_to_bf16(f) : float_to_f16(f); }
template <bool BF16> DEVICE u32 pack(float low, float high) { return BF16 ? pack_bf16(low, high) : pack_f16(low, high); }

DEVICE u32 add_f16x2(u32 a, u32 b) {
    u32 d;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}

DEVICE u32 mul_f16x2(u32 a, u32 b) {
    u32 d;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}

// -- memory ----------------------------------------------------------------------------------------------------------
// Streaming loads are volatile asm so that the compiler keeps them where the pipeline issues them.

DEVICE Words4 load_stream4(const void* p) {
    Words4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}

DEVICE void load_stream2(const void* p, u32& a, u32& b) {
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v2.u32 {%0, %1}, [%2];" : "=r"(a), "=r"(b) : "l"(p));
}

// Of what is read after wait_for_previous(): it comes from memory meanwhile. Others may still be writing it: the L2 cache
// is where all of them meet.
DEVICE void prefetch_l2(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p) : "memory"); }

DEVICE u32 load_stream1(const void* p) {
    u32 a;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.u32 %0, [%1];" : "=r"(a) : "l"(p));
    return a;
}

DEVICE u16 load_stream_u16(const void* p) {
    u16 a;
    asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(a) : "l"(p));
    return a;
}

// L2 only: what another block of the same launch wrote, or an upload before an early start, is not in this
// multiprocessor's L1.
template <class T> DEVICE T load_l2(const T* p) {
    static_assert(sizeof(T) == 8, "a 64-bit integer");
    T v;
    asm volatile("ld.global.cg.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}

DEVICE Float4 load_l2(const Float4* p) {
    Float4 v;
    asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(p) : "memory");
    return v;
}

// -- tensor cores ----------------------------------------------------------------------------------------------------

// d[16x8] += a[16x16] * b[16x8], float32 accumulators.
template <bool BF16> DEVICE void mma(float* d, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    if constexpr (BF16)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Transpose the 8x8 matrix of 16-bit elements whose row i lies in lanes 4i to 4i + 3.
DEVICE u32 transpose_8x8(u32 a) {
    u32 d;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(a));
    return d;
}
