// K7: hyper-connections, four residual streams: "after" one sub-layer and "before" the next in one pass over the streams [BI].
//
//   streams'[n] = post[n] * y + sum_m comb[m, n] * streams[m]                         (left out where there is no y yet)
//   mix[24]     = (flat(streams') . fn^T) / sqrt(mean(flat(streams')^2) + norm_eps)
//   pre, post', comb' = sigmoid, 2 sigmoid, Sinkhorn of mix * scale + base
//   layer_in    = rms(bf16(sum_n pre[n] * streams'[n])) * weight
//
// A cluster of 16 blocks works on eight tokens at a time (an octet); a block has 256 channels of all four streams, a warp 32 of
// those. The product runs on the tensor cores with fn on the rows: fn = hi + lo, two bf16 (16 bits of mantissa), 48 rows, kept in
// registers for the whole launch; tokens are the columns. The order of k is permuted so that a thread's operand is the 16 bytes
// that it loads. Such operands also give the products of a token's streams with each other (gram): their diagonal is the sum of
// squares, and all of them give the norm of layer_in before it is made, sum_mn pre[m] pre[n] gram[m, n]. It leaves out the
// rounding to bf16 inside the norm (2e-5 of it), and loses 2e-7 over c^2 where the streams cancel to a part c of themselves:
// less than their own rounding then leaves of layer_in. Sums go warp, block, cluster in a fixed order that the number of tokens
// does not touch; a token's column does not see the others. So its bits depend on nothing else in the launch.
//
// One warp loads octets (copy engine, 128-byte swizzle: token t's row has its 16-byte chunks at c ^ t). Eight warps multiply, four
// make gram (two times four, in turn, where no sub-layer has ended: all others would wait for one four), three add the warps' sums
// and send them to the token's owner (token t: block t, in every second octet t + 8) through distributed shared memory. There two
// warps in turn make pre, post and the norm's factor and send pre and factor to all blocks, and one does the Sinkhorn of up to 32
// tokens at a time, a lane each. Eight warps make layer_in while the octet is still in shared memory: the streams are read once.
// Where a sub-layer has ended these eight mix an octet kLate ahead of that, in shared memory, and a last warp stores it from there.
// A stage is loaded anew when layer_in is made from it, so nothing is more than kAhead octets ahead of layer_in, and all rings of
// kAhead buffers need no other wait than the one for the stage.
#include "copy_engine.cuh"
#include "hopper.cuh"

using namespace hr;

struct Params {
  const __nv_bfloat16* streams;  // [T, 4, 4096]
  const __nv_bfloat16* y;        // [T, 4096] or null: layer_in of the streams as they are
  const float* post;             // [T, 4], with y
  const float* comb;             // [T, 4, 4], with y; row: old stream, column: new stream
  const uint4* fn;               // [rank][warp][24][lane]: operands of the tensor cores, see mhc.py's pack_weights
  const float* base;             // [24]
  const float* scale;            // [3]
  const __nv_bfloat16* weight;   // [4096]
  __nv_bfloat16* streams_out;    // [T, 4, 4096], with y
  __nv_bfloat16* layer_in;       // [T, 4096]
  float* post_out;               // [T, 4]
  float* comb_out;               // [T, 4, 4]
  float eps, norm_eps;
  int32_t tokens, rounds;
  int32_t share, rest;  // octets of a cluster, and how many clusters have one more: set by launch()
};

