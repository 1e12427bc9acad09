// Indexer logits over paged fp4 keys (68 bytes an entry), and exact stable top-k.
//
// Logits: s[t, j] = sum_h w[t, h] * relu(q[t, h] . k[j]). One warp-group takes 64 keys (a page) as the 64 rows of an fp8
// product whose columns are the 64 heads, so the sum over heads stays inside a quad of threads. Keys never touch shared
// memory: a thread loads the 16 bytes that hold one key's channels 32 * quad .. + 31, exactly one scale group, and unpacks them
// to e4m3 by table look-up (prmt); q's channels are permuted to match when it is loaded. A key's largest group scale is pulled
// out of the product; what a group's scale is below it, d = 0..14, is folded into the e4m3 code, exactly; d is clamped at 14.
//
// Top-k: one block a row. Keys are the fp32 bits made sortable; a histogram of 2048 equal parts of [min, max] finds the part
// that holds the k-th largest, and is repeated inside it until it is settled. Ties go to the lower index; output ascends.
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

constexpr int kStages = 5, kPageBytes = 4352;  // pages on their way to a block
// A dot product is below 128 * 448 * 384 < 2^25, so relu is the multiplication's own clamp to [0, 1] after shrinking by 2^25.
constexpr float kShrink = 2.98023223876953125e-8f;

__device__ __forceinline__ uint4 ld_u4(uint32_t addr) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(addr));
  return v;
}
__device__ __forceinline__ uint32_t ld_u1(uint32_t addr) {
  uint32_t v;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v) : "r"(addr));
  return v;
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

// The same from unshifted codes, for a scale 14 steps below the key's largest: those codes use the lowest bit.
__device__ __forceinline__ void unpack_lowest(uint32_t x, uint2 table, uint32_t& first, uint32_t& second) {
  const uint32_t magnitude = x & 0x77777777u, sign = x & 0x88888888u;
  // Selector 8 repeats the sign bit of byte 0 (0x80): 0xff where the nibble is negative, else 0x80; bit 6 tells them apart.
  first = prmt(table.x, table.y, magnitude) | ((prmt(0x80, 0, sign) << 1) & 0x80808080u);
  second = prmt(table.x, table.y, magnitude >> 16) | ((prmt(0x80, 0, sign >> 16) << 1) & 0x80808080u);
}

}  // namespace

