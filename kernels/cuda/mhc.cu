// K7: hyper-connections, four residual streams: "after" one sub-layer and "before" the next in one pass over the streams [BI].
//
//   streams'[n] = post[n] * y + sum_m comb[m, n] * streams[m]                         (left out where there is no y yet)
//   mix[24]     = (flat(streams') . fn^T) / sqrt(mean(flat(streams')^2) + norm_eps)
//   pre, post', comb' = sigmoid, 2 sigmoid, Sinkhorn of mix * scale + base
//   layer_in    = rms(bf16(sum_n pre[n] * streams'[n])) * weight
//
// A cluster of 16 blocks works on a tile of 8 or 16 tokens; a block has 256 channels of all four streams, a warp 32 of those.
// The product runs on the tensor cores with fn on the rows: fn = hi + lo, two bf16 (16 bits of mantissa), 48 rows, kept in
// registers for the whole launch; tokens are the columns. The order of k is permuted so that a thread's operand is the 16
// bytes that it loads. Sums go warp, block, cluster in a fixed order that the number of tokens does not touch; a token's
// column does not see the others. So its bits depend on nothing else in the launch, nor on the tile's size.
//
// A tile passes three steps: product (eight warps); layer_in; norm (eight others, one tile later). After the first two, sums go
// to the token's owner (token t of a tile: block t of the cluster), and the factors made of them come back, through distributed
// shared memory, behind the work on other tiles. A tile stays in shared memory until layer_in is made, so the streams are
// read once. Of the last four warps one loads post and comb, two sum what their block owns, and one does the Sinkhorn of up to
// 32 tokens at a time, a lane each. The product is at most two tiles ahead of layer_in: what travels has two buffers.
// Streams are loaded by the threads that multiply them (bulk copies of 512 bytes would take 70 cycles each to issue).
#include "hopper.cuh"

using namespace hr;

struct Params {
  const __nv_bfloat16* streams;  // [T, 4, 4096]
  const __nv_bfloat16* y;        // [T, 4096] or null: layer_in of the streams as they are
  const float* post;             // [T, 4], with y
  const float* comb;             // [T, 4, 4], with y; row: old stream, column: new stream
  const float* fn;               // [24, 16384]
  const float* base;             // [24]
  const float* scale;            // [3]
  const __nv_bfloat16* weight;   // [4096]
  __nv_bfloat16* streams_out;    // [T, 4, 4096], with y
  __nv_bfloat16* layer_in;       // [T, 4096]
  float* post_out;               // [T, 4]
  float* comb_out;               // [T, 4, 4]
  float eps, norm_eps;
  int32_t tokens, rounds;
  int32_t per_tile, unused;  // tokens of a tile that are used: set by launch()
};

