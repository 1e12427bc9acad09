// Indexer logits over paged fp4 keys (68 bytes an entry), and exact stable top-k.
//
// Logits: s[t, j] = sum_h w[t, h] * relu(q[t, h] . k[j]). One warp-group takes 64 keys (a page) as the 64 rows of an fp8
// product whose columns are the 64 heads, so the sum over heads stays inside a quad of threads. A thread copies the 16 bytes that
// hold one key's channels 32 * quad .. + 31, exactly one scale group, into a ring that only it reads, four pages ahead, and
// unpacks them to e4m3 by table look-up (prmt); q's channels are permuted to match when it is loaded. A key's largest group scale
// is pulled out of the product; what a group's scale is below it, d = 0..14, is folded into the e4m3 code, exactly; d is clamped
// at 14.
//
// Top-k: a block, or a cluster, a row. A floor that at least k keys reach comes from the warps' maxima. In one block those that
// reach it are listed first. Keys are the fp32 bits made sortable; a histogram of 2048 equal parts of [floor, max] finds the
// part that holds the k-th largest, and is repeated inside it until it is settled. Ties go to the lower index; output ascends.
#include "hopper.cuh"

using namespace hr;

struct LogitsParams {
  const uint8_t* q;  // [T, 64, 128] e4m3
  int64_t q_stride_t;
  const float* w;  // [T, 64]
  int64_t w_stride_t;
  const uint8_t* pages;  // 64 x 64 bytes of codes, then 64 x 4 of scales
  int64_t page_stride, num_pages;
  const int32_t* table;  // [T, max pages]
  int64_t table_stride;
  const int32_t* lengths;  // [T] visible keys
  float* logits;           // [T, >= max length]
  int64_t logits_stride;
  int32_t tokens, max_pages, skip, blocks, two;  // rows of at most `skip` keys are left out
};

struct TopkParams {
  const float* logits;
  int64_t logits_stride;
  const int32_t* lengths;
  const int32_t* table;  // or null: indices themselves are given out
  int64_t table_stride;
  int32_t* out;  // [T, k]
  int64_t out_stride;
  int32_t* out_lengths;  // [T]
  int32_t tokens, k;
};

namespace {

// e4m3 codes of the e2m1 magnitudes 0, .5, 1, 1.5, 2, 3, 4, 6 times 2^(6 - d), d = 0..14; magnitude 0 in the lowest byte.
__constant__ uint64_t kCodes[15] = {
    0x7c7874706c686000ull, 0x74706c6864605800ull, 0x6c6864605c585000ull, 0x64605c5854504800ull, 0x5c5854504c484000ull,
    0x54504c4844403800ull, 0x4c4844403c383000ull, 0x44403c3834302800ull, 0x3c3834302c282000ull, 0x34302c2824201800ull,
    0x2c2824201c181000ull, 0x24201c1814100800ull, 0x1c1814100c080400ull, 0x14100c0806040200ull, 0x0c08060403020100ull};

constexpr int kStages = 4;     // pages on their way to a block
constexpr int kStageBytes = 128 * 40;  // of each thread: its codes of two rows (2 x 16), its rows' scales (2 x 4)
constexpr int kStretch = 128;  // pages of one token whose places wait in shared memory
// A dot product is below 128 * 448 * 384 < 2^25, so relu is the multiplication's own clamp to [0, 1] after shrinking by 2^25.
constexpr float kShrink = 2.98023223876953125e-8f;
constexpr int kWeightStride = 20;  // floats; a quad's 16 weights, spaced so that the four quads lie in different banks

__device__ __forceinline__ float4 ld_f4(uint32_t addr) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(addr));
  return v;
}
__device__ __forceinline__ uint4 ld_u4(uint32_t addr) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(addr));
  return v;
}
__device__ __forceinline__ uint2 ld_u2(uint32_t addr) {
  uint2 v;
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(addr));
  return v;
}
template <int BYTES>
__device__ __forceinline__ void copy_async(uint32_t to, const void* from) {
  if constexpr (BYTES == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(BYTES) : "memory");
}

__device__ __forceinline__ uint32_t prmt(uint32_t a, uint32_t b, uint32_t select) {  // __byte_perm may drop the selectors' top bits
  uint32_t r;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(select));
  return r;
}

// Eight codes of a word become eight e4m3, in order. prmt takes a selector's lowest three bits as an index and, where the
// fourth is set, repeats the chosen byte's sign bit, which in these tables is 0: so one look-up gives the positive values and
// zeros, one with the fourth bits flipped the negative ones and zeros. The tables hold e4m3 codes shifted right by one, to keep
// that bit free; their sum, doubled, is the result. The doubling is a multiplication because the other integer pipe is full.
__device__ __forceinline__ void unpack(uint32_t x, uint4 table, uint32_t two, uint32_t& first, uint32_t& second) {
  const uint32_t y = x ^ 0x88888888u;
  first = prmt(table.x, table.y, x) * two + prmt(table.z, table.w, y) * two;
  second = prmt(table.x, table.y, x >> 16) * two + prmt(table.z, table.w, y >> 16) * two;
}

