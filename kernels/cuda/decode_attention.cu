// Decode attention over two lists of paged 584-byte fp8 entries, with a sink: one query token a row, K = V = the entry.
//
// One cluster of C blocks works on one token and 64 of its heads. The token's lists are cut into tiles of 64 entries (the
// first list is padded to whole tiles before the second begins), tiles into C runs of ceil(tiles / C), one run a block.
// C is a constant of the launch and the cut depends on the token's own lengths alone, never on the batch: so does the
// result (batch-invariant). The blocks exchange partial sums, as fp16 with a scale, through distributed shared memory and add them
// in run order. A token that is not cut (C = 1) can have S = 2 blocks all the same: both compute all logits, each has half of the
// output's channels. They exchange nothing but their loads of q, and the bits are those of one block.
//
// A block is four warp-groups. Two produce: they gather entries through a ring of shared memory, decode e4m3 to bf16 and write
// tiles into two shared buffers; most of a tile (28 of 36 KB) is always on its way, also while another is converted. Warp-group
// 0 multiplies q by the tile, does the softmax and the product with the first half of the block's channels; warp-group 1 the product
// with the second half, from the probabilities left in shared memory.
//
// Decoding e4m3 is integer work: sign, exponent and mantissa bits are moved into place as a bf16 of 2^-120 times the value
// (subnormals included), and one multiplication by 2^(120 + e - 32) brings in the scale of the group. Everything is
// kept 2^-32 too small, the rotary part likewise, so that the factor stays below bf16's largest exponent up to e = 39;
// the logits' scale and the last division undo it. All of this is exact. A scale byte of 0xFF (poison) becomes infinity.
//
// At its ends the kernel can take in raw q (norm without weight, rotary) and give out e4m3 (inverse rotary, one
// power-of-two scale per 128 channels; or bf16, rotated back), so that neither q nor the output makes a second trip through memory.
#include <cuda_fp16.h>

#include <type_traits>

#include "copy_engine.cuh"
#include "hopper.cuh"

using namespace hr;

struct List {
  const uint8_t* pages;    // base of page 0
  int64_t page_stride;     // bytes
  int64_t num_slots;       // slot -1 is none, any other outside [0, num_slots) breaks the token
  const int32_t* slots;    // [B, width]
  int64_t slots_stride;    // elements
  const int32_t* lengths;  // [B], entries of the row in use; null: no such list
  int32_t width;
  int32_t log2_entries;  // entries a page
};

struct Params {
  const __nv_bfloat16* q;  // [B, H, 512], of which the kernel gets a map
  int64_t q_stride_t, q_stride_h;
  List list[2];
  const float* sink;         // [H] or null
  const int64_t* positions;  // [B]; for raw q, and for an output that is rotated back
  const float* cos_sin;      // [positions, 64]: 32 cosines, 32 sines
  __nv_bfloat16* out;        // [B, H, 512], unless out8
  int64_t out_stride_t, out_stride_h;
  uint8_t* out8;  // [groups of 8 heads, B, 4096] e4m3
  int64_t out8_stride_g, out8_stride_t;
  float* out8_scale;  // [groups, B, 32], token stride 1
  int64_t scale_stride_g, scale_stride_c;
  float* lse;  // [B, H] or null
  float scale, eps;
  int32_t heads, batch, raw_q, turn_out;
  int32_t by_tiles, tiles_of_one, tiles_of_two;  // in the batch-invariant form: how many tiles one block takes, and two
#ifdef HR_TRACE
  void* trace;
#endif
};