namespace {

constexpr int kD = 4096, kRanks = 16, kChannels = kD / kRanks, kWarps = kChannels / 32, kCompute = kWarps * 32;
constexpr int kThreads = 2 * kCompute + 128;
constexpr uint32_t kTokenBytes = 4 * kChannels * 2 + 64;  // + 64: two tokens lie in different banks
constexpr uint32_t kYBytes = kChannels * 2 + 64;
constexpr int kRow = 28;  // floats of a token's partial sums: 24 products, a sum of squares, 3 unused

template <bool kAfter, int kTokens>
struct Layout {
  static constexpr uint32_t kY = kTokens * kTokenBytes, kPost = kY + kTokens * kYBytes, kComb = kPost + kTokens * 16;
  static constexpr uint32_t kStage = kAfter ? kComb + kTokens * 64 : kY;
  static constexpr int kStages = kTokens == 8 ? 3 : kAfter ? 4 : 5;
  static constexpr uint32_t kSums = kStages * kStage;  // [2][warp][token][kRow] fp32
  static constexpr uint32_t kOwn = kSums + 2 * kWarps * kTokens * kRow * 4;  // [2][rank][kRow] fp32: partial sums of the block's token
  static constexpr uint32_t kPre = kOwn + 2 * kRanks * kRow * 4;  // [2][token] of 4 fp32
  static constexpr uint32_t kNormSums = kPre + 2 * kTokens * 16;  // [2][warp][token] fp32: squares of layer_in
  static constexpr uint32_t kNormOwn = kNormSums + 2 * kWarps * kTokens * 4;  // [2][rank] fp32
  static constexpr uint32_t kNorm = kNormOwn + 2 * kRanks * 4;  // [2][token] fp32: factors
  static constexpr uint32_t kWaiting = kNorm + 2 * kTokens * 4;  // [2][32] of 20 fp32: for Sinkhorn
  static constexpr uint32_t kBars = kWaiting + 2 * 32 * 80;
  static constexpr uint32_t kBytes = kBars + 8 * (3 * kStages + 8);
};

__device__ __forceinline__ void mbar_expect(uint32_t bar, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
__device__ __forceinline__ void wait_cluster(uint32_t bar, uint32_t parity) {  // for what other blocks have sent
  asm volatile(
      "{\n.reg .pred p;\n"
      "WAIT_LOOP:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], %1;\n"
      "@p bra DONE;\n"
      "bra WAIT_LOOP;\n"
      "DONE:\n}\n" ::"r"(bar), "r"(parity)
      : "memory");
}
__device__ __forceinline__ void bulk_load(uint32_t to, const void* from, uint32_t bytes, uint32_t bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
               "r"(bytes), "r"(bar)
               : "memory");
}
__device__ __forceinline__ void send_f4(uint32_t to, float4 v, uint32_t bar) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to), "f"(v.x),
               "f"(v.y), "f"(v.z), "f"(v.w), "r"(bar)
               : "memory");
}
__device__ __forceinline__ void send_f1(uint32_t to, float v, uint32_t bar) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(to), "f"(v), "r"(bar) : "memory");
}
__device__ __forceinline__ uint4 ld_u4(uint32_t addr) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(addr) : "memory");
  return v;
}
__device__ __forceinline__ float4 ld_f4(uint32_t addr) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(addr) : "memory");
  return v;
}
__device__ __forceinline__ float ld_f1(uint32_t addr) {
  float v;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(addr) : "memory");
  return v;
}
__device__ __forceinline__ void st_f1(uint32_t addr, float v) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(addr), "f"(v) : "memory");
}
__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ float sum_ranks(uint32_t addr, uint32_t stride) {  // in a fixed order, four chains
  float v[4] = {};
#pragma unroll
  for (int r = 0; r < kRanks; ++r) v[r & 3] += ld_f1(addr + r * stride);
  return (v[0] + v[1]) + (v[2] + v[3]);
}
__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float sigmoid(float x) { return reciprocal(1.0f + __expf(-x)); }

// Two neighbouring values as bf16, and what is left of them as bf16.
__device__ __forceinline__ void split(float a, float b, uint32_t& hi, uint32_t& lo) {
  hi = pack_bf16(a, b);
  lo = pack_bf16(a - bf16_lo(hi), b - bf16_hi(hi));
}

// Softmax over rows, then alternate division by column and row sums, in one thread's registers.
__device__ __forceinline__ void sinkhorn(float (&m)[16], float eps, int rounds) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float top = fmaxf(fmaxf(m[4 * i], m[4 * i + 1]), fmaxf(m[4 * i + 2], m[4 * i + 3]));
    float sum = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) sum += m[4 * i + j] = __expf(m[4 * i + j] - top);
#pragma unroll
    for (int j = 0; j < 4; ++j) m[4 * i + j] = m[4 * i + j] * reciprocal(sum) + eps;
  }
#pragma unroll 1
  for (int round = 0; round < rounds; ++round) {
    if (round > 0) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float f = reciprocal(((m[4 * i] + m[4 * i + 1]) + (m[4 * i + 2] + m[4 * i + 3])) + eps);
#pragma unroll
        for (int j = 0; j < 4; ++j) m[4 * i + j] *= f;
      }
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float f = reciprocal(((m[j] + m[4 + j]) + (m[8 + j] + m[12 + j])) + eps);
#pragma unroll
      for (int i = 0; i < 4; ++i) m[4 * i + j] *= f;
    }
  }
}

}  // namespace

