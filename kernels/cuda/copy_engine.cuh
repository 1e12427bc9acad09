// The copy engine: bulk copies into shared memory, told to a barrier that expects their bytes, and maps of tensors for it.
#pragma once
#include <cuda.h>
#include <cuda_runtime.h>
#include <stdint.h>

namespace hr {

__device__ __forceinline__ void mbar_expect(uint32_t bar, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
__device__ __forceinline__ void bulk_load(uint32_t to, const void* from, uint32_t bytes, uint32_t bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
               "r"(bytes), "r"(bar)
               : "memory");
}

// Some heads' blocks of 64 channels of one query, as many as the map's box has, to shared memory and back.
__device__ __forceinline__ void tensor_load(uint32_t to, const CUtensorMap* map, int block, int head, int query, uint32_t bar) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(to),
               "l"(map), "r"(0), "r"(head), "r"(block), "r"(query), "r"(bar)
               : "memory");
}
// The same into each block of the cluster that `blocks` has a bit for, at the same place, told to its own barrier.
__device__ __forceinline__ void tensor_load_shared(uint32_t to, const CUtensorMap* map, int block, int head, int query, uint32_t bar,
                                                   uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3, %4, %5}], [%6], "
      "%7;" ::"r"(to),
      "l"(map), "r"(0), "r"(head), "r"(block), "r"(query), "r"(bar), "h"(blocks)
      : "memory");
}

// The driver's encoder of tensor maps, found at run time: the object needs no driver library to link with.
inline cudaError_t encode_map(CUtensorMap* map, const void* x, int rank, const cuuint64_t* dims, const cuuint64_t* strides, const cuuint32_t* box,
                              CUtensorMapSwizzle swizzle) {
  static decltype(&cuTensorMapEncodeTiled) encode = nullptr;
  if (!encode) {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    cudaError_t e = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
    if (e != cudaSuccess) return e;
    if (result != cudaDriverEntryPointSuccess) return cudaErrorNotSupported;
    encode = (decltype(encode))found;
  }
  const cuuint32_t step[4] = {1, 1, 1, 1};
  const CUresult r = encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, rank, (void*)x, dims, strides, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
                            swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return r == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// One query's boxes of heads x blocks of 64 channels: block after block, head after head, under the 128-byte swizzle in shared memory.
inline cudaError_t encode_heads(CUtensorMap* map, const void* x, int heads, int queries, int64_t stride_h, int64_t stride_t, int box_heads,
                                int box_blocks) {
  const cuuint64_t dims[4] = {64, (cuuint64_t)heads, 8, (cuuint64_t)queries};
  const cuuint64_t strides[3] = {(cuuint64_t)stride_h * 2, 128, (cuuint64_t)stride_t * 2};
  const cuuint32_t box[4] = {64, (cuuint32_t)box_heads, (cuuint32_t)box_blocks, 1};
  return encode_map(map, x, 4, dims, strides, box, CU_TENSOR_MAP_SWIZZLE_128B);
}

}  // namespace hr
