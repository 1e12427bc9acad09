// K6, compressed layers: prefill attention over the window and a second list, selected rows (c4a) or a dense prefix (c128a), with a sink;
// K = V = the row of 512 channels [BI].
//
// Rows come from bf16 workspaces of octets (see prefill_window.cu). A query's rows are cut into tiles of 64: the window's, from its first
// row on, then the second list's. A query's bits depend on its own lists alone.
//
// A block stays on its multiprocessor and takes every n-th query, 64 heads each, as one stream of tiles: rows and q of the next
// query are on their way while this one ends, and its output is stored under the next one's first product. Three warps gather rows
// by cp.async (a dense tile is one bulk copy), one loads q, both into swizzled operands. Warp-group 0 multiplies q by the tile, does the
// softmax and the product with channels 0..255; warp-group 1 that with channels 256..511, from the weights left in shared memory.
#include "prefill.cuh"

using namespace hr;

struct Params {
  const uint8_t* window;     // workspace of the window's rows
  const int32_t* row;        // [T]: the query's own row, the last one of its window
  const int32_t* length;     // [T]: rows of its window
  const uint8_t* second;     // workspace of the second list's rows
  const int32_t* list;       // [T, width]: rows, negative: none; null: rows first[t] .. first[t] + count[t] - 1
  int64_t list_stride;
  const int32_t* first;      // [T], multiples of 8; without a list
  const int32_t* count;      // [T]
  const float* sink;         // [H] or null
  __nv_bfloat16* out;        // [T, H, 512]
  int64_t out_stride_t, out_stride_h;
  float* lse;  // [T, H] or null
  float scale;
  int32_t heads, queries, unused;
};

namespace {

constexpr int kTile = 64, kLoaders = 96;
constexpr uint32_t kTileBytes = 65536, kQ = 2 * kTileBytes, kP = kQ + 65536;  // two tiles, q, weights [2] of 64 x 64 bf16
constexpr uint32_t kAlpha = kP + 16384, kBias = kAlpha + 512, kFactor = kBias + 512;  // [2][64] fp32 each
constexpr uint32_t kBars = kFactor + 512;  // full[2], empty[2], weights full[2], empty[2], q full[8], q empty
constexpr uint32_t kSmemBytes = kBars + 8 * 17;

struct Query {
  int row, length, count, window_tiles, tiles;
};
__device__ __forceinline__ Query query_at(const Params& p, int i) {
  Query q;
  q.row = __ldg(p.row + i);
  q.length = __ldg(p.length + i);
  q.count = __ldg(p.count + i);
  q.window_tiles = (q.length + kTile - 1) / kTile;
  q.tiles = max(1, q.window_tiles + (q.count + kTile - 1) / kTile);
  return q;
}

__device__ __forceinline__ float (&piece(float (&o)[128], int i))[32] { return *(float(*)[32])(o + 32 * i); }

}  // namespace

