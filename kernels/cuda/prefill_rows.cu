// K6, layers with selected entries (c4a): prefill attention over the window and a list of rows, with a sink; K = V = the row of 512 channels
// [BI].
//
// Rows come from bf16 workspaces of octets (see prefill_window.cu). A query's rows are cut into tiles of 64: the window's, from its first row
// on, then the list's. A query's bits depend on nothing else.
//
// A block stays on its multiprocessor and takes queries, 64 heads each, as one stream of tiles. Two warp-groups take the tiles in turn: the
// one whose turn it is makes a tile's logits and weights. Both multiply each tile's weights, each for 256 of the 512 output channels: the
// own tile's from registers, the other group's from shared memory. So one multiplies while the other exponentiates. Maximum and sum go to and
// fro with the weights. The third group loads rows, by cp.async; a tile is loaded and given back in halves of 256 channels, as the
// products need it. What a tile is, is told in a note.
#include <limits.h>

#include "prefill.cuh"

using namespace hr;

namespace {

constexpr int kTile = 64, kNotes = 8;
constexpr uint32_t kTileBytes = 65536, kHalf = 32768, kPart = 4096;  // half of the channels: of a tile, of an octet
constexpr uint32_t kQ = 2 * kTileBytes, kP = kQ + 65536;      // two tiles, q, weights of a tile: 64 x 64 bf16
constexpr uint32_t kStage = kP + 8192;                        // [8 warps] 16 heads x 64 channels of the output
constexpr uint32_t kState = kStage + 16384;                   // after a tile: maximum and sum of each thread's two heads
constexpr uint32_t kBias = kState + 2048;                     // [kNotes][64] fp32: 0, -inf where no row is, NaN where one is out of reach
constexpr uint32_t kNote = kBias + kNotes * 256;              // [kNotes] of what, query
constexpr uint32_t kBars = kNote + kNotes * 8;                // full, empty [2 tiles][2 halves]; q full, q empty [2 halves]; weights; notes
constexpr uint32_t kSmemBytes = kBars + 8 * (13 + kNotes);

// What a note says of a tile: its place in the query, the buffer it lies in; kNone: before the first tile. Queries alternate in
// kQueryParity, loads of a buffer in kLoadParity, as the phases of their barriers do.
constexpr int kFirst = 1, kSecond = 2, kLast = 4, kLeaves = 8, kBuffer = 16, kLoadParity = 32, kNone = 64, kEnd = 128, kQueryParity = 256;

__device__ __forceinline__ bool all_of_group(int barrier, bool v) {  // whether all 128 threads say so
  int r;
  asm volatile("{\n.reg .pred p, q;\nsetp.ne.b32 p, %1, 0;\nbarrier.cta.red.and.pred q, %2, 128, p;\nselp.b32 %0, 1, 0, q;\n}\n"
               : "=r"(r)
               : "r"((int)v), "r"(barrier)
               : "memory");
  return r;
}

// Where the warps that gather are: tile t of query i, the k-th of the block, which takes every n-th one.
struct Gather {
  int i, k = 0, t = 0, row, length, count, window_tiles, tiles;
  __device__ __forceinline__ explicit Gather(const RowsParams& p) {
    i = blockIdx.x;
    enter(p);
  }
  __device__ __forceinline__ void enter(const RowsParams& p) {
    if (i >= p.queries) return;
    row = ld_int(p.row + i);
    length = ld_int(p.length + i);
    count = ld_int(p.count + i);
    if (!window_lies_in(row, length, p.window_octets) || count < 0 || count > p.width) length = -1, count = 1;  // broken: one row, out of reach
    window_tiles = (length + kTile - 1) / kTile;
    tiles = max(1, window_tiles + (count + kTile - 1) / kTile);
  }
  __device__ __forceinline__ void advance(const RowsParams& p) {
    if (++t < tiles) return;
    t = 0;
    ++k;
    i += gridDim.x;
    enter(p);
  }
  __device__ __forceinline__ uint32_t octets(const RowsParams& p) const { return t < window_tiles ? p.window_octets : p.second_octets; }
  // The workspace row of the tile's row r, -1: none. What comes from the list may lie out of reach; it is not looked at here,
  // two tiles ahead, for that would wait for it.
  __device__ __forceinline__ int read(const RowsParams& p, int r) const {
    const bool in_window = t < window_tiles;
    const int at = (in_window ? t : t - window_tiles) * kTile + r;
    if (i >= p.queries || r >= kTile || at >= (in_window ? length : count)) return -1;
    if (in_window) return row - length + 1 + at;
    return length < 0 ? INT_MAX : ld_int(p.list + i * p.list_stride + at);
  }
};

__device__ __forceinline__ int places(int t, int tiles) {
  return (t == 0 ? kFirst : 0) | (t == 1 ? kSecond : 0) | (t + 1 == tiles ? kLast : 0) | (t + 2 >= tiles ? kLeaves : 0);
}

template <int N>
struct Constant {
  static constexpr int value = N;
};

}  // namespace

