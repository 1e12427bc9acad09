// Decode attention over two lists of paged 584-byte fp8 entries, with a sink: one query token a row, K = V = the entry.
//
// One cluster of C blocks works on one token and 64 of its heads. The token's lists are cut into tiles of 64 entries (the
// first list is padded to whole tiles before the second begins), tiles into C runs of ceil(tiles / C), one run a block.
// C is a constant of the launch and the cut depends on the token's own lengths alone, never on the batch: so does the
// result (batch-invariant). The blocks exchange partial sums through distributed shared memory and add them in run order.
//
// A block is four warp-groups. Two produce: they gather entries, half into registers and half into a ring of shared memory,
// decode e4m3 to bf16 and write tiles into two shared buffers; a whole tile (36 KB) is always on its way, also while another
// is converted. Warp-group 0 multiplies q by the tile, does the softmax and the product with channels 0..255; warp-group 1 the
// product with channels 256..511, from the probabilities left in shared memory.
//
// Decoding e4m3 is integer work: sign, exponent and mantissa bits are moved into place as a bf16 of 2^-120 times the value
// (subnormals included), and one multiplication by 2^(120 + e - 32) brings in the scale of the group. Everything is
// kept 2^-32 too small, the rotary part likewise, so that the factor stays below bf16's largest exponent up to e = 39;
// the logits' scale and the last division undo it. All of this is exact. A scale byte of 0xFF (poison) becomes infinity.
//
// At its ends the kernel can take in raw q (norm without weight, rotary) and give out e4m3 (inverse rotary, one
// power-of-two scale per 128 channels; or bf16, rotated back), so that neither q nor the output makes a second trip through memory.
#include "hopper.cuh"

using namespace hr;

struct List {
  const uint8_t* pages;    // base of page 0
  int64_t page_stride;     // bytes
  int64_t num_slots;       // slots outside [0, num_slots) are skipped
  const int32_t* slots;    // [B, width]
  int64_t slots_stride;    // elements
  const int32_t* lengths;  // [B], entries of the row in use; null: no such list
  int32_t width;
  int32_t log2_entries;  // entries a page
};

struct Params {
  const __nv_bfloat16* q;  // [B, H, 512]
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
#ifdef HR_TRACE
  void* trace;
#endif
};

namespace {

constexpr int kTile = 64, kRowBytes = 576;
constexpr uint32_t kQ = 0, kK = 65536, kKBytes = 65536, kP = 196608;
constexpr uint32_t kRaw = 204800;             // [5][256 threads] of 16 bytes: what of the next tile does not wait in registers
constexpr int kInRegisters = 4, kChunks = 9;  // pieces of 16 bytes that a thread has of an entry
constexpr uint32_t kAlpha = kRaw + (kChunks - kInRegisters) * 4096;  // [2][64] fp32
constexpr uint32_t kBias = kAlpha + 512;      // [2][64] fp32: 0, or -inf where a row of the tile holds no entry
constexpr uint32_t kMax = kBias + 512;        // [4][64] fp32, log2 units: of each block of the cluster
constexpr uint32_t kSum = kMax + 1024;        // [4][64] fp32
constexpr uint32_t kSink = kSum + 1024;       // [64] fp32
constexpr uint32_t kTurn = kSink + 256;       // [64] fp32: cosines and sines of the token's position
constexpr uint32_t kScales = kTurn + 256;     // [2][64] of 8 bytes: of the rows of a tile, before they are converted
constexpr uint32_t kSlots = kScales + 1024;   // [2][256 threads]: slots of four tiles, and of the next four
constexpr uint32_t kBars = kSlots + 2048;     // 8 mbarriers
constexpr uint32_t kSmemBytes = kBars + 64;
constexpr float kUnscale = 4294967296.0f;     // 2^32

#ifdef HR_TRACE  // a build for looking at one launch: clock readings, [block][warp-group][event]
#define HR_MARK(n)                                                                                        \
  if ((threadIdx.x & 127) == 0)                                                                           \
  ((int64_t*)p.trace)[((blockIdx.z * gridDim.x + blockIdx.x) * 4 + (threadIdx.x >> 7)) * 64 + ((n) & 63)] = clock64()
#else
#define HR_MARK(n)
#endif

struct Cut {
  int n0, n1, tiles0, tiles, first, count;
};

// The run of tiles that block `rank` of `size` takes.
__device__ __forceinline__ Cut cut_of(int n0, int n1, int rank, int size) {
  Cut c;
  c.n0 = n0;
  c.n1 = n1;
  c.tiles0 = (c.n0 + kTile - 1) / kTile;
  c.tiles = c.tiles0 + (c.n1 + kTile - 1) / kTile;
  int per = (c.tiles + size - 1) / size;
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
  return at ? __ldg(at) : -1;
}
// The same slot, read before the lengths were known, as if both lists were full: -1 if it lies past the end.
__device__ __forceinline__ int32_t cropped(const Cut& c, int tile, int row, int32_t slot) {
  if (tile >= c.count) return -1;
  tile += c.first;
  const int e = (tile < c.tiles0 ? tile : tile - c.tiles0) * kTile + row;
  return e < (tile < c.tiles0 ? c.n0 : c.n1) ? slot : -1;
}

// A slot outside the pool is none.
__device__ __forceinline__ int32_t checked(const Params& p, const Cut& c, int tile, int32_t slot) {
  return slot < p.list[c.first + tile >= c.tiles0].num_slots ? slot : -1;
}

__device__ __forceinline__ uint4 load_or_zero(const uint8_t* at, int ok) {
  uint4 v;
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n"
      "mov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\nmov.b32 %3, 0;\n"
      "@p ld.global.nc.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];\n}\n"
      : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
      : "l"(at), "r"(ok));
  return v;
}