// The lowest bits of the same eight, which the shifted tables lack. Only a scale 14 steps below the key's largest has any: the
// codes of 0.5 and 1.5 are then 1 and 3.
__device__ __forceinline__ void add_lowest(uint32_t x, uint32_t odd, uint32_t& first, uint32_t& second) {
  const uint32_t magnitude = x & 0x77777777u;
  first |= prmt(odd, 0, magnitude);
  second |= prmt(odd, 0, magnitude >> 16);
}

}  // namespace

__global__ void __launch_bounds__(128, 4) index_logits(const __grid_constant__ LogitsParams p) {
  __shared__ __align__(1024) uint8_t q_shared[64 * 128];
  __shared__ uint4 codes[15];  // positive and negative codes, shifted right by one
  __shared__ __align__(16) float w_shared[4 * kWeightStride];
  __shared__ __align__(16) uint8_t ring[kStages * kStageBytes];
  __shared__ uint32_t places[kStretch];  // of pages, in units of 16 bytes from the pool's first
  const int tid = threadIdx.x, lane = tid & 31, quad = lane & 3;
  if (tid < 15) {
    const uint32_t lo = (uint32_t)kCodes[tid] >> 1 & 0x3f3f3f3fu, hi = (uint32_t)(kCodes[tid] >> 32) >> 1 & 0x3f3f3f3fu;
    codes[tid] = make_uint4(lo, hi, lo | 0x40404040u, hi | 0x40404040u);
  }
  const uint32_t two = p.two;
  after_previous_kernel();

  // The pages of all tokens, laid end to end, are dealt out evenly: this block has [next, end) of them.
  auto pages_of = [&](int t) {
    const int n = t < p.tokens ? p.lengths[t] : 0;
    return n > p.skip ? min((n + 63) >> 6, p.max_pages) : 0;
  };
  int total = 0;
  for (int t = lane; t < p.tokens; t += 32) total += pages_of(t);
  total = __reduce_add_sync(~0u, total);
  const int share = total / (int)gridDim.x, more = total % (int)gridDim.x, me = blockIdx.x;
  int next = share * me + min(me, more);
  const int end = next + share + (me < more);
  if (next == end) return;
  int token = 0, base = 0;  // pages before the token's
  for (int t0 = 0;; t0 += 32) {
    const int mine = pages_of(t0 + lane);
    int sum = mine;
#pragma unroll
    for (int m = 1; m < 32; m <<= 1) {
      const int o = __shfl_up_sync(~0u, sum, m);
      if (lane >= m) sum += o;
    }
    const uint32_t past = __ballot_sync(~0u, base + sum > next);
    if (past) {
      const int l = __ffs(past) - 1;
      token = t0 + l;
      base += __shfl_sync(~0u, sum - mine, l);
      break;
    }
    base += __shfl_sync(~0u, sum, 31);
  }

  const int row = (tid >> 5) * 16 + (lane >> 2);
  const uint32_t weights = smem_u32(w_shared) + quad * (kWeightStride * 4);
  const uint64_t q_desc = operand(smem_u32(q_shared), 16, 1024);
  // A thread copies what it will read itself, so the ring needs no barriers: it waits for its own copies.
  const uint8_t* my_codes = p.pages + row * 64 + quad * 16;
  const uint8_t* my_scales = p.pages + 4096 + row * 4;
  const uint32_t ring_codes = smem_u32(ring) + tid * 16, ring_scales = smem_u32(ring) + 4096 + tid * 8;

  for (; next < end; ++token) {
    const int token_pages = pages_of(token), n = p.lengths[token];
    int at_page = next - base;
    base += token_pages;
    if (at_page >= token_pages) continue;
    while (next < min(end, base)) {
      const int count = min(min(end, base) - next, kStretch);
      bool unknown = false;
      if (tid < count) {
        const int id = p.table[token * p.table_stride + at_page + tid];
        unknown = (uint32_t)id >= (uint64_t)p.num_pages;
        places[tid] = unknown ? 0u : (uint32_t)(id * p.page_stride >> 4);
      }
      {  // word P = s * 8 + half * 4 + quad of a row holds q's channels 32 * quad + 8 * s + 4 * half .. + 3
        const uint32_t* src = (const uint32_t*)(p.q + token * p.q_stride_t);
        const uint32_t dst = smem_u32(q_shared);
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          int head = i * 4 + (tid >> 5), word = lane;
          int to = ((word >> 1) & 3) * 8 + (word & 1) * 4 + (word >> 3);
          st_shared_b32(dst + head * 128 + (((to >> 2) ^ (head & 7)) << 4) + (to & 3) * 4, src[head * 32 + word]);
        }
      }
      // Head 8 * j + 2 * quad + i is weight 2 * j + i of its quad.
      if (tid < 64) w_shared[(tid >> 1 & 3) * kWeightStride + (tid >> 3) * 2 + (tid & 1)] = p.w[token * p.w_stride_t + tid];
      fence_async();
      unknown = __syncthreads_or(unknown);
      const int place = row + 8 * (quad & 1) + 64 * (quad >> 1);
      float* out = p.logits + token * p.logits_stride + at_page * 64 + place;
      const int left = min(n - at_page * 64, count * 64) - place;
      const float4 weight[4] = {ld_f4(weights), ld_f4(weights + 16), ld_f4(weights + 32), ld_f4(weights + 48)};

      auto copy = [&](int i) {  // page i into its stage; past the last page nothing
        if (i < count) {
          const int64_t at = (int64_t)places[i] << 4;
          const uint32_t stage = i % kStages * kStageBytes;
          copy_async<16>(ring_codes + stage, my_codes + at);
          copy_async<16>(ring_codes + stage + 2048, my_codes + at + 512);
          copy_async<4>(ring_scales + stage, my_scales + at);
          copy_async<4>(ring_scales + stage + 4, my_scales + at + 32);
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
      };
      auto multiply = [&](float(&acc)[32], int i, int& top) {
        const uint32_t stage = i % kStages * kStageBytes;
        asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 1) : "memory");
        const uint4 code[2] = {ld_u4(ring_codes + stage), ld_u4(ring_codes + stage + 2048)};
        const uint2 scale = ld_u2(ring_scales + stage);
        uint32_t a[4][4];
        int tops[2], d[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const uint32_t s = h ? scale.y : scale.x;
          const uint32_t pair = __vmaxu2(s & 0x00ff00ffu, (s >> 8) & 0x00ff00ffu);
          tops[h] = max(pair & 0xffff, pair >> 16);
          d[h] = min(tops[h] - (int)prmt(s, 0, 0x4440u | quad), 14);
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const uint32_t x[4] = {code[h].x, code[h].y, code[h].z, code[h].w};
          const uint4 t = codes[d[h]];
#pragma unroll
          for (int i = 0; i < 4; ++i) unpack(x[i], t, two, a[i][h], a[i][2 + h]);
        }
        if (__any_sync(~0u, max(d[0], d[1]) == 14)) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const uint32_t x[4] = {code[h].x, code[h].y, code[h].z, code[h].w};
            const uint32_t odd = d[h] == 14 ? 0x01000100u : 0u;
#pragma unroll
            for (int i = 0; i < 4; ++i) add_lowest(x[i], odd, a[i][h], a[i][2 + h]);
          }
        }
        top = (quad & 1) ? tops[1] : tops[0];
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k) wgmma_fp8_rs(acc, a[k], q_desc + 2 * k, k != 0);
        wgmma_commit();
        copy(i + kStages);  // what lay there is unpacked
      };
      auto sum_of = [&](float(&acc)[32]) {  // over the thread's 16 heads, of either row
        float sum[2][2] = {};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float4 w = weight[j];
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            sum[h][0] = fmaf(w.x, __saturatef(acc[8 * j + 2 * h] * kShrink), sum[h][0]);
            sum[h][1] = fmaf(w.y, __saturatef(acc[8 * j + 2 * h + 1] * kShrink), sum[h][1]);
            sum[h][0] = fmaf(w.z, __saturatef(acc[8 * j + 4 + 2 * h] * kShrink), sum[h][0]);
            sum[h][1] = fmaf(w.w, __saturatef(acc[8 * j + 5 + 2 * h] * kShrink), sum[h][1]);
          }
        }
        return make_float2(sum[0][0] + sum[0][1], sum[1][0] + sum[1][1]);
      };
      // Lane `quad` of a quad ends row + 8 * (quad & 1) of the page i (quad < 2) or i + 1.
      auto give = [&](float2 even, int top_even, float2 odd, int top_odd, int i) {
        const bool later = quad & 2, lower = quad & 1;
        const float x = (later ? odd.x : even.x) + __shfl_xor_sync(~0u, later ? even.x : odd.x, 2);
        const float y = (later ? odd.y : even.y) + __shfl_xor_sync(~0u, later ? even.y : odd.y, 2);
        float v = (lower ? y : x) + __shfl_xor_sync(~0u, lower ? x : y, 1);
        const int top = later ? top_odd : top_even;
        // 2^(top - 127 - 6) / kShrink, in two steps since 2^(top - 127) may be below the smallest normal number.
        v *= 524288.0f * (top ? __uint_as_float((uint32_t)top << 23) : 5.877471754111438e-39f);
        if (i * 64 < left) out[i * 64] = v;
      };

      float acc[32];
      int top_even, top_odd;