namespace {

constexpr int kD = 4096, kRanks = 16, kChannels = kD / kRanks, kWarps = kChannels / 32, kCompute = kWarps * 32;
constexpr int kOctet = 8, kGramWarps = 4, kReducers = 3;
constexpr int kValues = 36;  // floats of a token's sums that travel: 24 products, 12 of the streams with each other, two of them twice
constexpr int kRow = 24;     // a warp's products of a token; four tokens lie in different banks
constexpr int kAhead = 8;    // octets that loading may be ahead of layer_in: what is loaded, and what travels, has as many buffers
constexpr int kLate = 4;     // octets between mixing and layer_in, which the same warps make

template <bool kAfter>
struct Layout {
  static constexpr uint32_t kY = kOctet * 4 * kChannels * 2, kPost = kY + kOctet * kChannels * 2, kComb = kPost + kOctet * 16;
  static constexpr uint32_t kStage = kAfter ? kY + 5120 : kY;  // y, post, comb; rows of 128 bytes under the swizzle: whole 1024
  static constexpr int kSums = kAfter ? 5 : kAhead;  // buffers of the warps' sums, for want of shared memory fewer
  static constexpr int kGramSets = kAfter ? 1 : 2;   // of four warps, which take octets in turn
  static constexpr int kThreads = 2 * kCompute + 32 * kGramWarps * kGramSets + 256;
  static constexpr uint32_t kPartial = kAhead * kStage;                                    // [kSums][warp][token][kRow] fp32
  static constexpr uint32_t kGrams = kPartial + kSums * kWarps * kOctet * kRow * 4;        // [kSums][warp][token] of 12 fp32
  static constexpr uint32_t kOwn = kGrams + kSums * kGramWarps * kOctet * 48;              // [kAhead / 2][rank][kValues] fp32
  static constexpr uint32_t kPre = kOwn + kAhead / 2 * kRanks * kValues * 4;               // [kAhead][token] of pre[4], factor
  static constexpr uint32_t kWaiting = kPre + kAhead * kOctet * 32;                        // [2][32] of 20 fp32: for Sinkhorn
  static constexpr uint32_t kWeight = kWaiting + 2 * 32 * 80;   // the block's channels of the norm's weight
  static constexpr uint32_t kGram = kWeight + kChannels * 2;    // [owner warp] of 12 fp32
  static constexpr uint32_t kBars = kGram + 2 * 48;
  static constexpr int kBarriers = 4 * kAhead + kSums + kAhead / 2 + kAhead;
  static constexpr uint32_t kBytes = kBars + 8 * kBarriers;
  static_assert(kComb + kOctet * 64 <= kY + 5120 && kBytes <= 232448);
  // What travels is free when its octet's stage was: a ring of stages must not be longer than those of sums, own sums and pre.
  static_assert(kAhead % 2 == 0 && kLate < kAhead && (kAfter ? kSums <= kAhead : kSums == kAhead));
};

__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
__device__ __forceinline__ void previous_kernel_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// Eight tokens from `token` on, four blocks of 64 channels from `block` on; tokens past the end are zeros.
__device__ __forceinline__ void load_streams(uint32_t to, const CUtensorMap* map, int token, int block, uint32_t bar) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %3, %5}], [%2];"
               ::"r"(to), "l"(map), "r"(bar), "r"(0), "r"(token), "r"(block)
               : "memory");
}
__device__ __forceinline__ void store_streams(const CUtensorMap* map, int token, int block, uint32_t from) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %2, %4}], [%1];\n"
               "cp.async.bulk.commit_group;" ::"l"(map), "r"(from), "r"(0), "r"(token), "r"(block)
               : "memory");
}
template <int kMost>
__device__ __forceinline__ void wait_stores_read() {  // until at most kMost stores still read shared memory
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kMost) : "memory");
}
__device__ __forceinline__ void load_y(uint32_t to, const CUtensorMap* map, int token, int block, uint32_t bar) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];"
               ::"r"(to), "l"(map), "r"(bar), "r"(0), "r"(token), "r"(block)
               : "memory");
}
__device__ __forceinline__ void send_f4(uint32_t to, float4 v, uint32_t bar) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to), "f"(v.x),
               "f"(v.y), "f"(v.z), "f"(v.w), "r"(bar)
               : "memory");
}
__device__ __forceinline__ void send_f1(uint32_t to, float v, uint32_t bar) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(to), "f"(v), "r"(bar) : "memory");
}
__device__ __forceinline__ void st_u2(uint32_t addr, uint2 v) {
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(addr), "r"(v.x), "r"(v.y) : "memory");
}
__device__ __forceinline__ void st_f1(uint32_t addr, float v) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(addr), "f"(v) : "memory");
}
__device__ __forceinline__ void mma(float (&d)[4], uint4 a, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}
__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float sigmoid(float x) { return reciprocal(1.0f + __expf(-x)); }

// A place in a ring of buffers and the parity of its barriers' phase.
template <int kSize>
struct Turn {
  int n = 0, at = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void next() {
    if constexpr ((kSize & (kSize - 1)) == 0) {
      ++n, at = n % kSize, phase = n / kSize & 1;  // fewer operations, and none where n is a counter anyway
    } else if (++at == kSize) {
      at = 0, phase ^= 1;
    }
  }
};
template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// The order of an octet's tokens over the eight groups of four lanes: neighbours differ in bit 2, so their chunks in banks.
__device__ __forceinline__ int token_of(int group) { return (group >> 1) | (group & 1) << 2; }

__device__ __forceinline__ void reciprocals(float a, float b, float& ra, float& rb) {  // one division for two
  const float r = reciprocal(a * b);
  ra = r * b;
  rb = r * a;
}

// Softmax over rows plus eps, then alternate division by column and row sums plus eps, in one thread's registers. The matrix
// stays as it is and is r[i] * m[i][j] * c[j]: dividing column j by its sum c[j] * s + eps makes 1 / c[j] = s + eps / c[j].
__device__ __forceinline__ void sinkhorn(float (&m)[16], float eps, int rounds) {
  float r[4] = {1, 1, 1, 1}, c[4], ri[4] = {1, 1, 1, 1}, ci[4] = {1, 1, 1, 1};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float top = fmaxf(fmaxf(m[4 * i], m[4 * i + 1]), fmaxf(m[4 * i + 2], m[4 * i + 3]));
    float sum = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) sum += m[4 * i + j] = __expf(m[4 * i + j] - top);
    const float f = reciprocal(sum);
#pragma unroll
    for (int j = 0; j < 4; ++j) m[4 * i + j] = m[4 * i + j] * f + eps;
  }
  auto columns = [&]() {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      ci[j] = m[12 + j] * r[3] + (m[8 + j] * r[2] + (m[4 + j] * r[1] + (m[j] * r[0] + eps * ci[j])));
    }
    reciprocals(ci[0], ci[1], c[0], c[1]);
    reciprocals(ci[2], ci[3], c[2], c[3]);
  };
  columns();
#pragma unroll 1
  for (int round = 1; round < rounds; ++round) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      ri[i] = m[4 * i + 3] * c[3] + (m[4 * i + 2] * c[2] + (m[4 * i + 1] * c[1] + (m[4 * i] * c[0] + eps * ri[i])));
    }
    reciprocals(ri[0], ri[1], r[0], r[1]);
    reciprocals(ri[2], ri[3], r[2], r[3]);
    columns();
  }
#pragma unroll
  for (int i = 0; i < 16; ++i) m[i] *= r[i >> 2] * c[i & 3];
}