__global__ void __launch_bounds__(128, 5) index_logits(const __grid_constant__ LogitsParams p) {
  __shared__ __align__(1024) uint8_t q_shared[64 * 128];
  __shared__ __align__(128) uint8_t ring[kStages * kPageBytes];
  __shared__ uint4 codes[15];  // positive and negative codes, shifted right by one
  __shared__ __align__(8) float w_shared[64];
  __shared__ uint64_t bars[2 * kStages];
  const int tid = threadIdx.x, lane = tid & 31, quad = lane & 3;
  const uint32_t full = smem_u32(bars), empty = full + 8 * kStages, pages = smem_u32(ring);
  if (tid == 0) {
    for (int i = 0; i < kStages; ++i) {
      mbar_init(full + 8 * i, 1);
      mbar_init(empty + 8 * i, 4);
    }
    fence_barrier_init();
  }
  if (tid < 15) {
    const uint32_t lo = (uint32_t)kCodes[tid] >> 1 & 0x3f3f3f3fu, hi = (uint32_t)(kCodes[tid] >> 32) >> 1 & 0x3f3f3f3fu;
    codes[tid] = make_uint4(lo, hi, lo | 0x40404040u, hi | 0x40404040u);
  }
  const uint32_t two = p.two;

  // The pages of all tokens, laid end to end, are dealt out evenly: this block has [begin, end) of them.
  auto pages_of = [&](int t) {
    const int n = t < p.tokens ? p.lengths[t] : 0;
    return n > p.skip ? min((n + 63) >> 6, p.max_pages) : 0;
  };
  int64_t total = 0;
  for (int t = lane; t < p.tokens; t += 32) total += pages_of(t);
#pragma unroll
  for (int m = 16; m; m >>= 1) total += __shfl_xor_sync(~0u, total, m);
  const int64_t begin = total * blockIdx.x / gridDim.x, end = total * (blockIdx.x + 1) / gridDim.x;
  if (begin == end) return;
  int token = 0;
  int64_t base = 0;  // pages before the token's
  for (int t0 = 0;; t0 += 32) {
    const int mine = pages_of(t0 + lane);
    int sum = mine;
#pragma unroll
    for (int m = 1; m < 32; m <<= 1) {
      const int o = __shfl_up_sync(~0u, sum, m);
      if (lane >= m) sum += o;
    }
    const uint32_t past = __ballot_sync(~0u, base + sum > begin);
    if (past) {
      const int l = __ffs(past) - 1;
      token = t0 + l;
      base += __shfl_sync(~0u, sum - mine, l);
      break;
    }
    base += __shfl_sync(~0u, sum, 31);
  }
  auto copy = [&](int page, int stage) {
    const uint8_t* from = p.pages + (int64_t)page * p.page_stride;
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(full + 8 * stage), "n"(kPageBytes) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     pages + stage * kPageBytes),
                 "l"(from), "n"(kPageBytes), "r"(full + 8 * stage)
                 : "memory");
  };
  const int row = (tid >> 5) * 16 + (lane >> 2);
  int done = 0;  // pages before the present stretch: they have gone through the ring
  __syncthreads();

  for (int64_t next = begin; next < end; ++token) {
    const int n = p.lengths[token], first = (int)(next - base), token_pages = pages_of(token);
    // A stretch: pages of one token, 32 at most, so that a lane keeps one page id.
    base += token_pages;
    if (first >= token_pages) continue;
    const int64_t stop = min(end, base);
    for (int at_page = first; next < stop;) {
      const int count = (int)min(stop - next, (int64_t)32);
      const int id = lane < count ? p.table[token * p.table_stride + at_page + lane] : 0;
      const bool known = (uint32_t)id < (uint64_t)p.num_pages;
      if (tid < min(count, kStages)) copy(known ? id : 0, (done + tid) % kStages);
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
      if (tid < 64) w_shared[tid] = p.w[token * p.w_stride_t + tid];
      fence_async();
      __syncthreads();
      const uint64_t q_desc = operand(smem_u32(q_shared), 16, 1024);
      float* out = p.logits + token * p.logits_stride + at_page * 64 + row + 8 * (quad & 1);
      const int left = n - at_page * 64 - row - 8 * (quad & 1);
      for (int i = 0; i < count; ++i) {
        const int stage = (done + i) % kStages, phase = (done + i) / kStages & 1;
        const uint32_t at = pages + stage * kPageBytes;
        mbar_wait(full + 8 * stage, phase);
        const uint4 code[2] = {ld_u4(at + row * 64 + quad * 16), ld_u4(at + row * 64 + 512 + quad * 16)};
        const uint32_t scale[2] = {ld_u1(at + 4096 + row * 4), ld_u1(at + 4096 + row * 4 + 32)};
        uint32_t a[4][4];
        int top[2];
        int d[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const uint32_t s = scale[h];
          const uint32_t pair = __vmaxu2(s & 0x00ff00ffu, (s >> 8) & 0x00ff00ffu);
          top[h] = max(pair & 0xffff, pair >> 16);
          d[h] = min(top[h] - (int)((s >> (8 * quad)) & 0xff), 14);
        }
        const bool lowest = __any_sync(~0u, max(d[0], d[1]) == 14);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const uint32_t x[4] = {code[h].x, code[h].y, code[h].z, code[h].w};
          const uint4 t = codes[d[h]];
          if (!lowest) {
#pragma unroll
            for (int k = 0; k < 4; ++k) unpack(x[k], t, two, a[k][h], a[k][2 + h]);
          } else {
            const uint2 whole = make_uint2((uint32_t)kCodes[d[h]], (uint32_t)(kCodes[d[h]] >> 32));
#pragma unroll
            for (int k = 0; k < 4; ++k) unpack_lowest(x[k], whole, a[k][h], a[k][2 + h]);
          }
        }
        __syncwarp();
        if (lane == 0) mbar_arrive(empty + 8 * stage);
        float acc[32];
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k) wgmma_fp8_rs(acc, a[k], q_desc + 2 * k, k != 0);
        wgmma_commit();
        // The page before has been read by all by now: another is asked for in its place.
        if (tid < 32 && i > 0 && i - 1 + kStages < count) {
          const int page = __shfl_sync(~0u, known ? id : 0, i - 1 + kStages);
          if (lane == 0) {
            const int old = done + i - 1;
            mbar_wait(empty + 8 * (old % kStages), old / kStages & 1);
            copy(page, old % kStages);
          }
          __syncwarp();
        }
        wgmma_wait<0>();
        float sum[2][2] = {};
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const float2 w = *(const float2*)(w_shared + 8 * j + 2 * quad);
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            sum[h][0] = fmaf(w.x, __saturatef(acc[4 * j + 2 * h] * kShrink), sum[h][0]);
            sum[h][1] = fmaf(w.y, __saturatef(acc[4 * j + 2 * h + 1] * kShrink), sum[h][1]);
          }
        }
        // Lane `quad` of a quad ends row + 8 * (quad & 1): one exchange instead of two for half of the rows each.
        const float s0 = sum[0][0] + sum[0][1], s1 = sum[1][0] + sum[1][1];
        float v = (quad & 1) ? s1 : s0;
        v += __shfl_xor_sync(~0u, (quad & 1) ? s0 : s1, 1);
        v += __shfl_xor_sync(~0u, v, 2);
        const int e = (quad & 1) ? top[1] : top[0];
        // 2^(e - 127 - 6) / kShrink, in two steps since 2^(e - 127) may be below the smallest normal number.
        v *= 524288.0f * (e ? __uint_as_float((uint32_t)e << 23) : 5.877471754111438e-39f);
        if (!__shfl_sync(~0u, known, i)) v = -INFINITY;
        if (quad < 2 && i * 64 < left) out[i * 64] = v;
      }
      __syncthreads();  // q is about to be replaced, and every page has been read
      next += count;
      at_page += count;
      done += count;
    }
  }
}