__device__ __forceinline__ uint32_t mul_bf16x2(uint32_t a, uint32_t b) {
  uint32_t r;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
// Four e4m3 to bf16 of 2^-120 times the value, in order.
__device__ __forceinline__ void decode4(uint32_t codes, uint32_t& a, uint32_t& b) {
  const uint32_t low = codes * 16 & 0xf0f0f0f0u, high = (codes & 0x80808080u) | (codes >> 4 & 0x07070707u);
  a = __byte_perm(low, high, 0x5140);
  b = __byte_perm(low, high, 0x7362);
}

__device__ __forceinline__ uint4 ld_u4(uint32_t addr) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(addr));
  return v;
}

__device__ __forceinline__ uint32_t ld_u1(uint32_t addr) {
  uint32_t v;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v) : "r"(addr) : "memory");
  return v;
}

// Fills the tiles. A warp has 8 rows of every tile. Each of its loads takes 256 bytes of two rows (so few pages, few lines),
// the last one the ends of all eight: a thread has 16 bytes of a scale group, of the rows of one parity. Its own row, lane % 8, is
// the one whose slot and place it knows; thread 8 * t + r of a warp reads the slots of row r in tiles t of four (slots, later).
// They wait in shared memory: a register would be waited for by way of a scoreboard that the entries' loads use too.
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
  uint4 raw[kInRegisters];  // rows 2 * i + parity: both halves of i = 0, then of i = 1; the ring has i = 2, 3 and the ends
  uint32_t places[3];       // of what is to be asked into the ring, in units of 16 bytes; kNone: zeros
  const uint8_t* base;
  constexpr uint32_t kNone = ~0u;
  auto load = [&](uint32_t place, int bytes) {
    return load_or_zero(base + ((uint64_t)place << 4) + bytes + quarter * 64 + part * 16, place != kNone);
  };
  // Only the thread itself reads what it asks for here, so there is no barrier: it waits for its own copies.
  auto load_ring = [&](uint32_t place, int bytes, int piece) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(ring + piece * 4096),
                 "l"(base + ((uint64_t)place << 4) + bytes + part * 16), "r"(place != kNone ? 16 : 0)
                 : "memory");
  };
  auto fetch = [&](int tile, int32_t slot) {
    const List& l = p.list[c.first + tile >= c.tiles0];
    const int entries = 1 << l.log2_entries, at = slot & (entries - 1);
    const uint32_t page = (uint32_t)(slot >> l.log2_entries) * (uint32_t)(l.page_stride >> 4);
    const uint32_t place = slot < 0 ? kNone : page + at * (kRowBytes / 16);
    base = l.pages;
    if (quarter == 0)
      asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(scales + (tile & 1) * 512 + own * 8),
                   "l"(base + ((uint64_t)page << 4) + entries * kRowBytes + at * 8), "r"(slot < 0 ? 0 : 8)
                   : "memory");
    const uint32_t i0 = __shfl_sync(~0u, place, parity), i1 = __shfl_sync(~0u, place, 2 + parity);
    places[0] = __shfl_sync(~0u, place, 4 + parity);
    places[1] = __shfl_sync(~0u, place, 6 + parity);
    places[2] = __shfl_sync(~0u, place, lane >> 2);
    raw[0] = load(i0, 0);
    raw[1] = load(i0, 256);
    raw[2] = load(i1, 0);
    raw[3] = load(i1, 256);
  };
  const uint32_t slot_ring = smem + kSlots + (tid & ~31) * 4;
  auto slot_at = [&](int tile) {
    return checked(p, c, tile, (int32_t)ld_u1(slot_ring + (tile & 4) * 256 + ((tile & 3) * 8 + own) * 4));
  };
  st_shared_b32(slot_ring + lane * 4, slots);
  st_shared_b32(slot_ring + 1024 + lane * 4, later);
  __syncwarp();
  HR_MARK(50);
  int32_t slot = slot_at(0), next_slot = slot_at(1);
  HR_MARK(51);
  fetch(0, slot);