template <bool kAfter, int kTokens>
__global__ void __launch_bounds__(kThreads, 1) mhc(const __grid_constant__ Params p) {
  using L = Layout<kAfter, kTokens>;
  constexpr int kTiles = kTokens / 8;  // column tiles of 8 tokens
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  const uint32_t smem = smem_u32(shared_bytes);
  const int rank = blockIdx.x % kRanks, cluster = blockIdx.x / kRanks, clusters = gridDim.x / kRanks;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int tiles = (p.tokens + p.per_tile - 1) / p.per_tile;
  const int count = (tiles - cluster + clusters - 1) / clusters;  // of this cluster: cluster, cluster + clusters, ...
  // Of a stage: post and comb are there; product made (and streams mixed); free.
  const uint32_t full = smem + L::kBars, ready = full + 8 * L::kStages, empty = ready + 8 * L::kStages;
  // Two each: partial sums of the own token, pre, squares of the own token, norm's factors.
  const uint32_t own_bar = empty + 8 * L::kStages, pre_bar = own_bar + 16, norm_own_bar = own_bar + 32, norm_bar = own_bar + 48;
  if (threadIdx.x == 0) {
    for (int i = 0; i < L::kStages; ++i) {
      mbar_init(full + 8 * i, 1);
      mbar_init(ready + 8 * i, kWarps);
      mbar_init(empty + 8 * i, kWarps);
    }
    for (int i = 0; i < 8; ++i) mbar_init(own_bar + 8 * i, 1);
    fence_barrier_init();
    for (int i = 0; i < 2; ++i) {
      mbar_expect(own_bar + 8 * i, kRanks * kRow * 4);
      mbar_expect(pre_bar + 8 * i, p.per_tile * 16);
      mbar_expect(norm_own_bar + 8 * i, kRanks * 4);
      mbar_expect(norm_bar + 8 * i, p.per_tile * 4);
    }
  }
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");

  if (warp >= 2 * kWarps) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
  if (warp == 2 * kWarps) {  // loads
    __syncthreads();
    cluster_sync();
    asm volatile("griddepcontrol.wait;" ::: "memory");
    for (int it = 0; kAfter && it < count; ++it) {
      const int stage = it % L::kStages, token0 = (cluster + it * clusters) * p.per_tile, valid = min(p.per_tile, p.tokens - token0);
      const uint32_t at = smem + stage * L::kStage, bar = full + 8 * stage;
      if (it >= L::kStages) mbar_wait(empty + 8 * stage, (it / L::kStages - 1) & 1);
      if (lane == 0) {
        mbar_expect(bar, valid * 80);
        bulk_load(at + L::kPost, p.post + (int64_t)token0 * 4, valid * 16, bar);
        bulk_load(at + L::kComb, p.comb + (int64_t)token0 * 16, valid * 64, bar);
      }
    }
    return;
  }
  if (warp > 2 * kWarps) {
    const float factor = lane < 4 ? p.scale[0] : lane < 8 ? p.scale[1] : p.scale[2], base = lane < 24 ? p.base[lane] : 0.0f;
    __syncthreads();
    cluster_sync();
    if (rank >= p.per_tile) return;
    asm volatile("griddepcontrol.wait;" ::: "memory");
    const int64_t token0 = (int64_t)cluster * p.per_tile + rank, step = (int64_t)clusters * p.per_tile;
    if (warp == 2 * kWarps + 1) {  // pre and post of the own token
      for (int it = 0; it < count; ++it) {
        const int buf = it & 1, at = it & 63;
        const int64_t token = token0 + it * step;
        wait_cluster(own_bar + 8 * buf, (it >> 1) & 1);
        if (lane == 0) mbar_expect(own_bar + 8 * buf, kRanks * kRow * 4);
        const float sum = sum_ranks(smem + L::kOwn + buf * kRanks * kRow * 4 + min(lane, 24) * 4, kRow * 4);
        const float r = rsqrtf(__shfl_sync(~0u, sum, 24) * (1.0f / (4 * kD)) + p.norm_eps);
        const float v = sum * r * factor + base, s = sigmoid(v) + p.eps;
        const float4 pre = make_float4(__shfl_sync(~0u, s, 0), __shfl_sync(~0u, s, 1), __shfl_sync(~0u, s, 2), __shfl_sync(~0u, s, 3));
        if (lane < kRanks) send_f4(map_rank(smem + L::kPre + (buf * kTokens + rank) * 16, lane), pre, map_rank(pre_bar + 8 * buf, lane));
        if (lane >= 4 && lane < 8 && token < p.tokens) p.post_out[token * 4 + lane - 4] = 2.0f * sigmoid(v);
        if (lane >= 8 && lane < 24) st_f1(smem + L::kWaiting + at * 80 + (lane - 8) * 4, v);
        if ((at & 31) == 31 || it == count - 1) asm volatile("bar.arrive 3, 64;" ::: "memory");
      }
    } else if (warp == 2 * kWarps + 2) {  // norm of the own token
      for (int it = 0; it < count; ++it) {
        const int buf = it & 1;
        wait_cluster(norm_own_bar + 8 * buf, (it >> 1) & 1);
        if (lane == 0) mbar_expect(norm_own_bar + 8 * buf, kRanks * 4);
        const float f = rsqrtf(sum_ranks(smem + L::kNormOwn + buf * kRanks * 4, 4) * (1.0f / kD) + p.norm_eps);
        if (lane < kRanks) send_f1(map_rank(smem + L::kNorm + (buf * kTokens + rank) * 4, lane), f, map_rank(norm_bar + 8 * buf, lane));
      }
    } else {  // Sinkhorn
      for (int it = 0; it < count; it += 32) {
        asm volatile("bar.sync 3, 64;" ::: "memory");
        const int64_t token = token0 + (it + lane) * step;
        if (it + lane >= count || token >= p.tokens) continue;
        float m[16];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float4 row = ld_f4(smem + L::kWaiting + ((it + lane) & 63) * 80 + i * 16);
          m[4 * i] = row.x, m[4 * i + 1] = row.y, m[4 * i + 2] = row.z, m[4 * i + 3] = row.w;
        }
        sinkhorn(m, p.eps, p.rounds);
#pragma unroll
        for (int i = 0; i < 4; ++i)
          *(float4*)(p.comb_out + token * 16 + 4 * i) = make_float4(m[4 * i], m[4 * i + 1], m[4 * i + 2], m[4 * i + 3]);
      }
    }
    return;
  }

  const int own = lane >> 2, quad = lane & 3, part = warp % kWarps, channel = rank * kChannels + part * 32 + quad * 8;
  const int64_t step = (int64_t)clusters * p.per_tile;
  if (warp >= kWarps) {  // layer_in and its norm
    asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
    const uint4 weight = *(const uint4*)(p.weight + channel);
    __syncthreads();
    cluster_sync();
    asm volatile("griddepcontrol.wait;" ::: "memory");
    uint4 out[kTiles] = {};
    auto norm = [&](int it) {  // of the tile before it
      const int buf = (it - 1) & 1;
      wait_cluster(norm_bar + 8 * buf, ((it - 1) >> 1) & 1);
      if (threadIdx.x == kCompute) mbar_expect(norm_bar + 8 * buf, p.per_tile * 4);
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
        const int t = j * 8 + own;
        const int64_t token = (int64_t)cluster * p.per_tile + (it - 1) * step + t;
        const float f = ld_f1(smem + L::kNorm + (buf * kTokens + t) * 4);
        auto scaled = [&](uint32_t x, uint32_t g) { return pack_bf16(bf16_lo(x) * f * bf16_lo(g), bf16_hi(x) * f * bf16_hi(g)); };
        if (t < p.per_tile && token < p.tokens)
          *(uint4*)(p.layer_in + token * kD + channel) =
              make_uint4(scaled(out[j].x, weight.x), scaled(out[j].y, weight.y), scaled(out[j].z, weight.z), scaled(out[j].w, weight.w));
      }
    };
    for (int it = 0; it < count; ++it) {
      const int buf = it & 1, stage = it % L::kStages;
      uint4 now[kTiles];
      mbar_wait(ready + 8 * stage, (it / L::kStages) & 1);
      wait_cluster(pre_bar + 8 * buf, (it >> 1) & 1);
      if (threadIdx.x == kCompute) mbar_expect(pre_bar + 8 * buf, p.per_tile * 16);
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
        const int t = j * 8 + own;
        const float4 pre = ld_f4(smem + L::kPre + (buf * kTokens + t) * 16);
        const uint32_t line = smem + stage * L::kStage + t * kTokenBytes + part * 64 + quad * 16;
        uint4 x[4];
#pragma unroll
        for (int s = 0; s < 4; ++s) x[s] = ld_u4(line + s * kChannels * 2);
        float squares[2] = {};
        auto sum = [&](uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
          const uint32_t v = pack_bf16(pre.x * bf16_lo(a) + pre.y * bf16_lo(b) + pre.z * bf16_lo(c) + pre.w * bf16_lo(d),
                                       pre.x * bf16_hi(a) + pre.y * bf16_hi(b) + pre.z * bf16_hi(c) + pre.w * bf16_hi(d));
          squares[0] += bf16_lo(v) * bf16_lo(v);
          squares[1] += bf16_hi(v) * bf16_hi(v);
          return v;
        };
        now[j].x = sum(x[0].x, x[1].x, x[2].x, x[3].x);
        now[j].y = sum(x[0].y, x[1].y, x[2].y, x[3].y);
        now[j].z = sum(x[0].z, x[1].z, x[2].z, x[3].z);
        now[j].w = sum(x[0].w, x[1].w, x[2].w, x[3].w);
        float both = squares[0] + squares[1];
        both += __shfl_xor_sync(~0u, both, 1);
        both += __shfl_xor_sync(~0u, both, 2);
        if (quad == 0) st_f1(smem + L::kNormSums + ((buf * kWarps + part) * kTokens + t) * 4, both);
      }
      __syncwarp();
      if (lane == 0) mbar_arrive(empty + 8 * stage);
      named_barrier(2, kCompute);
      const int to = threadIdx.x - kCompute;
      if (to < p.per_tile) {
        float squares = 0;
#pragma unroll
        for (int i = 0; i < kWarps; ++i) squares += ld_f1(smem + L::kNormSums + ((buf * kWarps + i) * kTokens + to) * 4);
        send_f1(map_rank(smem + L::kNormOwn + (buf * kRanks + rank) * 4, to), squares, map_rank(norm_own_bar + 8 * buf, to));
      }
      if (it > 0) norm(it);
