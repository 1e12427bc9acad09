// K6, window-only layers: prefill attention over the window's rows, dense, with a sink; K = V = the row of 512 channels [BI].
//
// Rows come from a bf16 workspace of octets: 8 rows are 8 KB, eight blocks of 64 channels, in each the 8 rows of 128 bytes under the
// 128-byte swizzle. An octet lies in shared memory as it lies in the workspace, for both products.
//
// A block works through neighbouring queries of one sequence and keeps their rows in a ring of 18 octets (144 rows, a window is at
// most 17 octets), so that a row is loaded once for all of the block's queries. Two warp-groups take queries in turn, 64 heads
// each. q streams by in eight blocks of 64 channels (each is needed once), whose places both groups use in turn: while one has its
// logits made, the other makes its output. Logits with all 144 rows stay in registers, rows outside of the window get weight 0, and the
// output is made 64 channels at a time, each part on its way to memory, by the copy engine, under the product of the next.
//
// Row r lies in slot r % 144, so the order of all sums is fixed by r % 144 alone: callers keep r equal to the position modulo 144, and
// then a query's bits depend neither on the cut of the prompt nor on the rest of the launch.
#include "prefill.cuh"

using namespace hr;

struct Params {
  const uint8_t* rows;       // workspace of octets
  const int32_t* row;        // [T]: the query's own row, the last one of its window
  const int32_t* length;     // [T]: rows of its window, at most 128
  const float* sink;         // [H] or null
  __nv_bfloat16* out;        // [T, H, 512]
  int64_t out_stride_t, out_stride_h;
  float* lse;  // [T, H] or null
  float scale;
  int32_t heads, queries, octets;  // octets: of the workspace
};

namespace {

constexpr int kOctets = 18, kRows = kOctets * 8, kBlocks = 8, kLoads = 4;
constexpr uint32_t kOctetBytes = 8192, kBlockBytes = 8192;
constexpr uint32_t kQ = kOctets * kOctetBytes;             // [kBlocks] of 64 heads x 64 channels
constexpr uint32_t kStage = kQ + kBlocks * kBlockBytes;    // [2 groups] of the output, as many
constexpr uint32_t kBars = kStage + 2 * kBlockBytes;       // q full [2 groups][kBlocks], q empty [kBlocks]; octets loaded [kLoads]; 2 counters
constexpr uint32_t kSmemBytes = kBars + 8 * (3 * kBlocks + kLoads + 1);

__device__ __forceinline__ int done_of(uint32_t counter) {  // warps of a group that have finished a query, in all
  int n;
  asm volatile("ld.acquire.cta.shared::cta.s32 %0, [%1];" : "=r"(n) : "r"(counter) : "memory");
  return n;
}

// A query's window, as all who follow the ring read it: one that is empty or broken has no row.
struct Window {
  int row, length;
  bool broken;
  __device__ __forceinline__ Window(const Params& p, int i) : row(ld_int(p.row + i)), length(ld_int(p.length + i)) {
    broken = !window_lies_in(row, length, p.octets);
    if (broken || length == 0) row = length = 0;
  }
};

// What is in the ring, followed alike by the warp that loads and by those that wait for the loads.
struct Ring {
  int first = 0, last = -1;  // octets
  bool fresh = false;        // nothing of what was in it is left
  int row = -2, run = 0;     // of the query before; queries in a row whose rows follow each other
  // The next query's window: how many octets are to be loaded, from `from` on.
  __device__ __forceinline__ int step(int now, int length, int& from) {
    run = now == row + 1 ? run + 1 : 0;
    row = now;
    fresh = false;
    if (length <= 0) return 0;
    const int a = (now - length + 1) >> 3, b = now >> 3;
    if (last < 0 || a < first || a > last + 1 || b < first) {
      run = 0;
      fresh = true;
      from = first = a;
      last = b;
      return b - a + 1;
    }
    from = last + 1;
    const int more = max(0, b - last);
    last = max(last, b);
    first = max(first, last - kOctets + 1);
    return more;
  }
};

// Accumulators that a first product overwrites all the same. What is never set stays alive in registers from query to query.
template <int N>
__device__ __forceinline__ void clear(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("mov.f32 %0, 0f00000000;" : "=f"(d[i]));
}
__device__ __forceinline__ void part_product(float (&o)[32], const uint32_t (&pr)[9][4], uint64_t v_desc) {
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < 9; ++k) wgmma_pv64(o, pr[k], v_desc + k * (2 * kOctetBytes >> 4), k != 0);
  wgmma_commit();
}

}  // namespace