#pragma unroll
  for (int k = 0; k < 4; ++k) load_ring(places[k >> 1], 256 * (k & 1) + quarter * 64, k);
  load_ring(places[2], 512, 4);
  HR_MARK(1);
#pragma unroll 1
  for (int it = 0; it < c.count; ++it) {
    const int buf = it & 1;
    HR_MARK(4 + 4 * it);
    asm volatile("cp.async.wait_all;" ::: "memory");
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
    uint32_t factor[4];
    auto read_factors = [&](int half) {
#pragma unroll
      for (int k = 0; k < 4; ++k)
        asm volatile("ld.shared.u8 %0, [%1];"
                     : "=r"(factor[k])
                     : "r"(scales + buf * 512 + parity * 8 + quarter + half * 32 + (k >> 1) * 16 + (k & 1) * 4));
#pragma unroll
      for (int k = 0; k < 4; ++k)  // rotary: 2^-32, twice
        factor[k] = (k & 1) && rotary ? 0x2f802f80u : min(factor[k] + 88u, 255u) * 0x00800080u;
    };
    read_factors(0);
    mbar_wait(empty + 8 * buf, ((it >> 1) & 1) ^ 1);
    HR_MARK(5 + 4 * it);
    if (quarter == 0) st_shared_b32(smem + kBias + buf * 256 + (row0 + own) * 4, slot >= 0 ? 0u : 0xff800000u);
    auto convert = [&](int k, const uint4& d) {
      const uint32_t i = k >> 1, f = factor[k & 3], line = (((k & 1) ? second : first) ^ (i << 5)) + i * 256 + buf * kKBytes;
      uint32_t w[8];
      decode4(d.x, w[0], w[1]);
      decode4(d.y, w[2], w[3]);
      decode4(d.z, w[4], w[5]);
      decode4(d.w, w[6], w[7]);
      const bool plain = (k & 1) && rotary;
      st_shared_v4(line, make_uint4(mul_bf16x2(plain ? d.x : w[0], f), mul_bf16x2(plain ? d.y : w[1], f),
                                    mul_bf16x2(plain ? d.z : w[2], f), mul_bf16x2(plain ? d.w : w[3], f)));
      if (!plain)
        st_shared_v4(line ^ 16, make_uint4(mul_bf16x2(w[4], f), mul_bf16x2(w[5], f), mul_bf16x2(w[6], f), mul_bf16x2(w[7], f)));
    };
    // As each piece is converted, the same piece of the next tile is asked for: a whole tile is always on its way. Loads that
    // wait in registers go together, since those that trickle in would share scoreboards with the ones waited for.
    slot = next_slot;
    next_slot = after_slot;
#pragma unroll
    for (int k = 0; k < 4; ++k) convert(k, raw[k]);
    fetch(it + 1, slot);
    read_factors(1);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      convert(4 + k, ld_u4(ring + k * 4096));
      load_ring(places[k >> 1], 256 * (k & 1) + quarter * 64, k);
    }
    constexpr uint32_t f = 0x2f802f80u;
    const uint4 d = ld_u4(ring + 4 * 4096);
    st_shared_v4(end + buf * kKBytes, make_uint4(mul_bf16x2(d.x, f), mul_bf16x2(d.y, f), mul_bf16x2(d.z, f), mul_bf16x2(d.w, f)));
    load_ring(places[2], 512, 4);
    HR_MARK(6 + 4 * it);
    fence_async();
    __syncwarp();
    if (lane == 0) mbar_arrive(full + 8 * buf);
    HR_MARK(3 + 4 * it);
  }
}