namespace {

constexpr int kTile = 64, kRowBytes = 576;
constexpr int kPieces = 9, kRing = 7;  // pieces of 16 bytes that a thread has of a tile, and how many of them the ring has room for
constexpr int kQBlocks = 7;            // of q's eight blocks of 64 channels: the last one's place holds probabilities later
constexpr uint32_t kQ = 0, kRaw = kQBlocks * 8192;  // the ring: [7][256 threads] of 16 bytes
constexpr uint32_t kK = kRaw + kRing * 4096, kKBytes = 65536, kP = kK + 2 * kKBytes;
constexpr uint32_t kAlpha = kP + 8192;       // [2][64] fp32
constexpr uint32_t kHeld = kAlpha + 512;     // [2][64] bits: which rows of a tile hold an entry
constexpr uint32_t kNotes = kHeld + 16;      // [C][heads that a block ends] of 16 bytes, up to 72: see finish
constexpr uint32_t kSink = kNotes + 1152;    // [64] fp32
constexpr uint32_t kTurn = kSink + 256;      // [64] fp32: cosines and sines of the token's position
constexpr uint32_t kScales = kTurn + 256;    // [2][64] of 8 bytes: of the rows of a tile, before they are converted
constexpr uint32_t kSlots = kScales + 1024;  // [2][256 threads]: slots of four tiles, and of the next four
constexpr uint32_t kBars = kSlots + 2048;    // 7 mbarriers
constexpr uint32_t kLost = kBars + 56;       // whether a list has a length that cannot be, or a slot that does not exist
constexpr uint32_t kSmemBytes = kBars + 64;
constexpr float kUnscale = 4294967296.0f;    // 2^32

#ifdef HR_TRACE  // a build for looking at one launch: clock readings, [block][warp-group][event]
#define HR_MARK(n)                                                                                        \
  if ((threadIdx.x & 127) == 0)                                                                           \
  ((int64_t*)p.trace)[((blockIdx.z * gridDim.x + blockIdx.x) * 4 + (threadIdx.x >> 7)) * 64 + ((n) & 63)] = clock64()
#else
#define HR_MARK(n)
#endif

__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
// Waits for all groups of copies but the youngest N.
template <int N>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

struct Cut {
  int n0, n1, tiles0, tiles, first, count, parts;
};

// The run of tiles that block `rank` of `size` takes. Either all blocks of the launch share a token or, in the batch-invariant form,
// one, two or four of them by the number of its tiles alone; the launch then has enough for its longest.
__device__ __forceinline__ Cut cut_of(const Params& p, int n0, int n1, int rank, int size) {
  Cut c;
  c.n0 = n0;
  c.n1 = n1;
  c.tiles0 = (c.n0 + kTile - 1) / kTile;
  c.tiles = c.tiles0 + (c.n1 + kTile - 1) / kTile;
  c.parts = p.by_tiles ? min(size, c.tiles > p.tiles_of_two ? 4 : c.tiles > p.tiles_of_one ? 2 : 1) : size;
  const int per = (c.tiles + c.parts - 1) / c.parts;
  c.first = min(c.tiles, rank * per);
  c.count = min(c.tiles, c.first + per) - c.first;
  return c;
}

// Where the slot of row `row` of the block's tile `tile` is; null: there is none.
__device__ __forceinline__ const int32_t* slot_place(const Params& p, const Cut& c, int token, int tile, int row) {
  if (tile >= c.count) return nullptr;
  tile += c.first;
  const int second = tile >= c.tiles0;
  const List& l = p.list[second];
  const int e = (tile - (second ? c.tiles0 : 0)) * kTile + row;
  return e < (second ? c.n1 : c.n0) ? l.slots + token * l.slots_stride + e : nullptr;
}
__device__ __forceinline__ int32_t slot_of(const Params& p, const Cut& c, int token, int tile, int row) {
  const int32_t* at = slot_place(p, c, token, tile, row);
  return at ? ld_int(at) : -1;
}
// The same slot, read before the lengths were known, as if both lists were full: -1 if it lies past the end.
__device__ __forceinline__ int32_t cropped(const Cut& c, int tile, int row, int32_t slot) {
  if (tile >= c.count) return -1;
  tile += c.first;
  const int e = (tile < c.tiles0 ? tile : tile - c.tiles0) * kTile + row;
  return e < (tile < c.tiles0 ? c.n0 : c.n1) ? slot : -1;
}

__device__ __forceinline__ uint32_t mul_bf16x2(uint32_t a, uint32_t b) {
  uint32_t r;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
// Four e4m3 to bf16 of 2^-120 times the value, in order. Codes a byte apart, times 16: the sign is then bit 11 of each half, and
// adding 0x7800 carries it to bit 15. A product and two picks: the units that shift and mask are those that bound the producers.
__device__ __forceinline__ void decode4(uint32_t codes, uint32_t sixteen, uint32_t& a, uint32_t& b) {
  asm("mad.lo.u32 %0, %1, %2, 0x78007800;" : "=r"(a) : "r"(__byte_perm(codes, 0, 0x4140)), "r"(sixteen));
  asm("mad.lo.u32 %0, %1, %2, 0x78007800;" : "=r"(b) : "r"(__byte_perm(codes, 0, 0x4342)), "r"(sixteen));
  a &= 0x87f087f0u;
  b &= 0x87f087f0u;
}

// Fills the tiles. A warp has 8 rows of every tile. Each of its loads takes 256 bytes of two rows (so few pages, few lines),
// the last one the ends of all eight: a thread has 16 bytes of a scale group, of the rows of one parity. Its own row, lane % 8, is
// the one whose slot and place it knows; thread 8 * t + r of a warp reads the slots of row r in tiles t of four (slots, later).
// Nothing that comes from memory waits in a register: the compiler may ask for it late and wait for it early.
__device__ __forceinline__ void produce(const Params& p, const Cut& c, uint32_t smem, int token, int tid, int32_t slots, int32_t later,
                                        uint32_t full, uint32_t empty) {
  const int lane = tid & 31, row0 = tid >> 5 << 3, own = lane & 7, part = lane & 3, parity = lane >> 2 & 1, quarter = lane >> 3;
  const bool rotary = quarter == 3;  // in the second half of a row
  const uint32_t ring = smem + kRaw + tid * 16, scales = smem + kScales + row0 * 8;
  // Where the thread's 16 channels go in row `parity` of the warp, two chunks that differ in bit 4; rotary ones fill one chunk.
  // Row 2 * i + parity: bits 5 and 6 flipped by i, 256 * i further.
  const uint32_t to = smem + kK + row0 * 128 + parity * 128 + quarter * 8192;
  const uint32_t first = to + (((2 * part) ^ parity) << 4), second = to + 32768 + (((rotary ? part : 2 * part) ^ parity) << 4);
  const uint32_t end = smem + kK + 7 * 8192 + (row0 + (lane >> 2)) * 128 + (((4 + part) ^ (lane >> 2)) << 4);
  const uint8_t* rows[5] = {};  // of what is to be asked for: the thread's bytes in row 2 * i + parity, and those of the end
  uint32_t present = 0;         // bit i: there is such a row; else zeros
  const uint32_t sixteen = 16 | (uint32_t)p.heads >> 31;  // 16; of a constant the compiler would make a shift
  // Only the thread itself reads what it asks for here, so there is no barrier: it waits for its own copies.
  auto load = [&](int piece, uint32_t to) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\ncp.async.commit_group;" ::"r"(to),
                 "l"(rows[piece >> 1] + (piece & 1) * 256), "r"(present & (1 << (piece >> 1)) ? 16 : 0)
                 : "memory");
  };
  auto fetch = [&](int tile, int32_t slot) {
    const List& l = p.list[c.first + tile >= c.tiles0];
    const int entries = 1 << l.log2_entries, at = slot & (entries - 1);
    const uint32_t page = (uint32_t)(slot >> l.log2_entries) * (uint32_t)(l.page_stride >> 4);
    if (quarter == 0)
      asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(scales + (tile & 1) * 512 + own * 8),
                   "l"(l.pages + ((uint64_t)page << 4) + entries * kRowBytes + at * 8), "r"(slot < 0 ? 0 : 8)
                   : "memory");
    asm volatile("cp.async.commit_group;" ::: "memory");
    const uint32_t place = page + at * (kRowBytes / 16), all = __ballot_sync(~0u, slot >= 0);
    present = (all >> parity & 1) | (all >> (1 + parity) & 2) | (all >> (2 + parity) & 4) | (all >> (3 + parity) & 8) |
              (all >> (lane >> 2) & 1) << 4;
#pragma unroll
    for (int i = 0; i < 5; ++i) {
      const uint32_t of = __shfl_sync(~0u, place, i < 4 ? 2 * i + parity : lane >> 2);
      rows[i] = l.pages + ((uint64_t)of << 4) + (i < 4 ? quarter * 64 : 512) + part * 16;
      asm volatile("" : "+l"(rows[i]));  // a register, not what it is computed from
    }
  };
  const uint32_t slot_ring = smem + kSlots + (tid & ~31) * 4;
  bool lost = false;  // a slot was met that is none of the pool's, nor -1, which stands for no entry
  auto slot_at = [&](int tile) {
    const uint32_t slot = ld_u1(slot_ring + (tile & 4) * 256 + ((tile & 3) * 8 + own) * 4);
    const bool known = slot < p.list[c.first + tile >= c.tiles0].num_slots;
    lost |= !known && slot != ~0u;
    return known ? (int32_t)slot : -1;
  };
  st_shared_b32(slot_ring + lane * 4, slots);
  st_shared_b32(slot_ring + 1024 + lane * 4, later);
  __syncwarp();
  HR_MARK(50);
  int32_t slot = slot_at(0), next_slot = slot_at(1);
  HR_MARK(51);
  fetch(0, slot);
