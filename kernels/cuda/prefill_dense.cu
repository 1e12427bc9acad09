// K6, layers whose second list is a dense prefix (c128a): prefill attention over the window and that prefix, with a sink; K = V = the row
// of 512 channels [BI].
//
// Rows come from bf16 workspaces of octets (see prefill_window.cu). A query's rows are cut into tiles of at most 64, whole octets, see
// `Dense`; cut and order depend on the row's place in its octet, so callers keep rows equal to positions modulo 8. A query's bits depend on
// nothing else. Tiles run up in even rows and down in odd ones: a query then begins with the tile that the one before ended with. Of a
// short tile only pairs of octets that have rows are multiplied: there is a form of the products and exponentials for each number of pairs.
//
// A block stays on its multiprocessor and takes runs of queries, 64 heads each, as one stream: a query's q, then its tiles, through three
// slots of 64 KB. The first warp-group takes q into registers (three quarters of it, for more there is no room) and makes logits and
// weights. The next two multiply weights, each for 256 of the 512 output channels. Of the last one's warps, the third plans a query's tiles
// ahead, one a lane, and two load, by bulk copies, each half of the channels; the first of them tells in notes what lies where. So q's slot
// is free as soon as it is read, and the next q is on its way while a query is multiplied. The output leaves by way of the slot of the
// query's last tile but one.
//
// Weights are multiplied under the exponentials of the tile behind, not beside its logits: products of both kinds at once hold up the group
// that everything waits for. The two groups wait until the logits' product is done, therefore; but between queries, while the first group
// is busy with q, they do not. What they and it are told is made the same for a warp by a shuffle: with branches that may part lanes around
// the products ptxas is apt to serialise them (C7511, a remark of nvcc that must not appear).
//
// No wait is part of a circle. A slot's half is loaded again when its tile has been multiplied, for which the next tile of the query has to
// have its logits, or when an output has left it, for which the next query has to have its first weights; the order of the slots is such
// that both come before the load (tests/kernels/test_cuda_prefill_logic.py). A plan is overwritten when both loaders have read it, and
// waits for nothing else. A phase says only odd or even: weights, logits, plans and the slots' barriers have two sides or are waited for
// each time, and of eight notes none is overwritten unread, since of any two items one at least waits for a slot.
#include <float.h>

#include <type_traits>

#include "prefill.cuh"

using namespace hr;

// What the kernel gets besides.
struct Launch : RowsParams {
  int32_t chunk;                       // queries in a row for one block
  CUtensorMap window_map, second_map;  // the workspaces in boxes of half the channels of 8 octets
  CUtensorMap seven_map;               // the window's in boxes of 7
};

