// Indexer logits over paged fp4 keys (68 bytes an entry), and exact stable top-k.
//
// Logits: s[t, j] = sum_h w[t, h] * relu(q[t, h] . k[j]). One warp-group takes 64 keys (a page) as the 64 rows of an fp8
// product whose columns are the 64 heads, so the sum over heads stays inside a quad of threads. Pages come by the copy engine into
// a ring of four. A thread reads 16 bytes that hold one key's channels 32 * quad .. + 31, exactly one scale group, and unpacks
// them to e4m3 by table look-up (prmt), under the product of the page before; q's channels are permuted to match when it is
// loaded. A key's largest group scale is pulled out of the product; what a group's scale is below it, d = 0..14, is folded into
// the e4m3 code, exactly; d is clamped at 14.
//
// Top-k: a block, or a cluster, a row. A floor that at least k keys reach comes from the largest keys of each lane. In one block
// each warp lists those that reach it first. A histogram of equal parts of [floor, max] finds the part that holds the k-th largest, and
// is repeated inside it, by the fp32 bits made sortable, until it is settled. Ties go to the lower index; output ascends.
#include <cstddef>

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
  int32_t width;                                 // of a row of logits: past it nothing is written
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
  int32_t tokens, k, max_length;
};

namespace {

// e4m3 codes of the e2m1 magnitudes 0, .5, 1, 1.5, 2, 3, 4, 6 times 2^(6 - d), d = 0..14; magnitude 0 in the lowest byte.
__constant__ uint64_t kCodes[15] = {
    0x7c7874706c686000ull, 0x74706c6864605800ull, 0x6c6864605c585000ull, 0x64605c5854504800ull, 0x5c5854504c484000ull,
    0x54504c4844403800ull, 0x4c4844403c383000ull, 0x44403c3834302800ull, 0x3c3834302c282000ull, 0x34302c2824201800ull,
    0x2c2824201c181000ull, 0x24201c1814100800ull, 0x1c1814100c080400ull, 0x14100c0806040200ull, 0x0c08060403020100ull};

constexpr int kStages = 4;  // pages on their way to a block
constexpr int kPageBytes = 4352;
constexpr int kStretch = 128;  // pages of one token whose places wait in shared memory
constexpr int kSwitch = 2;     // so many pages' time goes by until a token's q has come
// The keys' codes have the opposite sign. A dot product is below 128 * 448 * 384 < 2^25, so relu is the multiplication's own clamp
// to [0, 1] after shrinking by 2^25.
constexpr float kShrink = -2.98023223876953125e-8f;
constexpr int kWeightStride = 20;  // floats; a quad's 16 weights, spaced so that the four quads lie in different banks

__device__ __forceinline__ uint32_t prmt(uint32_t a, uint32_t b, uint32_t select) {  // __byte_perm may drop the selectors' top bits
  uint32_t r;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(select));
  return r;
}
__device__ __forceinline__ uint32_t dot_u8s8(uint32_t a, uint32_t b, uint32_t sum) {
  uint32_t r;
  asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(sum));
  return r;
}

// Eight codes of a word become eight e4m3 of the opposite sign, in order. prmt takes a selector's lowest three bits as an index
// and, where the fourth is set, repeats the chosen byte's sign bit. With the fourth bits away it looks magnitudes up; with them, in
// bytes of 0x40, it gives 0x40 for a positive code and 0 for a negative one, half of the sign bit wanted. The doubling is a
// multiplication because the other integer pipe is full.
__device__ __forceinline__ void unpack(uint32_t x, uint2 table, uint32_t two, uint32_t signs, uint32_t& first, uint32_t& second) {
  const uint32_t magnitude = x & 0x77777777u;
  first = prmt(table.x, table.y, magnitude) + prmt(signs, signs, x) * two;
  second = prmt(table.x, table.y, magnitude >> 16) + prmt(signs, signs, x >> 16) * two;
}

struct LogitsShared {
  alignas(128) uint8_t ring[kStages * kPageBytes];
  alignas(16) uint2 codes[256];
  alignas(16) float weights[4 * kWeightStride];
  uint64_t full[kStages], empty[kStages];
  uint32_t places[kStretch];  // of pages, in units of 16 bytes from the pool's first
  int32_t plan[6];            // pages of each warp's tokens; the token that the block begins with, the pages before it
};

}  // namespace