#pragma unroll
      for (int i = 0; i < kStages; ++i) copy(i);
#pragma unroll 1
      for (int i = 0; i < count; i += 2) {  // past the last page it multiplies once more, for nothing
        multiply(acc, i, top_even);
        wgmma_wait<0>();
        const float2 even = sum_of(acc);
        multiply(acc, i + 1, top_odd);
        wgmma_wait<0>();
        give(even, top_even, sum_of(acc), top_odd, i);
      }
      __syncthreads();  // q and the places are about to be replaced, and what follows writes over what others wrote
      if (unknown)
        for (int i = tid >> 6; i < count; i += 2) {
          const uint32_t id = p.table[token * p.table_stride + at_page + i];
          const int at = (at_page + i) * 64 + (tid & 63);
          if (id >= (uint64_t)p.num_pages && at < n) p.logits[token * p.logits_stride + at] = -INFINITY;
        }
      next += count;
      at_page += count;
    }
  }
}

namespace {

constexpr int kBins = 2048, kThreads = 1024;

// What is no number counts as the least, so that a row of n keys has n of them: a search for the k-th would not end otherwise.
__device__ __forceinline__ float number(float v) { return v == v ? v : -INFINITY; }

__device__ __forceinline__ uint32_t sortable(float v) {
  uint32_t b = __float_as_uint(number(v) + 0.0f);  // -0 becomes 0: they tie
  return b ^ ((b >> 31) ? 0xffffffffu : 0x80000000u);
}

__device__ __forceinline__ float unsort(uint32_t k) { return __uint_as_float(k ^ ((k >> 31) ? 0x80000000u : 0xffffffffu)); }

// Sum over the threads after this one (exclusive suffix), and the total; all threads of the block call it.
__device__ __forceinline__ uint32_t suffix_sum(uint32_t v, uint32_t* scratch) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  uint32_t s = v;
#pragma unroll
  for (int m = 1; m < 32; m <<= 1) {
    uint32_t o = __shfl_down_sync(~0u, s, m);
    if (lane + m < 32) s += o;
  }
  if (lane == 0) scratch[warp] = s;
  __syncthreads();
  uint32_t after = 0;
  uint32_t t = lane > warp ? scratch[lane] : 0;
#pragma unroll
  for (int m = 16; m; m >>= 1) t += __shfl_xor_sync(~0u, t, m);
  after = t;
  __syncthreads();
  return s - v + after;
}

}  // namespace