namespace {

constexpr int kNotes = 8, kPlanned = 16;                             // tiles of a plan
constexpr uint32_t kSlotBytes = 65536, kHalf = 32768, kPart = 4096;  // half of the channels: of a tile or q, of an octet
constexpr uint32_t kP = 3 * kSlotBytes;                              // [2] weights of a tile: 64 x 64 bf16
constexpr uint32_t kRest = kP + 2 * 8192;                            // the last 128 channels of q
constexpr uint32_t kState = kRest + 16384;  // [2][64 heads] factor for the sums so far; with the last tile maximum and sum of weights, too
constexpr uint32_t kInfo = kState + 2048;   // [2] what the weights' tile is, query
constexpr uint32_t kNote = kInfo + 16;      // [kNotes] what the item is, query, which of the tile's 64 rows count
constexpr uint32_t kPlan = kNote + kNotes * 16;  // [2][kPlanned] tiles: what it is, first octet, which of its 64 rows count
// Full, empty [3][2 halves]; weights full, empty [2]; logits [2]; rest of q full, empty; plans made, read [2]; notes.
constexpr uint32_t kBars = kPlan + 2 * kPlanned * 16;
constexpr uint32_t kSmemBytes = kBars + 8 * (24 + kNotes);

// What an item is: the slot it lies in, in which loads alternate; its place in the query; whether the next query needs it there, too;
// whether the output takes its slot; whether the query has no row at all; whether that is because it is broken.
constexpr int kSlot = 3, kLoadParity = 4, kFirst = 8, kLast = 16, kKept = 32, kOut = 64, kNone = 128, kEnd = 256, kBroken = 512;
// And, each from a bit on: pairs of octets that are multiplied, less one; octets in a row, of the second list (kFar) or of the window.
// Behind these the query's own octet may follow (kOwn), maybe merged of two (kMerged): the row's place in it; how far behind the first.
constexpr int kPairs = 10, kOctets = 12, kFar = 1 << 16, kOwn = 1 << 17, kMerged = 1 << 18, kPlace = 19, kOwnAt = 22;

__device__ __forceinline__ void group_barrier(int id, bool v) {  // passed when all 128 threads know v
  asm volatile("{\n.reg .pred p, q;\nsetp.ne.b32 p, %1, 0;\nbarrier.cta.red.or.pred q, %0, 128, p;\n}\n" ::"r"(id), "r"((int)v) : "memory");
}
__device__ __forceinline__ void octets_load(uint32_t to, const CUtensorMap* map, int half, int octet, uint32_t bar) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(to),
               "l"(map), "r"(0), "r"(0), "r"(4 * half), "r"(octet), "r"(bar)
               : "memory");
}
inline cudaError_t encode_octets(CUtensorMap* map, const void* octets, int number, int box_octets) {
  const cuuint64_t dims[4] = {64, 8, 8, (cuuint64_t)max(1, number)}, strides[3] = {128, 1024, 8192};  // channel, row, block, octet
  const cuuint32_t box[4] = {64, 8, 4, (cuuint32_t)box_octets};
  return encode_map(map, octets, 4, dims, strides, box, CU_TENSOR_MAP_SWIZZLE_NONE);  // swizzled as it lies
}

// Runs are dealt to and fro, for later queries tend to have more rows.
__device__ __forceinline__ int next_query(const Launch& p, int i) {
  if ((i + 1) % p.chunk) return i + 1;
  const int run = i / p.chunk, blocks = gridDim.x;
  return (2 * blocks * (run / blocks + 1) - 1 - run) * p.chunk;
}

// The first n bits.
__device__ __forceinline__ uint32_t ones(int n) { return n >= 32 ? ~0u : n <= 0 ? 0 : (1u << n) - 1; }