__global__ void __launch_bounds__(128, 4) index_logits(const __grid_constant__ LogitsParams p) {
  __shared__ __align__(1024) uint8_t q_shared[64 * 128];
  __shared__ LogitsShared sh;
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, quad = lane & 3;
  const uint32_t two = p.two, signs = two * 0x20202020u;
  const uint32_t at = __shfl_sync(~0u, smem_u32(&sh), 0);  // so that the loop does not work it out again and again
  const uint32_t own = 0xf8u << 8 * quad;                  // -8 for the scale of the thread's own group
  const uint32_t table_at = at + offsetof(LogitsShared, codes);
  for (int d = tid; d < 256; d += 128) sh.codes[d] = make_uint2((uint32_t)kCodes[min(d, 14)], (uint32_t)(kCodes[min(d, 14)] >> 32));
  auto full = [&](uint32_t stage) { return at + (uint32_t)offsetof(LogitsShared, full) + stage * 8; };
  auto empty = [&](uint32_t stage) { return at + (uint32_t)offsetof(LogitsShared, empty) + stage * 8; };
  if (tid == 0) {
    for (int i = 0; i < kStages; ++i) {
      mbar_init(full(i), 1);
      mbar_init(empty(i), 4);
    }
    fence_barrier_init();
  }

  // The pages of all tokens, laid end to end, each token's after kSwitch that stand for the time that its q takes, are dealt
  // out evenly: this block has [next, end) of them.
  auto pages_in = [&](int n) { return n > p.skip ? min((int)(((uint32_t)n + 63) >> 6), p.max_pages) + kSwitch : 0; };
  auto pages_of = [&](int t) { return t < p.tokens ? pages_in(p.lengths[t]) : 0; };
  const int each = (p.tokens + 127) / 128;  // tokens of a thread
  int next, end, mine;
  auto plan = [&](auto&& pages_of) {
    mine = 0;
#pragma unroll 8
    for (int i = 0; i < each; ++i) mine += pages_of(tid * each + i);
    int before = mine;
#pragma unroll
    for (int m = 1; m < 32; m <<= 1) {
      const int o = __shfl_up_sync(~0u, before, m);
      if (lane >= m) before += o;
    }
    if (lane == 31) sh.plan[warp] = before;
    __syncthreads();
    int total = 0;
    before -= mine;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      if (w == warp) before += total;
      total += sh.plan[w];
    }
    const int share = total / (int)gridDim.x, more = total % (int)gridDim.x, me = blockIdx.x;
    next = share * me + min(me, more);
    end = next + share + (me < more);
    if (before <= next && next < before + mine) {
      int t = tid * each;
      for (int pages; t < tid * each + each - 1 && before + (pages = pages_of(t)) <= next; ++t) before += pages;
      sh.plan[4] = t;
      sh.plan[5] = before;
    }
    __syncthreads();
  };
  // If no thread has two tokens, the plan is made while the kernel ahead still runs, from lengths that it may yet change: they are
  // looked at again.
  const bool early = each <= 1;
  if (early) plan([&](int t) { return t < p.tokens ? pages_in(__ldcg(p.lengths + t)) : 0; });
  after_previous_kernel();
  if (!early || __syncthreads_or(pages_of(tid) != mine)) plan(pages_of);
  if (next == end) return;
  int token = sh.plan[4], base = sh.plan[5];  // pages before the token's

  const int row = warp * 16 + (lane >> 2);
  const uint64_t q_desc = operand(smem_u32(q_shared), 16, 1024);
  const uint32_t my_codes = at + (uint32_t)offsetof(LogitsShared, ring) + row * 64 + quad * 16;
  const uint32_t my_scales = at + (uint32_t)offsetof(LogitsShared, ring) + 4096 + row * 4;
  uint32_t turn = 0;  // pages before the run

  for (; next < end; ++token) {
    const int token_pages = pages_of(token), n = min(p.lengths[token], p.width);
    int at_page = max(next - base - kSwitch, 0);
    next = base + kSwitch + at_page;
    base += token_pages;
    while (next < min(end, base)) {
      const int count = min(min(end, base) - next, kStretch);
      auto copy = [&](int i, uint32_t place) {  // page i into its stage, by one thread
        const uint32_t stage = (turn + i) % kStages;
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(full(stage)), "n"(kPageBytes) : "memory");
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                         at + (uint32_t)offsetof(LogitsShared, ring) + stage * kPageBytes),
                     "l"(p.pages + ((int64_t)place << 4)), "n"(kPageBytes), "r"(full(stage))
                     : "memory");
      };
      uint32_t q_words[16];