template <typename T>
__device__ __forceinline__ T keep(T x) {  // a value that the compiler is to take as it is, not to make anew in each use
  static_assert(sizeof(T) == 4);
  asm volatile("" : "+r"(x));
  return x;
}

// What every kind of warp begins with; each makes it for itself. A value of all kinds would be spilled in all of them where the
// kind with the fewest registers has no place for it.
template <bool kAfter>
struct Place {
  using L = Layout<kAfter>;
  static constexpr int S = kAhead;
  uint32_t smem;
  int warp, lane, rank, cluster, clusters, count;
  __device__ __forceinline__ Place(uint32_t shared, const Params& p) {
    smem = keep(shared);
    const int thread = keep((int)threadIdx.x);
    warp = thread >> 5, lane = keep(thread & 31);
    rank = blockIdx.x % kRanks, cluster = blockIdx.x / kRanks, clusters = gridDim.x / kRanks;
    count = p.share + (cluster < p.rest);  // octets of this cluster: cluster, cluster + clusters, ...
  }
  // Barriers of a stage: layer_in made; products made, so their sums are there; streams mixed; loaded.
  __device__ __forceinline__ uint32_t done(int i) const { return smem + L::kBars + 8 * i; }
  __device__ __forceinline__ uint32_t ready(int i) const { return done(S + i); }
  __device__ __forceinline__ uint32_t mixed(int i) const { return done(2 * S + i); }
  __device__ __forceinline__ uint32_t full(int i) const { return done(3 * S + i); }
  __device__ __forceinline__ uint32_t streams(int i) const { return kAfter ? mixed(i) : full(i); }
  // The warps' sums are added; the own token's sums of all ranks; pre and factors of all tokens.
  __device__ __forceinline__ uint32_t added(int i) const { return done(4 * S + i); }
  __device__ __forceinline__ uint32_t own(int i) const { return done(4 * S + L::kSums + i); }
  __device__ __forceinline__ uint32_t pre(int i) const { return done(4 * S + L::kSums + kAhead / 2 + i); }
  // Where an octet's sums are: with as many buffers as stages, in the stage's.
  __device__ __forceinline__ int sums(const Turn<S>& turn, const Turn<L::kSums>& buf) const { return kAfter ? buf.at : turn.at; }
  // A warp's 32 channels of a stage's tokens: the lane's token, and its 16 bytes in the first stream, the next 1024 on.
  __device__ __forceinline__ int token() const { return token_of(lane >> 2); }
  __device__ __forceinline__ uint32_t line(int part) const {
    return keep(smem + (part >> 1) * 4096 + token() * 128 + (((part & 1) * 4 + (lane & 3)) ^ token()) * 16);
  }
};

template <bool kAfter>
__device__ __forceinline__ void product(const Place<kAfter>& at, const Params& p) {
  using L = Layout<kAfter>;
  uint4 w[3][8];  // rows 0..15 of hi; 16..23 of hi and 0..7 of lo; 8..23 of lo. Step 2 * stream + half
#pragma unroll
  for (int m = 0; m < 3; ++m)
#pragma unroll
    for (int k = 0; k < 8; ++k) w[m][k] = __ldg(p.fn + ((at.rank * kWarps + at.warp) * 24 + m * 8 + k) * 32 + at.lane);

  // These warps do not wait for the kernel ahead: weights were there before it, and all else comes by way of the loading warp.
  const int group = at.lane >> 2, quad = at.lane & 3;
  const uint32_t line = at.line(at.warp), to = keep(at.smem + L::kPartial + ((at.warp * kOctet + quad) * kRow + group) * 4);
  Turn<kAhead> turn;
  Turn<L::kSums> buf;
  uint4 x[4];
  auto load = [&]() {
#pragma unroll
    for (int s = 0; s < 4; ++s) x[s] = ld_u4(line + turn.at * L::kStage + s * 1024);
  };
  mbar_wait(at.streams(0), 0);
  load();
#pragma unroll 1
  for (int it = 0; it < at.count; ++it) {
    const uint32_t now = at.ready(turn.at), sums = to + at.sums(turn, buf) * kWarps * kOctet * kRow * 4;
    float acc[3][4] = {};
#pragma unroll
    for (int s = 0; s < 4; ++s)
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int m = 0; m < 3; ++m) mma(acc[m], w[m][2 * s + h], h ? x[s].z : x[s].x, h ? x[s].w : x[s].y);
    turn.next();
    if (it + 1 < at.count) mbar_wait(at.streams(turn.at), turn.phase);
    load();  // the next octet, while the products end; after the last one, nothing of use
    if (kAfter && it >= L::kSums) mbar_wait(at.added(buf.at), buf.phase ^ 1);
#pragma unroll
    for (int m = 0; m < 3; ++m) asm volatile("" : "+f"(acc[m][0]), "+f"(acc[m][1]), "+f"(acc[m][2]), "+f"(acc[m][3]));
#pragma unroll
    for (int c = 0; c < 2; ++c) {  // column 2 * quad + c: token quad + 4 * c
      st_f1(sums + c * 4 * kRow * 4, acc[0][c] + acc[1][2 + c]);
      st_f1(sums + c * 4 * kRow * 4 + 32, acc[0][2 + c] + acc[2][c]);
      st_f1(sums + c * 4 * kRow * 4 + 64, acc[1][c] + acc[2][2 + c]);
    }
    __syncwarp();
    if (at.lane == 0) mbar_arrive(now);
    if (kAfter) buf.next();
  }
}