#pragma unroll
  for (int k = 0; k < kRing; ++k) load(k, ring + k * 4096);
  // The first tile is asked for whole: what the ring has no room for waits where the warp itself will write the second one.
  const uint32_t beside = smem + kK + kKBytes + row0 * 128 + lane * 16 - kRing * 512;
#pragma unroll
  for (int k = kRing; k < kPieces; ++k) load(k, beside + k * 512);
  uint32_t turn = ring;  // where the next piece lies
  HR_MARK(1);
  auto tile = [&](int it, auto is_first) {
    constexpr bool kFirst = decltype(is_first)::value;
    constexpr int kAhead = kFirst ? kPieces : kRing;  // pieces on their way
    const int buf = it & 1;
    HR_MARK(4 + 4 * it);
    wait_copies<kAhead - 1>();
    __syncwarp();  // slots and scales came by way of other lanes
    const int32_t after_slot = slot_at(it + 2);
    if (((it + 2) & 3) == 0) {  // the four before are used up
      const uint32_t to_slot = slot_ring + ((it + 6) & 4) * 256 + lane * 4;
      const int32_t* from = slot_place(p, c, token, it + 6 + quarter, row0 + own);
      if (from)
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to_slot), "l"(from) : "memory");
      else
        st_shared_b32(to_slot, ~0u);
    }
    // The lane's own two factors: of row `own`, groups `quarter` and 4 + quarter. Rotary: 2^-32, twice.
    uint32_t factor[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      asm volatile("ld.shared.u8 %0, [%1];" : "=r"(factor[h]) : "r"(scales + buf * 512 + own * 8 + quarter + h * 4));
      factor[h] = min(factor[h] + 88u, 255u) * 0x00800080u;
    }
    if (rotary) factor[1] = 0x2f802f80u;
    mbar_wait(empty + 8 * buf, ((it >> 1) & 1) ^ 1);
    HR_MARK(5 + 4 * it);
    const uint32_t held = __ballot_sync(~0u, slot >= 0);
    if (lane == 0) asm volatile("st.shared.u8 [%0], %1;" ::"r"(smem + kHeld + buf * 8 + (row0 >> 3)), "r"(held) : "memory");
    const uint32_t first_at = first + buf * kKBytes, second_at = second + buf * kKBytes;
    auto convert = [&](int k, const uint4& d) {
      if (k == 8) {
        constexpr uint32_t f = 0x2f802f80u;
        st_shared_v4(end + buf * kKBytes,
                     make_uint4(mul_bf16x2(d.x, f), mul_bf16x2(d.y, f), mul_bf16x2(d.z, f), mul_bf16x2(d.w, f)));
        return;
      }
      const uint32_t i = k >> 1, line = (((k & 1) ? second_at : first_at) ^ (i << 5)) + i * 256;
      const uint32_t f = __shfl_sync(~0u, factor[k & 1], (lane & 24) + 2 * i + parity);
      uint32_t w[8];
      decode4(d.x, sixteen, w[0], w[1]);
      decode4(d.y, sixteen, w[2], w[3]);
      decode4(d.z, sixteen, w[4], w[5]);
      decode4(d.w, sixteen, w[6], w[7]);
      const bool plain = (k & 1) && rotary;
      st_shared_v4(line, make_uint4(mul_bf16x2(plain ? d.x : w[0], f), mul_bf16x2(plain ? d.y : w[1], f),
                                    mul_bf16x2(plain ? d.z : w[2], f), mul_bf16x2(plain ? d.w : w[3], f)));
      if (!plain)
        st_shared_v4(line ^ 16, make_uint4(mul_bf16x2(w[4], f), mul_bf16x2(w[5], f), mul_bf16x2(w[6], f), mul_bf16x2(w[7], f)));
    };
    // In the place of each piece that is converted goes the seventh after it: nearly a whole tile is always on its way.
    slot = next_slot;
    next_slot = after_slot;
    uint4 next = ld_u4(turn);
#pragma unroll
    for (int k = 0; k < kPieces; ++k) {
      if (k == kPieces - kAhead) fetch(it + 1, slot);  // its scales make one group more
      const uint4 d = next;
      const uint32_t at = turn;
      if (!kFirst || k < kRing) turn = turn == ring + (kRing - 1) * 4096 ? ring : turn + 4096;
      if (k + 1 < kPieces) {
        if (k < kPieces - kAhead)
          wait_copies<kAhead - 2>();
        else
          wait_copies<kAhead - 1>();
        next = ld_u4(kFirst && k + 1 >= kRing ? beside + (k + 1) * 512 : turn);
      }
      convert(k, d);
      if (!kFirst || k < kRing) load((k + kAhead) % kPieces, at);
    }
    HR_MARK(6 + 4 * it);
    if (lost) st_shared_b32(smem + kLost, 1);
    fence_async();
    __syncwarp();
    if (lane == 0) mbar_arrive(full + 8 * buf);
    HR_MARK(3 + 4 * it);
  };
  if (c.count > 0) tile(0, std::true_type{});