#pragma unroll
      for (int j = 0; j < kTiles; ++j) out[j] = now[j];
    }
    norm(count);
    return;
  }

  asm volatile("setmaxnreg.inc.sync.aligned.u32 160;");
  uint32_t w[3][8][4];  // rows 0..15 of hi; 16..23 of hi and 0..7 of lo; 8..23 of lo. Step 2 * stream + half
#pragma unroll
  for (int s = 0; s < 4; ++s)
#pragma unroll
    for (int third = 0; third < 3; ++third) {
      const float4* row = (const float4*)(p.fn + (int64_t)(third * 8 + own) * (4 * kD) + s * kD + channel);
      const float4 x[2] = {__ldg(row), __ldg(row + 1)};
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        uint32_t hi[2], lo[2];
        split(x[h].x, x[h].y, hi[0], lo[0]);
        split(x[h].z, x[h].w, hi[1], lo[1]);
        const int k = 2 * s + h;
#pragma unroll
        for (int c = 0; c < 2; ++c) {  // fragment words: 0, 2 of the upper eight rows, 1, 3 of the lower
          if (third == 0) w[0][k][2 * c] = hi[c], w[1][k][2 * c + 1] = lo[c];
          if (third == 1) w[0][k][2 * c + 1] = hi[c], w[2][k][2 * c] = lo[c];
          if (third == 2) w[1][k][2 * c] = hi[c], w[2][k][2 * c + 1] = lo[c];
        }
      }
    }
  __syncthreads();
  cluster_sync();
  asm volatile("griddepcontrol.wait;" ::: "memory");

  constexpr int kAhead = L::kStages - 2;
  auto fetch = [&](int it) {  // what this thread will read of a tile; only its own copies are waited for
    if (it < count) {
      const uint32_t at = smem + it % L::kStages * L::kStage + part * 64 + quad * 16;
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
        const int t = j * 8 + own;
        const int64_t token = (int64_t)cluster * p.per_tile + it * step + t;
        const bool real = t < p.per_tile && token < p.tokens;
        const __nv_bfloat16* from = p.streams + (real ? token : 0) * (4 * kD) + channel;
        auto copy = [&](uint32_t to, const void* from) {
          asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(real ? 16 : 0) : "memory");
        };
#pragma unroll
        for (int s = 0; s < 4; ++s) copy(at + t * kTokenBytes + s * kChannels * 2, from + s * kD);
        if (kAfter) copy(at + L::kY + t * kYBytes, p.y + (real ? token : 0) * kD + channel);
      }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  };