constexpr int kCandidates = 1024, kListed = 4096;

struct TopkShared {
  uint32_t bins[kBins];
  uint32_t scratch[32], found[3], minimum, maximum, floor, count, chosen;
  uint32_t num_candidates;
  alignas(16) uint32_t candidate_key[kCandidates];
  int32_t candidate_place[kCandidates];
};

// A word of the shared memory of block r of the cluster.
template <int SIZE>
__device__ __forceinline__ uint32_t peer(const uint32_t* at, int r) {
  if constexpr (SIZE == 1) return *at;
  uint32_t v;
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(v) : "r"(map_rank(smem_u32(at), r)));
  return v;
}
template <int SIZE>
__device__ __forceinline__ void sync() {
  if constexpr (SIZE == 1)
    __syncthreads();
  else
    cluster_sync();
}

// Writes the slots of the k largest keys. key: a thread's, in order of place, threads and blocks likewise; 0 is no key. Those
// below lo are not counted (at least k are not), hi is the largest. sh.bins are 0.
template <int KEYS, int SIZE, class Place, class Slot>
__device__ __forceinline__ void choose(const TopkParams& p, TopkShared& sh, const uint32_t (&key)[KEYS], uint32_t lo, uint32_t hi,
                                       int rank, int32_t* out, Place place, Slot slot) {
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  // First cut: 2048 parts of [least, most], equal in value, so that an ordinary row fills them evenly. Rounding is monotonic,
  // hence so is the part; if the range is not finite, or empty, cut the bits instead.
  const float least = unsort(lo), most = unsort(hi), steps = (kBins - 0.5f) / (most - least);
  bool by_value = most - least < 3e38f && steps < 3e38f;
  uint32_t want = p.k, bin = 0, inside = 0;
  int shift = 0;
  auto part = [&](uint32_t k) -> uint32_t {
    return by_value ? (uint32_t)((unsort(k) - least) * steps) : (k - lo) >> shift;
  };
  while (true) {
    shift = max(0, 21 - __clz(hi - lo));  // (hi - lo) >> shift < 2048
    __syncthreads();
#pragma unroll
    for (int r = 0; r < KEYS; ++r)
      if (key[r] >= lo && key[r] <= hi) atomicAdd(&sh.bins[part(key[r])], 1u);
    sync<SIZE>();
    uint32_t b0 = 0, b1 = 0;
#pragma unroll
    for (int r = 0; r < SIZE; ++r) {
      b0 += peer<SIZE>(&sh.bins[2 * tid], r);
      b1 += peer<SIZE>(&sh.bins[2 * tid + 1], r);
    }
    const uint32_t after = suffix_sum(b0 + b1, sh.scratch);  // keys in the parts beyond this thread's
    if (after < want && after + b0 + b1 >= want) {
      bool upper = after + b1 >= want;
      sh.found[0] = 2 * tid + upper;
      sh.found[1] = upper ? after : after + b1;
      sh.found[2] = upper ? b1 : b0;
    }
    sync<SIZE>();
    bin = sh.found[0];
    inside = sh.found[2];
    if (inside <= kCandidates) {
      want -= sh.found[1];
      break;
    }
    // Too many in one part: narrow the range of bits around it and cut again. By value, the range is that of its members.
    want -= sh.found[1];
    uint32_t new_lo = ~0u, new_hi = 0;
#pragma unroll
    for (int r = 0; r < KEYS; ++r)
      if (key[r] >= lo && key[r] <= hi && part(key[r]) == bin) {
        new_lo = min(new_lo, key[r]);
        new_hi = max(new_hi, key[r]);
      }
    new_lo = __reduce_min_sync(~0u, new_lo);
    new_hi = __reduce_max_sync(~0u, new_hi);
    if (tid == 0) {
      sh.minimum = ~0u;
      sh.maximum = 0;
    }
    __syncthreads();
    if (lane == 0) {
      atomicMin(&sh.minimum, new_lo);
      atomicMax(&sh.maximum, new_hi);
    }
    sh.bins[tid] = 0;
    sh.bins[tid + kThreads] = 0;
    sync<SIZE>();
    lo = ~0u;
    hi = 0;
    for (int r = 0; r < SIZE; ++r) {
      lo = min(lo, peer<SIZE>(&sh.minimum, r));
      hi = max(hi, peer<SIZE>(&sh.maximum, r));
    }
    sync<SIZE>();
    by_value = false;
    if (lo == hi) {  // all equal: the first `want` of them by place
      shift = 0;
      bin = 0;
      break;
    }
  }

  // Chosen: every key in a part beyond, the `want` best of the part. With few in it, they are ranked one against another
  // and the last chosen becomes the mark; if all in it are equal, they are counted by place.
  uint32_t mark_key = lo;
  int32_t mark_place = -1;
  const bool counted = inside > kCandidates;
  if (!counted) {
#pragma unroll
    for (int r = 0; r < KEYS; ++r)
      if (key[r] >= lo && key[r] <= hi && part(key[r]) == bin) {
        const uint32_t at = atomicAdd(&sh.num_candidates, 1u);
        sh.candidate_key[at] = key[r];
        sh.candidate_place[at] = place(r);
      }
    sync<SIZE>();
    if constexpr (SIZE > 1) {  // every block takes all the others' after its own
      uint32_t own = sh.num_candidates, to = own;
      for (int r = 0; r < SIZE; ++r) {
        if (r == rank) continue;
        const uint32_t num = peer<SIZE>(&sh.num_candidates, r);
        // The other's own entries are its first `num`; what it appends lies beyond them.
        if (tid < num) {
          sh.candidate_key[to + tid] = peer<SIZE>(&sh.candidate_key[tid], r);
          sh.candidate_place[to + tid] = (int32_t)peer<SIZE>((const uint32_t*)&sh.candidate_place[tid], r);
        }
        to += num;
      }
      sync<SIZE>();
    }
    for (uint32_t i = warp; i < inside; i += 32) {
      const uint32_t k = sh.candidate_key[i];
      const int32_t at = sh.candidate_place[i];
      uint32_t better = 0;
      for (uint32_t j = lane; j < inside; j += 32)
        better += sh.candidate_key[j] > k || (sh.candidate_key[j] == k && sh.candidate_place[j] < at);
      better = __reduce_add_sync(~0u, better);
      if (better == want - 1 && lane == 0) {
        sh.found[0] = k;
        sh.found[1] = (uint32_t)at;
      }
    }
    __syncthreads();
    mark_key = sh.found[0];
    mark_place = (int32_t)sh.found[1];
  }

  uint32_t over = 0, same = 0;
#pragma unroll
  for (int r = 0; r < KEYS; ++r) {
    over += key[r] > mark_key || (key[r] == mark_key && place(r) <= mark_place);
    same += counted && key[r] == mark_key;
  }
  uint32_t over_before = over, same_before = same;  // inclusive over the warp, then exclusive over the row
#pragma unroll
  for (int m = 1; m < 32; m <<= 1) {
    const uint32_t x = __shfl_up_sync(~0u, over_before, m), y = __shfl_up_sync(~0u, same_before, m);
    if (lane >= m) {
      over_before += x;
      same_before += y;
    }
  }
  __syncthreads();
  if (lane == 31) {
    sh.bins[warp] = over_before;
    sh.bins[32 + warp] = same_before;
  }
  __syncthreads();
  over_before += __reduce_add_sync(~0u, lane < warp ? sh.bins[lane] : 0) - over;
  same_before += __reduce_add_sync(~0u, lane < warp ? sh.bins[32 + lane] : 0) - same;
  if constexpr (SIZE > 1) {
    if (tid == kThreads - 1) {
      sh.count = over_before + over;
      sh.chosen = same_before + same;
    }
    sync<SIZE>();
    for (int r = 0; r < rank; ++r) {
      over_before += peer<SIZE>(&sh.count, r);
      same_before += peer<SIZE>(&sh.chosen, r);
    }
  }
  if (over + same) {
#pragma unroll
    for (int r = 0; r < KEYS; ++r) {
      const bool is_over = key[r] > mark_key || (key[r] == mark_key && place(r) <= mark_place);
      const bool is_same = counted && key[r] == mark_key;
      if (is_over || (is_same && same_before < want)) out[over_before + (counted ? min(same_before, want) : 0u)] = slot(place(r));
      over_before += is_over;
      same_before += is_same;
    }
  }
  if constexpr (SIZE > 1) cluster_sync();  // nobody leaves while another still reads
}