// Products of a token's streams with each other, over 64 channels a warp; each set of warps for the octets whose turn it is.
template <bool kAfter>
__device__ __forceinline__ void gram(const Place<kAfter>& at, const Params& p) {
  using L = Layout<kAfter>;
  const int part = at.warp % kGramWarps, set = (at.warp - 2 * kWarps) / kGramWarps, group = at.lane >> 2, quad = at.lane & 3;
  // Four tokens at a time, the even or the odd ones: on the rows their streams 0 and 1, then 2 and 3, on the columns either two. A
  // lane has 8 of the 32 bytes that a token has in a step; the tokens of four neighbouring groups have theirs in different banks.
  const int token = (group & 3) * 2, stream = group >> 2;
  const uint32_t zero = p.tokens >> 31;
  const uint32_t line = keep(at.smem + part * 4096 + stream * 1024 + token * 128 + ((quad >> 1) ^ token) * 16 + (quad & 1) * 8);
  // Of the two columns of a lane's results one may be of the row's token. Sums of a token: 00 01 10 11, 02 03 12 13, 22 23 32 33.
  const bool same = (quad & 1) == (group >> 1 & 1);
  const uint32_t to = keep(at.smem + L::kGrams + (part * kOctet + token) * 48 + (stream * 2 + (quad >> 1)) * 4);
  Turn<kAhead> turn;
  Turn<L::kSums> buf;
  if (set) turn.next();
#pragma unroll 1
  for (int it = set; it < at.count; it += L::kGramSets) {
    const uint32_t from = line + turn.at * L::kStage, now = at.ready(turn.at), sums = to + at.sums(turn, buf) * kGramWarps * kOctet * 48;
    uint2 x[2][4];  // streams 0 and 1, streams 2 and 3 of even tokens, then of odd ones
    auto load = [&](int i) {
#pragma unroll
      for (int s = 0; s < 4; ++s) x[i & 1][s] = ld_u2((from ^ (i * 32 + (s >> 1) * 16)) + (s >> 1) * 128 + (s & 1) * 2048);
    };
    mbar_wait(at.streams(turn.at), turn.phase);
    load(0);
    float left[2][4] = {}, right[2][4] = {};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i < 3) load(i + 1);
      const uint2* v = x[i & 1];
#pragma unroll
      for (int o = 0; o < 2; ++o) {
        // Copied by an operation, lest the compiler copy for each product.
        const uint4 rows = make_uint4(v[2 * o].x ^ zero, v[2 * o + 1].x ^ zero, v[2 * o].y ^ zero, v[2 * o + 1].y ^ zero);
        mma(left[o], rows, v[2 * o].x, v[2 * o].y);
        mma(right[o], rows, v[2 * o + 1].x, v[2 * o + 1].y);
      }
    }
    if (kAfter && it >= L::kSums) mbar_wait(at.added(buf.at), buf.phase ^ 1);
    // No product may sink into the branch.
#pragma unroll
    for (int o = 0; o < 2; ++o) {
      asm volatile("" : "+f"(left[o][0]), "+f"(left[o][1]), "+f"(left[o][2]), "+f"(left[o][3]));
      asm volatile("" : "+f"(right[o][0]), "+f"(right[o][1]), "+f"(right[o][2]), "+f"(right[o][3]));
    }
    if (same) {
#pragma unroll
      for (int o = 0; o < 2; ++o) {
        st_f1(sums + o * 48, group & 1 ? left[o][1] : left[o][0]);
        st_f1(sums + o * 48 + 16, group & 1 ? right[o][1] : right[o][0]);
        st_f1(sums + o * 48 + 32, group & 1 ? right[o][3] : right[o][2]);
      }
    }
    __syncwarp();
    if (at.lane == 0) mbar_arrive(now);
    turn.next();
    if (L::kGramSets == 2) turn.next();
    if (kAfter) buf.next();
  }
}

// Sums of the warps, to the owners.
template <bool kAfter>
__device__ __forceinline__ void reduce(const Place<kAfter>& at, int reducer) {
  using L = Layout<kAfter>;
  const int i = reducer * 32 + at.lane, token = i / (kValues / 4), unit = i % (kValues / 4);
  // Units 0..5 are the product's, of eight warps; the others gram's, of four.
  const bool grams = unit >= 6;
  const uint32_t from = keep(at.smem + (grams ? L::kGrams + token * 48 + (unit - 6) * 16 : L::kPartial + (token * kRow + 4 * unit) * 4));
  const int each = grams ? kOctet * 48 : kOctet * kRow * 4, all = keep(grams ? kGramWarps * kOctet * 48 : kWarps * kOctet * kRow * 4);
  const uint32_t to = keep(at.smem + L::kOwn + (at.rank * kValues + 4 * unit) * 4);
  Turn<kAhead> turn;
  Turn<L::kSums> buf;
#pragma unroll 1
  for (int it = 0; it < at.count; ++it, turn.next()) {
    mbar_wait(at.ready(turn.at), turn.phase);
    float4 m = {};
    if (token < kOctet) {
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        if (w == kGramWarps && grams) break;
        const float4 v = ld_f4(from + at.sums(turn, buf) * all + w * each);
        m.x += v.x, m.y += v.y, m.z += v.z, m.w += v.w;
      }
    }
    __syncwarp();
    if (kAfter) {
      if (at.lane == 0) mbar_arrive(at.added(buf.at));
      buf.next();
    }
    if (it == 0) cluster_wait();
    // The octet's stage was loaded after layer_in of kAhead octets back was made here, so every owner has read what these sums
    // overwrite, and may overwrite pre.
    const int slot = it / 2 % (kAhead / 2), owner = token + (it & 1) * 8;
    if (token < kOctet) send_f4(map_rank(to + slot * kRanks * kValues * 4, owner), m, map_rank(at.own(slot), owner));
  }
}