// q_map: q in boxes of 64 heads x 64 channels; out_map: the output in boxes of 16 heads.
__global__ void __launch_bounds__(384, 1) prefill_window(const __grid_constant__ CUtensorMap q_map,
                                                          const __grid_constant__ CUtensorMap out_map, const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  const uint32_t smem = smem_u32(shared_bytes);
  const int group = threadIdx.x >> 7, warp = threadIdx.x >> 5, lane = threadIdx.x & 31, head0 = blockIdx.y * 64;
  const int begin = (int64_t)blockIdx.x * p.queries / gridDim.x, end = (int64_t)(blockIdx.x + 1) * p.queries / gridDim.x;
  const uint32_t q_full = smem + kBars, q_empty = q_full + 8 * 2 * kBlocks, loaded = q_empty + 8 * kBlocks, done = loaded + 8 * kLoads;
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2 * kBlocks; ++i) mbar_init(q_full + 8 * i, 1);
    for (int i = 0; i < kBlocks; ++i) mbar_init(q_empty + 8 * i, 4);
    for (int i = 0; i < kLoads; ++i) mbar_init(loaded + 8 * i, 1);
    for (int i = 0; i < 2; ++i) st_shared_b32(done + 4 * i, 0);
    fence_barrier_init();
  }
  // Weight 0 times whatever memory held could be NaN.
  for (uint32_t at = threadIdx.x * 16; at < kOctets * kOctetBytes; at += 384 * 16) st_shared_v4(smem + at, make_uint4(0, 0, 0, 0));
  fence_async();
  __syncthreads();
  after_previous_kernel();

  if (group == 2) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (lane != 0) return;
    if (warp == 8) {
      Ring ring;
      int loads = 0;
      for (int i = begin; i < end; ++i) {
        int from = 0;
        const Window window(p, i);
        const int more = ring.step(window.row, window.length, from);
        if (more == 0) continue;
        // The octet that a new one replaces was last read ten queries ago, if rows followed each other since.
        const int free = i - begin - (more == 1 && ring.run >= 10 ? 9 : 0);  // queries that must be done
        for (int g = 0; g < 2; ++g)  // a count, not an mbarrier: the groups may be several queries ahead of what is asked here
          while (done_of(done + 4 * g) < 4 * ((free + 1 - g) / 2)) __nanosleep(64);
        const uint32_t bar = loaded + 8 * (loads++ % kLoads);
        // Products take the whole ring. What another sequence left there could be NaN, which weight 0 does not make 0.
        const int octets = ring.fresh ? kOctets : more;
        mbar_expect(bar, octets * kOctetBytes);
        for (int o = from; o < from + octets; ++o)
          bulk_load(smem + o % kOctets * kOctetBytes, p.rows + (int64_t)(o < from + more ? o : from) * kOctetBytes, kOctetBytes, bar);
      }
    } else if (warp == 9) {
      for (int i = begin; i < end; ++i)
        for (int block = 0; block < kBlocks; ++block) {
          const int n = i - begin;
          const uint32_t bar = q_full + 8 * (n % 2 * kBlocks + block);
          if (n > 0) mbar_wait(q_empty + 8 * block, (n - 1) & 1);
          mbar_expect(bar, kBlockBytes);
          tensor_load(smem + kQ + block * kBlockBytes, &q_map, block, head0, i, bar);
        }
    }
    return;
  }

  asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
  const int quad = lane & 3, head = head0 + (warp & 3) * 16 + (lane >> 2);
  const bool has[2] = {head < p.heads, head + 8 < p.heads};
  const float to_log2 = p.scale * kLog2e;
  const float sink[2] = {p.sink && has[0] ? p.sink[head] * kLog2e : -INFINITY, p.sink && has[1] ? p.sink[head + 8] * kLog2e : -INFINITY};
  const uint64_t k_desc = operand(smem, 16, kOctetBytes), v_desc = operand(smem, 1024, kOctetBytes);
  const uint32_t stage = smem + kStage + group * kBlockBytes + (warp & 3) * 2048;  // the warp's 16 heads
  Ring ring;
  int n = 0, loads = 0;
  for (int i = begin; i < end; ++i) {
    int from;
    const Window window(p, i);
    const int row = window.row, length = window.length;
    const bool load = ring.step(row, length, from) > 0;
    if (load) {
      mbar_wait(loaded + 8 * (loads % kLoads), (loads / kLoads) & 1);
      ++loads;
    }
    if (((i - begin) & 1) != group) continue;
    float s[72];
    clear(s);
#pragma unroll 1
    for (int block = 0; block < kBlocks; ++block) {
      const uint64_t q_desc = operand(smem + kQ + block * kBlockBytes, 16, 1024);
      mbar_wait(q_full + 8 * (group * kBlocks + block), n & 1);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4; ++k) wgmma_qk144(s, q_desc + 2 * k, k_desc + block * 64 + 2 * k, block | k);
      wgmma_commit();
      if (block > 0) {
        wgmma_wait<1>();
        if (lane == 0) mbar_arrive(q_empty + 8 * (block - 1));
      }
    }
    wgmma_wait<0>();
    settled(s);
    if (lane == 0) mbar_arrive(q_empty + 8 * (kBlocks - 1));
    ++n;

    // The window's places in the ring are `number` ones from `first` on, or, if it goes round the end, all but these.
    const int own = row % kRows, oldest = own - length + 1;
    const bool round = oldest < 0;
    const uint32_t number = round ? kRows - length : length;
    int place = 2 * quad - (round ? own + 1 : oldest);  // of the thread's first column, counted from `first`
    asm volatile("" : "+r"(place));                     // or else the compiler keeps 36 column numbers in registers all along
    float top[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int c = 0; c < 18; ++c)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const bool in = ((uint32_t)(place + 8 * c + e) < number) != round;
        s[4 * c + e] = in ? s[4 * c + e] : -INFINITY;
        s[4 * c + 2 + e] = in ? s[4 * c + 2 + e] : -INFINITY;
        top[0] = fmaxf(top[0], s[4 * c + e]);
        top[1] = fmaxf(top[1], s[4 * c + 2 + e]);
      }
    float factor[2], sum[2] = {0, 0};
    const float spoilt = window.broken ? kNan : 0.0f;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      top[h] = quad_max(top[h]) * to_log2;
      if (top[h] == -INFINITY) top[h] = 0;  // no row: every exponential below is 0
    }
    uint32_t pr[9][4];