// A tile: what the item is, except for what the loader knows; its first octet; which of its 64 rows count.
struct Tile {
  int what, first;
  uint32_t low, high;
  __device__ __forceinline__ bool same(const Tile& b) const {  // what one query loads, another may use
    return first == b.first && ((what ^ b.what) & (15 << kOctets | kFar)) == 0 && !((what | b.what) & kOwn);
  }
};
// A query's tiles: those of the second list, of which the last may be short, then the window's. Of the window's first and last octet, if
// it has 17, the query has at most eight rows, each at a place of its own: they are merged into one octet, the query's own. That lies in
// the first tile of the window, behind the oldest of the others. Queries whose rows share an octet so have their last tile in common.
struct Dense {
  int row, start, count, first, near, far, tiles;
  __device__ __forceinline__ Dense(const Launch& p, int i) {
    row = ld_int(p.row + i);
    int length = ld_int(p.length + i);
    count = ld_int(p.count + i);
    first = ld_int(p.first + i);
    far = (max(count, 0) >> 3) + ((count & 7) != 0);
    if (!window_lies_in(row, length, p.window_octets) || count < 0 ||
        (count > 0 && ((first & 7) || first < 0 || (first >> 3) > p.second_octets - far)))
      length = far = 0, count = -1;
    start = length > 0 ? row - length + 1 : 0;
    near = length > 0 ? (row >> 3) - (start >> 3) + 1 : 0;
    tiles = max(1, (far + 7 >> 3) + (near > 0) + (near > 1));
  }
  __device__ __forceinline__ Tile tile(int t) const {  // the t-th in this query's order
    const int u = row & 1 ? tiles - 1 - t : t, place = row & 7;
    const int others = min(near, 16) - 1, last = min(8, others);  // octets of the window but for its own, those in its last tile
    int octets = 0, what = (t == 0 ? kFirst : 0) | (t + 1 == tiles ? kLast : 0) | (t == max(0, tiles - 2) ? kOut : 0);
    if (count < 0) what |= kBroken;
    Tile x = {0, 0, 0, 0};
    if (8 * u < far) {
      octets = min(8, far - 8 * u);
      what |= kFar;
      x.first = (first >> 3) + 8 * u;
      x.low = ones(count - 64 * u), x.high = ones(count - 64 * u - 32);
    } else if (near > 0) {
      const bool own = u == 0 || 8 * (u - 1) < far;
      octets = own ? others - last : last;
      x.first = (row >> 3) - (own ? others : last);
      const int before = start - 8 * x.first;  // rows that the window begins behind
      x.low = ones(8 * octets) & ~ones(before), x.high = ones(8 * octets - 32) & ~ones(before - 32);
      if (own) {
        what |= kOwn | (near > 16 ? kMerged : 0) | place << kPlace | others << kOwnAt;
        uint32_t rows = ones(place + 1);
        if (near > 16) rows |= 255 & ~ones(start & 7);
        if (near == 1) rows &= ~ones(start & 7);
        (octets < 4 ? x.low : x.high) |= rows << 8 * (octets & 3);
        octets += 1;
      }
    }
    const int pairs = max(1, octets + 1 >> 1);
    x.what = what | (octets == 0 ? kNone : 0) | pairs - 1 << kPairs | octets - (what & kOwn ? 1 : 0) << kOctets;
    return x;
  }
};

// The logits' products with so many pairs of octets.
template <int kNumber>
__device__ __forceinline__ void multiply_rows(float (&s)[32], const uint32_t (&q)[4], uint64_t rows, int adds) {
  if constexpr (kNumber == 1) wgmma_qk16_rs(s, q, rows, adds);
  if constexpr (kNumber == 2) wgmma_qk32_rs(s, q, rows, adds);
  if constexpr (kNumber == 3) wgmma_qk48_rs(s, q, rows, adds);
  if constexpr (kNumber == 4) wgmma_qk_rs(s, q, rows, adds);
}
template <int kNumber>
__device__ __forceinline__ void multiply_rows(float (&s)[32], uint64_t q, uint64_t rows, int adds) {
  if constexpr (kNumber == 1) wgmma_qk16(s, q, rows, adds);
  if constexpr (kNumber == 2) wgmma_qk32(s, q, rows, adds);
  if constexpr (kNumber == 3) wgmma_qk48(s, q, rows, adds);
  if constexpr (kNumber == 4) wgmma_qk(s, q, rows, adds);
}
// Calls the form for a tile's number of pairs.
template <class F>
__device__ __forceinline__ void with_pairs(int what, const F& form) {
  const int less_one = what >> kPairs & 3;
  if (less_one == 3)
    form(std::integral_constant<int, 4>());
  else if (less_one == 2)
    form(std::integral_constant<int, 3>());
  else if (less_one == 1)
    form(std::integral_constant<int, 2>());
  else
    form(std::integral_constant<int, 1>());
}

}  // namespace

