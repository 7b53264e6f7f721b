// xxh3-64 with seed 0 of rows of bytes, and rows copied while they are hashed: each byte comes from memory once.
//
// Follows the XXH3 specification (https://github.com/Cyan4973/xxHash) for inputs of more than 240 bytes: eight 64-bit
// sums over stripes of 64 bytes, scrambled after each 16 stripes. Shorter rows have other formulas and are the
// caller's. Little-endian machines only, as all of this service.

#include <stdint.h>
#include <string.h>

#include "simd.h"

namespace {

constexpr int64_t kStripe = 64;
constexpr int64_t kStripes = 16;  // until the sums are scrambled
constexpr int64_t kStreamBytes = 256 * 1024;  // from here on a copy goes past the caches
constexpr uint64_t kPrime32[] = {0x9E3779B1u, 0x85EBCA77u, 0xC2B2AE3Du};
constexpr uint64_t kPrime64[] = {0x9E3779B185EBCA87u, 0xC2B2AE3D27D4EB4Fu, 0x165667B19E3779F9u, 0x85EBCA77C2B2AE63u,
                                 0x27D4EB2F165667C5u};

alignas(64) constexpr uint8_t kSecret[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e};
constexpr int64_t kScramble = sizeof kSecret - kStripe;  // where the secret for scrambling begins
constexpr int64_t kLast = kScramble - 7;                 // for the last stripe
constexpr int64_t kMerge = 11;                           // for the sum of the sums

typedef uint64_t Words __attribute__((vector_size(TANDEM_LANES * 4)));
constexpr int kParts = kStripe / sizeof(Words);

// A stripe, or the sums over stripes: eight words in as many registers as that takes.
struct Stripe {
  Words parts[kParts];
};

TANDEM_INLINE Words load_words(const uint8_t* from) {
  Words words;
  memcpy(&words, from, sizeof words);
  return words;
}

// Each pair of words, the other way round: lanes of half a word.
#define TANDEM_OTHER_WORD(l) ((l) ^ 2)
TANDEM_INLINE Words swap_pairs(Words x) {
  const U32 halves = (U32)x;
  return (Words)__builtin_shufflevector(halves, halves, TANDEM_EACH_LANE(TANDEM_OTHER_WORD));
}

// The product of each word's lower and upper half.
TANDEM_INLINE Words fold_product(Words x) {
#if defined(__AVX512F__)
  return (Words)_mm512_mul_epu32((__m512i)x, (__m512i)(x >> 32));
#elif defined(__AVX2__)
  return (Words)_mm256_mul_epu32((__m256i)x, (__m256i)(x >> 32));
#elif defined(__x86_64__)
  return (Words)_mm_mul_epu32((__m128i)x, (__m128i)(x >> 32));
#elif defined(__aarch64__)
  return (Words)vmull_u32(vmovn_u64((uint64x2_t)x), vshrn_n_u64((uint64x2_t)x, 32));
#else
  return (x & 0xffffffffu) * (x >> 32);
#endif
}

// What becomes of a stripe that was read. kStream: past the caches, to an address that is a multiple of 64; a copy then
// takes two thirds of the memory traffic, for the line that it overwrites is not read first.
enum class Copy { kNone, kPlain, kStream };

TANDEM_INLINE void store_past_caches(uint8_t* to, Words words) {
#if defined(__AVX512F__)
  _mm512_stream_si512((__m512i*)to, (__m512i)words);
#elif defined(__AVX2__)
  _mm256_stream_si256((__m256i*)to, (__m256i)words);
#elif defined(__x86_64__)
  _mm_stream_si128((__m128i*)to, (__m128i)words);
#else
  memcpy(to, &words, sizeof words);
#endif
}

// Adds the stripe at `row` to `sums`; but for kNone it lies at `copy` afterwards.
template <Copy kCopy>
TANDEM_INLINE void add_stripe(Stripe& sums, const uint8_t* row, const uint8_t* secret, uint8_t* copy) {
  for (int i = 0; i < kParts; ++i) {
    const int at = i * int(sizeof(Words));
    const Words data = load_words(row + at);
    if (kCopy == Copy::kPlain) memcpy(copy + at, &data, sizeof data);
    if (kCopy == Copy::kStream) store_past_caches(copy + at, data);
    sums.parts[i] += swap_pairs(data) + fold_product(data ^ load_words(secret + at));
  }
}

TANDEM_INLINE void scramble(Stripe& sums) {
  for (int i = 0; i < kParts; ++i) {
    const Words sum = sums.parts[i];
    sums.parts[i] = (sum ^ sum >> 47 ^ load_words(kSecret + kScramble + i * sizeof(Words))) * kPrime32[0];
  }
}

TANDEM_INLINE uint64_t read64(const uint8_t* from) {
  uint64_t value;
  memcpy(&value, from, sizeof value);
  return value;
}

TANDEM_INLINE uint64_t merged(const Stripe& stripe, int64_t size) {
  uint64_t sums[8];
  memcpy(sums, &stripe, sizeof sums);
  uint64_t hash = uint64_t(size) * kPrime64[0];
  for (int i = 0; i < 8; i += 2) {
    const unsigned __int128 product = (unsigned __int128)(sums[i] ^ read64(kSecret + kMerge + 8 * i)) *
                                      (sums[i + 1] ^ read64(kSecret + kMerge + 8 * i + 8));
    hash += uint64_t(product) ^ uint64_t(product >> 64);
  }
  hash = (hash ^ hash >> 37) * 0x165667919E3779F9u;
  return hash ^ hash >> 32;
}

// The digest of row[0 … size), size > 240; but for kNone the row lies at `copy` afterwards.
template <Copy kCopy>
uint64_t digest(const uint8_t* row, int64_t size, uint8_t* copy) {
  const uint64_t start[8] = {kPrime32[2], kPrime64[0], kPrime64[1], kPrime64[2],
                             kPrime64[3], kPrime32[1], kPrime64[4], kPrime32[0]};
  Stripe sums;
  memcpy(&sums, start, sizeof sums);
  const int64_t stripes = (size - 1) / kStripe;  // the last bytes have a stripe of their own
  for (int64_t first = 0; first < stripes; first += kStripes) {
    const int64_t count = stripes - first < kStripes ? stripes - first : kStripes;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t at = (first + i) * kStripe;
      add_stripe<kCopy>(sums, row + at, kSecret + 8 * i, copy + at);
    }
    if (count == kStripes) scramble(sums);
  }
  constexpr Copy kRest = kCopy == Copy::kStream ? Copy::kPlain : kCopy;
  add_stripe<kRest>(sums, row + size - kStripe, kSecret + kLast, copy + size - kStripe);
  return merged(sums, size);
}

}  // namespace