// Asks for q of 64 heads, straight into its place in shared memory; a warp has 8 of them. Missing heads become zeros.
__device__ __forceinline__ void ask_q(const Params& p, uint32_t smem, int token, int head0, int warp, int lane) {
  const int rows = p.heads - head0;
#pragma unroll 4
  for (int i = 0; i < 8; ++i) {
    const int row = warp * 8 + i;
    const __nv_bfloat16* src = p.q + token * p.q_stride_t + (head0 + (row < rows ? row : 0)) * p.q_stride_h + lane * 8;
    const uint32_t line = smem + kQ + row * 128 + (((lane & 7) ^ i) << 4) + (lane >> 3) * 8192, bytes = row < rows ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(line), "l"(src), "r"(bytes) : "memory");
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(line + 4 * 8192), "l"(src + 256), "r"(bytes) : "memory");
  }
}

// Norms (without weight) and rotates a warp's 8 heads of q in place.
__device__ __forceinline__ void norm_rope_q(const Params& p, uint32_t smem, int token, int warp, int lane) {
  float4 cs = {}, sn = {};
  if (lane >= 24) {
    const float* t = p.cos_sin + p.positions[token] * 64 + (lane - 24) * 4;
    cs = *(const float4*)t;
    sn = *(const float4*)(t + 32);
  }
#pragma unroll 2
  for (int i = 0; i < 8; ++i) {
    const uint32_t line = smem + kQ + (warp * 8 + i) * 128 + (((lane & 7) ^ i) << 4) + (lane >> 3) * 8192;
    uint4 a = ld_u4(line), b = ld_u4(line + 4 * 8192);
    uint32_t* w[2] = {(uint32_t*)&a, (uint32_t*)&b};
    float sum = 0;
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float x = bf16_lo(w[h][j]), y = bf16_hi(w[h][j]);
        sum += x * x + y * y;
      }
#pragma unroll
    for (int m = 16; m; m >>= 1) sum += __shfl_xor_sync(~0u, sum, m);
    const float r = rsqrtf(sum * (1.0f / 512) + p.eps);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      w[0][j] = pack_bf16(bf16_lo(w[0][j]) * r, bf16_hi(w[0][j]) * r);
      float x = bf16_lo(w[1][j]) * r, y = bf16_hi(w[1][j]) * r;
      if (lane >= 24) {
        float c = ((float*)&cs)[j], s = ((float*)&sn)[j], t = x;
        x = t * c - y * s;
        y = y * c + t * s;
      }
      w[1][j] = pack_bf16(x, y);
    }
    st_shared_v4(line, a);
    st_shared_v4(line + 4 * 8192, b);
  }
}

__device__ __forceinline__ float ld_f1(uint32_t addr) {
  float v;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(addr));
  return v;
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

__device__ __forceinline__ float4 ld_f4(uint32_t addr) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(addr));
  return v;
}

// A product instruction takes 128 channels: one of 256 needs more registers than a thread has before the groups trade theirs.
__device__ __forceinline__ float (&low_half(float (&o)[128]))[64] { return *(float(*)[64])(o); }
__device__ __forceinline__ float (&high_half(float (&o)[128]))[64] { return *(float(*)[64])(o + 64); }

