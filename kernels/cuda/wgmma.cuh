// Warp-group products (wgmma): D, 64 rows of fp32 in registers, gets A B, or that in addition to what it holds. A has 64 rows, in
// shared memory (ss, by a descriptor) or in registers (rs); B lies in shared memory, along its depth or (pv) along its columns.
//
// Shared-memory operands are rows of 128 bytes under the 128-byte swizzle: the 16-byte chunk c of row r lies at chunk
// c ^ (r % 8). Eight rows (1024 bytes) are one atom; the base of every operand is aligned to 1024 bytes.
#pragma once
#include <stdint.h>

namespace hr {

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
// After a wait: what the product wrote is read from here on, not before (the compiler sees no tie between the two).
template <int N>
__device__ __forceinline__ void settled(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Operand descriptor under the 128-byte swizzle. Row-contiguous along k: lead is unused and stride (between groups of 8
// rows) is 1024. Contiguous along m or n (the transposed form): lead is between blocks of 64 columns, stride between groups of 8 k.
__device__ __forceinline__ uint64_t operand(uint32_t addr, uint32_t lead_bytes, uint32_t stride_bytes) {
  return (uint64_t)((addr & 0x3ffff) >> 4) | ((uint64_t)(lead_bytes >> 4) << 16) | ((uint64_t)(stride_bytes >> 4) << 32) |
         ((uint64_t)1 << 62);
}

// The operands of D: their names, and the registers that they are.
#define HR_NAMES8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define HR_NAMES16 HR_NAMES8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define HR_NAMES24 HR_NAMES16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define HR_NAMES32 HR_NAMES24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define HR_NAMES64 \
  HR_NAMES32 \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define HR_NAMES72 HR_NAMES64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define HR_NAMES128 \
  HR_NAMES64 \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, " \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define HR_D8(i) \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define HR_D16(i) HR_D8(i), HR_D8(i + 8)
#define HR_D24(i) HR_D16(i), HR_D8(i + 16)
#define HR_D32(i) HR_D24(i), HR_D8(i + 24)
#define HR_D64(i) HR_D32(i), HR_D32(i + 32)
#define HR_D128(i) HR_D64(i), HR_D64(i + 64)
#define HR_D72(i) HR_D64(i), HR_D8(i + 64)

// D: the first N words of an array. a, b, p: the names of the operands after D's N. flags: what follows the two signs.
#define HR_WGMMA_SS(name, shape, N, a, b, p, flags)                                                                     \
  template <int M>                                                                                                      \
  __device__ __forceinline__ void name(float (&d)[M], uint64_t desc_a, uint64_t desc_b, int accumulate) {               \
    static_assert(M >= N, "");                                                                                          \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " p ", 0;\nwgmma.mma_async.sync.aligned." shape " {" HR_NAMES##N       \
                 "}, " a ", " b ", p, 1, 1" flags ";\n}\n"                                                                \
                 : HR_D##N(0)                                                                                           \
                 : "l"(desc_a), "l"(desc_b), "r"(accumulate));                                                          \
  }
#define HR_WGMMA_RS(name, shape, N, a, b, p, flags)                                                                     \
  template <int M>                                                                                                      \
  __device__ __forceinline__ void name(float (&d)[M], const uint32_t(&a_)[4], uint64_t desc_b, int accumulate) {        \
    static_assert(M >= N, "");                                                                                          \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " p ", 0;\nwgmma.mma_async.sync.aligned." shape " {" HR_NAMES##N       \
                 "}, {" a "}, " b ", p, 1, 1" flags ";\n}\n"                                                              \
                 : HR_D##N(0)                                                                                           \
                 : "r"(a_[0]), "r"(a_[1]), "r"(a_[2]), "r"(a_[3]), "l"(desc_b), "r"(accumulate));                       \
  }

HR_WGMMA_SS(wgmma_qk16, "m64n16k16.f32.bf16.bf16", 8, "%8", "%9", "%10", ", 0, 0")
HR_WGMMA_SS(wgmma_qk32, "m64n32k16.f32.bf16.bf16", 16, "%16", "%17", "%18", ", 0, 0")
HR_WGMMA_SS(wgmma_qk48, "m64n48k16.f32.bf16.bf16", 24, "%24", "%25", "%26", ", 0, 0")
HR_WGMMA_SS(wgmma_qk, "m64n64k16.f32.bf16.bf16", 32, "%32", "%33", "%34", ", 0, 0")
HR_WGMMA_SS(wgmma_qk144, "m64n144k16.f32.bf16.bf16", 72, "%72", "%73", "%74", ", 0, 0")
HR_WGMMA_SS(wgmma_pv_ss, "m64n128k16.f32.bf16.bf16", 64, "%64", "%65", "%66", ", 0, 1")
HR_WGMMA_SS(wgmma_pv_ss256, "m64n256k16.f32.bf16.bf16", 128, "%128", "%129", "%130", ", 0, 1")
HR_WGMMA_RS(wgmma_qk16_rs, "m64n16k16.f32.bf16.bf16", 8, "%8, %9, %10, %11", "%12", "%13", ", 0")
HR_WGMMA_RS(wgmma_qk32_rs, "m64n32k16.f32.bf16.bf16", 16, "%16, %17, %18, %19", "%20", "%21", ", 0")
HR_WGMMA_RS(wgmma_qk48_rs, "m64n48k16.f32.bf16.bf16", 24, "%24, %25, %26, %27", "%28", "%29", ", 0")
HR_WGMMA_RS(wgmma_qk_rs, "m64n64k16.f32.bf16.bf16", 32, "%32, %33, %34, %35", "%36", "%37", ", 0")
HR_WGMMA_RS(wgmma_pv64, "m64n64k16.f32.bf16.bf16", 32, "%32, %33, %34, %35", "%36", "%37", ", 1")
HR_WGMMA_RS(wgmma_pv_rs, "m64n128k16.f32.bf16.bf16", 64, "%64, %65, %66, %67", "%68", "%69", ", 1")
HR_WGMMA_RS(wgmma_pv_rs256, "m64n256k16.f32.bf16.bf16", 128, "%128, %129, %130, %131", "%132", "%133", ", 1")
HR_WGMMA_RS(wgmma_fp8_rs, "m64n64k32.f32.e4m3.e4m3", 32, "%32, %33, %34, %35", "%36", "%37", "")

#undef HR_WGMMA_SS
#undef HR_WGMMA_RS
#undef HR_NAMES8
#undef HR_NAMES16
#undef HR_NAMES24
#undef HR_NAMES32
#undef HR_NAMES64
#undef HR_NAMES72
#undef HR_NAMES128
#undef HR_D8
#undef HR_D16
#undef HR_D24
#undef HR_D32
#undef HR_D64
#undef HR_D72
#undef HR_D128

}  // namespace hr