// q_map: q in boxes of 64 heads x 128 channels; out_map: the output in boxes of 16 heads x 256 channels.
__global__ void __launch_bounds__(512, 1) prefill_dense(const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap out_map,
                                                        const __grid_constant__ Launch p) {
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  const uint32_t smem = smem_u32(shared_bytes);
  const int own_warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);  // so that the compiler knows it to be the same for a warp
  const int group = own_warp >> 2, warp = own_warp & 3, lane = threadIdx.x & 31, head0 = blockIdx.y * 64;
  const uint32_t full = smem + kBars, empty = full + 48, p_full = full + 96, p_empty = full + 112, logits = full + 128;
  const uint32_t rest_full = full + 144, rest_empty = full + 152, plan_made = full + 160, plan_read = full + 176, noted = full + 192;
  if (threadIdx.x == 0) {
    for (int i = 0; i < 6; ++i) {
      mbar_init(full + 8 * i, 1);
      mbar_init(empty + 8 * i, 4);
    }
    for (int i = 0; i < 2; ++i) {
      mbar_init(p_full + 8 * i, 4);
      mbar_init(p_empty + 8 * i, 8);
      mbar_init(logits + 8 * i, 4);
      mbar_init(plan_made + 8 * i, 1);
      mbar_init(plan_read + 8 * i, 2);
    }
    mbar_init(rest_full, 1);
    mbar_init(rest_empty, 4);
    for (int i = 0; i < kNotes; ++i) mbar_init(noted + 8 * i, 1);
    fence_barrier_init();
  }
  __syncthreads();
  after_previous_kernel();

  if (group == 3) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (warp == 2) {
      int plans = 0;
#pragma unroll 1
      for (int i = blockIdx.x * p.chunk; i < p.queries;) {
        const int after = next_query(p, i);
        const bool more = after < p.queries;
        const Tile next = Dense(p, more ? after : i).tile(0);
        const Dense q(p, i);
#pragma unroll 1
        for (int t = 0; t < q.tiles; t += kPlanned, ++plans) {
          Tile x = q.tile(t + lane);
          if (more && q.tiles > 1 && t + lane + 1 == q.tiles && x.same(next)) x.what |= kKept;
          mbar_wait(plan_read + 8 * (plans & 1), (plans >> 1 & 1) ^ 1);
          const uint32_t to = smem + kPlan + ((plans & 1) * kPlanned + lane) * 16;
          if (lane < kPlanned) st_shared_v4(to, make_uint4(x.what, x.first, x.low, x.high));
          __syncwarp();
          if (lane == 0) mbar_arrive(plan_made + 8 * (plans & 1));
        }
        i = after;
      }
    }
    if (warp > 1) return;
    const int half = warp;
    int it = 0, plans = 0, loaded = 0;  // loaded: a bit for each slot, whether it was so an odd number of times, and one for the rest of q
    int slots = 0 | 1 << 2 | 2 << 4;    // in the order in which they come free, of two bits each
    const auto note = [&](int what, int query, uint32_t low, uint32_t high) {
      if (half == 0 && lane == 0) {
        st_shared_v4(smem + kNote + (it & (kNotes - 1)) * 16, make_uint4(what, query, low, high));
        mbar_arrive(noted + 8 * (it & (kNotes - 1)));
      }
      ++it;
    };
    bool there = false, one = false;  // the query's first tile is the one that the one before ended with; that one had no other
