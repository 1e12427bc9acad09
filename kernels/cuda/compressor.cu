// K1: compressor pooling straight from the projection's output, with norm, rotary, quantisation and insert; and the state rows.
// In the same launch, K2's kv side: rotary, quantisation and insert of the window's entries, by blocks of their own.
//
// One block an entry: 128 threads of four channels each, times GROUPS shares of the pooled tokens. A pooled token comes from
// this step's rows if it belongs to the step, else from the sequence's ring; so a chunk's rows are read from device memory
// once (twice from L2, as groups overlap) and only the last few of a sequence are ever stored. Tokens are taken in a fixed
// order, four at a time within a share, shares in order: the result does not depend on where a chunk was cut.
#include "hopper.cuh"

using namespace hr;

struct CompressParams {
  const float* x;  // [T, 2 * width]: values, then scores without ape
  int64_t x_stride;
  const float* ape;            // [ratio, width]
  const __nv_bfloat16* weight;  // [512]
  const int64_t* positions;    // [T]
  const int32_t* first_row;    // [T] the row of x where the token's sequence begins in this step
  const int32_t* last_row;     // [T] where it ends
  const int64_t* ring;         // [T] the sequence's ring, or -1: padding
  float* state;                // rings of `ring_rows` rows of 2 * width: values, scores with ape
  int64_t ring_stride;         // elements
  const int64_t* slots;        // [T] where the entry goes, or -1
  uint8_t* pages;
  int64_t page_stride;
  const float* cos_sin;  // [positions, 64]
  float eps;
  int32_t ring_rows, keep, log2_entries, tokens;
  int32_t pool, save;  // which of the two this launch does
  int32_t window_tokens, window_log2_entries;
  int64_t num_positions, num_rings, num_slots, num_window_slots;
  const __nv_bfloat16* kv;  // [window tokens, 512], normed
  int64_t kv_stride;
  const int64_t* window_positions;
  const int64_t* window_slots;  // -1: padding
  uint8_t* window_pages;
  int64_t window_page_stride;
};

namespace {
// A place that is none of the pool's would be somebody else's: better no worker than a wrong page.
__device__ __forceinline__ void must(bool holds) {
  if (!holds) __trap();
}

struct Part {  // of a softmax over tokens, for four channels
  float top[4], sum[4], value[4];
};

// Rotates, quantises and writes an entry; 128 threads have four channels each. turns: the 32 cosines and 32 sines of its position.
__device__ __forceinline__ void insert(const float (&v)[4], int t, uint8_t* pages, int64_t page_stride, int log2_entries, int64_t slot,
                                       const float* turns) {
  const int entries = 1 << log2_entries, at = (int)(slot & (entries - 1));
  uint8_t* page = pages + (slot >> log2_entries) * page_stride;
  if (t >= 112) {
    const float* turn = turns + (t - 112) * 2;
    const float2 cs = *(const float2*)turn, sn = *(const float2*)(turn + 32);
    *(uint2*)(page + at * 576 + 448 + (t - 112) * 8) = make_uint2(pack_bf16(v[0] * cs.x - v[1] * sn.x, v[1] * cs.x + v[0] * sn.x),
                                                                  pack_bf16(v[2] * cs.y - v[3] * sn.y, v[3] * cs.y + v[2] * sn.y));
    if (t == 127) page[entries * 576 + at * 8 + 7] = 0;
  }
  // 16 threads a scale group; the last half warp is the rotary part and only keeps the others company.
  const uint32_t lo = pack_bf16(v[0], v[1]), hi = pack_bf16(v[2], v[3]);
  const float x[4] = {bf16_lo(lo), bf16_hi(lo), bf16_lo(hi), bf16_hi(hi)};
  float top = fmaxf(fmaxf(fabsf(x[0]), fabsf(x[1])), fmaxf(fabsf(x[2]), fabsf(x[3])));
#pragma unroll
  for (int m = 8; m; m >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, m));
  const int e = scale_exponent(fmaxf(top, 1e-4f));
  const float inv = pow2(-e);
  // What is no finite number may not show in the codes: the group's scale says so.
  const uint32_t broken = __ballot_sync(~0u, !(fabsf(x[0]) + fabsf(x[1]) + fabsf(x[2]) + fabsf(x[3]) < INFINITY));
  if (t < 112) {
    *(uint32_t*)(page + at * 576 + t * 4) = pack_e4m3(x[0] * inv, x[1] * inv, x[2] * inv, x[3] * inv);
    if ((t & 15) == 0) page[entries * 576 + at * 8 + (t >> 4)] = broken >> (t & 16) & 0xffff ? 255 : (uint8_t)(e + 127);
  }
}
}  // namespace

