// What only Hopper has: barriers that count bytes, copies of boxes of a matrix, and warpgroup matrix instructions.
//
// Matrices stand in shared memory in rows of 128 bytes (64 elements), with the hardware's 128-byte swizzle.
#pragma once
#include "common.cuh"

struct __align__(64) TensorMap { u64 opaque[16]; };

// -- barriers and copies ---------------------------------------------------------------------------------------------

DEVICE void init_barrier(u32 at, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(count) : "memory");
}

DEVICE void arrive(u32 at) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at) : "memory"); }

DEVICE void wait_barrier(u32 at, u32 parity) {
    asm volatile(
        "{.reg .pred p;\n"
        "again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
        "@!p bra again;}" ::"r"(at), "r"(parity) : "memory");
}

DEVICE void expect(u32 at, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory");
}

DEVICE void copy_bulk(u32 to, const void* from, int bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}

DEVICE void load_box(u32 to, const TensorMap& map, int column, int row, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%2, %3}], [%4];"
                 ::"r"(to), "l"(&map), "r"(column), "r"(row), "r"(barrier) : "memory");
}

DEVICE void prefetch_map(const TensorMap& map) { asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory"); }

// -- matrix instructions ---------------------------------------------------------------------------------------------

DEVICE void matrix_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void matrix_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> DEVICE void matrix_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }

// A matrix in groups of 8 rows that follow each other; `columns_apart`: bytes between its columns of 64 elements, where an
// instruction spans several.
DEVICE u64 descriptor(u32 address, int columns_apart = 16) {
    return (u64)(address >> 4 & 0x3fff) | (u64)(columns_apart >> 4) << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
}

#define FOUR(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define SIXTEEN(i) FOUR(i), FOUR(i + 1), FOUR(i + 2), FOUR(i + 3)
#define SIXTY4(i) SIXTEEN(i), SIXTEEN(i + 4), SIXTEEN(i + 8), SIXTEEN(i + 12)
#define R8 "%0,%1,%2,%3,%4,%5,%6,%7"
#define R16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define R32 R16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define R64                                                                                                       \
    R32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57" \
        ",%58,%59,%60,%61,%62,%63"
#define R128                                                                                                      \
    R64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89" \
        ",%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111"     \
        ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#if IS_BF16
#define TYPES ".f32.bf16.bf16"  // of sums and of both factors
#else
#define TYPES ".f32.f16.f16"
#endif

// The compiler does not know that a pending instruction writes these: it must not move or use them before the wait.
template <int N> DEVICE void pin(float (&d)[N][4]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : FOUR(i)::"memory");
}