// q_map: q in boxes of 64 heads x 256 channels; out_map: the output in boxes of 16 heads x 64 channels.
__global__ void __launch_bounds__(384, 1) prefill_rows(const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap out_map,
                                                       const __grid_constant__ RowsParams p) {
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  const uint32_t smem = smem_u32(shared_bytes);
  const int group = threadIdx.x >> 7, warp = threadIdx.x >> 5, lane = threadIdx.x & 31, head0 = blockIdx.y * 64;
  const uint32_t full = smem + kBars, empty = full + 32, q_full = full + 64, q_empty = full + 80, p_full = full + 96, noted = full + 104;
  if (threadIdx.x == 0) {
    for (int i = 0; i < 4; ++i) {
      mbar_init(full + 8 * i, 128);
      mbar_init(empty + 8 * i, 4);
    }
    for (int i = 0; i < 2; ++i) {
      mbar_init(q_full + 8 * i, 1);
      mbar_init(q_empty + 8 * i, 8);
    }
    mbar_init(p_full, 4);
    for (int i = 0; i < kNotes; ++i) mbar_init(noted + 8 * i, 4);
    fence_barrier_init();
  }
  // Rows past a list's end keep what memory held, and weight 0 times that could be NaN.
  for (uint32_t at = threadIdx.x * 16; at < kStage; at += 384 * 16) st_shared_v4(smem + at, make_uint4(0, 0, 0, 0));
  fence_async();
  __syncthreads();
  after_previous_kernel();

  if (group == 2) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 72;");
    const auto note = [&](int it, int what, int query) {  // the warp's biases are in place
      const int slot = it & (kNotes - 1);
      if (threadIdx.x == 256) st_shared_i2(smem + kNote + slot * 8, what, query);
      __syncwarp();
      if (lane == 0) mbar_arrive(noted + 8 * slot);
    };
    const auto bias = [&](int it, int r, uint32_t b) { st_shared_b32(smem + kBias + (it & (kNotes - 1)) * 256 + r * 4, b); };
    int it = 0;
    // Four warps take four rows at a time, in turn; in a load a thread has 16 bytes of each block of 64 channels of its row. The rows'
    // numbers are read one a lane, two tiles ahead.
    const int loader = warp - 8, sub = lane >> 3, chunk = lane & 7;
    const int turned = (chunk ^ ((loader & 1) * 4 + sub)) << 4;
    const int r_own = lane < 16 ? ((lane >> 2) * 4 + loader) * 4 + (lane & 3) : kTile;
    Gather at(p);
    const auto tell = [&](int tile, int from) {  // of the tile where `at` is
      if (r_own < kTile) bias(tile, r_own, from == -1 ? 0xff800000u : (uint32_t)from >> 3 < at.octets(p) ? 0u : 0x7fffffffu);
      note(tile, places(at.t, at.tiles) | (tile & 1 ? kBuffer : 0) | (tile & 2 ? kLoadParity : 0) | (at.k & 1 ? kQueryParity : 0), at.i);
    };
    int from = at.read(p, r_own), from_next = -1, from_third = -1;
    bool more = at.i < p.queries, window = at.t < at.window_tiles;
    uint32_t octets = at.octets(p);
    if (more) {
      tell(0, from);
      at.advance(p);
      from_next = at.read(p, r_own);
    }
    for (; more; ++it) {
      const int buf = it & 1;
      const uint8_t* base = window ? p.window : p.second;
      const uint8_t* src[4];
      uint32_t bytes[4];
#pragma unroll
      for (int g = 0; g < 4; ++g) {
        const int row = __shfl_sync(~0u, from, g * 4 + sub), x = max(row, 0);
        bytes[g] = (uint32_t)row >> 3 < octets ? 16 : 0;
        // Row r of the tile has chunk c at place c ^ r % 8, the workspace has that at place c ^ r % 8 ^ x % 8.
        src[g] = base + (((int64_t)(x >> 3) << 13) + ((((x & 7) << 7) | ((x & 7) << 4)) ^ turned));
      }
      // The next tile is told of before this one's loads, so that its own need not wait behind them.
      more = at.i < p.queries;
      window = at.t < at.window_tiles;
      octets = at.octets(p);
      if (more) {
        tell(it + 1, from_next);
        at.advance(p);
        from_third = at.read(p, r_own);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t bar = full + 16 * buf + 8 * half;
        if (it >= 2) mbar_wait(empty + 16 * buf + 8 * half, ((it >> 1) - 1) & 1);
#pragma unroll
        for (int g = 0; g < 4; ++g) {
          const uint32_t octet = smem + buf * kTileBytes + half * kHalf + (g * 2 + (loader >> 1)) * kPart;
          const uint32_t to = octet + (loader & 1) * 512 + sub * 128 + (chunk << 4);
#pragma unroll
          for (int block = 0; block < 4; ++block)
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to + block * 1024), "l"(src[g] + half * kPart + block * 1024),
                         "r"(bytes[g])
                         : "memory");
        }
        // In memory when the barrier says so: as in CUTLASS's loops over cp.async, the tensor cores' reads need no proxy fence.
        asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
      }
      from = from_next, from_next = from_third;
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    note(it, kEnd, 0);
    note(it + 1, kEnd, 0);
    return;
  }

  asm volatile("setmaxnreg.inc.sync.aligned.u32 216;");
  const int quad = lane & 3, head = head0 + (warp & 3) * 16 + (lane >> 2);
  const bool has[2] = {head < p.heads, head + 8 < p.heads};
  const float to_log2 = p.scale * kLog2e;
  const float sink[2] = {p.sink && has[0] ? p.sink[head] * kLog2e : -INFINITY, p.sink && has[1] ? p.sink[head + 8] * kLog2e : -INFINITY};
  const uint64_t q_desc = operand(smem + kQ, 16, 1024), k_desc = operand(smem, 16, kPart);
  const uint64_t p_desc = operand(smem + kP, 16, 1024), v_desc = operand(smem + group * kHalf, 1024, kPart);
  const uint32_t state = smem + kState + (threadIdx.x & 127) * 16;
  // Where this lane puts matrices: a row of 128 bytes in 16 of them, of the weights or of the output on its way.
  const uint32_t line = ((warp & 3) * 16 + (lane & 15)) * 128, stage = smem + kStage + group * 8192 + (warp & 3) * 2048;
  const auto chunk_at = [&](int k) { return ((2 * k + (lane >> 4)) ^ (lane & 7)) << 4; };
  float o[128], s[32], m[2] = {-INFINITY, -INFINITY}, l[2] = {0, 0}, factor[2] = {0, 0};