// SIZE blocks (a cluster) share a row; each keeps up to KEYS keys a thread in registers. Neither changes the result.
template <int KEYS, int SIZE>
__global__ void __launch_bounds__(kThreads, 1) top_k(const __grid_constant__ TopkParams p) {
  __shared__ TopkShared sh;
  const int rank = SIZE == 1 ? 0 : blockIdx.x, token = blockIdx.y;
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  after_previous_kernel();
  const int n = p.lengths[token];
  const float* row = p.logits + token * p.logits_stride;
  int32_t* out = p.out + token * p.out_stride;
  const int32_t* table = p.table ? p.table + token * p.table_stride : nullptr;
  auto slot = [&](int i) { return table ? table[i >> 6] * 64 + (i & 63) : i; };
  if (rank == 0 && tid == 0 && p.out_lengths) p.out_lengths[token] = min(max(n, 0), p.k);
  if (n <= p.k) {
    if (rank == 0)
      for (int i = tid; i < p.k; i += kThreads) out[i] = i < n ? slot(i) : -1;
    return;
  }
  // A thread owns `per` neighbouring places, so that counting by thread is counting by place.
  const int per = ((n + kThreads * SIZE - 1) / (kThreads * SIZE) + 3) & ~3;
  const int start = (rank * kThreads + tid) * per;
  const bool aligned = ((uintptr_t)row & 15) == 0;
  uint32_t key[KEYS];  // 0 lies below every number: it stands for no key, and is never counted nor chosen
#pragma unroll
  for (int r = 0; r < KEYS; r += 4) {
    key[r] = key[r + 1] = key[r + 2] = key[r + 3] = 0u;
    const int i = start + r;
    if (r < per && i < n) {
      if (aligned && i + 3 < n) {
        const float4 v = *(const float4*)(row + i);
        key[r] = sortable(v.x);
        key[r + 1] = sortable(v.y);
        key[r + 2] = sortable(v.z);
        key[r + 3] = sortable(v.w);
      } else {
#pragma unroll
        for (int j = 0; j < 4; ++j)
          if (i + j < n) key[r + j] = sortable(row[i + j]);
      }
    }
  }
  sh.bins[tid] = 0;
  sh.bins[tid + kThreads] = 0;
  if (tid == 0) sh.num_candidates = 0;
  uint32_t lo = ~0u, hi = 0;
#pragma unroll
  for (int r = 0; r < KEYS; ++r) {
    lo = min(lo, key[r] ? key[r] : ~0u);
    hi = max(hi, key[r]);
  }
  // Each lane of a warp has a key at least as large as the least of the lanes' largest, so a warp has 32 of them: with k / 32
  // warps there are k, and the k / 32-th largest of the warps' values is a floor below which nothing needs to be counted.
  uint32_t warp_floor = __reduce_min_sync(~0u, hi);
  lo = __reduce_min_sync(~0u, lo);
  hi = __reduce_max_sync(~0u, hi);
  if (lane == 0) {
    sh.scratch[warp] = lo;
    sh.candidate_key[warp] = hi;
    sh.candidate_key[32 + warp] = warp_floor;
  }
  __syncthreads();
  lo = __reduce_min_sync(~0u, sh.scratch[lane]);
  hi = __reduce_max_sync(~0u, sh.candidate_key[lane]);
  if (warp == 0) {
    const uint32_t mine = sh.candidate_key[32 + lane];
    int rank_of = 0;
#pragma unroll
    for (int r = 0; r < 32; ++r) {
      const uint32_t other = __shfl_sync(~0u, mine, r);
      rank_of += other > mine || (other == mine && r < lane);
    }
    const uint32_t floor = __reduce_max_sync(~0u, rank_of == (p.k + 31) / 32 - 1 ? mine : 0u);
    if (lane == 0) sh.floor = floor;
  }
  if constexpr (SIZE > 1) {
    if (tid == 0) {
      sh.minimum = lo;
      sh.maximum = hi;
    }
    sync<SIZE>();
    uint32_t least_key = ~0u, floor = 0;
    for (int r = 0; r < SIZE; ++r) {
      least_key = min(least_key, peer<SIZE>(&sh.minimum, r));
      floor = max(floor, peer<SIZE>(&sh.floor, r));
      hi = max(hi, peer<SIZE>(&sh.maximum, r));
    }
    lo = max(least_key, floor);
  } else {
    __syncthreads();
    lo = max(lo, sh.floor);
  }

  choose<KEYS, SIZE>(p, sh, key, lo, hi, rank, out, [&](int r) { return start + r; }, slot);
}