// q_map: q in boxes of 64 heads x 64 channels, swizzled.
__global__ void __launch_bounds__(384, 1) prefill_rows(const __grid_constant__ CUtensorMap q_map, const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  const uint32_t smem = smem_u32(shared_bytes);
  const int group = threadIdx.x >> 7, warp = threadIdx.x >> 5, lane = threadIdx.x & 31, head0 = blockIdx.y * 64;
  const uint32_t full = smem + kBars, empty = full + 16, p_full = full + 32, p_empty = full + 48, q_full = full + 64, q_empty = full + 128;
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; ++i) {
      mbar_init(full + 8 * i, kLoaders + 3);
      mbar_init(empty + 8 * i, 8);
      mbar_init(p_full + 8 * i, 4);
      mbar_init(p_empty + 8 * i, 4);
    }
    for (int i = 0; i < 8; ++i) mbar_init(q_full + 8 * i, 1);
    mbar_init(q_empty, 4);
    fence_barrier_init();
  }
  // Rows past a list's end keep what memory held, and weight 0 times that could be NaN.
  for (uint32_t at = threadIdx.x * 16; at < 2 * kTileBytes; at += 384 * 16) st_shared_v4(smem + at, make_uint4(0, 0, 0, 0));
  fence_async();
  __syncthreads();
  after_previous_kernel();

  if (group == 2) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
    if (warp == 11) {  // q
      if (lane != 0) return;
      int k = 0;
      for (int i = blockIdx.x; i < p.queries; i += gridDim.x, ++k) {
        if (k > 0) mbar_wait(q_empty, (k - 1) & 1);
        for (int block = 0; block < 8; ++block) {
          mbar_expect(q_full + 8 * block, 8192);
          tensor_load(smem + kQ + block * 8192, &q_map, block * 64, head0, i, q_full + 8 * block);
        }
      }
      return;
    }
    const int loader = warp - 8, sub = lane >> 3, chunk = lane & 7;
    int it = 0;
    for (int i = blockIdx.x; i < p.queries; i += gridDim.x) {
      const Query q = query_at(p, i);
      for (int t = 0; t < q.tiles; ++t, ++it) {
        const int buf = it & 1;
        const bool in_window = t < q.window_tiles;
        const int at = (in_window ? t : t - q.window_tiles) * kTile, used = (in_window ? q.length : q.count) - at;
        const bool dense = !in_window && p.list == nullptr && used > 0;
        const uint8_t* base = in_window ? p.window : p.second;
        int rows[6];  // of four rows at a time, three warps in turn; the thread has 16 bytes of each block of 64 channels
#pragma unroll
        for (int g = 0; g < 6; ++g) {
          const int r = (g * 3 + loader) * 4 + sub;
          rows[g] = -1;
          if (r < kTile && r < used) {
            if (in_window)
              rows[g] = q.row - q.length + 1 + at + r;
            else if (dense)
              rows[g] = 0;
            else
              asm volatile("ld.global.nc.b32 %0, [%1];" : "=r"(rows[g]) : "l"(p.list + i * p.list_stride + at + r));
          }
        }
        if (it >= 2) mbar_wait(empty + 8 * buf, ((it >> 1) - 1) & 1);
        if (chunk == 0)
#pragma unroll
          for (int g = 0; g < 6; ++g) {
            const int r = (g * 3 + loader) * 4 + sub;
            if (r < kTile) st_shared_b32(smem + kBias + buf * 256 + r * 4, rows[g] >= 0 ? 0u : 0xff800000u);
          }
        if (dense) {
          mbar_arrive(full + 8 * buf);
          __syncwarp();
          if (lane == 0) {
            if (loader == 0) {
              const uint32_t bytes = (min(used, kTile) + 7) / 8 * 8192;
              mbar_expect(full + 8 * buf, bytes);
              bulk_load(smem + buf * kTileBytes, base + (int64_t)(__ldg(p.first + i) + at) * 1024, bytes, full + 8 * buf);
            } else {
              mbar_arrive(full + 8 * buf);
            }
          }
          continue;
        }
#pragma unroll
        for (int g = 0; g < 6; ++g) {
          const int r = (g * 3 + loader) * 4 + sub;
          if (r < kTile) {
            const int from = max(rows[g], 0);
            const uint8_t* src = base + (int64_t)(from >> 3) * 8192 + (from & 7) * 128 + ((chunk ^ (r & 7) ^ (from & 7)) << 4);
            const uint32_t to = smem + buf * kTileBytes + (r >> 3) * 8192 + (r & 7) * 128 + (chunk << 4);
#pragma unroll
            for (int block = 0; block < 8; ++block)
              asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to + block * 1024), "l"(src + block * 1024),
                           "r"(rows[g] >= 0 ? 16 : 0)
                           : "memory");
          }
        }
        asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(full + 8 * buf) : "memory");
        __syncwarp();
        if (lane == 0) mbar_arrive(full + 8 * buf);  // for the biases
      }
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    return;
  }

  asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
  const int quad = lane & 3, row0 = (warp & 3) * 16 + (lane >> 2), head = head0 + row0;
  const bool has[2] = {head < p.heads, head + 8 < p.heads};
  const float* alphas = (const float*)(shared_bytes + kAlpha);
  float* factors = (float*)(shared_bytes + kFactor);
  float o[128];