#pragma unroll 1
  for (int it = 0; it < kAhead; ++it) fetch(it);
#pragma unroll 1
  for (int it = 0; it < count; ++it) {
    const int64_t token0 = (int64_t)cluster * p.per_tile + it * step;
    const int buf = it & 1, stage = it % L::kStages;
    const uint32_t all = smem + L::kSums + buf * kWarps * kTokens * kRow * 4, sums = all + warp * kTokens * kRow * 4;
    const uint32_t at = smem + stage * L::kStage;
    // Two tiles back layer_in is made, here: its stage is free, and every block has read what this turn's sums overwrite.
    if (it >= 2) mbar_wait(empty + 8 * ((it - 2) % L::kStages), ((it - 2) / L::kStages) & 1);
    fetch(it + kAhead);
    asm volatile("cp.async.wait_group %0;" ::"n"(kAhead) : "memory");
    if (kAfter) mbar_wait(full + 8 * stage, (it / L::kStages) & 1);
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      const int t = j * 8 + own;
      const uint32_t line = at + t * kTokenBytes + warp * 64 + quad * 16;
      uint4 x[4];
#pragma unroll
      for (int s = 0; s < 4; ++s) x[s] = ld_u4(line + s * kChannels * 2);
      if (kAfter) {
        const uint4 y = ld_u4(at + L::kY + t * kYBytes + warp * 64 + quad * 16);
        const float4 post = ld_f4(at + L::kPost + t * 16);
        float4 c[4];
#pragma unroll
        for (int s = 0; s < 4; ++s) c[s] = ld_f4(at + L::kComb + t * 64 + s * 16);
        auto mixed = [&](uint32_t y2, uint32_t& x0, uint32_t& x1, uint32_t& x2, uint32_t& x3) {
          const uint32_t old[4] = {x0, x1, x2, x3};
          float lo[4] = {post.x * bf16_lo(y2), post.y * bf16_lo(y2), post.z * bf16_lo(y2), post.w * bf16_lo(y2)};
          float hi[4] = {post.x * bf16_hi(y2), post.y * bf16_hi(y2), post.z * bf16_hi(y2), post.w * bf16_hi(y2)};
#pragma unroll
          for (int s = 0; s < 4; ++s) {
            const float a = bf16_lo(old[s]), b = bf16_hi(old[s]);
            lo[0] += c[s].x * a, lo[1] += c[s].y * a, lo[2] += c[s].z * a, lo[3] += c[s].w * a;
            hi[0] += c[s].x * b, hi[1] += c[s].y * b, hi[2] += c[s].z * b, hi[3] += c[s].w * b;
          }
          x0 = pack_bf16(lo[0], hi[0]);
          x1 = pack_bf16(lo[1], hi[1]);
          x2 = pack_bf16(lo[2], hi[2]);
          x3 = pack_bf16(lo[3], hi[3]);
        };
        mixed(y.x, x[0].x, x[1].x, x[2].x, x[3].x);
        mixed(y.y, x[0].y, x[1].y, x[2].y, x[3].y);
        mixed(y.z, x[0].z, x[1].z, x[2].z, x[3].z);
        mixed(y.w, x[0].w, x[1].w, x[2].w, x[3].w);
#pragma unroll
        for (int s = 0; s < 4; ++s) {
          st_shared_v4(line + s * kChannels * 2, x[s]);
          if (t < p.per_tile && token0 + t < p.tokens) *(uint4*)(p.streams_out + ((token0 + t) * 4 + s) * kD + channel) = x[s];
        }
      }
      float acc[3][4] = {}, more[3][4] = {}, gram[4] = {};  // two chains a row tile; products of the tokens with each other
#pragma unroll
      for (int s = 0; s < 2; ++s)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const uint32_t a0 = h ? x[s].z : x[s].x, a1 = h ? x[s].w : x[s].y, b0 = h ? x[s + 2].z : x[s + 2].x,
                         b1 = h ? x[s + 2].w : x[s + 2].y;
#pragma unroll
          for (int m = 0; m < 3; ++m) {
            mma(acc[m], w[m][2 * s + h], a0, a1);
            mma(more[m], w[m][2 * s + h + 4], b0, b1);
          }
          mma(gram, {a0, 0, a1, 0}, a0, a1);
          mma(gram, {b0, 0, b1, 0}, b0, b1);
        }