#pragma unroll 1
  for (int it = 1; it < c.count; ++it) tile(it, std::false_type{});
}

// Where block `atom` of q begins: the last one lies where probabilities will be, of the same rows, until registers have it.
__device__ __forceinline__ uint32_t q_block(uint32_t smem, int atom) {
  return smem + (atom < kQBlocks ? kQ + atom * 8192 : kP);
}

// Asks for q of 64 heads, straight into its place; missing heads become zeros. Two blocks of a token ask for half of it each, for both.
template <int S>
__device__ __forceinline__ void ask_q(const CUtensorMap* map, uint32_t smem, int token, int head0, int side, uint32_t bar) {
  mbar_expect(bar, 65536);
#pragma unroll
  for (int i = 0; i < 8 / S; ++i) {
    const int atom = side * (8 / S) + i;
    if constexpr (S == 1)
      tensor_load(q_block(smem, atom), map, atom, head0, token, bar);
    else
      tensor_load_shared(q_block(smem, atom), map, atom, head0, token, bar, 3);
  }
}

// Norms (without weight) and rotates a warp's 8 heads of q in place.
__device__ __forceinline__ void norm_rope_q(const Params& p, uint32_t smem, int warp, int lane) {
  float4 cs = {}, sn = {};
  if (lane >= 24) {
    cs = ld_f4(smem + kTurn + (lane - 24) * 16);
    sn = ld_f4(smem + kTurn + 128 + (lane - 24) * 16);
  }
  constexpr int kTurns = 4;  // heads at a time: their waits overlap
#pragma unroll 1
  for (int first = 0; first < 8; first += kTurns) {
    uint32_t w[kTurns][2][4];
    float sum[kTurns] = {};
    auto line = [&](int i, int h) {
      return q_block(smem, 4 * h + (lane >> 3)) + (warp * 8 + first + i) * 128 + (((lane & 7) ^ (first + i)) << 4);
    };
#pragma unroll
    for (int i = 0; i < kTurns; ++i)
#pragma unroll
      for (int h = 0; h < 2; ++h) *(uint4*)w[i][h] = ld_u4(line(i, h));
#pragma unroll
    for (int i = 0; i < kTurns; ++i)
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          float x = bf16_lo(w[i][h][j]), y = bf16_hi(w[i][h][j]);
          sum[i] += x * x + y * y;
        }
#pragma unroll
    for (int m = 16; m; m >>= 1)
#pragma unroll
      for (int i = 0; i < kTurns; ++i) sum[i] += __shfl_xor_sync(~0u, sum[i], m);
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
      const float r = rsqrtf(sum[i] * (1.0f / 512) + p.eps);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        uint32_t &a = w[i][0][j], &b = w[i][1][j];
        a = pack_bf16(bf16_lo(a) * r, bf16_hi(a) * r);
        float x = bf16_lo(b) * r, y = bf16_hi(b) * r;
        if (lane >= 24) {
          float c = ((float*)&cs)[j], s = ((float*)&sn)[j], t = x;
          x = t * c - y * s;
          y = y * c + t * s;
        }
        b = pack_bf16(x, y);
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) st_shared_v4(line(i, h), *(uint4*)w[i][h]);
    }
  }
}

__device__ __forceinline__ void round_bf16(float& x, float& y) {
  uint32_t v = pack_bf16(x, y);
  x = bf16_lo(v);
  y = bf16_hi(v);
}
__device__ __forceinline__ void turn_back(float& x, float& y, float c, float s) {
  float t = x;
  x = x * c + y * s;
  y = y * c - t * s;
}

// A product instruction takes 128 channels: one of 256 needs more registers than a thread has before the groups trade theirs.
template <int kHalf, int N>
__device__ __forceinline__ float (&half_of(float (&o)[N]))[64] {
  return *(float(*)[64])(o + 64 * kHalf);
}

// Writes 8 heads x 128 channels of a warp: v[2 * k + e] is channel 8 * k + 2 * quad + e of head `head` + lane / 4, divided already.
// `stage` is 2304 bytes of the warp's own.
__device__ __forceinline__ void emit(const Params& p, uint32_t smem, uint32_t stage, float (&v)[32], int token, int head, int rows,
                                     int quarter, int lane) {
  const int row = lane >> 2, quad = lane & 3;
  if (quarter == 3 && (p.turn_out || p.out8)) {
    // The rotary channels are rounded first, as if they had been stored before they are rotated back.
#pragma unroll
    for (int k = 8; k < 16; ++k) {
      const uint32_t at = smem + kTurn + (4 * (k - 8) + quad) * 4;
      round_bf16(v[2 * k], v[2 * k + 1]);
      turn_back(v[2 * k], v[2 * k + 1], ld_f1(at), ld_f1(at + 128));
    }
  }
  if (p.out8 == nullptr) {
    const uint32_t line = stage + row * 272 + quad * 4;
#pragma unroll
    for (int k = 0; k < 16; ++k) st_shared_b32(line + k * 16, pack_bf16(v[2 * k], v[2 * k + 1]));
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int r = 2 * i + (lane >> 4), chunk = lane & 15;
      if (r < rows)
        *(uint4*)(p.out + token * p.out_stride_t + (head + r) * p.out_stride_h + quarter * 128 + chunk * 8) =
            ld_u4(stage + r * 272 + chunk * 16);
    }
    __syncwarp();
    return;
  }
  float top = 0;
#pragma unroll
  for (int k = 0; k < 16; ++k) {
    // Rounded to bf16 first, so that the fused form gives the bytes of the stand-alone one.
    if (quarter != 3 || k < 8) round_bf16(v[2 * k], v[2 * k + 1]);
    top = fmaxf(top, fmaxf(fabsf(v[2 * k]), fabsf(v[2 * k + 1])));
  }
  top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
  top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
  const int e = scale_exponent(fmaxf(top, 1e-10f)), own = head + row;
  const float f = pow2(-e);
  if (quad == 0 && row < rows)
    p.out8_scale[(own >> 3) * p.scale_stride_g + token + ((own & 7) * 4 + quarter) * p.scale_stride_c] = pow2(e);
  const uint32_t line = stage + row * 144 + quad * 2;
