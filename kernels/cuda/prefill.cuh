// What the two kernels of prefill attention share: loads of q and of rows, sums over a quad, the store of the output.
#pragma once
#include <cuda.h>

#include "hopper.cuh"

namespace hr {

__device__ __forceinline__ void mbar_expect(uint32_t bar, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
__device__ __forceinline__ void bulk_load(uint32_t to, const void* from, uint32_t bytes, uint32_t bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
               "r"(bytes), "r"(bar)
               : "memory");
}

// After a wait: what the product wrote is read from here on, not before (the compiler sees no tie between the two).
template <int N>
__device__ __forceinline__ void settled(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// 64 heads x 64 channels of one query.
__device__ __forceinline__ void tensor_load(uint32_t to, const CUtensorMap* map, int channel, int head, int query, uint32_t bar) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to),
               "l"(map), "r"(channel), "r"(head), "r"(query), "r"(bar)
               : "memory");
}

__device__ __forceinline__ float quad_max(float v) {
  v = fmaxf(v, __shfl_xor_sync(~0u, v, 1));
  return fmaxf(v, __shfl_xor_sync(~0u, v, 2));
}
__device__ __forceinline__ float quad_sum(float v) {
  v += __shfl_xor_sync(~0u, v, 1);
  return v + __shfl_xor_sync(~0u, v, 2);
}

// Word i of lane l of a quad becomes word l of lane i: eight neighbouring columns come together in one lane.
__device__ __forceinline__ uint4 turn(uint32_t a, uint32_t b, uint32_t c, uint32_t d, int quad) {
  const bool odd = quad & 1, high = quad & 2;
  uint32_t x = __shfl_xor_sync(~0u, odd ? a : b, 1), y = __shfl_xor_sync(~0u, odd ? c : d, 1);
  if (odd) a = x, c = y; else b = x, d = y;
  x = __shfl_xor_sync(~0u, high ? a : c, 2);
  y = __shfl_xor_sync(~0u, high ? b : d, 2);
  if (high) a = x, b = y; else c = x, d = y;
  return make_uint4(a, b, c, d);
}

// 64 channels of the output: 8 blocks of 8 columns, of which a quad's lanes have two columns each (a word), of rows r and r + 8 in turn.
__device__ __forceinline__ void store_packed(const uint32_t (&w)[16], __nv_bfloat16* upper, int64_t to_lower, int quad, bool has_upper,
                                             bool has_lower) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint4 a = turn(w[8 * i], w[8 * i + 2], w[8 * i + 4], w[8 * i + 6], quad);
    const uint4 b = turn(w[8 * i + 1], w[8 * i + 3], w[8 * i + 5], w[8 * i + 7], quad);
    if (has_upper) *(uint4*)(upper + (4 * i + quad) * 8) = a;
    if (has_lower) *(uint4*)(upper + to_lower + (4 * i + quad) * 8) = b;
  }
}
__device__ __forceinline__ void store_part(const float (&o)[32], const float (&f)[2], __nv_bfloat16* upper, int64_t to_lower, int quad,
                                           bool has_upper, bool has_lower) {
  uint32_t w[16];
#pragma unroll
  for (int c = 0; c < 16; ++c) w[c] = pack_bf16(o[2 * c] * f[c & 1], o[2 * c + 1] * f[c & 1]);
  store_packed(w, upper, to_lower, quad, has_upper, has_lower);
}

__device__ __forceinline__ float (&low_half(float (&o)[128]))[64] { return *(float(*)[64])(o); }
__device__ __forceinline__ float (&high_half(float (&o)[128]))[64] { return *(float(*)[64])(o + 64); }

// The driver's encoder of tensor maps, found at run time: the object needs no driver library to link with.
inline cudaError_t encode_q(CUtensorMap* map, const void* q, int heads, int queries, int64_t stride_h, int64_t stride_t) {
  static decltype(&cuTensorMapEncodeTiled) encode = nullptr;
  if (!encode) {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    cudaError_t e = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
    if (e != cudaSuccess) return e;
    if (result != cudaDriverEntryPointSuccess) return cudaErrorNotSupported;
    encode = (decltype(encode))found;
  }
  const cuuint64_t dims[3] = {512, (cuuint64_t)heads, (cuuint64_t)queries}, strides[2] = {(cuuint64_t)stride_h * 2, (cuuint64_t)stride_t * 2};
  const cuuint32_t box[3] = {64, 64, 1}, step[3] = {1, 1, 1};
  const CUresult r = encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, (void*)q, dims, strides, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
                            CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return r == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

template <class P>
inline cudaError_t launch_prefill(void (*kernel)(CUtensorMap, P), const P& p, const void* q, int64_t stride_t, int64_t stride_h, int blocks,
                                  uint32_t smem_bytes, cudaStream_t stream) {
  if (p.queries == 0) return cudaSuccess;
  CUtensorMap map;
  cudaError_t e = encode_q(&map, q, p.heads, p.queries, stride_h, stride_t);
  if (e == cudaSuccess) e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes);
  if (e != cudaSuccess) return e;
  cudaLaunchConfig_t cfg = {};
  cfg.gridDim = dim3(p.queries < blocks ? p.queries : blocks, (p.heads + 63) / 64);
  cfg.blockDim = dim3(384);
  cfg.dynamicSmemBytes = smem_bytes;
  cfg.stream = stream;
  cudaLaunchAttribute attr = early_launch();
  cfg.attrs = &attr;
  cfg.numAttrs = 1;
  return cudaLaunchKernelEx(&cfg, kernel, map, p);
}

}  // namespace hr