#pragma unroll
      for (int m = 0; m < 3; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[m][i] += more[m][i];
      if (quad == own >> 1) st_f1(sums + (t * kRow + 24) * 4, own & 1 ? gram[1] : gram[0]);  // the diagonal: sums of squares
#pragma unroll
      for (int c = 0; c < 2; ++c) {  // column: token 2 * quad + c of the eight
        const uint32_t to = sums + ((j * 8 + 2 * quad + c) * kRow + own) * 4;
        st_f1(to, acc[0][c] + acc[1][2 + c]);
        st_f1(to + 32, acc[0][2 + c] + acc[2][c]);
        st_f1(to + 64, acc[1][c] + acc[2][2 + c]);
      }
    }
    __syncwarp();
    if (lane == 0) mbar_arrive(ready + 8 * stage);
    named_barrier(1, kCompute);
    if (threadIdx.x < p.per_tile * (kRow / 4)) {
      const int t = threadIdx.x / (kRow / 4), u = threadIdx.x % (kRow / 4);
      float4 m = {};
#pragma unroll
      for (int i = 0; i < kWarps; ++i) {
        const float4 v = ld_f4(all + ((i * kTokens + t) * kRow + 4 * u) * 4);
        m.x += v.x, m.y += v.y, m.z += v.z, m.w += v.w;
      }
      send_f4(map_rank(smem + L::kOwn + ((buf * kRanks + rank) * kRow + 4 * u) * 4, t), m, map_rank(own_bar + 8 * buf, t));
    }
  }
}

