// Copies byte runs into or out of one contiguous payload and digests the payload in the same pass.
//
// Digest: the sum, modulo 2^64, over the payload's 8-byte little-endian words w[i] of mix(w[i] + (i + 1) * K); a tail
// shorter than a word is padded with zeros. mix is a bijection of 64-bit words and K is odd: each word counts with its
// position. A sum has no order, so it is the same digest that cuda/page_move.cu takes with thousands of threads.
//
// The digest is of the bytes stored, also when somebody writes to the source meanwhile: each word is loaded once, an
// empty asm makes the register's value opaque, and that one value is both stored and mixed. (Reading the destination
// back would cost a third of the speed and prove only that this core's stores reach its own cache.)
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "cache bytes and digests are little-endian"
#endif

#if defined(__AVX512DQ__) && defined(__AVX512VL__)
#define LANES 8
#define PIN(v) __asm__ volatile("" : "+v"(v))
#elif defined(__AVX2__)
#define LANES 4
#define PIN(v) __asm__ volatile("" : "+x"(v))
#elif defined(__SSE2__)
#define LANES 2
#define PIN(v) __asm__ volatile("" : "+x"(v))
#elif defined(__aarch64__)
#define LANES 2
#define PIN(v) __asm__ volatile("" : "+w"(v))
#else
#define LANES 1
#define PIN(v) __asm__ volatile("" : "+r"(v))
#endif

// Stores past the cache: what is scattered is read much later, and a line that is only overwritten need not be fetched.
#if LANES == 8
#define STREAM(to, v) _mm512_stream_si512((void *)(to), (__m512i)(v))
#elif LANES == 4
#define STREAM(to, v) _mm256_stream_si256((void *)(to), (__m256i)(v))
#elif LANES == 2 && defined(__SSE2__)
#define STREAM(to, v) _mm_stream_si128((void *)(to), (__m128i)(v))
#endif
#ifdef STREAM
#define STREAMED() _mm_sfence()
#else
#define STREAM(to, v) (*(loose_t *)(to) = (v))
#define STREAMED() ((void)0)
#endif

#define K 0x9e3779b97f4a7c15ull

#if LANES > 1
typedef uint64_t words_t __attribute__((vector_size(8 * LANES)));
#else
typedef uint64_t words_t;
#endif
typedef words_t loose_t __attribute__((aligned(1), may_alias));

static inline words_t mix(words_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

static inline uint64_t mix_word(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

// `to` and `from` do not overlap; `word` is the payload's word index of the first byte. `past` the cache where aligned.
static inline uint64_t copy_run(uint8_t *to, const uint8_t *from, uint64_t bytes, uint64_t word, int past) {
  uint64_t at = 0, sum = 0;
#if LANES > 1
  words_t sums = {0}, keys;
  for (int i = 0; i < LANES; ++i) keys[i] = (word + i + 1) * K;
  if (past && (uintptr_t)to % sizeof(words_t) == 0) {
    for (; at + sizeof(words_t) <= bytes; at += sizeof(words_t)) {
      words_t v = *(const loose_t *)(from + at);
      PIN(v);
      STREAM(to + at, v);
      sums += mix(v + keys);
      keys += LANES * K;
    }
  }
  for (; at + sizeof(words_t) <= bytes; at += sizeof(words_t)) {
    words_t v = *(const loose_t *)(from + at);
    PIN(v);
    *(loose_t *)(to + at) = v;
    sums += mix(v + keys);
    keys += LANES * K;
  }
  for (int i = 0; i < LANES; ++i) sum += sums[i];
#endif
  for (; at < bytes; at += 8) {
    uint64_t v = 0;
    const uint64_t n = bytes - at < 8 ? bytes - at : 8;
    memcpy(&v, from + at, n);
    __asm__ volatile("" : "+r"(v));
    memcpy(to + at, &v, n);
    sum += mix_word(v + (word + at / 8 + 1) * K);
  }
  return sum;
}

// Runs follow one another in the payload. All lengths but the last are multiples of 8.
uint64_t hr_gather(const int64_t *addresses, const int64_t *lengths, int64_t n, uint8_t *payload) {
  uint64_t at = 0, sum = 0;
  for (int64_t i = 0; i < n; ++i) {
    sum += copy_run(payload + at, (const uint8_t *)(uintptr_t)addresses[i], (uint64_t)lengths[i], at / 8, 0);
    at += (uint64_t)lengths[i];
  }
  return sum;
}

uint64_t hr_scatter(const uint8_t *payload, const int64_t *addresses, const int64_t *lengths, int64_t n) {
  uint64_t at = 0, sum = 0;
  for (int64_t i = 0; i < n; ++i) {
    sum += copy_run((uint8_t *)(uintptr_t)addresses[i], payload + at, (uint64_t)lengths[i], at / 8, 1);
    at += (uint64_t)lengths[i];
  }
  STREAMED();
  return sum;
}