// RATIO 4: tokens p-7 .. p-4 with columns [0, 512), p-3 .. p with columns [512, 1024). RATIO 128: tokens p-127 .. p.
template <int RATIO, int GROUPS>
__global__ void __launch_bounds__(128 * GROUPS) compress(const __grid_constant__ CompressParams p) {
  constexpr int kWidth = RATIO == 4 ? 1024 : 512, kPooled = RATIO == 4 ? 8 : 128, kShare = kPooled / GROUPS;
  __shared__ Part parts[GROUPS > 1 ? (GROUPS - 1) * 128 : 1];
  __shared__ float squares[4];
  const int tid = threadIdx.x, group = tid >> 7, t = tid & 127;
  after_previous_kernel();
  if ((int)blockIdx.x >= p.tokens) {  // a window entry for each group of threads
    const int row = ((int)blockIdx.x - p.tokens) * GROUPS + group;
    if (row >= p.window_tokens || p.window_slots[row] < 0) return;
    must(p.window_slots[row] < p.num_window_slots && (uint64_t)p.window_positions[row] < p.num_positions);
    const uint2 w = *(const uint2*)(p.kv + row * p.kv_stride + t * 4);
    const float v[4] = {bf16_lo(w.x), bf16_hi(w.x), bf16_lo(w.y), bf16_hi(w.y)};
    insert(v, t, p.window_pages, p.window_page_stride, p.window_log2_entries, p.window_slots[row],
           p.cos_sin + p.window_positions[row] * 64);
    return;
  }
  const int token = blockIdx.x;
  const int64_t pos = p.positions[token], ring = p.ring[token], slot = p.slots[token];
  const int first = p.first_row[token], last = p.last_row[token];
  const int64_t first_pos = pos - (token - first);
  if (ring < 0) return;
  must(ring < p.num_rings && (uint64_t)pos < p.num_positions);
  float* rows = p.state + ring * p.ring_stride;

  if (p.save && token > last - p.keep) {
    const float4* src = (const float4*)(p.x + token * p.x_stride);
    const float4* bias = (const float4*)(p.ape + (pos % RATIO) * kWidth);
    float4* dst = (float4*)(rows + (pos % p.ring_rows) * 2 * kWidth);
    for (int i = tid; i < 2 * kWidth / 4; i += 128 * GROUPS) {
      float4 v = src[i];
      if (i >= kWidth / 4) {
        const float4 b = bias[i - kWidth / 4];
        v.x += b.x, v.y += b.y, v.z += b.z, v.w += b.w;
      }
      dst[i] = v;
    }
  }
  if (!p.pool || slot < 0 || (pos + 1) % RATIO != 0) return;

  Part s;
#pragma unroll
  for (int c = 0; c < 4; ++c) s.top[c] = -INFINITY, s.sum[c] = s.value[c] = 0;
#pragma unroll 2
  for (int base = 0; base < kShare; base += 4) {
    float4 value[4], score[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int place = group * kShare + base + j;  // 0: the oldest
      const int64_t from = pos - (kPooled - 1) + place;
      const int column = (RATIO == 4 && place >= 4 ? 512 : 0) + t * 4;
      value[j] = make_float4(0, 0, 0, 0);
      score[j] = make_float4(-INFINITY, -INFINITY, -INFINITY, -INFINITY);
      if (from >= first_pos) {
        const float* row = p.x + (first + (from - first_pos)) * p.x_stride + column;
        value[j] = *(const float4*)row;
        score[j] = *(const float4*)(row + kWidth);
        const float4 b = *(const float4*)(p.ape + (from % RATIO) * kWidth + column);
        score[j].x += b.x, score[j].y += b.y, score[j].z += b.z, score[j].w += b.w;
      } else if (from >= 0) {
        const float* row = rows + (from % p.ring_rows) * 2 * kWidth + column;
        value[j] = *(const float4*)row;
        score[j] = *(const float4*)(row + kWidth);
      }
    }
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      float z[4], top = s.top[c];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        z[j] = ((const float*)&score[j])[c] * kLog2e;
        top = fmaxf(top, z[j]);
      }
      const float shift = top == -INFINITY ? 0.0f : top, scale = exp2_fast(s.top[c] - shift);
      s.sum[c] *= scale;
      s.value[c] *= scale;
      s.top[c] = top;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float e = exp2_fast(z[j] - shift);
        s.sum[c] += e;
        s.value[c] = fmaf(e, ((const float*)&value[j])[c], s.value[c]);
      }
    }
  }
  if (group > 0) parts[(group - 1) * 128 + t] = s;
  __syncthreads();
  if (group > 0) return;