// The end of a product warp: 16 heads, 256 channels. With C blocks a token, the block of rank r ends 64 / C of the heads: the
// warps of the other heads hand their sums over, register by register, into the tiles' memory of the block that ends them.
template <int C>
__device__ __forceinline__ void finish(const Params& p, uint32_t smem, float (&o)[128], int token, int head0, int rank, int group,
                                       int warp, int lane) {
  const int w4 = warp & 3, row0 = w4 * 16 + (lane >> 2), quad = lane & 3;
  const int owner = w4 / (4 / C);
  auto region = [&](int from) {  // of 16 KiB, in the owner's memory, for what rank `from` hands to this warp's counterpart
    return smem + kK + (((from < owner ? from : from - 1) * (4 / C) + w4 % (4 / C)) * 2 + group) * 16384;
  };
  if constexpr (C > 1) {
    cluster_sync();  // the products of all are done, hence their tiles free; the row sums are written
    HR_MARK(58);
    if (owner != rank) {
      const uint32_t to = map_rank(region(rank), owner) + lane * 16;
#pragma unroll
      for (int i = 0; i < 32; ++i)
        asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to + i * 512), "f"(o[4 * i]), "f"(o[4 * i + 1]),
                     "f"(o[4 * i + 2]), "f"(o[4 * i + 3])
                     : "memory");
      if (group == 0 && lane < 16) {
        const uint32_t at = smem + kMax + rank * 256 + (w4 * 16 + lane) * 4, there = map_rank(at, owner);
        asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(there), "f"(ld_f1(at)) : "memory");
        asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(there + (kSum - kMax)), "f"(ld_f1(at + (kSum - kMax))) : "memory");
      }
    }
    cluster_sync();
    HR_MARK(59);
    if (owner != rank) return;
  } else {
    named_barrier(1, 256);
  }
  HR_MARK(52);
  float weight[C][2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = row0 + 8 * h, head = head0 + row;
    float top = -INFINITY, sum = 0;
#pragma unroll
    for (int r = 0; r < C; ++r) top = fmaxf(top, ld_f1(smem + kMax + r * 256 + row * 4));
    const float shift = top == -INFINITY ? 0.0f : top;
#pragma unroll
    for (int r = 0; r < C; ++r) {
      weight[r][h] = exp2_fast(ld_f1(smem + kMax + r * 256 + row * 4) - shift);
      sum += weight[r][h] * ld_f1(smem + kSum + r * 256 + row * 4);
    }
    if (p.lse && group == 0 && quad == 0 && head < p.heads) p.lse[(int64_t)token * p.heads + head] = (top + __log2f(sum)) * kLn2;
    if (p.sink) sum += exp2_fast(ld_f1(smem + kSink + row * 4) * kLog2e - shift);
    const float f = top == -INFINITY ? 0.0f : kUnscale / sum;
#pragma unroll
    for (int r = 0; r < C; ++r) weight[r][h] *= f;
  }
  HR_MARK(53);
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    float a[4] = {0, 0, 0, 0};
#pragma unroll
    for (int r = 0; r < C; ++r) {
      float4 v = make_float4(o[4 * i], o[4 * i + 1], o[4 * i + 2], o[4 * i + 3]);
      if (C > 1 && r != rank) v = ld_f4(region(r) + i * 512 + lane * 16);
      a[0] += weight[r][0] * v.x;
      a[1] += weight[r][0] * v.y;
      a[2] += weight[r][1] * v.z;
      a[3] += weight[r][1] * v.w;
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) o[4 * i + k] = a[k];
  }
  HR_MARK(54);
  // Out by way of shared memory, so that stores are whole lines; a warp stages its own rows.
  const uint32_t stage = smem + kK + (C == 4 ? 98304 + group * 8448 : C == 2 ? 65536 + (group * 2 + (w4 & 1)) * 8448 : warp * 8448);
  const int rows = min(16, p.heads - head0 - w4 * 16);
  // The rotary channels of the output, rounded first, as if they had been stored before they are rotated back.
  auto turn_rotary = [&]() {
#pragma unroll
    for (int i = 24; i < 32; ++i) {
      const uint32_t at = smem + kTurn + (4 * (i - 24) + quad) * 4;
      const float c = ld_f1(at), s = ld_f1(at + 128);
      turn_back(o[4 * i], o[4 * i + 1], c, s);
      turn_back(o[4 * i + 2], o[4 * i + 3], c, s);
    }
  };
  if (p.out8 == nullptr) {
    if (p.turn_out && group == 1) {
#pragma unroll
      for (int i = 96; i < 128; i += 2) round_bf16(o[i], o[i + 1]);
      turn_rotary();
    }
    // Rows of 528 bytes: eight of them lie in different banks, and each is whole for the copy engine.
    const uint32_t at = stage + ((lane & 7) + (lane & 8)) * 528 + (lane >> 4) * 16;
#pragma unroll
    for (int i = 0; i < 32; i += 2)
      asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at + i * 16),
                   "r"(pack_bf16(o[4 * i], o[4 * i + 1])), "r"(pack_bf16(o[4 * i + 2], o[4 * i + 3])),
                   "r"(pack_bf16(o[4 * i + 4], o[4 * i + 5])), "r"(pack_bf16(o[4 * i + 6], o[4 * i + 7]))
                   : "memory");
    HR_MARK(55);
    fence_async();
    __syncwarp();
    HR_MARK(56);
    if (lane < rows) {
      const __nv_bfloat16* dst = p.out + token * p.out_stride_t + (head0 + w4 * 16 + lane) * p.out_stride_h + group * 256;
      asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 512;" ::"l"(dst), "r"(stage + lane * 528) : "memory");
      HR_MARK(57);
      asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group.read 0;" ::: "memory");
    }
    return;
  }
  // Rounded to bf16 first, so that the fused form gives the bytes of the stand-alone one.