#pragma unroll 1
    for (int i = blockIdx.x * p.chunk; i < p.queries; i = next_query(p, i)) {
      const int own = slots & 3, own_parity = loaded >> own & 1;
      slots = one ? slots >> 2 & 3 | own << 2 | (slots & 48) : slots >> 4 | own << 2 | (slots & 12) << 2;
      loaded ^= 1 << own;
      note(own | (own_parity ? kLoadParity : 0), i, 0, 0);
#pragma unroll 1
      for (int part = 2 * half; part < 2 * half + 2; ++part) {  // of 128 channels
        const uint32_t side = 16 * own + 8 * half, bar = part < 3 ? full + side : rest_full;
        if (part != 1) mbar_wait(part < 3 ? empty + side : rest_empty, (part < 3 ? own_parity : loaded >> 3 & 1) ^ 1);
        if (lane == 0) {
          if (part != 1) mbar_expect(bar, part == 0 ? kHalf : kHalf / 2);
          tensor_load(smem + (part < 3 ? own * kSlotBytes + part * (kHalf / 2) : kRest), &q_map, 2 * part, head0, i, bar);
        }
      }
      loaded ^= 8;
      uint4 plan;  // of this lane's tile
      int what, t = 0;
#pragma unroll 1
      do {
        if (t % kPlanned == 0) {
          mbar_wait(plan_made + 8 * (plans & 1), plans >> 1 & 1);
          plan = ld_u4(smem + kPlan + ((plans & 1) * kPlanned + (lane & (kPlanned - 1))) * 16);
        }
        const auto of_tile = [&](uint32_t x) { return __shfl_sync(~0u, x, t & (kPlanned - 1)); };
        what = of_tile(plan.x);
        const int first = of_tile(plan.y), slot = slots & 3;
        const uint32_t low = of_tile(plan.z), high = of_tile(plan.w);
        if (t++ % kPlanned == 0) {  // every lane's has come, or it could not have been shuffled
          if (lane == 0) mbar_arrive(plan_read + 8 * (plans & 1));
          ++plans;
        }
        slots = slots >> 2 | slot << 4;
        const bool have = what & kFirst && there;
        if (!have) loaded ^= 1 << slot;
        const int parity = (loaded >> slot & 1) ^ 1;  // of its last load
        note(slot | (parity ? kLoadParity : 0) | what, i, low, high);
        if (have) continue;
        const uint32_t bar = full + 16 * slot + 8 * half, to = smem + slot * kSlotBytes + half * kHalf;
        const int octets = what >> kOctets & 15, places = what & kNone ? 0 : 2 * (what >> kPairs & 3) + 2;
        const uint8_t* from = (what & kFar ? p.second : p.window) + half * kPart;
        mbar_wait(empty + 16 * slot + 8 * half, parity ^ 1);
        if (lane == 0) mbar_expect(bar, places * kPart);
        __syncwarp();
        if (octets == 8 || what & kMerged) {  // a copy of a whole half takes as long to begin as one of a part of it
          if (lane == 0) octets_load(to, what & kMerged ? &p.seven_map : what & kFar ? &p.second_map : &p.window_map, half, first, bar);
        } else if (lane < places) {  // a place without an octet gets the first one again, so that no query multiplies what is not its own
          const bool is_own = what & kOwn && (lane == octets || octets == 0);
          const int octet = first + (is_own ? what >> kOwnAt & 15 : lane < octets ? lane : 0);
          bulk_load(to + lane * kPart, from + (int64_t)octet * 8192, kPart, bar);
        }
        if (what & kMerged && lane < 8) {  // of each block of channels: rows of the window's last octet, then those of its first one
          const int later = (what >> kPlace & 7) + 1, rows = lane & 1 ? 8 - later : later;
          const int at = (lane >> 1) * 1024 + (lane & 1 ? later * 128 : 0);
          bulk_load(to + 7 * kPart + at, from + (int64_t)(first + (lane & 1 ? -1 : 15)) * 8192 + at, rows * 128, bar);
        }
      } while (!(what & kLast));
      there = what & kKept, one = what & kFirst;
    }
    note(kEnd, 0, 0, 0);
    return;
  }

  const int quad = lane & 3, place = warp * 16 + (lane >> 2);
  if (group == 0) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 168;");
    const float to_log2 = p.scale * kLog2e;
    // Where this lane puts or takes the first matrices of 64 columns; the k-th lie at this place ^ 32 k.
    const uint32_t matrix = smem + (warp * 16 + (lane & 15)) * 128 + (((lane >> 4) ^ (lane & 7)) << 4);
    const uint64_t k_desc = operand(smem, 16, kPart), q_desc = operand(smem + kRest, 16, 1024);
    uint32_t q[24][4];
    float s[32], m[2] = {-INFINITY, -INFINITY}, l[2] = {0, 0};