// One block a row. Few keys reach the floor: they are listed first, in order, and only the list is counted and chosen from.
template <int KEYS>
__global__ void __launch_bounds__(kThreads, 1) top_k_listed(const __grid_constant__ TopkParams p) {
  __shared__ TopkShared sh;
  __shared__ uint32_t list_key[kListed];
  __shared__ uint16_t list_place[kListed];
  static_assert(KEYS * kThreads <= 65536);
  const int token = blockIdx.y, tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  sh.bins[tid] = 0;
  sh.bins[tid + kThreads] = 0;
  if (tid == 0) sh.num_candidates = 0;
  after_previous_kernel();
  const int n = p.lengths[token];
  const float* row = p.logits + token * p.logits_stride;
  int32_t* out = p.out + token * p.out_stride;
  const int32_t* table = p.table ? p.table + token * p.table_stride : nullptr;
  auto slot = [&](int i) { return table ? table[i >> 6] * 64 + (i & 63) : i; };
  if (tid == 0 && p.out_lengths) p.out_lengths[token] = min(max(n, 0), p.k);
  if (n <= p.k) {
    for (int i = tid; i < p.k; i += kThreads) out[i] = i < n ? slot(i) : -1;
    return;
  }
  const int per = ((n + kThreads - 1) / kThreads + 3) & ~3, start = tid * per;
  const bool aligned = ((uintptr_t)row & 15) == 0;
  float v[KEYS];  // NaN: no key
  float most = __int_as_float(0x7fffffff);
#pragma unroll
  for (int r = 0; r < KEYS; r += 4) {
    v[r] = v[r + 1] = v[r + 2] = v[r + 3] = __int_as_float(0x7fffffff);
    const int i = start + r;
    if (r < per && i < n) {
      if (aligned && i + 3 < n) {
        const float4 x = *(const float4*)(row + i);
        v[r] = number(x.x);
        v[r + 1] = number(x.y);
        v[r + 2] = number(x.z);
        v[r + 3] = number(x.w);
      } else {
#pragma unroll
        for (int j = 0; j < 4; ++j)
          if (i + j < n) v[r + j] = number(row[i + j]);
      }
    }
  }
#pragma unroll
  for (int r = 0; r < KEYS; ++r) most = fmaxf(most, v[r]);
  // Each lane of a warp has a key at least as large as the least of the lanes' largest, so a warp has 32 of them: with k / 32
  // warps there are k, and the k / 32-th largest of the warps' values is a floor below which nothing needs to be counted.
  uint32_t hi = start < n ? sortable(most) : 0u;
  const uint32_t warp_floor = __reduce_min_sync(~0u, hi);
  hi = __reduce_max_sync(~0u, hi);
  if (lane == 0) {
    sh.candidate_key[warp] = hi;
    sh.candidate_key[32 + warp] = warp_floor;
  }
  __syncthreads();
  hi = __reduce_max_sync(~0u, sh.candidate_key[lane]);
  uint32_t lo;
  {
    const uint32_t mine = sh.candidate_key[32 + lane];
    int rank_of = 0;
#pragma unroll
    for (int r = 0; r < 32; r += 4) {
      const uint4 other = *(const uint4*)(sh.candidate_key + 32 + r);
      rank_of += other.x > mine || (other.x == mine && r < lane);
      rank_of += other.y > mine || (other.y == mine && r + 1 < lane);
      rank_of += other.z > mine || (other.z == mine && r + 2 < lane);
      rank_of += other.w > mine || (other.w == mine && r + 3 < lane);
    }
    lo = __reduce_max_sync(~0u, rank_of == (p.k + 31) / 32 - 1 ? mine : 0u);  // 0: there are not so many full warps
  }
  if (lo == 0) {  // the least key, for want of a floor
    uint32_t least = ~0u;
#pragma unroll
    for (int r = 0; r < KEYS; ++r)
      if (v[r] == v[r]) least = min(least, sortable(v[r]));
    least = __reduce_min_sync(~0u, least);
    if (lane == 0) sh.candidate_key[64 + warp] = least;
    __syncthreads();
    lo = __reduce_min_sync(~0u, sh.candidate_key[64 + lane]);
  }
  const float floor = unsort(lo);
  uint32_t count = 0;
#pragma unroll
  for (int r = 0; r < KEYS; ++r) count += v[r] >= floor;
  uint32_t before = count;
#pragma unroll
  for (int m = 1; m < 32; m <<= 1) {
    const uint32_t x = __shfl_up_sync(~0u, before, m);
    if (lane >= m) before += x;
  }
  if (lane == 31) sh.scratch[warp] = before;
  __syncthreads();
  const uint32_t of_warp = sh.scratch[lane], total = __reduce_add_sync(~0u, of_warp);
  before += __reduce_add_sync(~0u, lane < warp ? of_warp : 0u) - count;
  if (total <= kListed) {
#pragma unroll
    for (int r = 0; r < KEYS; ++r)
      if (v[r] >= floor) {
        list_key[before] = sortable(v[r]);
        list_place[before++] = (uint16_t)(start + r);
      }
    __syncthreads();
    const int few = (total + kThreads - 1) / kThreads, first = tid * few;
    uint32_t key[4];
    int32_t places[4];
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const bool is = r < few && first + r < (int)total;
      key[r] = is ? list_key[first + r] : 0u;
      places[r] = is ? list_place[first + r] : 0;
    }
    choose<4, 1>(p, sh, key, lo, hi, 0, out, [&](int r) { return places[r]; }, slot);
    return;
  }
  uint32_t key[KEYS];