// pre, post and the norm's factor of the own tokens; of two warps each does every second one.
template <bool kAfter>
__device__ __forceinline__ void own_tokens(const Place<kAfter>& at, const Params& p, int first) {
  using L = Layout<kAfter>;
  // Lane i has the values 2 i and 2 i + 1 of the 36.
  const int lane = at.lane, rank = at.rank;
  const float factor = lane < 2 ? p.scale[0] : lane < 4 ? p.scale[1] : p.scale[2];
  const float2 base = lane < 12 ? *(const float2*)(p.base + 2 * lane) : make_float2(0, 0);
  const uint32_t pre_to = keep(map_rank(at.smem + L::kPre + (rank & 7) * 32, lane & 15)), pre_bar_to = keep(map_rank(at.pre(0), lane & 15));
  const uint32_t grams = at.smem + L::kGram + first * 48, values = keep(at.smem + L::kOwn + min(lane, 17) * 8);
  const int own = (at.count - (rank >> 3) + 1) / 2;
  // Both warps have done the tokens of n's group of 32, for the warp of the Sinkhorns. Neighbouring groups have barriers of their own,
  // for one warp may be in the next before the other has ended this one. The next group takes the place of the one before this, and the
  // one after that its barrier: therefore that warp has to be here, done with the one before. The first group has none before it, and
  // after the last one nothing comes: they need not wait.
  auto group_done = [](int n, bool waits) {
    if (waits) {
      if (n & 32)
        asm volatile("bar.sync 4, 96;" ::: "memory");
      else
        asm volatile("bar.sync 3, 96;" ::: "memory");
    } else {
      if (n & 32)
        asm volatile("bar.arrive 4, 96;" ::: "memory");
      else
        asm volatile("bar.arrive 3, 96;" ::: "memory");
    }
  };
  previous_kernel_wait();
#pragma unroll 1
  for (int n = first; n < own; n += 2) {
    constexpr int kSlots = kAhead / 2;
    const int it = 2 * n + (rank >> 3), slot = n % kSlots, buf = it % kAhead;
    const int token = (at.cluster + it * at.clusters) * kOctet + (rank & 7);
    mbar_wait(at.own(slot), n / kSlots & 1);
    const uint32_t from = values + slot * kRanks * kValues * 4;
    float2 v[4] = {};  // in a fixed order, four chains
#pragma unroll
    for (int r = 0; r < kRanks; ++r) {
      const float2 x = ld_f2(from + r * kValues * 4);
      v[r & 3].x += x.x, v[r & 3].y += x.y;
    }
    const float2 sum = make_float2((v[0].x + v[1].x) + (v[2].x + v[3].x), (v[0].y + v[1].y) + (v[2].y + v[3].y));
    if (lane >= 12 && lane < 18) st_shared_f2(grams + (lane - 12) * 8, sum.x, sum.y);
    __syncwarp();
    if (lane == 0) mbar_expect(at.own(slot), kRanks * kValues * 4);
    const float4 g0 = ld_f4(grams), g1 = ld_f4(grams + 16), g2 = ld_f4(grams + 32);  // 00 01 10 11, 02 03 12 13, 22 23 32 33
    const float r = rsqrtf(((g0.x + g0.w) + (g2.x + g2.w)) * (1.0f / (4 * kD)) + p.norm_eps) * factor;
    const float2 x = make_float2(sum.x * r + base.x, sum.y * r + base.y), s = make_float2(sigmoid(x.x), sigmoid(x.y));
    if (lane >= 4 && lane < 12) st_shared_f2(at.smem + L::kWaiting + (n & 63) * 80 + (lane - 4) * 8, x.x, x.y);
    const bool ends = (n & 31) >= 30 || n + 2 >= own, waits = n >= 32 && n >> 5 != (own - 1) >> 5;
    if (ends && !waits) group_done(n, false);
    auto pre_of = [&](int i) { return __shfl_sync(~0u, (i & 1 ? s.y : s.x) + p.eps, i >> 1); };
    const float4 pre = make_float4(pre_of(0), pre_of(1), pre_of(2), pre_of(3));
    if (lane < kRanks) send_f4(pre_to + buf * kOctet * 32, pre, pre_bar_to + 8 * buf);
    const float squares = pre.x * (pre.x * g0.x + 2 * ((pre.y * g0.y + pre.z * g1.x) + pre.w * g1.y)) +
                          pre.y * (pre.y * g0.w + 2 * (pre.z * g1.z + pre.w * g1.w)) +
                          (pre.z * (pre.z * g2.x + 2 * (pre.w * g2.y)) + pre.w * pre.w * g2.w);
    const float f = rsqrtf((squares < 0 ? 0.0f : squares) * (1.0f / kD) + p.norm_eps);  // NaN stays NaN
    if (lane < kRanks) send_f1(pre_to + buf * kOctet * 32 + 16, f, pre_bar_to + 8 * buf);
    if (lane >= 2 && lane < 4 && token < p.tokens)
      *(float2*)(p.post_out + (int64_t)token * 4 + 2 * lane - 4) = make_float2(2 * s.x, 2 * s.y);
    if (ends && waits) group_done(n, true);
  }
  if (first == 1 && own % 32 == 1) group_done(own, false);  // none of the last group's
}