#pragma unroll
  for (int k = 0; k < 16; k += 2) {
    const uint32_t w = pack_e4m3(v[2 * k] * f, v[2 * k + 1] * f, v[2 * k + 2] * f, v[2 * k + 3] * f);
    asm volatile("st.shared.b16 [%0], %1;" ::"r"(line + k * 8), "h"((uint16_t)w) : "memory");
    asm volatile("st.shared.b16 [%0], %1;" ::"r"(line + k * 8 + 8), "h"((uint16_t)(w >> 16)) : "memory");
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int r = 4 * i + (lane >> 3), chunk = lane & 7, h = head + r;
    if (r < rows)
      *(uint4*)(p.out8 + (h >> 3) * p.out8_stride_g + token * p.out8_stride_t + (h & 7) * 512 + quarter * 128 + chunk * 16) =
          ld_u4(stage + r * 144 + chunk * 16);
  }
  __syncwarp();
}

// The end of a product warp: 16 heads, 2 * N channels. With C blocks a token each ends kHeads of the heads. It is sent the sums of
// all blocks for these, where its q and its ring were: as fp16, times a power of two for each head and half of the channels, so that
// the magnitudes of a half add up to less than one (what that loses is small beside the rounding of the output), with a note for
// each head: maximum, divisor, the powers' inverses.
template <int C, int N>
__device__ __forceinline__ void finish(const Params& p, uint32_t smem, float (&o)[N], float (&m)[2], float (&l)[2], int token,
                                       int head0, int rank, int group, int first_quarter, int warp, int lane) {
  const int row0 = (warp & 3) * 16 + (lane >> 2), quad = lane & 3;
  const uint32_t stage = smem + (C == 1 ? kQ : kK) + warp * 2304;
  if constexpr (C == 1) {
    if (group == 0 && quad == 0) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        st_shared_b32(smem + kNotes + (row0 + 8 * h) * 8, __float_as_uint(m[h]));
        st_shared_b32(smem + kNotes + (row0 + 8 * h) * 8 + 4, __float_as_uint(l[h]));
      }
    }
    named_barrier(1, 256);
    float f[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = row0 + 8 * h, head = head0 + row;
      const float top = ld_f1(smem + kNotes + row * 8), shift = top == -INFINITY ? 0.0f : top;
      float sum = ld_f1(smem + kNotes + row * 8 + 4);
      if (p.lse && first_quarter == 0 && quad == 0 && head < p.heads) p.lse[(int64_t)token * p.heads + head] = (top + __log2f(sum)) * kLn2;
      sum += exp2_fast(ld_f1(smem + kSink + row * 4) * kLog2e - shift);
      f[h] = top == -INFINITY && sum == sum ? 0.0f : kUnscale / sum;
    }
#pragma unroll
    for (int half = 0; half < N / 64; ++half) {
      if (half + 1 < N / 64)
        wgmma_wait<1>();  // what lies in the first half is written while the second is multiplied
      else
        wgmma_wait<0>();
      if (half == 0)
        settled(half_of<0>(o));
      else
        settled(half_of<N / 64 - 1>(o));
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float v[32];
#pragma unroll
        for (int k = 0; k < 16; ++k) {
          v[2 * k] = o[64 * half + 4 * k + 2 * h] * f[h];
          v[2 * k + 1] = o[64 * half + 4 * k + 2 * h + 1] * f[h];
        }
        const int first = head0 + (warp & 3) * 16 + 8 * h;
        emit(p, smem, stage, v, token, first, p.heads - first, first_quarter + half, lane);
      }
    }
  } else {
    constexpr int kHeads = (64 + C - 1) / C;
    static_assert(C * kHeads * 1024 <= kK - kQ && C * kHeads * 16 <= kSink - kNotes, "no room for what the blocks send");
    auto region = [&](int from) { return smem + kQ + from * kHeads * 1024; };  // [16 of 32 channels][kHeads][4 lanes] of 16 bytes
    wgmma_wait<0>();
    settled(o);
    cluster_wait();  // q and the ring of every block are used up
    HR_MARK(58);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = row0 + 8 * h, owner = row / kHeads, own = row - owner * kHeads;
      float some[4] = {};
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        some[2 * (i & 1)] += fabsf(o[4 * i + 2 * h]);
        some[2 * (i & 1) + 1] += fabsf(o[4 * i + 2 * h + 1]);
      }
      float top = (some[0] + some[1]) + (some[2] + some[3]);
      top += __shfl_xor_sync(~0u, top, 1);
      top += __shfl_xor_sync(~0u, top, 2);
      const uint32_t e = min(max(__float_as_uint(top) >> 23, 20u), 240u);  // top < 2^(e - 126)
      const float f = __uint_as_float((253u - e) << 23);                   // 2^(126 - e)
      if (quad == 0) {
        const uint32_t at = map_rank(smem + kNotes + (rank * kHeads + own) * 16, owner);
        asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(at + 8 + group * 4), "f"(__uint_as_float((e + 1u) << 23)) : "memory");
        if (group == 0) asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(at), "f"(m[h]), "f"(l[h]) : "memory");
      }
      const uint32_t to = map_rank(region(rank) + group * 8 * kHeads * 64 + own * 64 + quad * 16, owner);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        uint32_t w[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int at = 16 * j + 4 * i + 2 * h;
          asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(w[i]) : "f"(o[at + 1] * f), "f"(o[at] * f));
        }
        asm volatile("st.shared::cluster.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to + j * kHeads * 64), "r"(w[0]), "r"(w[1]),
                     "r"(w[2]), "r"(w[3])
                     : "memory");
      }
    }
    cluster_sync();
    HR_MARK(59);
    // 8 heads x 128 channels at a time; blocks are added in the order of their runs.
    for (int unit = warp; unit < (kHeads + 7) / 8 * 4; unit += 8) {
      const int octet = unit >> 2, quarter = unit & 3, first = rank * kHeads + octet * 8;  // of the 64 heads
      const int rows = min(min(kHeads - octet * 8, 64 - first), p.heads - head0 - first);
      const int own = min(octet * 8 + (lane >> 2), kHeads - 1);
      float weight[C], top = -INFINITY, sum = 0;
#pragma unroll
      for (int r = 0; r < C; ++r) top = fmaxf(top, ld_f1(smem + kNotes + (r * kHeads + own) * 16));
      const float shift = top == -INFINITY ? 0.0f : top;
#pragma unroll
      for (int r = 0; r < C; ++r) {
        const float4 x = ld_f4(smem + kNotes + (r * kHeads + own) * 16);
        weight[r] = exp2_fast(x.x - shift);
        sum += weight[r] * x.y;
        weight[r] *= quarter < 2 ? x.z : x.w;
      }
      if (p.lse && quarter == 0 && quad == 0 && (lane >> 2) < rows)
        p.lse[(int64_t)token * p.heads + head0 + rank * kHeads + own] = (top + __log2f(sum)) * kLn2;
      sum += exp2_fast(ld_f1(smem + kSink + min(rank * kHeads + own, 63) * 4) * kLog2e - shift);
      const float f = top == -INFINITY && sum == sum ? 0.0f : kUnscale / sum;
#pragma unroll
      for (int r = 0; r < C; ++r) weight[r] *= f;
      float v[32] = {};
#pragma unroll
      for (int r = 0; r < C; ++r) {
        const uint32_t from = region(r) + quarter * 4 * kHeads * 64 + own * 64 + quad * 16;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const uint4 d = ld_u4(from + j * kHeads * 64);
          const uint32_t w[4] = {d.x, d.y, d.z, d.w};
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float2 x = __half22float2(*(const __half2*)&w[i]);
            v[8 * j + 2 * i] = fmaf(weight[r], x.x, v[8 * j + 2 * i]);
            v[8 * j + 2 * i + 1] = fmaf(weight[r], x.y, v[8 * j + 2 * i + 1]);
          }
        }
      }
      HR_MARK(54);
      emit(p, smem, stage, v, token, head0 + first, rows, quarter, lane);
    }
  }
}

}  // namespace