#pragma unroll
  for (int i = 0; i < 128; i += 2) round_bf16(o[i], o[i + 1]);
  if (group == 1) turn_rotary();
  float top[2][2] = {};
#pragma unroll
  for (int i = 0; i < 128; ++i) top[i >> 6][(i >> 1) & 1] = fmaxf(top[i >> 6][(i >> 1) & 1], fabsf(o[i]));
#pragma unroll
  for (int g = 0; g < 2; ++g)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float a = top[g][h];
      a = fmaxf(a, __shfl_xor_sync(~0u, a, 1));
      a = fmaxf(a, __shfl_xor_sync(~0u, a, 2));
      const int e = scale_exponent(fmaxf(a, 1e-10f)), head = head0 + row0 + 8 * h;
      top[g][h] = pow2(-e);
      if (quad == 0 && head < p.heads)
        p.out8_scale[(head >> 3) * p.scale_stride_g + token + ((head & 7) * 4 + group * 2 + g) * p.scale_stride_c] = pow2(e);
    }
  const uint32_t line = stage + (lane >> 2) * 256 + quad * 2;
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    const uint32_t unit = (i ^ ((lane >> 2) * 2)) * 8;
    const float s0 = top[i >> 4][0], s1 = top[i >> 4][1];
    const uint32_t v = pack_e4m3(o[4 * i] * s0, o[4 * i + 1] * s0, o[4 * i + 2] * s1, o[4 * i + 3] * s1);
    asm volatile("st.shared.b16 [%0], %1;" ::"r"(line + unit), "h"((uint16_t)v) : "memory");
    asm volatile("st.shared.b16 [%0], %1;" ::"r"(line + 8 * 256 + unit), "h"((uint16_t)(v >> 16)) : "memory");
  }
  __syncwarp();
  const int half = lane >> 4, chunk = lane & 15;  // two rows at a time
#pragma unroll 4
  for (int i = half; i < rows; i += 2) {
    const int head = head0 + w4 * 16 + i;
    uint8_t* dst = p.out8 + (head >> 3) * p.out8_stride_g + token * p.out8_stride_t + (head & 7) * 512 + group * 256 + chunk * 16;
    *(uint4*)dst = ld_u4(stage + i * 256 + ((chunk ^ (i & 7)) << 4));
  }
}

}  // namespace

template <int C>
__global__ void __launch_bounds__(512, 1) decode_attention(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  const uint32_t smem = smem_u32(shared_bytes);
  const int rank = C == 1 ? 0 : blockIdx.x, head0 = blockIdx.y * 64, token = blockIdx.z;
  const int group = threadIdx.x >> 7, lane = threadIdx.x & 31;
  const int warp = threadIdx.x >> 5;
  HR_MARK(0);
  after_previous_kernel();
  // Whatever does not need the lengths is under way before they are here: q, and slots as if both lists were full.
  int n0 = p.list[0].lengths ? p.list[0].lengths[token] : 0, n1 = p.list[1].lengths ? p.list[1].lengths[token] : 0;
  const Cut guess = cut_of(p.list[0].width, p.list[1].width, rank, C);
  const int entry_row = (warp & 7) * 8 + (lane & 7), quarter = lane >> 3;
  int32_t slots = -1, later = -1;
  if (group >= 2) {
    slots = slot_of(p, guess, token, quarter, entry_row);
    later = slot_of(p, guess, token, quarter + 4, entry_row);
  } else {
    ask_q(p, smem, token, head0, warp, lane);
  }
  const uint32_t bars = smem + kBars;
  // full[2], empty[2] of the tiles; written, read of the probabilities. A warp arrives as one.
  const uint32_t full = bars, empty = bars + 16, p_full = bars + 32, p_empty = bars + 40;
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; ++i) {
      mbar_init(full + 8 * i, 8);
      mbar_init(empty + 8 * i, 8);
    }
    mbar_init(p_full, 4);
    mbar_init(p_empty, 4);
    fence_barrier_init();
  }
  __syncthreads();
  n0 = min(max(n0, 0), p.list[0].width);
  n1 = min(max(n1, 0), p.list[1].width);
  const Cut c = cut_of(n0, n1, rank, C);

  const int row0 = (warp & 3) * 16 + (lane >> 2), quad = lane & 3;
  if (group == 1) {
    const int i = threadIdx.x & 63;
    if (threadIdx.x < 192) {
      if (p.sink && head0 + i < p.heads) ((float*)(shared_bytes + kSink))[i] = p.sink[head0 + i];
    } else if (p.out8 || p.turn_out) {
      ((float*)(shared_bytes + kTurn))[i] = p.cos_sin[p.positions[token] * 64 + i];
    }
  }
  if (group < 2) {
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncwarp();
    if (p.raw_q) norm_rope_q(p, smem, token, warp, lane);
    fence_async();
    HR_MARK(1);
    named_barrier(1, 256);
    HR_MARK(2);
  }
  if (group >= 2) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 64;");
    if (guess.tiles0 == c.tiles0 && guess.first == c.first) {
      slots = cropped(c, quarter, entry_row, slots);
      later = cropped(c, quarter + 4, entry_row, later);
    } else {
      slots = slot_of(p, c, token, quarter, entry_row);
      later = slot_of(p, c, token, quarter + 4, entry_row);
    }
    produce(p, c, smem, token, threadIdx.x - 256, slots, later, full, empty);
    if (C > 1) {
      cluster_sync();
      cluster_sync();
    }
  } else if (group == 0) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 208;");
    float o[128];