#pragma unroll
    for (int c = 0; c < 32; ++c) s[c] = 0;
    int it = 0, j = 0;  // notes, tiles
    const auto next_note = [&]() {
      mbar_wait(noted + 8 * (it & (kNotes - 1)), (it / kNotes) & 1);
      const int2 n = ld_i2(smem + kNote + (it++ & (kNotes - 1)) * 16);
      return make_int2(__shfl_sync(~0u, n.x, 0), n.y);
    };
    const auto tell = [&](int what, int query) {  // the other groups, of the weights
      if (threadIdx.x == 0) st_shared_i2(smem + kInfo + (j & 1) * 8, what, query);
      fence_async();
      __syncwarp();
      if (lane == 0) mbar_arrive(p_full + 8 * (j & 1));
    };
    int2 n = next_note();
    for (int query = 0;; ++query) {
      if (lane == 0) mbar_arrive(logits + 8 * (j & 1));  // the last tile's weights need not wait
      if (n.x & kEnd) break;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t at = 16 * (n.x & kSlot) + 8 * half, from = matrix + (n.x & kSlot) * kSlotBytes + half * kHalf;
        mbar_wait(full + at, n.x & kLoadParity ? 1 : 0);
#pragma unroll
        for (int k = 0; k < 16 - 8 * half; ++k) load_matrices(q[16 * half + k], (from + (k >> 2) * 8192) ^ 32 * (k & 3));
      }
      // An arrival may overtake loads that are under way: it has to wait for what they bring.
      uint32_t brought = 0;
#pragma unroll
      for (int k = 0; k < 24; ++k) brought ^= q[k][3];
      group_barrier(1, brought == 1);
      if (lane < 2) mbar_arrive(empty + 16 * (n.x & kSlot) + 8 * lane);
      n = next_note();
      bool last;
      const auto tile = [&](auto number) __attribute__((always_inline)) {
        constexpr int kNumber = decltype(number)::value;
        const uint32_t own_full = full + 16 * (n.x & kSlot);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          mbar_wait(own_full + 8 * half, n.x & kLoadParity ? 1 : 0);
          if (half == 1 && (n.x & kFirst)) mbar_wait(rest_full, query & 1);
          const uint64_t desc = k_desc + (((n.x & kSlot) * kSlotBytes + half * kHalf) >> 4);
          wgmma_fence();
#pragma unroll
          for (int k = 0; k < 16 - 8 * half; ++k) multiply_rows<kNumber>(s, q[16 * half + k], desc + (k >> 2) * 64 + (k & 3) * 2, half | k);
          if (half == 1) {
#pragma unroll
            for (int k = 0; k < 8; ++k) {
              multiply_rows<kNumber>(s, q_desc + (k >> 2) * 512 + (k & 3) * 2, desc + (2 + (k >> 2)) * 64 + (k & 3) * 2, 1);
            }
          }
          wgmma_commit();
        }
        wgmma_wait<0>();
        if (lane == 0 && !(n.x & kFirst)) mbar_arrive(logits + 8 * (j & 1));
        settled(s);
        if (lane == 0 && (n.x & kLast)) mbar_arrive(rest_empty);

#pragma unroll
        for (int c = 0; c < 8 * kNumber; ++c) s[c] *= to_log2;
        const int2 rows = ld_i2(smem + kNote + (it - 1 & (kNotes - 1)) * 16 + 8);
        if ((rows.x & rows.y) != -1) {
          const uint32_t in[2] = {(uint32_t)rows.x >> 2 * quad, (uint32_t)rows.y >> 2 * quad};
#pragma unroll
          for (int c = 0; c < 2 * kNumber; ++c)
#pragma unroll
            for (int e = 0; e < 2; ++e)
              if (!(in[c >> 2] >> (8 * (c & 3) + e) & 1)) s[4 * c + e] = s[4 * c + 2 + e] = -INFINITY;
        }
        float top[2] = {-INFINITY, -INFINITY};