#pragma unroll
    for (int k = 0; k < 9; ++k)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float a = exp2_fast(fmaf(s[8 * k + 2 * j], to_log2, -top[j & 1])), b = exp2_fast(fmaf(s[8 * k + 2 * j + 1], to_log2, -top[j & 1]));
        sum[j & 1] += a + b;
        pr[k][j] = pack_bf16(a, b);
      }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      sum[h] = quad_sum(sum[h]);
      if (p.lse && quad == 0 && has[h]) p.lse[(int64_t)i * p.heads + head + 8 * h] = (top[h] + __log2f(sum[h])) * kLn2 + spoilt;
      factor[h] = (sum[h] == 0.0f ? 0.0f : 1.0f / (sum[h] + exp2_fast(sink[h] - top[h]))) + spoilt;
    }
    float o[2][32];  // parts of the output, in turn
    clear(o[0]);
    clear(o[1]);
    part_product(o[0], pr, v_desc);
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      float(&part)[32] = o[c & 1];
      if (c < 7) {
        part_product(o[(c + 1) & 1], pr, v_desc + (c + 1) * 64);
        wgmma_wait<1>();
      } else {
        wgmma_wait<0>();
      }
      settled(part);
      if (c == 7 && lane == 0) asm volatile("red.release.cta.shared::cta.add.u32 [%0], 1;" ::"r"(done + 4 * group) : "memory");
      if (lane == 0) tensor_stores_read();
      __syncwarp();
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        uint32_t w[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) w[j] = pack_bf16(part[8 * k + 2 * j] * factor[j & 1], part[8 * k + 2 * j + 1] * factor[j & 1]);
        store_matrices(stage + (lane & 15) * 128 + (((2 * k + (lane >> 4)) ^ (lane & 7)) << 4), w);
      }
      fence_async();
      __syncwarp();
      if (lane == 0) tensor_store(&out_map, c, head0 + (warp & 3) * 16, i, stage);
    }
  }
  if (lane == 0) tensor_stores_read();
}

extern "C" int hr_prefill_window(const Params* p, const void* q, int64_t stride_t, int64_t stride_h, int blocks, void* stream) {
  return launch_prefill(prefill_window, *p, q, stride_t, stride_h, 1, 1, blocks, 384, kSmemBytes, (cudaStream_t)stream);
}