template <int C, int S>
__global__ void __launch_bounds__(512, 1) decode_attention(const __grid_constant__ CUtensorMap q_map,
                                                            const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  const uint32_t smem = smem_u32(shared_bytes);
  const int rank = C == 1 ? 0 : blockIdx.x, side = S == 1 ? 0 : blockIdx.x, head0 = blockIdx.y * 64, token = blockIdx.z;
  const int group = threadIdx.x >> 7, lane = threadIdx.x & 31;
  const int warp = threadIdx.x >> 5;
  const uint32_t bars = smem + kBars;
  // full[2], empty[2] of the tiles; written, read of the probabilities; q is here. A warp arrives as one. The numbered barrier 1 joins
  // the product groups.
  const uint32_t full = bars, empty = bars + 16, p_full = bars + 32, p_empty = bars + 40, q_full = bars + 48;
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; ++i) {
      mbar_init(full + 8 * i, 8);
      mbar_init(empty + 8 * i, 8);
    }
    mbar_init(p_full, 4);
    mbar_init(p_empty, 4);
    mbar_init(q_full, 1);
    st_shared_b32(smem + kLost, 0);
    fence_barrier_init();
  }
  // Whatever does not need the lengths is under way before they are here: slots as if both lists were full.
  const Cut guess = cut_of(p, p.list[0].width, p.list[1].width, rank, C);
  const int entry_row = (warp & 7) * 8 + (lane & 7), quarter = lane >> 3;
  const int32_t *at_slots = slot_place(p, guess, token, quarter, entry_row),
                *at_later = slot_place(p, guess, token, quarter + 4, entry_row);
  const int32_t *at_n0 = p.list[0].lengths ? p.list[0].lengths + token : nullptr,
                *at_n1 = p.list[1].lengths ? p.list[1].lengths + token : nullptr;
  // Computed before the wait, so that it hides the parameters' way from memory.
  asm volatile("" ::"l"(at_slots), "l"(at_later), "l"(at_n0), "l"(at_n1) : "memory");
  if constexpr (S == 1)
    __syncthreads();
  else
    cluster_sync();  // either block writes q into the other
  after_previous_kernel();
  HR_MARK(0);
  int32_t slots = -1, later = -1;
  if (group >= 2) {
    if (at_slots) slots = ld_int(at_slots);
    if (at_later) later = ld_int(at_later);
  }
  int n0 = at_n0 ? ld_int(at_n0) : 0, n1 = at_n1 ? ld_int(at_n1) : 0;
  const bool broken = n0 < 0 || n1 < 0 || n0 > p.list[0].width || n1 > p.list[1].width;
  n0 = min(max(n0, 0), p.list[0].width);
  n1 = min(max(n1, 0), p.list[1].width);
  const Cut c = cut_of(p, n0, n1, rank, C);
  // A block that has its token to itself ends it as in a launch of one block a token: the same bits, and nobody waits.
  const bool together = C > 1 && c.parts > 1;
  if (C > 1 && !together && rank > 0) return;
  // Not before the slots have been asked for, which have the longer way to go.
  if (threadIdx.x == 0) ask_q<S>(&q_map, smem, token, head0, side, q_full);

  const int row0 = (warp & 3) * 16 + (lane >> 2), quad = lane & 3;
  if (group == 1) {
    const int i = threadIdx.x & 63;
    if (threadIdx.x < 192) {
      ((float*)(shared_bytes + kSink))[i] = p.sink && head0 + i < p.heads ? p.sink[head0 + i] : -INFINITY;
    } else if (p.raw_q || p.out8 || p.turn_out) {
      ((float*)(shared_bytes + kTurn))[i] = p.cos_sin[p.positions[token] * 64 + i];
    }
  }
  if (p.raw_q && group < 2) {
    named_barrier(1, 256);  // cosines and sines
    mbar_wait(q_full, 0);
    HR_MARK(1);
    norm_rope_q(p, smem, warp, lane);
    fence_async();
    named_barrier(1, 256);
    HR_MARK(2);
  }
  if (group >= 2) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 64;");
    // The run may be longer than was guessed: fewer blocks share a short list.
    if (guess.tiles0 == c.tiles0 && guess.first == c.first && guess.count >= min(c.count, 8)) {
      slots = cropped(c, quarter, entry_row, slots);
      later = cropped(c, quarter + 4, entry_row, later);
    } else {
      slots = slot_of(p, c, token, quarter, entry_row);
      later = slot_of(p, c, token, quarter + 4, entry_row);
    }
    produce(p, c, smem, token, threadIdx.x - 256, slots, later, full, empty);
    if (together) {
      asm volatile("cp.async.wait_all;" ::: "memory");
      cluster_arrive();
      cluster_wait();
      cluster_sync();
    }
  } else if (group == 0) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
    if (broken) st_shared_b32(smem + kLost, 1);
    const int first_quarter = S == 1 ? 0 : side * 2;
    float o[128 / S];