#pragma unroll
  for (int i = 0; i < 128; ++i) o[i] = 0;
  int it = 0;
  if (group == 0) {
    const float to_log2 = p.scale * kLog2e;
    const float sink[2] = {p.sink && has[0] ? p.sink[head] * kLog2e : -INFINITY, p.sink && has[1] ? p.sink[head + 8] * kLog2e : -INFINITY};
    float m[2] = {-INFINITY, -INFINITY}, l[2] = {0, 0}, factor[2] = {0, 0};
    uint32_t pr[4][4] = {};
    bool held = false;  // the previous tile's memory
    int k = 0;
    for (int i = blockIdx.x; i < p.queries; i += gridDim.x, ++k) {
      const int tiles = query_at(p, i).tiles;
      m[0] = m[1] = -INFINITY;
      l[0] = l[1] = 0;
#pragma unroll
      for (int c = 0; c < 128; ++c) o[c] = 0;
      for (int t = 0; t < tiles; ++t, ++it) {
        const int buf = it & 1;
        const uint64_t q_desc = operand(smem + kQ, 16, 1024), k_desc = operand(smem + buf * kTileBytes, 16, 8192);
        const uint64_t v_desc = operand(smem + buf * kTileBytes, 1024, 8192);
        float s[32];
#pragma unroll
        for (int c = 0; c < 32; ++c) s[c] = 0;
        mbar_wait(full + 8 * buf, (it >> 1) & 1);
        fence_async();
        if (t == 0) {
#pragma unroll 1
          for (int block = 0; block < 8; ++block) mbar_wait(q_full + 8 * block, k & 1);
        }
        wgmma_fence();
#pragma unroll
        for (int kk = 0; kk < 32; ++kk)
          wgmma_qk(s, q_desc + (kk >> 2) * 512 + (kk & 3) * 2, k_desc + (kk >> 2) * 64 + (kk & 3) * 2, kk != 0);
        wgmma_commit();
        if (held) {  // the product with the previous tile is older, hence done
          wgmma_wait<1>();
#pragma unroll
          for (int kk = 0; kk < 4; ++kk)  // the tensor cores read these registers until here: keep the compiler off them
            asm volatile("" ::"r"(pr[kk][0]), "r"(pr[kk][1]), "r"(pr[kk][2]), "r"(pr[kk][3]));
          if (lane == 0) mbar_arrive(empty + 8 * (buf ^ 1));
        }
        wgmma_wait<0>();
        settled(s);
        if (t == tiles - 1 && lane == 0) mbar_arrive(q_empty);

        float top[2] = {-INFINITY, -INFINITY};
        const float* bias = (const float*)(shared_bytes + kBias + buf * 256) + 2 * quad;
#pragma unroll
        for (int c = 0; c < 8; ++c) {
          const float2 b = *(const float2*)(bias + 8 * c);
          s[4 * c] = fmaf(s[4 * c], to_log2, b.x);
          s[4 * c + 1] = fmaf(s[4 * c + 1], to_log2, b.y);
          s[4 * c + 2] = fmaf(s[4 * c + 2], to_log2, b.x);
          s[4 * c + 3] = fmaf(s[4 * c + 3], to_log2, b.y);
          top[0] = fmaxf(top[0], fmaxf(s[4 * c], s[4 * c + 1]));
          top[1] = fmaxf(top[1], fmaxf(s[4 * c + 2], s[4 * c + 3]));
        }
        float alpha[2], shift[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float now = fmaxf(m[h], quad_max(top[h]));
          shift[h] = now == -INFINITY ? 0.0f : now;  // no row yet: every exponential below is exp2(-inf)
          alpha[h] = exp2_fast(m[h] - shift[h]);
          m[h] = now;
          l[h] *= alpha[h];
        }
#pragma unroll
        for (int c = 0; c < 32; ++c) {
          s[c] = exp2_fast(s[c] - shift[(c >> 1) & 1]);
          l[(c >> 1) & 1] += s[c];
        }
#pragma unroll
        for (int kk = 0; kk < 4; ++kk)
#pragma unroll
          for (int j = 0; j < 4; ++j) pr[kk][j] = pack_bf16(s[8 * kk + 2 * j], s[8 * kk + 2 * j + 1]);

        if (it >= 2) mbar_wait(p_empty + 8 * buf, ((it >> 1) - 1) & 1);
        const uint32_t line = smem + kP + buf * 8192 + row0 * 128 + quad * 4;
#pragma unroll
        for (int c = 0; c < 8; ++c) {
          const uint32_t place = (c ^ (row0 & 7)) << 4;
          st_shared_b32(line + place, pr[c >> 1][(c & 1) * 2]);
          st_shared_b32(line + 1024 + place, pr[c >> 1][(c & 1) * 2 + 1]);
        }
        if (quad == 0) {
          float* al = (float*)(shared_bytes + kAlpha + buf * 256);
          al[row0] = alpha[0];
          al[row0 + 8] = alpha[1];
        }
        if (t == tiles - 1) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const float sum = quad_sum(l[h]);
            factor[h] = m[h] == -INFINITY ? 0.0f : 1.0f / (sum + exp2_fast(sink[h] - m[h]));
            if (quad == 0) {
              factors[(k & 1) * 64 + row0 + 8 * h] = factor[h];
              if (p.lse && has[h]) p.lse[(int64_t)i * p.heads + head + 8 * h] = (m[h] + __log2f(sum)) * kLn2;
            }
          }
        }
        fence_async();
        __syncwarp();
        if (lane == 0) mbar_arrive(p_full + 8 * buf);
        if (__any_sync(~0u, alpha[0] != 1.0f || alpha[1] != 1.0f)) {
#pragma unroll
          for (int c = 0; c < 128; ++c) o[c] *= alpha[(c >> 1) & 1];
        }
        wgmma_fence();
#pragma unroll
        for (int kk = 0; kk < 4; ++kk) {
          wgmma_pv_rs(low_half(o), pr[kk], v_desc + kk * 1024, 1);
          wgmma_pv_rs(high_half(o), pr[kk], v_desc + kk * 1024 + 128, 1);
        }
        wgmma_commit();
        held = t + 1 < tiles;
        // If the next tile is late, there is time to see this one through, so that its memory is free the sooner.
        if (held && !mbar_done(full + 8 * (buf ^ 1), ((it + 1) >> 1) & 1)) {
          wgmma_wait<0>();
          if (lane == 0) mbar_arrive(empty + 8 * buf);
          held = false;
        }
      }
      wgmma_wait<0>();
      settled(o);
      if (lane == 0) mbar_arrive(empty + 8 * ((it - 1) & 1));
      __nv_bfloat16* upper = p.out + i * p.out_stride_t + head * p.out_stride_h;