#pragma unroll
    for (int i = 0; i < 128; ++i) o[i] = 0;
    float m[2] = {-INFINITY, -INFINITY}, l[2] = {0, 0};
    uint32_t pr[4][4] = {};
    bool held = false;  // the previous tile's memory
    const float to_log2 = p.scale * kLog2e * kUnscale;
    const uint64_t q_desc = operand(smem + kQ, 16, 1024);
    for (int it = 0; it < c.count; ++it) {
      const int buf = it & 1;
      const uint64_t k_desc = operand(smem + kK + buf * kKBytes, 16, 1024);
      const uint64_t v_desc = operand(smem + kK + buf * kKBytes, 8192, 1024);
      float s[32];
      mbar_wait(full + 8 * buf, (it >> 1) & 1);
      HR_MARK(4 + 4 * it);
      wgmma_fence();
#pragma unroll
      for (int kk = 0; kk < 32; ++kk) {
        uint64_t step = (kk >> 2) * 512 + (kk & 3) * 2;
        wgmma_qk(s, q_desc + step, k_desc + step, kk != 0);
      }
      wgmma_commit();
      if (held) {  // the product with the previous tile is older, hence done
        wgmma_wait<1>();
#pragma unroll
        for (int kk = 0; kk < 4; ++kk)  // the tensor cores read these registers until here: keep the compiler off them
          asm volatile("" ::"r"(pr[kk][0]), "r"(pr[kk][1]), "r"(pr[kk][2]), "r"(pr[kk][3]));
        if (lane == 0) mbar_arrive(empty + 8 * (buf ^ 1));
      }
      wgmma_wait<0>();
      HR_MARK(5 + 4 * it);

      float top[2] = {-INFINITY, -INFINITY};
      const float* bias = (const float*)(shared_bytes + kBias + buf * 256) + 2 * quad;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float2 b = *(const float2*)(bias + 8 * i);
        s[4 * i] = fmaf(s[4 * i], to_log2, b.x);
        s[4 * i + 1] = fmaf(s[4 * i + 1], to_log2, b.y);
        s[4 * i + 2] = fmaf(s[4 * i + 2], to_log2, b.x);
        s[4 * i + 3] = fmaf(s[4 * i + 3], to_log2, b.y);
        top[0] = fmaxf(top[0], fmaxf(s[4 * i], s[4 * i + 1]));
        top[1] = fmaxf(top[1], fmaxf(s[4 * i + 2], s[4 * i + 3]));
      }
      float alpha[2], shift[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        top[h] = fmaxf(top[h], __shfl_xor_sync(~0u, top[h], 1));
        top[h] = fmaxf(top[h], __shfl_xor_sync(~0u, top[h], 2));
        float now = fmaxf(m[h], top[h]);
        shift[h] = now == -INFINITY ? 0.0f : now;  // no entry yet: every exponential below is exp2(-inf)
        alpha[h] = exp2_fast(m[h] - shift[h]);
        m[h] = now;
        l[h] *= alpha[h];
      }
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        int h = (i >> 1) & 1;
        s[i] = exp2_fast(s[i] - shift[h]);
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
        for (int i = 0; i < 128; ++i) o[i] *= alpha[(i >> 1) & 1];
      }
      wgmma_fence();