#pragma unroll
      for (int i = 0; i < 16; ++i) q_words[i] = ((const uint32_t*)(p.q + token * p.q_stride_t))[i * 128 + tid];
      bool unknown = false;
      if (tid < count) {
        const int id = p.table[token * p.table_stride + at_page + tid];
        unknown = (uint32_t)id >= (uint64_t)p.num_pages;
        const uint32_t place = unknown ? 0u : (uint32_t)(id * p.page_stride >> 4);
        if (tid < kStages / 2) copy(tid, place);
        sh.places[tid] = place;
      }
      // Word P = s * 8 + half * 4 + quad of a row holds q's channels 32 * quad + 8 * s + 4 * half .. + 3.
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const int head = i * 4 + warp, to = ((lane >> 1) & 3) * 8 + (lane & 1) * 4 + (lane >> 3);
        st_shared_b32(smem_u32(q_shared) + head * 128 + (((to >> 2) ^ (head & 7)) << 4) + (to & 3) * 4, q_words[i]);
      }
      // Head 8 * j + 2 * quad + i is weight 2 * j + i of its quad.
      if (tid < 64) sh.weights[(tid >> 1 & 3) * kWeightStride + (tid >> 3) * 2 + (tid & 1)] = p.w[token * p.w_stride_t + tid];
      fence_async();
      unknown = __syncthreads_or(unknown);
      const int place = row + 8 * (quad & 1);
      float* out = p.logits + token * p.logits_stride + at_page * 64 + place;
      if (tid >= kStages / 2 && tid < min(kStages, count)) copy(tid, sh.places[tid]);  // not before: q would wait behind them
      const int limit = quad < 2 ? min(n - at_page * 64, count * 64) - place : 0;
      const uint32_t weights = at + (uint32_t)offsetof(LogitsShared, weights) + quad * (kWeightStride * 4);
      const float4 weight[4] = {ld_f4(weights), ld_f4(weights + 16), ld_f4(weights + 32), ld_f4(weights + 48)};

      auto fetch = [&](uint32_t(&a)[4][4], int i, uint32_t& top) {
        const uint32_t stage = (turn + i) % kStages, parity = (turn + i) / kStages & 1;
        mbar_wait(full(stage), parity);
        const uint2 scale = make_uint2(ld_u1(my_scales + stage * kPageBytes), ld_u1(my_scales + stage * kPageBytes + 32));
        const uint4 code[2] = {ld_u4(my_codes + stage * kPageBytes), ld_u4(my_codes + stage * kPageBytes + 512)};
        __syncwarp();
        if (lane == 0) mbar_arrive(empty(stage));
        uint32_t tops[2];  // a row's largest scale, in the highest byte
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const uint32_t s = h ? scale.y : scale.x;
          const uint32_t pair = __vmaxu2(s, s << 8);  // each half's upper byte is the larger of its two
          tops[h] = max(pair, pair << 16);
          const uint32_t at = dot_u8s8(s, own, dot_u8s8(tops[h], 8u << 24, table_at));  // 8 bytes for each step below it
          const uint32_t x[4] = {code[h].x, code[h].y, code[h].z, code[h].w};
          const uint2 t = ld_u2(at);
#pragma unroll
          for (int i = 0; i < 4; ++i) unpack(x[i], t, two, signs, a[i][h], a[i][2 + h]);
        }
        top = (quad & 1) ? tops[1] : tops[0];
        if (i + kStages < count && tid == (i & 3) * 32) {
          mbar_wait(empty(stage), parity);
          copy(i + kStages, sh.places[i + kStages]);
        }
      };
      auto multiply = [&](float(&acc)[32], uint32_t(&a)[4][4]) {
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k) wgmma_fp8_rs(acc, a[k], q_desc + 2 * k, k != 0);
        wgmma_commit();
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
      auto ready = [&](float(&acc)[32]) {
        wgmma_wait<0>();
#pragma unroll
        for (int i = 0; i < 32; ++i) asm volatile("" : "+f"(acc[i])::"memory");
      };
      auto give = [&](float2 sum, uint32_t top, int i) {
        // Lanes 1 and 3 of a quad end with the lower row's sum.
        float v = (quad & 1 ? sum.y : sum.x) + __shfl_xor_sync(~0u, quad & 1 ? sum.x : sum.y, 1);
        v += __shfl_xor_sync(~0u, v, 2);
        v *= __uint_as_float(min((top >> 24) + 19, 255u) << 23);  // 2^(top - 127 - 6) / |kShrink|, or infinity
        if (i * 64 < limit) out[i * 64] = v;
      };

      // A page is unpacked under the product of the one before. After the last, what was unpacked is multiplied once more, for
      // nothing: a product in a branch would make the compiler wait after each.
      float acc[32];
      uint32_t a[2][4][4], top[2];
      fetch(a[0], 0, top[0]);
      multiply(acc, a[0]);
      if (1 < count) fetch(a[1], 1, top[1]);