#pragma unroll
        for (int c = 0; c < 8 * kNumber; ++c) top[c >> 1 & 1] = fmaxf(top[c >> 1 & 1], s[c]);
        if (n.x & kFirst) m[0] = m[1] = -INFINITY, l[0] = l[1] = 0;
        mbar_wait(p_empty + 8 * (j & 1), (j >> 1 & 1) ^ 1);
        const uint32_t state = smem + kState + (j & 1) * 1024 + place * 16;
        if (__any_sync(~0u, top[0] > m[0] + kSlack || top[1] > m[1] + kSlack)) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const float was = m[h], most = quad_max(top[h]);
            m[h] = most > was + kSlack ? most : was;
            const float alpha = m[h] == -INFINITY ? 1.0f : exp2_fast(was - m[h]);
            l[h] *= alpha;
            st_shared_b32(state + 128 * h, __float_as_uint(alpha));  // of a quad all the same
          }
        } else {
          st_shared_b32(state, 0x3f800000);
          st_shared_b32(state + 128, 0x3f800000);
        }
        const int2 next = next_note();
        const float shift[2] = {fmaxf(m[0], -FLT_MAX), fmaxf(m[1], -FLT_MAX)};  // with no row at all every weight is exp2(-inf)
#pragma unroll
        for (int k = 0; k < kNumber; ++k) {
          uint32_t w[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float a = exp2_fast(s[8 * k + 2 * i] - shift[i & 1]), b = exp2_fast(s[8 * k + 2 * i + 1] - shift[i & 1]);
            l[i & 1] += a + b;
            w[i] = pack_bf16(a, b);
          }
          store_matrices((matrix + kP + (j & 1) * 8192) ^ 32 * k, w);
        }
        if (n.x & kLast) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            st_shared_b32(state + 128 * h + 4, __float_as_uint(m[h]));
            st_shared_b32(state + 128 * h + 8, __float_as_uint(quad_sum(l[h])));
          }
        }
        tell(n.x, n.y);
        ++j;
        last = n.x & kLast;
        n = next;
      };
      do {
        with_pairs(n.x, tile);
      } while (!last);
    }
    mbar_wait(p_empty + 8 * (j & 1), (j >> 1 & 1) ^ 1);
    tell(kEnd, 0);
    return;
  }

  asm volatile("setmaxnreg.inc.sync.aligned.u32 160;");
  const int half = group - 1;
  const uint64_t p_desc = operand(smem + kP, 16, 1024), v_desc = operand(smem + half * kHalf, 1024, kPart);
  const int head = head0 + place;
  const bool has[2] = {head < p.heads, head + 8 < p.heads};
  const float sink[2] = {p.sink && has[0] ? p.sink[head] * kLog2e : -INFINITY, p.sink && has[1] ? p.sink[head + 8] * kLog2e : -INFINITY};
  float o[2][64];