template <bool kAfter>
__device__ __forceinline__ void sinkhorns(const Place<kAfter>& at, const Params& p) {
  using L = Layout<kAfter>;
  previous_kernel_wait();
  const int own = (at.count - (at.rank >> 3) + 1) / 2;
  for (int n = 0; n < own; n += 32) {
    if (n & 32)
      asm volatile("bar.sync 4, 96;" ::: "memory");
    else
      asm volatile("bar.sync 3, 96;" ::: "memory");
    const int64_t token = ((int64_t)at.cluster + (int64_t)(2 * (n + at.lane) + (at.rank >> 3)) * at.clusters) * kOctet + (at.rank & 7);
    if (n + at.lane >= own || token >= p.tokens) continue;
    float m[16];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float4 row = ld_f4(at.smem + L::kWaiting + ((n + at.lane) & 63) * 80 + i * 16);
      m[4 * i] = row.x, m[4 * i + 1] = row.y, m[4 * i + 2] = row.z, m[4 * i + 3] = row.w;
    }
    sinkhorn(m, p.eps, p.rounds);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      *(float4*)(p.comb_out + token * 16 + 4 * i) = make_float4(m[4 * i], m[4 * i + 1], m[4 * i + 2], m[4 * i + 3]);
  }
}

template <bool kAfter>
__device__ __forceinline__ void load(const Place<kAfter>& at, const Params& p, const CUtensorMap* streams_map, const CUtensorMap* y_map) {
  using L = Layout<kAfter>;
  constexpr int S = kAhead;
  previous_kernel_wait();
  Turn<S> turn;
#pragma unroll 1
  for (int it = 0, token0 = at.cluster * kOctet; it < at.count; ++it, token0 += at.clusters * kOctet, turn.next()) {
    const int valid = min(kOctet, p.tokens - token0);
    const uint32_t to = at.smem + turn.at * L::kStage, bar = at.full(turn.at);
    if (it >= S) mbar_wait(at.done(turn.at), turn.phase ^ 1);
    mbar_expect(bar, (kAfter ? L::kPost + valid * 80 : L::kY) + (it == 0 ? kChannels * 2 : 0));
    if (it == 0) bulk_load(at.smem + L::kWeight, p.weight + at.rank * kChannels, kChannels * 2, bar);
    load_streams(to, streams_map, token0, at.rank * 4, bar);
    if (kAfter) {
      load_y(to + L::kY, y_map, token0, at.rank * 4, bar);
      bulk_load(to + L::kPost, p.post + (int64_t)token0 * 4, valid * 16, bar);
      bulk_load(to + L::kComb, p.comb + (int64_t)token0 * 16, valid * 64, bar);
    }
  }
}

// Mixed streams, to global memory.
template <bool kAfter>
__device__ __forceinline__ void store(const Place<kAfter>& at, const CUtensorMap* out_map) {
  using L = Layout<kAfter>;
  previous_kernel_wait();
  Turn<kAhead> turn, back;
#pragma unroll 1
  for (int it = 0, token0 = at.cluster * kOctet; it < at.count; ++it, token0 += at.clusters * kOctet, turn.next()) {
    mbar_wait(at.mixed(turn.at), turn.phase);
    store_streams(out_map, token0, at.rank * 4, at.smem + turn.at * L::kStage);
    if (it == 0) continue;
    wait_stores_read<1>();
    mbar_arrive(at.done(back.at));
    back.next();
  }
  wait_stores_read<0>();  // nobody loads into the last stage
}