#pragma unroll 1
      for (int i = 0;; i += 2) {
        ready(acc);
        const float2 even = sum_of(acc);
        multiply(acc, a[1]);
        give(even, top[0], i);
        if (i + 1 == count) break;
        if (i + 2 < count) fetch(a[0], i + 2, top[0]);
        ready(acc);
        const float2 odd = sum_of(acc);
        multiply(acc, a[0]);
        give(odd, top[1], i + 1);
        if (i + 2 == count) break;
        if (i + 3 < count) fetch(a[1], i + 3, top[1]);
      }
      wgmma_wait<0>();
      __syncthreads();  // q and the places are about to be replaced, and what follows writes over what others wrote
      if (unknown)
        for (int i = tid >> 6; i < count; i += 2) {
          const uint32_t id = p.table[token * p.table_stride + at_page + i];
          const int at = (at_page + i) * 64 + (tid & 63);
          if (id >= (uint64_t)p.num_pages && at < n) p.logits[token * p.logits_stride + at] = -INFINITY;
        }
      next += count;
      turn += count;
      at_page += count;
    }
  }
}

namespace {

constexpr int kBins = 2048, kThreads = 1024;

// What is no number counts as the least, so that a row of n keys has n of them: a search for the k-th would not end otherwise.
__device__ __forceinline__ float number(float v) { return fmaxf(v, -INFINITY); }

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

constexpr int kCandidates = 1024;

struct TopkShared {
  uint32_t bins[kBins];
  uint32_t scratch[32], found[3], minimum, maximum, floor, count, chosen;
  uint32_t num_candidates;
  alignas(16) uint32_t candidate_key[kCandidates];
  int32_t candidate_place[kCandidates];
};

// A word of the shared memory of block r of the cluster.
__device__ __forceinline__ uint32_t peer(const uint32_t* at, int r) {
  uint32_t v;
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(v) : "r"(map_rank(smem_u32(at), r)));
  return v;
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
    cluster_sync();
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
    cluster_sync();
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
    cluster_sync();
    lo = ~0u;
    hi = 0;
    for (int r = 0; r < SIZE; ++r) {
      lo = min(lo, peer(&sh.minimum, r));
      hi = max(hi, peer(&sh.maximum, r));
    }
    cluster_sync();
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
    cluster_sync();
    // Every block takes all the others' after its own.
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
    cluster_sync();
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
  if (tid == kThreads - 1) {
    sh.count = over_before + over;
    sh.chosen = same_before + same;
  }
  cluster_sync();
  for (int r = 0; r < rank; ++r) {
    over_before += peer(&sh.count, r);
    same_before += peer(&sh.chosen, r);
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
  cluster_sync();  // nobody leaves while another still reads
}

// A row of logits, and where its chosen places go.
struct TopkRow {
  const float* logits;
  const int32_t* table;
  int32_t* out;
  int32_t n;
  bool broken;  // its length cannot be: such a row has chosen nothing
  __device__ TopkRow(const TopkParams& p, int token)
      : logits(p.logits + token * p.logits_stride),
        table(p.table ? p.table + token * p.table_stride : nullptr),
        out(p.out + token * p.out_stride),
        n(p.lengths[token]),
        broken((uint32_t)n > (uint32_t)p.max_length) {}
  // A page whose slots no int32 could name gives slots that none has, and -1 least of all.
  static __device__ int32_t known(int32_t page) { return (uint32_t)page < 1u << 25 ? page : -(1 << 25); }
  __device__ int32_t slot(int place) const { return table ? known(table[place >> 6]) * 64 + (place & 63) : place; }
  // Which threads met a logit that is no finite number: of a broken key, or of none. The row then has chosen nothing, and says so
  // once all have met in a barrier.
  __device__ void end(const TopkParams& p, int token, float zero) const {
    if (zero != 0 && p.out_lengths) p.out_lengths[token] = -1;
  }
  // Gives out how many there will be and, if the row has no more than k, all of them. Of several blocks one writes.
  __device__ bool all(const TopkParams& p, int token, bool writes) const {
    if (writes && threadIdx.x == 0 && p.out_lengths) p.out_lengths[token] = broken ? -1 : min(n, p.k);
    if (n > p.k && !broken) return false;
    if (writes)
      for (int i = threadIdx.x; i < p.k; i += blockDim.x) out[i] = i < n && !broken ? slot(i) : -1;
    return true;
  }
};

// SIZE blocks (a cluster) share a row; each keeps up to KEYS keys a thread in registers. Neither changes the result.
template <int KEYS, int SIZE>
__global__ void __launch_bounds__(kThreads, 1) top_k_cluster(const __grid_constant__ TopkParams p) {
  __shared__ TopkShared sh;
  const int rank = blockIdx.x, token = blockIdx.y;
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  after_previous_kernel();
  const TopkRow row(p, token);
  if (row.all(p, token, rank == 0)) return;
  const int n = row.n;
  // A thread owns `per` neighbouring places, so that counting by thread is counting by place.
  const int per = ((n + kThreads * SIZE - 1) / (kThreads * SIZE) + 3) & ~3;
  const int start = (rank * kThreads + tid) * per;
  const bool aligned = ((uintptr_t)row.logits & 15) == 0;
  float zero = 0;  // NaN after a logit that is no finite number
  auto taken = [&](float x) {
    zero = fmaf(x, 0.0f, zero);
    return sortable(x);
  };
  uint32_t key[KEYS];  // 0 lies below every number: it stands for no key, and is never counted nor chosen
#pragma unroll
  for (int r = 0; r < KEYS; r += 4) {
    key[r] = key[r + 1] = key[r + 2] = key[r + 3] = 0u;
    const int i = start + r;
    if (r < per && i < n) {
      if (aligned && i + 3 < n) {
        const float4 v = *(const float4*)(row.logits + i);
        key[r] = taken(v.x);
        key[r + 1] = taken(v.y);
        key[r + 2] = taken(v.z);
        key[r + 3] = taken(v.w);
      } else {
#pragma unroll
        for (int j = 0; j < 4; ++j)
          if (i + j < n) key[r + j] = taken(row.logits[i + j]);
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
  if (tid == 0) {
    sh.minimum = lo;
    sh.maximum = hi;
  }
  cluster_sync();
  uint32_t least_key = ~0u, floor = 0;
  for (int r = 0; r < SIZE; ++r) {
    least_key = min(least_key, peer(&sh.minimum, r));
    floor = max(floor, peer(&sh.floor, r));
    hi = max(hi, peer(&sh.maximum, r));
  }
  lo = max(least_key, floor);

  choose<KEYS, SIZE>(
      p, sh, key, lo, hi, rank, row.out, [&](int r) { return start + r; }, [&](int place) { return row.slot(place); });
  row.end(p, token, zero);
}

constexpr int kParts = 1024, kFew = 128;

// The r-th largest of the values of the lane's octet, r = 1..8.
__device__ __forceinline__ uint32_t octet_rank(uint32_t x, int r) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int size = 2; size <= 8; size <<= 1)
#pragma unroll
    for (int m = size >> 1; m; m >>= 1) {
      const uint32_t o = __shfl_xor_sync(~0u, x, m);
      const bool second = (lane & m) != 0, rising = size < 8 && (lane & size) != 0;
      x = second == rising ? max(x, o) : min(x, o);
    }
  return __shfl_sync(~0u, x, (lane & ~7) + r - 1);
}

// The sum over the threads before this one; all threads of the block call it.
template <int THREADS>
__device__ __forceinline__ uint32_t prefix_sum(uint32_t x, uint32_t* warps) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  uint32_t sum = x;
#pragma unroll
  for (int m = 1; m < 32; m <<= 1) {
    const uint32_t o = __shfl_up_sync(~0u, sum, m);
    if (lane >= m) sum += o;
  }
  if (lane == 31) warps[warp] = sum;
  __syncthreads();
  return sum - x + __reduce_add_sync(~0u, lane < warp ? warps[lane] : 0u);
}

// One block a row of up to KEYS * THREADS keys. From 512 threads on, a floor that at least k keys reach leaves few to look at:
// each warp lists its own, and should they be too many reads its part of the row again.
template <int KEYS, int THREADS>
__global__ void __launch_bounds__(THREADS, 1) top_k_row(const __grid_constant__ TopkParams p) {
  constexpr bool kFloor = THREADS >= 512;
  constexpr int kWarps = THREADS / 32, kWords = KEYS * THREADS / 32, kEach = kParts / THREADS, kPages = KEYS * THREADS / 64;
  constexpr int kListed = 4096 / kWarps;
  __shared__ uint32_t parts[kParts], chosen[kWords], same[kWords];  // keys in each part; a bit for each place
  __shared__ uint32_t most_of[kWarps], least_of[kWarps], sums[3][kWarps], found[3], num_candidates;
  __shared__ uint32_t candidate_key[kFew], candidate_place[kFew];
  __shared__ uint2 list[kFloor ? kWarps : 1][kListed];  // bits and place of each warp's keys that reach the floor
  __shared__ int32_t pages[kPages];
  const int token = blockIdx.x, tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  for (int i = tid; i < kParts; i += THREADS) parts[i] = 0;
  if (tid < kWords) chosen[tid] = same[tid] = 0;
  if (tid == 0) num_candidates = 0;
  // The length as it is before the wait: most likely it stays, and the logits need not wait for it. If not, they are read again.
  int n = min(max(__ldcg(p.lengths + token), 0), p.max_length);
  after_previous_kernel();
  const TopkRow row(p, token);

  auto place = [&](int r) { return (r & ~3) * THREADS + tid * 4 + (r & 3); };
  const bool aligned = ((uintptr_t)row.logits & 15) == 0;
  float v[KEYS], zero;  // NaN: no key; NaN after a logit that is no finite number
  while (true) {
    zero = 0;
    auto taken = [&](float x) {
      zero = fmaf(x, 0.0f, zero);
      return number(x);
    };
#pragma unroll
    for (int from = 0; from < KEYS; from += 16) {
      constexpr int kAtOnce = KEYS < 16 ? KEYS : 16;
      float4 quad[kAtOnce / 4];
#pragma unroll
      for (int r = 0; r < kAtOnce; r += 4)  // in branches they would come one after another
        if (aligned && place(from + r) + 3 < n) quad[r / 4] = *(const float4*)(row.logits + place(from + r));
#pragma unroll
      for (int r = 0; r < kAtOnce; r += 4) {
        const int i = place(from + r);
        float* to = v + from + r;
        if (aligned && i + 3 < n) {
          to[0] = taken(quad[r / 4].x);
          to[1] = taken(quad[r / 4].y);
          to[2] = taken(quad[r / 4].z);
          to[3] = taken(quad[r / 4].w);
        } else {
#pragma unroll
          for (int j = 0; j < 4; ++j) to[j] = i + j < n ? taken(row.logits[i + j]) : __int_as_float(0x7fffffff);
        }
      }
    }
    if (n == row.n || row.broken) break;
    n = row.n;
  }
  if (row.all(p, token, true)) return;
  const int page = tid < kPages && tid * 64 < n && row.table ? TopkRow::known(row.table[tid]) : tid;
  // Eight lanes have one set of values, or two: the largest of each lane's keys, or of its even and of its odd ones. `rank` keys
  // reach the rank-th largest of a set, so k keys reach the least of these over all sets. It is 0 where lanes have no key.
  uint32_t lo = 0, hi = 0;
  if constexpr (kFloor) {
    float most[2] = {v[0], v[1]};
#pragma unroll
    for (int r = 0; r < KEYS; ++r) most[r & 1] = fmaxf(most[r & 1], v[r]);
    const int sets = (p.k > THREADS / 2 ? 2 : 1) * THREADS / 8, rank = (p.k + sets - 1) / sets;
    if (sets == THREADS / 8) most[0] = fmaxf(most[0], most[1]);
    if (rank <= 8) {
      const uint32_t key = most[0] == most[0] ? sortable(most[0]) : 0u;
      lo = octet_rank(key, rank);
      hi = key;
      if (sets > THREADS / 8) {
        const uint32_t odd = most[1] == most[1] ? sortable(most[1]) : 0u;
        lo = min(lo, octet_rank(odd, rank));
        hi = max(hi, odd);
      }
    }
  }
  auto over_block = [&] {
    lo = __reduce_min_sync(~0u, lo);
    hi = __reduce_max_sync(~0u, hi);
    if (lane == 0) {
      least_of[warp] = lo;
      most_of[warp] = hi;
    }
    __syncthreads();
    lo = __reduce_min_sync(~0u, lane < kWarps ? least_of[lane] : ~0u);
    hi = __reduce_max_sync(~0u, lane < kWarps ? most_of[lane] : 0u);
  };
  if constexpr (kFloor) over_block();
  if (lo == 0) {  // for want of a floor, the least
    lo = ~0u;
    hi = 0;
#pragma unroll
    for (int r = 0; r < KEYS; ++r)
      if (v[r] == v[r]) {
        lo = min(lo, sortable(v[r]));
        hi = max(hi, sortable(v[r]));
      }
    if constexpr (kFloor) __syncthreads();
    over_block();
  }
  float least = unsort(lo), greatest = unsort(hi);
  uint32_t reach = 0;  // of the warp's keys
  if constexpr (kFloor) {
    uint32_t mine = 0;
#pragma unroll
    for (int r = 0; r < KEYS; ++r) mine += v[r] >= least;
    reach = mine;
#pragma unroll
    for (int m = 1; m < 32; m <<= 1) {
      const uint32_t o = __shfl_up_sync(~0u, reach, m);
      if (lane >= m) reach += o;
    }
    uint2* to = list[warp] + reach - mine;
    reach = __shfl_sync(~0u, reach, 31);
    if (reach <= kListed) {
#pragma unroll
      for (int r = 0; r < KEYS; ++r)
        if (v[r] >= least) *to++ = make_uint2(__float_as_uint(v[r]), place(r));
    }
    __syncwarp();
  }
  auto each = [&](auto&& f) {  // of the keys from least to greatest
    auto g = [&](float x, int at) {
      if (x >= least && x <= greatest) f(x, at);
    };
    if (kFloor && reach <= kListed) {
      for (uint32_t i = lane; i < reach; i += 32) g(__uint_as_float(list[warp][i].x), list[warp][i].y);
    } else if constexpr (kFloor) {
#pragma unroll 1
      for (int r = 0; r < KEYS; ++r)
        if (place(r) < n) g(number(row.logits[place(r)]), place(r));
    } else {
#pragma unroll
      for (int r = 0; r < KEYS; ++r) g(v[r], place(r));
    }
  };
  auto mark = [&](uint32_t* bits, int at) { atomicOr(bits + (at >> 5), 1u << (at & 31)); };

  // First cut: parts of [least, greatest], equal in value, so that an ordinary row fills them evenly. Rounding is monotonic, hence
  // so is the part. If the range is not finite, or empty, or too many fall into one part, the bits between its members are cut.
  const float steps = (kParts - 0.5f) / (greatest - least);
  bool by_value = greatest - least < 3e38f && steps < 3e38f;
  uint32_t want = p.k, inside;
  int shift = max(0, 22 - __clz(hi - lo));  // (hi - lo) >> shift < 1024
  auto part = [&](float x) -> uint32_t { return by_value ? (uint32_t)((x - least) * steps) : (sortable(x) - lo) >> shift; };
  if (tid < kPages) pages[tid] = page;
  while (true) {
    each([&](float x, int) { atomicAdd(&parts[part(x)], 1u); });
    __syncthreads();
    uint32_t own[kEach], sum = 0;
#pragma unroll
    for (int e = 0; e < kEach; ++e) sum += own[e] = parts[tid * kEach + e];
    const uint32_t of_warp = __reduce_add_sync(~0u, sum);
    if (lane == 0) sums[0][warp] = of_warp;
    __syncthreads();
    uint32_t beyond = __reduce_add_sync(~0u, lane > warp && lane < kWarps ? sums[0][lane] : 0u);
    if (beyond < want && beyond + of_warp >= want) {
      uint32_t suffix = sum;
#pragma unroll
      for (int m = 1; m < 32; m <<= 1) {
        const uint32_t o = __shfl_down_sync(~0u, suffix, m);
        if (lane + m < 32) suffix += o;
      }
      beyond += suffix - sum;
#pragma unroll
      for (int e = kEach - 1; e >= 0; --e) {
        if (beyond < want && beyond + own[e] >= want) {
          found[0] = tid * kEach + e;
          found[1] = beyond;
          found[2] = own[e];
        }
        beyond += own[e];
      }
    }
    __syncthreads();
    const uint32_t last = found[0];
    inside = found[2];
    want -= found[1];
    uint32_t low = ~0u, high = 0;
    each([&](float x, int at) {
      const uint32_t in = part(x);
      if (in > last || (in == last && inside == want)) mark(chosen, at);
      if (in != last) return;
      if (inside <= kFew) {
        const uint32_t i = atomicAdd(&num_candidates, 1u);
        candidate_key[i] = sortable(x);
        candidate_place[i] = at;
      }
      low = min(low, sortable(x));
      high = max(high, sortable(x));
    });
    if (inside <= kFew || inside == want) break;
    lo = low;
    hi = high;
    for (int i = tid; i < kParts; i += THREADS) parts[i] = 0;
    over_block();
    least = unsort(lo);
    greatest = unsort(hi);
    if (lo == hi) break;
    by_value = false;
    shift = max(0, 22 - __clz(hi - lo));
  }
  if (inside != want && inside <= kFew) {  // ranked one against another
    __syncthreads();
    for (uint32_t i = tid >> 3; i - (lane >> 3) < inside; i += THREADS / 8) {  // by eight lanes
      const uint32_t key = i < inside ? candidate_key[i] : ~0u, at = i < inside ? candidate_place[i] : 0u;
      uint32_t better = i < inside ? 0u : want;
      for (uint32_t o = lane & 7; o < inside; o += 8)
        better += candidate_key[o] > key || (candidate_key[o] == key && candidate_place[o] < at);
#pragma unroll
      for (int m = 1; m < 8; m <<= 1) better += __shfl_xor_sync(~0u, better, m);
      if ((lane & 7) == 0 && better < want) mark(chosen, at);
    }
  } else if (inside != want) {  // all equal: the first `want` by place
    each([&](float, int at) { mark(same, at); });
    __syncthreads();
    uint32_t bits = tid < kWords ? same[tid] : 0u;
    const uint32_t before = prefix_sum<THREADS>(__popc(bits), sums[1]);
    while (bits && before + __popc(bits) > want) bits &= ~(0x80000000u >> __clz(bits));
    if (bits) chosen[tid] |= bits;
  }
  __syncthreads();
  uint32_t bits = tid < kWords ? chosen[tid] : 0u;
  uint32_t at = prefix_sum<THREADS>(__popc(bits), sums[2]);
  for (; bits; bits &= bits - 1) row.out[at++] = pages[tid >> 1] * 64 + (tid & 1) * 32 + __ffs(bits) - 1;
  row.end(p, token, zero);
}

template <class Params>
static cudaError_t launch(void (*kernel)(Params), const TopkParams& p, dim3 grid, int threads, int cluster, cudaStream_t stream) {
  cudaLaunchConfig_t cfg = {};
  cfg.gridDim = grid;
  cfg.blockDim = dim3(threads);
  cfg.stream = stream;
  cudaLaunchAttribute attr[2] = {early_launch()};
  attr[1].id = cudaLaunchAttributeClusterDimension;
  attr[1].val.clusterDim.x = cluster;
  attr[1].val.clusterDim.y = attr[1].val.clusterDim.z = 1;
  cfg.attrs = attr;
  cfg.numAttrs = cluster > 1 ? 2 : 1;
  return cudaLaunchKernelEx(&cfg, kernel, p);
}

template <int SIZE>
static cudaError_t launch_cluster(const TopkParams& p, int keys, cudaStream_t s) {
  const dim3 grid(SIZE, p.tokens);
  if (keys <= 4) return launch(top_k_cluster<4, SIZE>, p, grid, kThreads, SIZE, s);
  if (keys <= 8) return launch(top_k_cluster<8, SIZE>, p, grid, kThreads, SIZE, s);
  if (keys <= 16) return launch(top_k_cluster<16, SIZE>, p, grid, kThreads, SIZE, s);
  if (keys <= 32) return launch(top_k_cluster<32, SIZE>, p, grid, kThreads, SIZE, s);
  return cudaErrorInvalidValue;
}

template <int KEYS, int THREADS>
static cudaError_t launch_row(const TopkParams& p, cudaStream_t s) {
  return launch(top_k_row<KEYS, THREADS>, p, dim3(p.tokens), THREADS, 1, s);
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
extern "C" int hr_top_k(const TopkParams* p, int size, void* stream) {
  const cudaStream_t on = (cudaStream_t)stream;
  const int max_length = p->max_length;
  const int keys = ((max_length + kThreads * size - 1) / (kThreads * size) + 3) & ~3;
  switch (size) {
    case 1:
      if (max_length <= 2048) return launch_row<8, 256>(*p, on);
      if (max_length <= 4096) return launch_row<8, 512>(*p, on);
      // A multiprocessor that has one row does it sooner with more threads, and many rows sooner two at a time.
      if (max_length <= 8192) return p->tokens <= 128 ? launch_row<8, 1024>(*p, on) : launch_row<16, 512>(*p, on);
      if (max_length <= 16384) return launch_row<16, 1024>(*p, on);
      if (max_length <= 32768) return launch_row<32, 1024>(*p, on);
      return (int)cudaErrorInvalidValue;
    case 2: return launch_cluster<2>(*p, keys, on);
    case 4: return launch_cluster<4>(*p, keys, on);
    case 8: return launch_cluster<8>(*p, keys, on);
    default: return (int)cudaErrorInvalidValue;
  }
}
