// Moves ranges of pages into or out of one contiguous payload, with a 64-bit digest of the bytes moved in the same pass.
//
// Digest: the sum, modulo 2^64, over the payload's 8-byte words w[i] (little-endian) of mix(w[i] + (i + 1) * K), where mix is a
// bijection of 64-bit words (two multiply-and-xorshift rounds) and K is odd. It depends on position; being a sum, it can be
// taken in any order, so blocks add theirs with integer atomics and the result is exact. It guards against accidents.
#include "hopper.cuh"

struct Piece {
  uint64_t from, to;  // device addresses, multiples of 16
  uint64_t at;        // offset in the payload, a multiple of 16
  uint64_t bytes;     // a multiple of 16
};

namespace {

constexpr int kThreads = 256, kUnroll = 4, kChunk = kThreads * kUnroll * 16;

__device__ __forceinline__ uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

}  // namespace

__global__ void __launch_bounds__(kThreads) move_pieces(const Piece* pieces, int64_t* digest) {
  __shared__ uint64_t sums[kThreads / 32];
  const Piece piece = pieces[blockIdx.y];
  constexpr uint64_t K = 0x9e3779b97f4a7c15ull;
  uint64_t sum = 0;
  for (uint64_t base = (uint64_t)blockIdx.x * kChunk; base < piece.bytes; base += (uint64_t)gridDim.x * kChunk) {
    const uint64_t own = base + threadIdx.x * 16;
    uint4 v[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i)
      if (own + i * kThreads * 16 < piece.bytes) v[i] = hr::ld_once_v4((const void*)(piece.from + own + i * kThreads * 16));
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const uint64_t at = own + i * kThreads * 16;
      if (at < piece.bytes) {
        const uint64_t word = (piece.at + at) / 8;
        sum += mix(((uint64_t)v[i].y << 32 | v[i].x) + (word + 1) * K) + mix(((uint64_t)v[i].w << 32 | v[i].z) + (word + 2) * K);
        *(uint4*)(piece.to + at) = v[i];
      }
    }
  }
#pragma unroll
  for (int m = 16; m; m >>= 1) sum += __shfl_xor_sync(~0u, sum, m);
  if ((threadIdx.x & 31) == 0) sums[threadIdx.x >> 5] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
#pragma unroll
    for (int i = 1; i < kThreads / 32; ++i) sum += sums[i];
    atomicAdd((unsigned long long*)digest, (unsigned long long)sum);
  }
}

// blocks: how many share a piece. The caller has set *digest to its start (0, or what earlier launches left).
extern "C" int hr_move_pieces(const Piece* pieces, int64_t count, int blocks, int64_t* digest, void* stream) {
  for (int64_t i = 0; i < count; i += 65535) {
    const int64_t n = count - i < 65535 ? count - i : 65535;
    move_pieces<<<dim3(blocks, (unsigned)n), kThreads, 0, (cudaStream_t)stream>>>(pieces + i, digest);
  }
  return (int)cudaGetLastError();
}