// Streams mixed, where a sub-layer has ended; layer_in.
template <bool kAfter>
__device__ __forceinline__ void layer(const Place<kAfter>& at, const Params& p) {
  using L = Layout<kAfter>;
  // Half of the tokens, 64 channels: eight lanes write whole lines of 128 bytes.
  const int part = at.warp - kWarps, t = keep((part & 1) * 4 + (at.lane >> 3)), channel = keep((part >> 1) * 64 + (at.lane & 7) * 8);
  const uint32_t line = keep(at.smem + (part >> 1) * 4096 + t * 128 + ((at.lane & 7) ^ t) * 16), factors = keep(at.smem + L::kPre + t * 32);
  __nv_bfloat16* to = p.layer_in + (int64_t)(at.cluster * kOctet + t) * kD + at.rank * kChannels + channel;
  const __nv_bfloat16* end = p.layer_in + (int64_t)p.tokens * kD;  // tokens past the last one
  const int64_t step = (int64_t)at.clusters * kOctet * kD;
  previous_kernel_wait();
  mbar_wait(at.full(0), 0);  // the norm's weights came with the first octet
  const uint32_t weights = keep(at.smem + L::kWeight + channel * 2);
  uint4 weight = ld_u4(weights);
  Turn<kAhead> late;
  auto make_layer_in = [&]() {
    if (!kAfter) mbar_wait(at.full(late.at), late.phase);
    uint4 x[4];
#pragma unroll
    for (int s = 0; s < 4; ++s) x[s] = ld_u4(line + late.at * L::kStage + s * 1024);
    const uint32_t bar = at.pre(late.at);
    weight = kAfter ? ld_u4(weights) : make_uint4(weight.x, weight.y, weight.z, keep(weight.w));  // for want of registers
    mbar_wait(bar, late.phase);
    const float4 pre = ld_f4(factors + late.at * kOctet * 32);
    const float f = ld_f1(factors + late.at * kOctet * 32 + 16);
    if (part == 0 && at.lane == 0) mbar_expect(bar, kOctet * 20);
    auto made = [&](uint32_t a, uint32_t b, uint32_t c, uint32_t d, uint32_t g) {
      const uint32_t v = pack_bf16(pre.x * bf16_lo(a) + pre.y * bf16_lo(b) + pre.z * bf16_lo(c) + pre.w * bf16_lo(d),
                                   pre.x * bf16_hi(a) + pre.y * bf16_hi(b) + pre.z * bf16_hi(c) + pre.w * bf16_hi(d));
      return pack_bf16(bf16_lo(v) * f * bf16_lo(g), bf16_hi(v) * f * bf16_hi(g));
    };
    const uint4 out = make_uint4(made(x[0].x, x[1].x, x[2].x, x[3].x, weight.x), made(x[0].y, x[1].y, x[2].y, x[3].y, weight.y),
                                 made(x[0].z, x[1].z, x[2].z, x[3].z, weight.z), made(x[0].w, x[1].w, x[2].w, x[3].w, weight.w));
    __syncwarp();
    if (at.lane == 0) mbar_arrive(at.done(late.at));
    if (to < end) *(uint4*)to = out;
    to += step;
    late.next();
  };
  if constexpr (!kAfter) {
#pragma unroll 1
    for (int it = 0; it < at.count; ++it) make_layer_in();
  } else {
    const uint32_t y_line = keep(line + L::kY - (part >> 1) * 3072);
    Turn<kAhead> turn;
#pragma unroll 1
    for (int it = 0; it < at.count + kLate; ++it) {
      if (it < at.count) {
        const uint32_t ends = at.smem + turn.at * L::kStage, from = line + turn.at * L::kStage;
        mbar_wait(at.full(turn.at), turn.phase);
        const float4 post = ld_f4(ends + L::kPost + t * 16);
        float4 c[4];
#pragma unroll
        for (int s = 0; s < 4; ++s) c[s] = ld_f4(ends + L::kComb + t * 64 + s * 16);
#pragma unroll 1
        for (int h = 0; h < 2; ++h) {  // four channels at a time, for want of registers; odd tokens the other way round: banks
          const uint32_t half = ((h ^ t) & 1) * 8;
          const uint2 y = ld_u2((y_line + turn.at * L::kStage) ^ half);
          uint2 x[4];
#pragma unroll
          for (int s = 0; s < 4; ++s) x[s] = ld_u2((from + s * 1024) ^ half);
          auto mix = [&](uint32_t y2, uint32_t& x0, uint32_t& x1, uint32_t& x2, uint32_t& x3) {
            const uint32_t old[4] = {x0, x1, x2, x3};
            float lo[4] = {post.x * bf16_lo(y2), post.y * bf16_lo(y2), post.z * bf16_lo(y2), post.w * bf16_lo(y2)};
            float hi[4] = {post.x * bf16_hi(y2), post.y * bf16_hi(y2), post.z * bf16_hi(y2), post.w * bf16_hi(y2)};
#pragma unroll
            for (int s = 0; s < 4; ++s) {
              const float a = bf16_lo(old[s]), b = bf16_hi(old[s]);
              lo[0] += c[s].x * a, lo[1] += c[s].y * a, lo[2] += c[s].z * a, lo[3] += c[s].w * a;
              hi[0] += c[s].x * b, hi[1] += c[s].y * b, hi[2] += c[s].z * b, hi[3] += c[s].w * b;
            }
            x0 = pack_bf16(lo[0], hi[0]);
            x1 = pack_bf16(lo[1], hi[1]);
            x2 = pack_bf16(lo[2], hi[2]);
            x3 = pack_bf16(lo[3], hi[3]);
          };
          mix(y.x, x[0].x, x[1].x, x[2].x, x[3].x);
          mix(y.y, x[0].y, x[1].y, x[2].y, x[3].y);
#pragma unroll
          for (int s = 0; s < 4; ++s) st_u2((from + s * 1024) ^ half, x[s]);
        }
        fence_async();  // the copy engine reads here, then writes
        __syncwarp();
        if (at.lane == 0) mbar_arrive(at.mixed(turn.at));
        turn.next();
      }
      if (it >= kLate) make_layer_in();
    }
  }
}

}  // namespace