#pragma unroll
      for (int kk = 0; kk < 4; ++kk) {
        wgmma_pv_rs(low_half(o), pr[kk], v_desc + kk * 128, 1);
        wgmma_pv_rs(high_half(o), pr[kk], v_desc + kk * 128 + 1024, 1);
      }
      wgmma_commit();
      held = it + 1 < c.count;
      // If the next tile is late, there is time to see this one through, so that its memory is free the sooner.
      if (held && !mbar_done(full + 8 * (buf ^ 1), ((it + 1) >> 1) & 1)) {
        wgmma_wait<0>();
        if (lane == 0) mbar_arrive(empty + 8 * buf);
        held = false;
      }
    }
    wgmma_wait<0>();
    HR_MARK(60);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      l[h] += __shfl_xor_sync(~0u, l[h], 1);
      l[h] += __shfl_xor_sync(~0u, l[h], 2);
      if (quad == 0) {
        const uint32_t at = smem + kMax + rank * 256 + (row0 + 8 * h) * 4;
        st_shared_b32(at, __float_as_uint(m[h]));
        st_shared_b32(at + (kSum - kMax), __float_as_uint(l[h]));
      }
    }
    finish<C>(p, smem, o, token, head0, rank, group, warp, lane);
    HR_MARK(62);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 176;");
    float o[128];
#pragma unroll
    for (int i = 0; i < 128; ++i) o[i] = 0;
    for (int it = 0; it < c.count; ++it) {
      const int buf = it & 1;
      const uint64_t v_desc = operand(smem + kK + buf * kKBytes + 4 * 8192, 8192, 1024);
      const uint64_t p_desc = operand(smem + kP, 16, 1024);
      mbar_wait(full + 8 * buf, (it >> 1) & 1);
      mbar_wait(p_full, it & 1);
      HR_MARK(4 + 4 * it);
      const float* al = (const float*)(shared_bytes + kAlpha + buf * 256);
      float alpha[2] = {al[row0], al[row0 + 8]};
      if (__any_sync(~0u, alpha[0] != 1.0f || alpha[1] != 1.0f)) {
#pragma unroll
        for (int i = 0; i < 128; ++i) o[i] *= alpha[(i >> 1) & 1];
      }
      wgmma_fence();
#pragma unroll
      for (int kk = 0; kk < 4; ++kk) {
        wgmma_pv_ss(low_half(o), p_desc + kk * 2, v_desc + kk * 128, 1);
        wgmma_pv_ss(high_half(o), p_desc + kk * 2, v_desc + kk * 128 + 1024, 1);
      }
      wgmma_commit();
      wgmma_wait<0>();
      HR_MARK(5 + 4 * it);
      if (lane == 0) {
        mbar_arrive(empty + 8 * buf);
        mbar_arrive(p_empty);
      }
    }
    finish<C>(p, smem, o, token, head0, rank, group, warp, lane);
    HR_MARK(62);
  }
}

template <int C>
static cudaError_t launch(const Params& p, cudaStream_t stream) {
  static bool ready = false;
  if (!ready) {
    cudaError_t e = cudaFuncSetAttribute(decode_attention<C>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmemBytes);
    if (e != cudaSuccess) return e;
    ready = true;
  }
  cudaLaunchConfig_t cfg = {};
  cfg.gridDim = dim3(C, (p.heads + 63) / 64, p.batch);
  cfg.blockDim = dim3(512);
  cfg.dynamicSmemBytes = kSmemBytes;
  cfg.stream = stream;
  cudaLaunchAttribute attr[2];
  attr[0].id = cudaLaunchAttributeClusterDimension;
  attr[0].val.clusterDim.x = C;
  attr[0].val.clusterDim.y = attr[0].val.clusterDim.z = 1;
  attr[1] = early_launch();
  cfg.attrs = attr;
  cfg.numAttrs = 2;
  return cudaLaunchKernelEx(&cfg, decode_attention<C>, p);
}

extern "C" int hr_decode_attention(const Params* p, int split, void* stream) {
  cudaStream_t s = (cudaStream_t)stream;
  switch (split) {
    case 1: return launch<1>(*p, s);
    case 2: return launch<2>(*p, s);
    case 4: return launch<4>(*p, s);
    default: return (int)cudaErrorInvalidValue;
  }
}
extern "C" int hr_decode_attention_params_bytes() { return (int)sizeof(Params); }