#pragma unroll
    for (int i = 0; i < 128 / S; ++i) o[i] = 0;
    float m[2] = {-INFINITY, -INFINITY}, l[2] = {0, 0};
    uint32_t pr[4][4] = {};
    bool held = false;  // the previous tile's memory
    const float to_log2 = p.scale * kLog2e * kUnscale;
    const uint64_t q_desc = operand(smem + kQ, 16, 1024);
    // Of the 32 steps along q's channels these read it from shared memory, the others from registers, as many as there is room for.
    constexpr int kShared = S == 1 ? 4 * kQBlocks : 12;
    uint32_t qr[32 - kShared][4];
    mbar_wait(q_full, 0);
#pragma unroll
    for (int kk = kShared; kk < 32; ++kk) {
      const int row = (warp & 3) * 16 + (lane & 15), chunk = (kk & 3) * 2 + (lane >> 4);
      load_matrices(qr[kk - kShared], q_block(smem, kk >> 2) + row * 128 + ((chunk ^ (row & 7)) << 4));
    }
    for (int it = 0; it < c.count; ++it) {
      const int buf = it & 1;
      const uint64_t k_desc = operand(smem + kK + buf * kKBytes, 16, 1024);
      const uint64_t v_desc = operand(smem + kK + buf * kKBytes + first_quarter * 16384, 8192, 1024);
      float s[32];
      mbar_wait(full + 8 * buf, (it >> 1) & 1);
      HR_MARK(4 + 4 * it);
      wgmma_fence();
#pragma unroll
      for (int kk = 0; kk < 32; ++kk) {
        uint64_t step = (kk >> 2) * 512 + (kk & 3) * 2;
        if (kk < kShared)
          wgmma_qk(s, q_desc + step, k_desc + step, kk != 0);
        else
          wgmma_qk_rs(s, qr[kk - kShared], k_desc + step, 1);
        if (kk == 7) {  // a quarter is on its way; all of it would hold the warp until most is done, and with it the tile before
          wgmma_commit();
          if (held) {  // the product with the previous tile is older, hence done
            wgmma_wait<1>();
#pragma unroll
            for (int i = 0; i < 4; ++i)  // the tensor cores read these registers until here: keep the compiler off them
              asm volatile("" ::"r"(pr[i][0]), "r"(pr[i][1]), "r"(pr[i][2]), "r"(pr[i][3]));
            if (lane == 0) mbar_arrive(empty + 8 * (buf ^ 1));
          }
          wgmma_fence();
        }
      }
      wgmma_commit();
      uint2 rows;  // bits: there is an entry
      asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(rows.x), "=r"(rows.y) : "r"(smem + kHeld + buf * 8));
      wgmma_wait<0>();
      settled(s);
      settled(o);  // of the product with the tile before, which is older
      HR_MARK(5 + 4 * it);
      if (together && it + 1 == c.count) cluster_arrive();

      if ((rows.x & rows.y) != ~0u) {
#pragma unroll
        for (int i = 0; i < 32; ++i)
          if (!((i < 16 ? rows.x : rows.y) >> ((i >> 2 & 3) * 8 + 2 * quad + (i & 1)) & 1)) s[i] = -INFINITY;
      }
      float top[2] = {-INFINITY, -INFINITY}, alpha[2], shift[2];
#pragma unroll
      for (int i = 0; i < 32; i += 2) top[i >> 1 & 1] = fmaxf(top[i >> 1 & 1], fmaxf(s[i], s[i + 1]));
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        top[h] = fmaxf(top[h], __shfl_xor_sync(~0u, top[h], 1));
        top[h] = fmaxf(top[h], __shfl_xor_sync(~0u, top[h], 2)) * to_log2;
        const float now = fmaxf(m[h], top[h]);
        shift[h] = now == -INFINITY ? 0.0f : now;  // no entry yet: every exponential below is exp2(-inf)
        alpha[h] = exp2_fast(m[h] - shift[h]);
        m[h] = now;
        l[h] *= alpha[h];
      }
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        const int h = i >> 1 & 1;
        // Rounded before the subtraction, as the maximum was: the largest is exactly one, however large the logits are.
        s[i] = exp2_fast(__fmul_rn(s[i], to_log2) - shift[h]);
        l[h] += s[i];
      }
#pragma unroll
      for (int kk = 0; kk < 4; ++kk)
#pragma unroll
        for (int j = 0; j < 4; ++j) pr[kk][j] = pack_bf16(s[8 * kk + 2 * j], s[8 * kk + 2 * j + 1]);

      mbar_wait(p_empty, (it & 1) ^ 1);
      const uint32_t line = smem + kP + row0 * 128 + quad * 4;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        uint32_t chunk = (i ^ (row0 & 7)) << 4;
        st_shared_b32(line + chunk, pr[i >> 1][(i & 1) * 2]);
        st_shared_b32(line + 1024 + chunk, pr[i >> 1][(i & 1) * 2 + 1]);
      }
      if (quad == 0) {
        float* al = (float*)(shared_bytes + kAlpha + buf * 256);
        al[row0] = alpha[0];
        al[row0 + 8] = alpha[1];
      }
      fence_async();
      __syncwarp();
      if (lane == 0) mbar_arrive(p_full);
      HR_MARK(6 + 4 * it);
      if (__any_sync(~0u, alpha[0] != 1.0f || alpha[1] != 1.0f)) {
#pragma unroll
        for (int i = 0; i < 128 / S; ++i) o[i] *= alpha[(i >> 1) & 1];
      }
      wgmma_fence();