// rows [*, size] bytes, ids [count] -> digests [count]; size > 240. On the calling thread alone.
TANDEM_EXPORT(void, tandem_row_digests)
(const uint8_t* rows, const int64_t* ids, int64_t count, int64_t size, uint64_t* digests) {
  uint8_t* const nowhere = nullptr;
  for (int64_t i = 0; i < count; ++i) digests[i] = digest<Copy::kNone>(rows + ids[i] * size, size, nowhere);
}

// Also copies each row into the row of targets [*, size] that target_ids [count] names.
TANDEM_EXPORT(void, tandem_copy_rows)
(const uint8_t* rows, const int64_t* ids, uint8_t* targets, const int64_t* target_ids, int64_t count, int64_t size,
 uint64_t* digests) {
  const bool streams = count * size >= kStreamBytes && size % kStripe == 0 && uintptr_t(targets) % kStripe == 0;
  for (int64_t i = 0; i < count; ++i) {
    uint8_t* const copy = targets + target_ids[i] * size;
    digests[i] = streams ? digest<Copy::kStream>(rows + ids[i] * size, size, copy)
                         : digest<Copy::kPlain>(rows + ids[i] * size, size, copy);
  }
#if defined(__x86_64__)
  if (streams) _mm_sfence();  // before anybody is told that the rows are there
#endif
}