#pragma unroll
      for (int c = 0; c < 4; ++c) store_part(piece(o, c), factor, upper + c * 64, 8 * p.out_stride_h, quad, has[0], has[1]);
    }
  } else {
    int k = 0;
    for (int i = blockIdx.x; i < p.queries; i += gridDim.x, ++k) {
      const int tiles = query_at(p, i).tiles;
      float factor[2];
      for (int t = 0; t < tiles; ++t, ++it) {
        const int buf = it & 1;
        const uint64_t v_desc = operand(smem + buf * kTileBytes + 4096, 1024, 8192), p_desc = operand(smem + kP + buf * 8192, 16, 1024);
        mbar_wait(full + 8 * buf, (it >> 1) & 1);
        fence_async();
        mbar_wait(p_full + 8 * buf, (it >> 1) & 1);
        const float alpha[2] = {alphas[buf * 64 + row0], alphas[buf * 64 + row0 + 8]};
        factor[0] = factors[(k & 1) * 64 + row0];  // of the last tile: read before p_empty lets the next be written
        factor[1] = factors[(k & 1) * 64 + row0 + 8];
        if (t > 0 && __any_sync(~0u, alpha[0] != 1.0f || alpha[1] != 1.0f)) {
#pragma unroll
          for (int c = 0; c < 128; ++c) o[c] *= alpha[(c >> 1) & 1];
        }
        wgmma_fence();
#pragma unroll
        for (int kk = 0; kk < 4; ++kk) {
          wgmma_pv_ss(low_half(o), p_desc + kk * 2, v_desc + kk * 1024, t | kk);
          wgmma_pv_ss(high_half(o), p_desc + kk * 2, v_desc + kk * 1024 + 128, t | kk);
        }
        wgmma_commit();
        wgmma_wait<0>();
        settled(o);
        if (lane == 0) {
          mbar_arrive(empty + 8 * buf);
          mbar_arrive(p_empty + 8 * buf);
        }
      }
      __nv_bfloat16* upper = p.out + i * p.out_stride_t + head * p.out_stride_h + 256;
#pragma unroll
      for (int c = 0; c < 4; ++c) store_part(piece(o, c), factor, upper + c * 64, 8 * p.out_stride_h, quad, has[0], has[1]);
    }
  }
}

extern "C" int hr_prefill_rows(const Params* p, const void* q, int64_t stride_t, int64_t stride_h, int blocks, void* stream) {
  return launch_prefill(prefill_rows, *p, q, stride_t, stride_h, blocks, kSmemBytes, (cudaStream_t)stream);
}