#pragma unroll
  for (int c = 0; c < 128; ++c) o[c >> 6][c & 63] = 0;
  int out_slot = -1;  // the one by way of which the last output left
  for (int j = 0;; ++j) {
    mbar_wait(p_full + 8 * (j & 1), j >> 1 & 1);
    int2 what = ld_i2(smem + kInfo + (j & 1) * 8);
    what.x = __shfl_sync(~0u, what.x, 0);
    if (what.x & kEnd) break;
    const uint32_t state = smem + kState + (j & 1) * 1024 + place * 16;
    const float4 now[2] = {ld_f4(state), ld_f4(state + 128)};
    if (__any_sync(~0u, now[0].x != 1.0f || now[1].x != 1.0f) && !(what.x & kFirst)) {
#pragma unroll
      for (int c = 0; c < 128; ++c) o[c >> 6][c & 63] *= now[(c >> 1) & 1].x;
    }
    if ((what.x & kFirst) && lane == 0 && out_slot >= 0) {
      tensor_stores_read();
      mbar_arrive(empty + 16 * out_slot + 8 * half);
    }
    if (what.x & kOut) out_slot = what.x & kSlot;
    const int adds = !(what.x & kFirst);
    const uint64_t desc = v_desc + (what.x & kSlot) * (kSlotBytes >> 4), weights = p_desc + (j & 1) * 512;
    mbar_wait(logits + 8 * (j + 1 & 1), j + 1 >> 1 & 1);
    with_pairs(what.x, [&](auto number) __attribute__((always_inline)) {
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < decltype(number)::value; ++k)
#pragma unroll
        for (int part = 0; part < 2; ++part) wgmma_pv_ss(o[part], weights + k * 2, desc + part * 128 + k * (2 * kPart >> 4), adds | k);
      wgmma_commit();
      wgmma_wait<0>();
      settled(o[0]);
      settled(o[1]);
    });
    if (lane == 0) {
      mbar_arrive(p_empty + 8 * (j & 1));
      if (!(what.x & (kKept | kOut))) mbar_arrive(empty + 16 * (what.x & kSlot) + 8 * half);
    }
    if (!(what.x & kLast)) continue;
    if (what.x & kNone) {
#pragma unroll
      for (int c = 0; c < 128; ++c) o[c >> 6][c & 63] = 0;
    }
    float factor[2];
    const float spoilt = what.x & kBroken ? kNan : 0.0f;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      factor[h] = (now[h].y == -INFINITY ? 0.0f : 1.0f / (now[h].z + exp2_fast(sink[h] - now[h].y))) + spoilt;
      if (half == 0 && quad == 0 && p.lse && has[h])
        p.lse[(int64_t)what.y * p.heads + head + 8 * h] = (now[h].y + __log2f(now[h].z)) * kLn2 + spoilt;
    }
    named_barrier(2 + half, 128);  // all warps of the group are done with the slot that takes the output
    const uint32_t stage = smem + out_slot * kSlotBytes + half * kHalf + warp * 8192;
#pragma unroll
    for (int c = 0; c < 4; ++c)
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        uint32_t w[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int at = 32 * c + 8 * k + 2 * i;
          w[i] = pack_bf16(o[at >> 6][at & 63] * factor[i & 1], o[at >> 6][(at & 63) + 1] * factor[i & 1]);
        }
        store_matrices((stage + c * 2048 + (lane & 15) * 128 + (((lane >> 4) ^ (lane & 7)) << 4)) ^ 32 * k, w);
      }
    fence_async();
    __syncwarp();
    if (lane == 0) tensor_store(&out_map, half * 4, head0 + warp * 16, what.y, stage);
  }
  if (lane == 0) tensor_stores_read();
}

extern "C" int hr_prefill_dense(const RowsParams* p, const void* q, int64_t stride_t, int64_t stride_h, int blocks, void* stream) {
  if (p->queries == 0) return cudaSuccess;
  Launch own = {*p};
  own.chunk = 1;
  // Neighbours share tiles, but no block should have more queries than it must: of 8,192 on 132 blocks 63, in runs of 9.
  int most = own.queries;
  for (int n = 1; n < 10; ++n) {
    const int runs = (own.queries + n - 1) / n, own_most = (runs + blocks - 1) / blocks * n;
    if (own_most <= most) most = own_most, own.chunk = n;
  }
  cudaError_t e = encode_octets(&own.window_map, p->window, p->window_octets, 8);
  if (e == cudaSuccess) e = encode_octets(&own.seven_map, p->window, p->window_octets, 7);
  if (e == cudaSuccess) e = encode_octets(&own.second_map, p->second_octets ? p->second : p->window, p->second_octets, 8);
  if (e != cudaSuccess) return e;
  return launch_prefill(prefill_dense, own, q, stride_t, stride_h, 2, 4, blocks, 512, kSmemBytes, (cudaStream_t)stream);
}
