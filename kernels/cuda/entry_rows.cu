// Paged 584-byte fp8 entries to rows of a bf16 workspace of octets, for prefill attention. A warp takes a row, a lane 16 channels of it.
#include "hopper.cuh"

using namespace hr;

struct Params {
  const uint8_t* pages;  // base of page 0
  int64_t page_stride;   // bytes
  int64_t num_slots;     // slot -1 gives a row of zeros, any other outside [0, num_slots) NaN
  const int32_t* slots;  // [rows]
  uint8_t* octets;       // where row 0 goes
  int32_t rows, log2_entries;
};

// Two e4m3 to two fp32, times f, to two bf16 (exact for the scales of a cache: a code has four bits).
__device__ __forceinline__ uint32_t decode2(uint32_t codes, float f) {
  uint32_t half2;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(half2) : "h"((uint16_t)codes));
  float lo, hi;
  asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %2;\ncvt.f32.f16 %0, a;\ncvt.f32.f16 %1, b;\n}\n" : "=f"(lo), "=f"(hi) : "r"(half2));
  return pack_bf16(lo * f, hi * f);
}

__global__ void __launch_bounds__(256) entry_rows(const __grid_constant__ Params p) {
  after_previous_kernel();
  const int row = blockIdx.x * 8 + (threadIdx.x >> 5), lane = threadIdx.x & 31, in_octet = row & 7;
  if (row >= p.rows) return;
  const int32_t slot = p.slots[row];
  const uint32_t none = slot == -1 ? 0 : 0x7fff7fffu;
  uint4 out[2] = {make_uint4(none, none, none, none), make_uint4(none, none, none, none)};
  if (slot >= 0 && slot < p.num_slots) {
    const int entries = 1 << p.log2_entries, at = slot & (entries - 1);
    const uint8_t* page = p.pages + (int64_t)(slot >> p.log2_entries) * p.page_stride;
    const uint8_t* from = page + at * 576 + (lane < 28 ? lane * 16 : 448 + (lane - 28) * 32);
    if (lane < 28) {
      const uint4 codes = ld_once_v4(from);
      const uint32_t scale = page[entries * 576 + at * 8 + (lane >> 2)];
      const float f = scale == 255 ? __int_as_float(0x7fffffff) : pow2((int)scale - 127);
      out[0] = make_uint4(decode2(codes.x, f), decode2(codes.x >> 16, f), decode2(codes.y, f), decode2(codes.y >> 16, f));
      out[1] = make_uint4(decode2(codes.z, f), decode2(codes.z >> 16, f), decode2(codes.w, f), decode2(codes.w >> 16, f));
    } else {
      out[0] = ld_once_v4(from);
      out[1] = ld_once_v4(from + 16);
    }
  }
  uint8_t* to = p.octets + (int64_t)(row >> 3) * 8192 + (lane >> 2) * 1024 + in_octet * 128;
#pragma unroll
  for (int i = 0; i < 2; ++i) *(uint4*)(to + ((((lane & 3) * 2 + i) ^ in_octet) << 4)) = out[i];
}

extern "C" int hr_entry_rows(const Params* p, void* stream) {
  if (p->rows == 0) return cudaSuccess;
  cudaLaunchConfig_t cfg = {};
  cfg.gridDim = dim3((p->rows + 7) / 8);
  cfg.blockDim = dim3(256);
  cfg.stream = (cudaStream_t)stream;
  cudaLaunchAttribute attr = early_launch();
  cfg.attrs = &attr;
  cfg.numAttrs = 1;
  return cudaLaunchKernelEx(&cfg, entry_rows, *p);
}