#pragma unroll
  for (int c = 0; c < 128; ++c) o[c] = 0;
#pragma unroll
  for (int c = 0; c < 32; ++c) s[c] = 0;
  uint32_t pr[4][4];

  const auto rescale = [&](const float(&alpha)[2]) {
    if (__any_sync(~0u, alpha[0] != 1.0f || alpha[1] != 1.0f)) {
#pragma unroll
      for (int c = 0; c < 128; ++c) o[c] *= alpha[(c >> 1) & 1];
    }
  };
  const auto weigh = [&](int query, bool writes) {  // all weights of a query are known
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float sum = quad_sum(l[h]);
      factor[h] = m[h] == -INFINITY ? 0.0f : 1.0f / (sum + exp2_fast(sink[h] - m[h]));
      if (writes && quad == 0 && p.lse && has[h]) p.lse[(int64_t)query * p.heads + head + 8 * h] = (m[h] + __log2f(sum)) * kLn2;
    }
  };
  const auto finish = [&](int query, auto from, auto to) {  // the output's parts of 64 channels
#pragma unroll
    for (int c = decltype(from)::value; c < decltype(to)::value; ++c) {
      if (lane == 0) tensor_stores_read();
      __syncwarp();
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        uint32_t w[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) w[j] = pack_bf16(o[32 * c + 8 * k + 2 * j] * factor[j & 1], o[32 * c + 8 * k + 2 * j + 1] * factor[j & 1]);
        store_matrices(stage + (lane & 15) * 128 + chunk_at(k), w);
      }
      fence_async();
      __syncwarp();
      if (lane == 0) tensor_store(&out_map, group * 4 + c, head0 + (warp & 3) * 16, query, stage);
    }
  };

  const auto load_q = [&](int query, int half) {
    mbar_expect(q_full + 8 * half, kHalf);
    tensor_load(smem + kQ + half * kHalf, &q_map, 4 * half, head0, query, q_full + 8 * half);
  };
  if (threadIdx.x == 0 && (int)blockIdx.x < p.queries)
    for (int half = 0; half < 2; ++half) load_q((int)blockIdx.x, half);

  for (int it = group;; it += 2) {
    const auto note_of = [&](int tile) {
      mbar_wait(noted + 8 * (tile & (kNotes - 1)), (tile / kNotes) & 1);
      return ld_i2(smem + kNote + (tile & (kNotes - 1)) * 8);
    };
    const int2 tile = note_of(it);
    int2 before = make_int2(kFirst | kNone, 0);  // the tile before, which the other group weighs
    if (it > 0) before = note_of(it - 1);
    if (before.x & kEnd) break;
    if (it > 0 && (before.x & kFirst) && (before.x & kLast))  // a query that this group makes no logits of
      for (int half = 0; half < 2; ++half) {
        mbar_wait(q_full + 8 * half, before.x & kQueryParity ? 1 : 0);
        if (lane == 0) mbar_arrive(q_empty + 8 * half);
      }
    const int what = tile.x, buf = what & kBuffer ? 1 : 0, parity = what & kLoadParity ? 1 : 0, q_parity = what & kQueryParity ? 1 : 0;
    const bool exists = !(what & kEnd), enters = what & (kFirst | kSecond), goes_on = !(what & kFirst);
    const uint32_t own_full = full + 16 * buf;
    const auto release = [&](int note) {
      if (lane == 0 && !(note & kNone)) mbar_arrive(empty + (note & kBuffer ? 16 : 0) + 8 * group);
    };
    const auto leave_q = [&](int half) {  // this group needs no more of it; whoever has the query's last tile loads the next one's
      if (lane == 0) mbar_arrive(q_empty + 8 * half);
      if ((threadIdx.x & 127) == 0 && (what & kLast)) {
        const int next = tile.y + (int)gridDim.x;
        mbar_wait(q_empty + 8 * half, q_parity);
        if (next < p.queries) load_q(next, half);
      }
      __syncwarp();
    };
    const auto multiply_q = [&](auto between) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (exists) {
          if (enters) mbar_wait(q_full + 8 * half, q_parity);
          mbar_wait(own_full + 8 * half, parity);
        }
        const uint64_t half_desc = k_desc + ((buf * kTileBytes + half * kHalf) >> 4);
        wgmma_fence();
#pragma unroll
        for (int k = 16 * half; k < 16 * half + 16; ++k)
          wgmma_qk(s, q_desc + (k >> 2) * 512 + (k & 3) * 2, half_desc + (k >> 2 & 3) * 64 + (k & 3) * 2, k != 0);
        wgmma_commit();
        if (half == 0) between();
      }
    };

    // Of the product with the tile before and the own tile's logits, the one that can begin first does.
    bool own_first = it > 0 && exists;
    if (own_first) {
      if ((warp & 3) == 0) {
        own_first = false;
        while (!own_first && !mbar_done(p_full, (it - 1) & 1))
          own_first = mbar_done(own_full, parity) && (!enters || mbar_done(q_full, q_parity));
      }
      own_first = all_of_group(1 + group, own_first);
    }
    // No branch may come between products that are under way: so the whole step stands in either order.
    const auto step = [&](auto order) {
      constexpr bool kOwnFirst = decltype(order)::value;
      if constexpr (kOwnFirst) multiply_q([]() {});
      if (it > 0) {
        mbar_wait(p_full, (it - 1) & 1);
        const float4 now = ld_f4(state);
        const float alpha[2] = {exp2_fast(m[0] - (now.x == -INFINITY ? 0.0f : now.x)), exp2_fast(m[1] - (now.y == -INFINITY ? 0.0f : now.y))};
        m[0] = now.x, m[1] = now.y, l[0] = now.z, l[1] = now.w;
        if (!(before.x & kFirst)) rescale(alpha);
      }
      const uint64_t before_desc = v_desc + (before.x & kBuffer ? kTileBytes >> 4 : 0);
      const int adds = !(before.x & kFirst);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4; ++k) wgmma_pv_ss256(o, p_desc + k * 2, before_desc + k * (2 * kPart >> 4), adds | k);
      wgmma_commit();
      if (before.x & kLast) weigh(before.y, false);
      if constexpr (!kOwnFirst) {
        // If the own tile is late, there is time to see this one through, so that its memory is free the sooner.
        bool held = exists && it > 0 && mbar_done(own_full, parity);
        if (!held) {
          wgmma_wait<0>();
          release(before.x);
        }
        multiply_q([&]() {
          wgmma_wait<1>();
          settled(o);
          if (held) release(before.x);
        });
        if (before.x & kLast) finish(before.y, Constant<0>(), Constant<2>());
        if (exists && (what & kLeaves)) {
          wgmma_wait<1>();
          leave_q(0);
        }
        wgmma_wait<0>();
      } else {
        if (what & kLeaves) {
          wgmma_wait<2>();
          leave_q(0);
        }
        wgmma_wait<1>();
      }
      settled(s);
      if (!kOwnFirst && !exists) {
        if (before.x & kLast) finish(before.y, Constant<2>(), Constant<4>());
        return;
      }
      if (what & kLeaves) leave_q(1);

      float top[2] = {-INFINITY, -INFINITY};
      const float* bias = (const float*)(shared_bytes + kBias + (it & (kNotes - 1)) * 256) + 2 * quad;
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
        const float was = goes_on ? m[h] : -INFINITY, most = quad_max(top[h]);
        m[h] = most > was + kSlack ? most : was;
        shift[h] = m[h] == -INFINITY ? 0.0f : m[h];  // no row yet: every exponential below is exp2(-inf)
        alpha[h] = exp2_fast(was - shift[h]);
        l[h] = goes_on ? l[h] * alpha[h] : 0.0f;
      }
      if constexpr (kOwnFirst) {
        wgmma_wait<0>();
        settled(o);
        release(before.x);
      }