template <bool kAfter>
__global__ void __launch_bounds__(Layout<kAfter>::kThreads, 1)
    mhc(const __grid_constant__ CUtensorMap streams_map, const __grid_constant__ CUtensorMap y_map,
        const __grid_constant__ CUtensorMap out_map, const __grid_constant__ Params p) {
  using L = Layout<kAfter>;
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  const uint32_t smem = smem_u32(shared_bytes);
  if (threadIdx.x < L::kBarriers) {
    constexpr int S = kAhead, first_own = 4 * S + L::kSums, first_pre = first_own + kAhead / 2;
    const int i = threadIdx.x;
    const uint32_t bar = smem + L::kBars + 8 * i;
    // Who arrives once a turn: layer_in's warps and the storing one; product's and gram's; mixing ones; then (loads) one that
    // says how many bytes come; adding ones; one that expects bytes again when it has read the last ones. A stage is loaded anew
    // after `done` only: layer_in needs pre, pre the sums of all ranks, and those are this block's after its products have read.
    mbar_init(bar, i < S                            ? kWarps + kAfter
                   : i < 2 * S                      ? kWarps + kGramWarps
                   : i < 3 * S                      ? kWarps
                   : i >= 4 * S && i < first_own    ? kReducers
                                                    : 1);
    fence_barrier_init();
    if (i >= first_own) mbar_expect(bar, i < first_pre ? kRanks * kValues * 4 : kOctet * 20);
  }
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  __syncthreads();
  cluster_arrive();  // who sends first waits for it

  // Registers a thread of the kinds of warps, four warps each (product and layer_in: eight, gram: four or eight). All begin with what
  // a block's share is; what one gives another takes. A value that finds no place is spilled to the little that is left of the L1
  // cache: 2 to 40 % of the time.
  constexpr int kProduct = 136, kLayer = kAfter ? 56 : 40, kGram = kAfter ? 48 : 40, kSmall = kAfter ? 40 : 48, kLeast = 32;
  constexpr int kFours = L::kThreads / 128, kShare = 65536 / L::kThreads / 8 * 8;
  static_assert(2 * kProduct + 2 * kLayer + L::kGramSets * kGram + kSmall + kLeast <= kFours * kShare);
  const int four = threadIdx.x >> 7, warp = threadIdx.x >> 5 & 3;
  if (four < kWarps / 4) {
    take_registers<kProduct>();
    product<kAfter>({smem, p}, p);
  } else if (four < 2 * kWarps / 4) {
    give_registers<kLayer>();
    layer<kAfter>({smem, p}, p);
  } else if (four < kFours - 2) {
    give_registers<kGram>();
    gram<kAfter>({smem, p}, p);
  } else if (four == kFours - 2) {
    give_registers<kSmall>();
    const Place<kAfter> at(smem, p);
    if (warp < 2) {
      own_tokens(at, p, warp);
    } else if (warp == 2) {
      sinkhorns(at, p);
    } else if (at.lane == 0) {
      load(at, p, &streams_map, &y_map);
    }
  } else {
    give_registers<kLeast>();
    const Place<kAfter> at(smem, p);
    if (warp < kReducers) {
      reduce(at, warp);
    } else if (kAfter && at.lane == 0) {
      store(at, &out_map);
    }
  }
}

template <bool kAfter>
static cudaError_t launch(Params p, cudaStream_t stream, int* most) {
  using L = Layout<kAfter>;
  static int held[kMaxDevices];  // clusters that each device can hold at once
  int device;
  cudaError_t e = this_device(&device);
  if (e != cudaSuccess) return e;
  int& clusters = held[device];
  cudaLaunchConfig_t cfg = {};
  cfg.blockDim = dim3(L::kThreads);
  cfg.dynamicSmemBytes = L::kBytes;
  cfg.stream = stream;
  cudaLaunchAttribute attr[2];
  attr[0].id = cudaLaunchAttributeClusterDimension;
  attr[0].val.clusterDim.x = kRanks;
  attr[0].val.clusterDim.y = attr[0].val.clusterDim.z = 1;
  attr[1] = early_launch();
  cfg.attrs = attr;
  cfg.numAttrs = 2;
  if (clusters == 0) {
    e = cudaFuncSetAttribute(mhc<kAfter>, cudaFuncAttributeMaxDynamicSharedMemorySize, L::kBytes);
    if (e == cudaSuccess) e = cudaFuncSetAttribute(mhc<kAfter>, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    cfg.gridDim = dim3(kRanks);
    if (e == cudaSuccess) e = cudaOccupancyMaxActiveClusters(&clusters, mhc<kAfter>, &cfg);
    if (e != cudaSuccess) return e;
    if (clusters == 0) return cudaErrorInvalidConfiguration;
  }
  if (most) *most = clusters;
  if (p.tokens == 0) return cudaSuccess;
  // Channels in blocks of 64 (128 bytes), tokens, streams, blocks of channels; y without streams.
  CUtensorMap maps[3];
  const cuuint64_t t = p.tokens, dims[4] = {64, t, 4, kD / 64}, strides[3] = {4 * kD * 2, kD * 2, 128};
  const cuuint64_t dims_y[3] = {64, t, kD / 64}, strides_y[2] = {kD * 2, 128};
  const cuuint32_t box[4] = {64, kOctet, 4, kChannels / 64}, box_y[3] = {64, kOctet, kChannels / 64};
  e = encode_map(&maps[0], p.streams, 4, dims, strides, box, CU_TENSOR_MAP_SWIZZLE_128B);
  if (e == cudaSuccess) e = encode_map(&maps[1], kAfter ? p.y : p.streams, 3, dims_y, strides_y, box_y, CU_TENSOR_MAP_SWIZZLE_128B);
  if (e == cudaSuccess) e = encode_map(&maps[2], kAfter ? p.streams_out : p.streams, 4, dims, strides, box, CU_TENSOR_MAP_SWIZZLE_128B);
  if (e != cudaSuccess) return e;
  const int octets = (p.tokens + kOctet - 1) / kOctet;
  // As few clusters as take the longest no longer: each of them loads all the weights.
  const int turns = (octets + clusters - 1) / clusters, used = (octets + turns - 1) / turns;
  p.share = octets / used;
  p.rest = octets % used;
  cfg.gridDim = dim3(kRanks * used);
  return cudaLaunchKernelEx(&cfg, mhc<kAfter>, maps[0], maps[1], maps[2], p);
}

extern "C" int hr_mhc(const Params* p, int* most_clusters, void* stream) {
  cudaStream_t s = (cudaStream_t)stream;
  return p->y ? launch<true>(*p, s, most_clusters) : launch<false>(*p, s, most_clusters);
}