#pragma unroll
      for (int kk = 0; kk < 4; ++kk) wgmma_pv_rs(half_of<0>(o), pr[kk], v_desc + kk * 128, 1);
      wgmma_commit();
      if constexpr (S == 1) {
#pragma unroll
        for (int kk = 0; kk < 4; ++kk) wgmma_pv_rs(half_of<1>(o), pr[kk], v_desc + kk * 128 + 1024, 1);
        wgmma_commit();
      }
      held = it + 1 < c.count;
      // If the next tile is late, there is time to see this one through, so that its memory is free the sooner.
      if (held && !mbar_done(full + 8 * (buf ^ 1), ((it + 1) >> 1) & 1)) {
        wgmma_wait<0>();
        settled(o);
        if (lane == 0) mbar_arrive(empty + 8 * buf);
        held = false;
      }
    }
    HR_MARK(60);
    if (together && c.count == 0) cluster_arrive();
    if (ld_u1(smem + kLost)) l[0] = l[1] = __int_as_float(0x7fffffff);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      l[h] += __shfl_xor_sync(~0u, l[h], 1);
      l[h] += __shfl_xor_sync(~0u, l[h], 2);
    }
    if (together)
      finish<C>(p, smem, o, m, l, token, head0, rank, group, first_quarter, warp, lane);
    else
      finish<1>(p, smem, o, m, l, token, head0, rank, group, first_quarter, warp, lane);
    HR_MARK(62);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 160;");
    const int first_quarter = S == 1 ? 2 : side * 2 + 1;
    float o[128 / S];
#pragma unroll
    for (int i = 0; i < 128 / S; ++i) o[i] = 0;
    for (int it = 0; it < c.count; ++it) {
      const int buf = it & 1;
      const uint64_t v_desc = operand(smem + kK + buf * kKBytes + first_quarter * 16384, 8192, 1024);
      const uint64_t p_desc = operand(smem + kP, 16, 1024);
      mbar_wait(full + 8 * buf, (it >> 1) & 1);
      mbar_wait(p_full, it & 1);
      HR_MARK(4 + 4 * it);
      const float* al = (const float*)(shared_bytes + kAlpha + buf * 256);
      float alpha[2] = {al[row0], al[row0 + 8]};
      if (__any_sync(~0u, alpha[0] != 1.0f || alpha[1] != 1.0f)) {
#pragma unroll
        for (int i = 0; i < 128 / S; ++i) o[i] *= alpha[(i >> 1) & 1];
      }
      wgmma_fence();
#pragma unroll
      for (int kk = 0; kk < 4; ++kk) wgmma_pv_ss(half_of<0>(o), p_desc + kk * 2, v_desc + kk * 128, 1);
      wgmma_commit();
      if constexpr (S == 1) {
#pragma unroll
        for (int kk = 0; kk < 4; ++kk) wgmma_pv_ss(half_of<1>(o), p_desc + kk * 2, v_desc + kk * 128 + 1024, 1);
        wgmma_commit();
      }
      if (it + 1 == c.count) break;
      wgmma_wait<0>();
      settled(o);
      HR_MARK(5 + 4 * it);
      if (lane == 0) {
        mbar_arrive(empty + 8 * buf);
        mbar_arrive(p_empty);
      }
    }
    if (together) cluster_arrive();
    float none[2] = {};
    if (together)
      finish<C>(p, smem, o, none, none, token, head0, rank, group, first_quarter, warp, lane);
    else
      finish<1>(p, smem, o, none, none, token, head0, rank, group, first_quarter, warp, lane);
    HR_MARK(62);
  }
}

template <int C, int S>
static cudaError_t launch(const Params& p, cudaStream_t stream) {
  CUtensorMap q_map;
  cudaError_t e = encode_heads(&q_map, p.q, p.heads, p.batch, p.q_stride_h, p.q_stride_t, 64, 1);
  if (e != cudaSuccess) return e;
  static bool ready[kMaxDevices];
  int device;
  e = this_device(&device);
  if (e != cudaSuccess) return e;
  if (!ready[device]) {
    e = cudaFuncSetAttribute(decode_attention<C, S>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmemBytes);
    if (e == cudaSuccess && C > 8) e = cudaFuncSetAttribute(decode_attention<C, S>, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    if (e != cudaSuccess) return e;
    ready[device] = true;
  }
  cudaLaunchConfig_t cfg = {};
  cfg.gridDim = dim3(C * S, (p.heads + 63) / 64, p.batch);
  cfg.blockDim = dim3(512);
  cfg.dynamicSmemBytes = kSmemBytes;
  cfg.stream = stream;
  cudaLaunchAttribute attr[2];
  attr[0].id = cudaLaunchAttributeClusterDimension;
  attr[0].val.clusterDim.x = C * S;
  attr[0].val.clusterDim.y = attr[0].val.clusterDim.z = 1;
  attr[1] = early_launch();
  cfg.attrs = attr;
  cfg.numAttrs = 2;
  return cudaLaunchKernelEx(&cfg, decode_attention<C, S>, q_map, p);
}

// Tokens that are not cut: two blocks for each where the card has room for them at once.
static cudaError_t launch_uncut(const Params& p, cudaStream_t stream) {
  int device = 0, processors = 0;
  cudaError_t e = cudaGetDevice(&device);
  if (e == cudaSuccess) e = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (e != cudaSuccess) return e;
  return 2 * p.batch * ((p.heads + 63) / 64) <= processors ? launch<1, 2>(p, stream) : launch<1, 1>(p, stream);
}

extern "C" int hr_decode_attention(const Params* p, int split, void* stream) {
  cudaStream_t s = (cudaStream_t)stream;
  switch (split) {
    case 1: return launch_uncut(*p, s);
    case 2: return launch<2, 1>(*p, s);
    case 4: return launch<4, 1>(*p, s);
    case 5: return launch<5, 1>(*p, s);
    case 10: return launch<10, 1>(*p, s);  // of c4a's ten tiles one each
    default: return (int)cudaErrorInvalidValue;
  }
}
extern "C" int hr_decode_attention_params_bytes() { return (int)sizeof(Params); }
