// What the two kernels of prefill attention share: loads of q and of rows, sums over a quad, the way of the output to memory.
#pragma once
#include "copy_engine.cuh"
#include "hopper.cuh"

namespace hr {

// What attention to the window and to a second list is given.
struct RowsParams {
  const uint8_t* window;     // workspace of the window's rows
  const int32_t* row;        // [T]: the query's own row, the last one of its window
  const int32_t* length;     // [T]: rows of its window, at most 128
  const uint8_t* second;     // workspace of the second list's rows
  const int32_t* list;       // [T, width]: rows, -1: none; null: rows first[t] .. first[t] + count[t] - 1
  int64_t list_stride;
  const int32_t* first;      // [T], multiples of 8; without a list
  const int32_t* count;      // [T]
  const float* sink;         // [H] or null
  __nv_bfloat16* out;        // [T, H, 512]
  int64_t out_stride_t, out_stride_h;
  float* lse;  // [T, H] or null
  float scale;
  int32_t heads, queries;
  int32_t window_octets, second_octets;  // in the workspaces
  int32_t width;                         // of the list
};

// Whether a query's window lies in a workspace of so many octets. If not, or if its second list does not, the query is broken: nothing
// is read for it, and its output is NaN.
__device__ __forceinline__ bool window_lies_in(int row, int length, int octets) {
  return length == 0 || (length > 0 && length <= 128 && row >= length - 1 && (row >> 3) < octets);
}
constexpr float kNan = __builtin_nanf("");

// A higher maximum counts only if it is so much higher (log2): weights up to 256 are as exact as those up to 1, and sums need no rescaling.
constexpr float kSlack = 8;

__device__ __forceinline__ void st_shared_i2(uint32_t addr, int x, int y) {
  asm volatile("st.shared.v2.s32 [%0], {%1, %2};" ::"r"(addr), "r"(x), "r"(y) : "memory");
}

__device__ __forceinline__ void tensor_store(const CUtensorMap* map, int block, int head, int query, uint32_t from) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%1, %2, %3, %4}], [%5];" ::"l"(map), "r"(0), "r"(head),
               "r"(block), "r"(query), "r"(from)
               : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
__device__ __forceinline__ void tensor_stores_read() {  // the thread's own stores: their shared memory is free again
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

__device__ __forceinline__ float quad_max(float v) {
  v = fmaxf(v, __shfl_xor_sync(~0u, v, 1));
  return fmaxf(v, __shfl_xor_sync(~0u, v, 2));
}
__device__ __forceinline__ float quad_sum(float v) {
  v += __shfl_xor_sync(~0u, v, 1);
  return v + __shfl_xor_sync(~0u, v, 2);
}

// Four 8 x 8 matrices of bf16, as accumulators have them; lane l gives the place of row l % 8 of matrix l / 8.
__device__ __forceinline__ void store_matrices(uint32_t addr, const uint32_t (&w)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(addr), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3])
               : "memory");
}

// The kernel gets maps of q, in boxes of 64 heads x q_blocks, and of the output, in boxes of 16 heads x out_blocks.
template <class P>
inline cudaError_t launch_prefill(void (*kernel)(CUtensorMap, CUtensorMap, P), const P& p, const void* q, int64_t stride_t, int64_t stride_h,
                                  int q_blocks, int out_blocks, int blocks, int threads, uint32_t smem_bytes, cudaStream_t stream) {
  if (p.queries == 0) return cudaSuccess;
  CUtensorMap q_map, out_map;
  cudaError_t e = encode_heads(&q_map, q, p.heads, p.queries, stride_h, stride_t, 64, q_blocks);
  if (e == cudaSuccess) e = encode_heads(&out_map, p.out, p.heads, p.queries, p.out_stride_h, p.out_stride_t, 16, out_blocks);
  if (e == cudaSuccess) e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes);
  if (e != cudaSuccess) return e;
  cudaLaunchConfig_t cfg = {};
  cfg.gridDim = dim3(p.queries < blocks ? p.queries : blocks, (p.heads + 63) / 64);
  cfg.blockDim = dim3(threads);
  cfg.dynamicSmemBytes = smem_bytes;
  cfg.stream = stream;
  cudaLaunchAttribute attr = early_launch();
  cfg.attrs = &attr;
  cfg.numAttrs = 1;
  return cudaLaunchKernelEx(&cfg, kernel, q_map, out_map, p);
}

}  // namespace hr