#pragma unroll
      for (int c = 0; c < 32; ++c) {
        s[c] = exp2_fast(s[c] - shift[(c >> 1) & 1]);
        l[(c >> 1) & 1] += s[c];
      }
#pragma unroll
      for (int k = 0; k < 4; ++k)
#pragma unroll
        for (int j = 0; j < 4; ++j) pr[k][j] = pack_bf16(s[8 * k + 2 * j], s[8 * k + 2 * j + 1]);
      // Only this group read the weights and the state of the tile before, and it is done with them: both may be overwritten.
#pragma unroll
      for (int k = 0; k < 4; ++k) store_matrices(smem + kP + line + chunk_at(k), pr[k]);
      asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(state), "f"(m[0]), "f"(m[1]), "f"(l[0]), "f"(l[1]) : "memory");
      fence_async();
      __syncwarp();
      if (lane == 0) mbar_arrive(p_full);
      if (before.x & kLast) finish(before.y, Constant<kOwnFirst ? 0 : 2>(), Constant<4>());
      if (goes_on) rescale(alpha);
      const uint64_t own_desc = v_desc + buf * (kTileBytes >> 4);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4; ++k) wgmma_pv_rs256(o, pr[k], own_desc + k * (2 * kPart >> 4), goes_on | k);
      wgmma_commit();
      if (what & kLast) weigh(tile.y, true);
      wgmma_wait<0>();
      settled(o);
      release(what);
      if (what & kLast) finish(tile.y, Constant<0>(), Constant<4>());
    };
    if (own_first)
      step(Constant<1>());
    else
      step(Constant<0>());
    if (!exists) break;
  }
  if (lane == 0) tensor_stores_read();
}

extern "C" int hr_prefill_rows(const RowsParams* p, const void* q, int64_t stride_t, int64_t stride_h, int blocks, void* stream) {
  return launch_prefill(prefill_rows, *p, q, stride_t, stride_h, 4, 1, blocks, 384, kSmemBytes, (cudaStream_t)stream);
}