template <bool kAfter, int kTokens>
static cudaError_t launch(Params p, cudaStream_t stream, int* most) {
  using L = Layout<kAfter, kTokens>;
  static int clusters = 0;  // that the card can hold at once
  cudaLaunchConfig_t cfg = {};
  cfg.blockDim = dim3(kThreads);
  cfg.dynamicSmemBytes = L::kBytes;
  cfg.stream = stream;
  cudaLaunchAttribute attr[2];
  attr[0].id = cudaLaunchAttributeClusterDimension;
  attr[0].val.clusterDim.x = kRanks;
  attr[0].val.clusterDim.y = attr[0].val.clusterDim.z = 1;
  attr[1] = early_launch();
  cfg.attrs = attr;
  cfg.numAttrs = 2;
  if (clusters == 0) {
    cudaError_t e = cudaFuncSetAttribute(mhc<kAfter, kTokens>, cudaFuncAttributeMaxDynamicSharedMemorySize, L::kBytes);
    if (e == cudaSuccess) e = cudaFuncSetAttribute(mhc<kAfter, kTokens>, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    cfg.gridDim = dim3(kRanks);
    if (e == cudaSuccess) e = cudaOccupancyMaxActiveClusters(&clusters, mhc<kAfter, kTokens>, &cfg);
    if (e != cudaSuccess) return e;
    if (clusters == 0) return cudaErrorInvalidConfiguration;
  }
  if (most) *most = clusters;
  if (p.tokens == 0) return cudaSuccess;
  p.per_tile = (p.tokens + clusters - 1) / clusters < kTokens ? (p.tokens + clusters - 1) / clusters : kTokens;
  if (kTokens == 8) p.per_tile = 8;
  const int tiles = (p.tokens + p.per_tile - 1) / p.per_tile;
  cfg.gridDim = dim3(kRanks * (tiles < clusters ? tiles : clusters));
  return cudaLaunchKernelEx(&cfg, mhc<kAfter, kTokens>, p);
}

// `tile`: 8 or 16 tokens; it changes the time, not one bit of the result.
extern "C" int hr_mhc(const Params* p, int tile, int* most_clusters, void* stream) {
  cudaStream_t s = (cudaStream_t)stream;
  if (p->y) return tile == 8 ? launch<true, 8>(*p, s, most_clusters) : launch<true, 16>(*p, s, most_clusters);
  return tile == 8 ? launch<false, 8>(*p, s, most_clusters) : launch<false, 16>(*p, s, most_clusters);
}