#pragma unroll
  for (int r = 0; r < KEYS; ++r) key[r] = v[r] == v[r] ? sortable(v[r]) : 0u;
  choose<KEYS, 1>(p, sh, key, lo, hi, 0, out, [&](int r) { return start + r; }, slot);
}

template <int KEYS, int SIZE>
static cudaError_t launch_top_k(const TopkParams& p, cudaStream_t stream) {
  cudaLaunchConfig_t cfg = {};
  cfg.gridDim = dim3(SIZE, p.tokens);
  cfg.blockDim = dim3(kThreads);
  cfg.stream = stream;
  cudaLaunchAttribute attr[2];
  attr[0].id = cudaLaunchAttributeClusterDimension;
  attr[0].val.clusterDim.x = SIZE;
  attr[0].val.clusterDim.y = attr[0].val.clusterDim.z = 1;
  attr[1] = early_launch();
  cfg.attrs = attr;
  cfg.numAttrs = 2;
  if constexpr (SIZE == 1) return cudaLaunchKernelEx(&cfg, top_k_listed<KEYS>, p);
  else return cudaLaunchKernelEx(&cfg, top_k<KEYS, SIZE>, p);
}

template <int SIZE>
static cudaError_t launch_top_k(const TopkParams& p, int keys, cudaStream_t s) {
  if (keys <= 4) return launch_top_k<4, SIZE>(p, s);
  if (keys <= 8) return launch_top_k<8, SIZE>(p, s);
  if (keys <= 16) return launch_top_k<16, SIZE>(p, s);
  if (keys <= 32) return launch_top_k<32, SIZE>(p, s);
  return cudaErrorInvalidValue;
}

extern "C" int hr_index_logits(const LogitsParams* p, void* stream) {
  cudaLaunchConfig_t cfg = {};
  cfg.gridDim = dim3(p->blocks);
  cfg.blockDim = dim3(128);
  cfg.stream = (cudaStream_t)stream;
  cudaLaunchAttribute attr[1] = {early_launch()};
  cfg.attrs = attr;
  cfg.numAttrs = 1;
  return (int)cudaLaunchKernelEx(&cfg, index_logits, *p);
}
// size: blocks a row, 1, 2, 4 or 8; a row may hold 32768 * size logits.
extern "C" int hr_top_k(const TopkParams* p, int max_length, int size, void* stream) {
  const int keys = ((max_length + kThreads * size - 1) / (kThreads * size) + 3) & ~3;
  switch (size) {
    case 1: return launch_top_k<1>(*p, keys, (cudaStream_t)stream);
    case 2: return launch_top_k<2>(*p, keys, (cudaStream_t)stream);
    case 4: return launch_top_k<4>(*p, keys, (cudaStream_t)stream);
    case 8: return launch_top_k<8>(*p, keys, (cudaStream_t)stream);
    default: return (int)cudaErrorInvalidValue;
  }
}