#pragma unroll
  for (int g = 1; g < GROUPS; ++g) {
    const Part o = parts[(g - 1) * 128 + t];
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const float top = fmaxf(s.top[c], o.top[c]), shift = top == -INFINITY ? 0.0f : top;
      const float a = exp2_fast(s.top[c] - shift), b = exp2_fast(o.top[c] - shift);
      s.sum[c] = s.sum[c] * a + o.sum[c] * b;
      s.value[c] = s.value[c] * a + o.value[c] * b;
      s.top[c] = top;
    }
  }
  float v[4], sum = 0;
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    v[c] = s.value[c] / s.sum[c];
    sum += v[c] * v[c];
  }
#pragma unroll
  for (int m = 16; m; m >>= 1) sum += __shfl_xor_sync(~0u, sum, m);
  if ((tid & 31) == 0) squares[tid >> 5] = sum;
  named_barrier(1, 128);
  sum = squares[0] + squares[1] + squares[2] + squares[3];
  const float r = rsqrtf(sum * (1.0f / 512) + p.eps);
  const uint2 w = *(const uint2*)(p.weight + t * 4);
  v[0] *= r * bf16_lo(w.x);
  v[1] *= r * bf16_hi(w.x);
  v[2] *= r * bf16_lo(w.y);
  v[3] *= r * bf16_hi(w.y);

  must(slot < p.num_slots);
  insert(v, t, p.pages, p.page_stride, p.log2_entries, slot, p.cos_sin + (pos - pos % RATIO) * 64);
}

template <int RATIO, int GROUPS>
static int launch(const CompressParams& p, cudaStream_t stream) {
  const int blocks = p.tokens + (p.window_tokens + GROUPS - 1) / GROUPS;
  if (blocks == 0) return (int)cudaSuccess;
  cudaLaunchConfig_t cfg = {};
  cfg.gridDim = dim3(blocks);
  cfg.blockDim = dim3(128 * GROUPS);
  cfg.stream = stream;
  cudaLaunchAttribute attr[1] = {early_launch()};
  cfg.attrs = attr;
  cfg.numAttrs = 1;
  return (int)cudaLaunchKernelEx(&cfg, compress<RATIO, GROUPS>, p);
}

extern "C" int hr_compress(const CompressParams* p, int ratio, void* stream) {
  switch (ratio) {
    case 4: return launch<4, 2>(*p, (cudaStream_t)stream);
    case 128: return launch<128, 8>(*p, (cudaStream_t)stream);
    default: return (int)cudaErrorInvalidValue;
  }
}