namespace {

constexpr int kBins = 2048, kThreads = 1024;

__device__ __forceinline__ uint32_t sortable(float v) {
  uint32_t b = __float_as_uint(v + 0.0f);  // -0 becomes 0: they tie
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

constexpr int kCandidates = 1024;

struct TopkShared {
  uint32_t bins[kBins];
  uint32_t scratch[32], found[3], minimum, maximum, floor, count, chosen;
  uint32_t num_candidates;
  uint32_t candidate_key[kCandidates];
  int32_t candidate_place[kCandidates];
};

// SIZE blocks (a cluster) share a row; each keeps up to KEYS keys a thread in registers. Neither changes the result.
template <int KEYS, int SIZE>
__global__ void __launch_bounds__(kThreads, 1) top_k(const __grid_constant__ TopkParams p) {
  __shared__ TopkShared sh;
  const int rank = SIZE == 1 ? 0 : blockIdx.x, token = blockIdx.y;
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  const int n = p.lengths[token];
  const float* row = p.logits + token * p.logits_stride;
  int32_t* out = p.out + token * p.out_stride;
  const int32_t* table = p.table ? p.table + token * p.table_stride : nullptr;
  auto slot = [&](int i) { return table ? table[i >> 6] * 64 + (i & 63) : i; };
  auto sync = [&] {
    if constexpr (SIZE == 1)
      __syncthreads();
    else
      cluster_sync();
  };
  auto peer = [&](const uint32_t* at, int r) {  // a word of block r's shared memory
    if constexpr (SIZE == 1) return *at;
    uint32_t v;
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(v) : "r"(map_rank(smem_u32(at), r)));
    return v;
  };
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
    sync();
    uint32_t least_key = ~0u, floor = 0;
    for (int r = 0; r < SIZE; ++r) {
      least_key = min(least_key, peer(&sh.minimum, r));
      floor = max(floor, peer(&sh.floor, r));
      hi = max(hi, peer(&sh.maximum, r));
    }
    lo = max(least_key, floor);
  } else {
    __syncthreads();
    lo = max(lo, sh.floor);
  }

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
    sync();
    uint32_t b0 = 0, b1 = 0;
#pragma unroll
    for (int r = 0; r < SIZE; ++r) {
      b0 += peer(&sh.bins[2 * tid], r);
      b1 += peer(&sh.bins[2 * tid + 1], r);
    }
    const uint32_t after = suffix_sum(b0 + b1, sh.scratch);  // keys in the parts beyond this thread's
    if (after < want && after + b0 + b1 >= want) {
      bool upper = after + b1 >= want;
      sh.found[0] = 2 * tid + upper;
      sh.found[1] = upper ? after : after + b1;
      sh.found[2] = upper ? b1 : b0;
    }
    sync();
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
    sync();
    lo = ~0u;
    hi = 0;
    for (int r = 0; r < SIZE; ++r) {
      lo = min(lo, peer(&sh.minimum, r));
      hi = max(hi, peer(&sh.maximum, r));
    }
    sync();
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
        sh.candidate_place[at] = start + r;
      }
    sync();
    if constexpr (SIZE > 1) {  // every block takes all the others' after its own
      uint32_t own = sh.num_candidates, to = own;
      for (int r = 0; r < SIZE; ++r) {
        if (r == rank) continue;
        const uint32_t num = peer(&sh.num_candidates, r);
        // The other's own entries are its first `num`; what it appends lies beyond them.
        if (tid < num) {
          sh.candidate_key[to + tid] = peer(&sh.candidate_key[tid], r);
          sh.candidate_place[to + tid] = (int32_t)peer((const uint32_t*)&sh.candidate_place[tid], r);
        }
        to += num;
      }
      sync();
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
    over += key[r] > mark_key || (key[r] == mark_key && start + r <= mark_place);
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
    sync();
    for (int r = 0; r < rank; ++r) {
      over_before += peer(&sh.count, r);
      same_before += peer(&sh.chosen, r);
    }
  }
  if (over + same) {
#pragma unroll
    for (int r = 0; r < KEYS; ++r) {
      const int i = start + r;
      const bool is_over = key[r] > mark_key || (key[r] == mark_key && i <= mark_place);
      const bool is_same = counted && key[r] == mark_key;
      if (is_over || (is_same && same_before < want)) out[over_before + (counted ? min(same_before, want) : 0u)] = slot(i);
      over_before += is_over;
      same_before += is_same;
    }
  }
  if constexpr (SIZE > 1) cluster_sync();  // nobody leaves while another still reads
}

template <int KEYS, int SIZE>
static cudaError_t launch_top_k(const TopkParams& p, cudaStream_t stream) {
  cudaLaunchConfig_t cfg = {};
  cfg.gridDim = dim3(SIZE, p.tokens);
  cfg.blockDim = dim3(kThreads);
  cfg.stream = stream;
  cudaLaunchAttribute attr[1];
  attr[0].id = cudaLaunchAttributeClusterDimension;
  attr[0].val.clusterDim.x = SIZE;
  attr[0].val.clusterDim.y = attr[0].val.clusterDim.z = 1;
  cfg.attrs = attr;
  cfg.numAttrs = 1;
  return cudaLaunchKernelEx(&cfg, top_k<KEYS, SIZE>, p);
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
  index_logits<<<p->blocks, 128, 0, (cudaStream_t)stream>>>(*p);
  return (int)cudaGetLastError();
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
