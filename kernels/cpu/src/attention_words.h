// Decode's products over int8 KV as products of 16-bit words, two to a 32-bit lane, with exact sums in 32 bits.
//
// A query is rounded to 15 bits of its largest element, and the weights of kTokens values, scales included, to
// 15 bits of the largest: a hundredth of what rounding to bfloat16 costs. Float32 computes without this.

#pragma once

#include "attention_fetch.h"
#include "attention_math.h"

namespace {

template <typename T, typename K>
constexpr bool kHasWords = false;
template <>
constexpr bool kHasWords<Bf16, Int8> = true;

typedef int16_t I16 __attribute__((vector_size(TANDEM_LANES * 4)));

constexpr int kRowWords = 2 * kLanes;  // of a vector
constexpr float kLargestWord = 16383;  // sums of up to 1032 dims, or of as many tokens, stay below 2^31

// ---- vectors of words ----

TANDEM_INLINE I16 load_words(const Int8* from) {
#if defined(__AVX512BW__)
  return bit_cast<I16>(_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
#elif defined(__AVX2__)
  return bit_cast<I16>(_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#elif defined(__SSE2__)
  const __m128i x = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
  return bit_cast<I16>(_mm_srai_epi16(_mm_unpacklo_epi8(x, x), 8));
#else
  int8_t bytes __attribute__((vector_size(kRowWords)));
  memcpy(&bytes, from, sizeof bytes);
  return __builtin_convertvector(bytes, I16);
#endif
}

TANDEM_INLINE I16 load_words_n(const Int8* from, int64_t n) {
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  return bit_cast<I16>(_mm512_cvtepi8_epi16(_mm256_maskz_loadu_epi8(__mmask32((uint64_t{1} << n) - 1), from)));
#else
  Int8 bytes[kRowWords] = {};
  memcpy(bytes, from, size_t(n));
  return load_words(bytes);
#endif
}

// sum + a * b of neighbouring words.
TANDEM_INLINE I32 add_pairs(I32 sum, I16 a, I16 b) {
#if defined(__AVX512VNNI__)
  return bit_cast<I32>(_mm512_dpwssd_epi32(bit_cast<__m512i>(sum), bit_cast<__m512i>(a), bit_cast<__m512i>(b)));
#elif defined(__AVX512BW__)
  return sum + bit_cast<I32>(_mm512_madd_epi16(bit_cast<__m512i>(a), bit_cast<__m512i>(b)));
#elif defined(__AVX2__)
  return sum + bit_cast<I32>(_mm256_madd_epi16(bit_cast<__m256i>(a), bit_cast<__m256i>(b)));
#elif defined(__SSE2__)
  return sum + bit_cast<I32>(_mm_madd_epi16(bit_cast<__m128i>(a), bit_cast<__m128i>(b)));
#else
  const I32 x = bit_cast<I32>(a), y = bit_cast<I32>(b);
  return sum + (x << 16 >> 16) * (y << 16 >> 16) + (x >> 16) * (y >> 16);
#endif
}

// Words of a and of b in turn: of the first, or the second, four of every eight.
TANDEM_INLINE I16 pair_low(I16 a, I16 b) {
#if defined(__AVX512BW__)
  return bit_cast<I16>(_mm512_unpacklo_epi16(bit_cast<__m512i>(a), bit_cast<__m512i>(b)));
#elif defined(__AVX2__)
  return bit_cast<I16>(_mm256_unpacklo_epi16(bit_cast<__m256i>(a), bit_cast<__m256i>(b)));
#else
  return __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
#endif
}
TANDEM_INLINE I16 pair_high(I16 a, I16 b) {
#if defined(__AVX512BW__)
  return bit_cast<I16>(_mm512_unpackhi_epi16(bit_cast<__m512i>(a), bit_cast<__m512i>(b)));
#elif defined(__AVX2__)
  return bit_cast<I16>(_mm256_unpackhi_epi16(bit_cast<__m256i>(a), bit_cast<__m256i>(b)));
#else
  return __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
#endif
}

// ---- products ----

class Words {
  int16_t* queries_;  // [H, width]
  float* units_;      // [H + kLanes]: what one of a query's words stands for
  int32_t* weights_;  // [tokens, kGroup], up to kLanes of them more
  int32_t* pairs_;    // [tokens / 2, kGroup]: words of two tokens each

 public:
  void carve(Carver& carver, int64_t heads, int64_t width, int64_t tokens) {
    queries_ = carver.take<int16_t>(heads * width);
    units_ = carver.take<float>(heads + kLanes);
    weights_ = carver.take<int32_t>(heads ? tokens * 4 + 2 * kLanes : 0);
    pairs_ = carver.take<int32_t>(heads ? tokens * 2 : 0);
  }

  // Rounds the query [dims] of a head, zeros up to `width`.
  template <typename T>
  void start_head(int64_t head, const T* query, int64_t dims, int64_t width) {
    I32 top = bit_cast<I32>(splat(kSmallestRow));
    for (int64_t d = 0; d < dims; d += kLanes)
      top = max(top, bit_cast<I32>(load_n(query + d, int(least(kLanes, dims - d)))) & 0x7fffffff);
    const float largest = bit_cast<F32>(highest_of_groups<1>(top))[0];
    units_[head] = largest / kLargestWord;
    int16_t* to = queries_ + head * width;
    for (int64_t d = 0; d < width; d += kLanes) {
      const int n = int(most(0, least(kLanes, dims - d)));
      const I32 rounded = to_int(load_n(query + d, n) * (kLargestWord / largest));
      for (int i = 0; i < kLanes; ++i) to[d + i] = int16_t(rounded[i]);
    }
  }

  // Scores [tokens, kGroup] of kHeads heads from `head` on, yet to be multiplied by the keys' scales.
  template <int kGroup, int kHeads>
  void score(const Int8* const* rows, int64_t offset, int64_t head, int64_t count, int64_t dims, int64_t width,
             float* scores, Fetch& fetch) const {
    constexpr int kAtOnce = kLanes / kGroup;
    F32 units = {};
    for (int i = 0; i < kLanes; ++i) units[i] = units_[head + least(i % kGroup, kHeads - 1)];
    for (int64_t t = 0; t < count; t += kAtOnce) {
      const Int8* keys[kAtOnce];
      for (int i = 0; i < kAtOnce; ++i) keys[i] = rows[least(t + i, count - 1)] + offset;
      fetch.some((kAtOnce + 3) / 4);
      I32 sum[kLanes] = {};
      for (int64_t d = 0; d < dims; d += kRowWords) {
        const bool whole = d + kRowWords <= dims;
        I16 query[kHeads];
        for (int g = 0; g < kHeads; ++g) memcpy(query + g, queries_ + (head + g) * width + d, sizeof(I16));
#pragma GCC unroll 16
        for (int i = 0; i < kAtOnce; ++i) {
          const I16 key = whole ? load_words(keys[i] + d) : load_words_n(keys[i] + d, dims - d);
#pragma GCC unroll 4
          for (int g = 0; g < kHeads; ++g) sum[i * kGroup + g] = add_pairs(sum[i * kGroup + g], key, query[g]);
        }
      }
      store(scores + t * kGroup, to_float(sums(sum)) * units);
    }
  }

  // sums [kHeads, width] = sums * decay + weights [tokens, kGroup] times values; see `straighten` for their order.
  template <int kGroup, int kHeads>
  void add_values(const Int8* const* rows, int64_t offset, int64_t count, int64_t dims, const float* weights,
                  const float* decay, float* sums, int64_t width, Fetch& fetch) {
    float units[kLanes];
    round_weights<kGroup>(weights, count, units);
    for (int64_t d = 0; d < dims; d += kRowWords) {
      const bool whole = d + kRowWords <= dims;
      I32 low[kHeads] = {}, high[kHeads] = {};
      for (int64_t t = 0; t < count; t += 2) {
        fetch.some(t >> 1 & 1);
        const Int8 *from = rows[t] + offset + d, *next = rows[least(t + 1, count - 1)] + offset + d;
        const I16 even = whole ? load_words(from) : load_words_n(from, dims - d);
        const I16 odd = whole ? load_words(next) : load_words_n(next, dims - d);
        const I16 first = pair_low(even, odd), second = pair_high(even, odd);
#pragma GCC unroll 4
        for (int g = 0; g < kHeads; ++g) {
          const I16 pair = bit_cast<I16>(splat_int(pairs_[t / 2 * kGroup + g]));
          low[g] = add_pairs(low[g], first, pair);
          high[g] = add_pairs(high[g], second, pair);
        }
      }
      for (int g = 0; g < kHeads; ++g) {
        float* to = sums + g * width + d;
        store(to, fma(to_float(low[g]), splat(units[g]), load(to) * decay[g]));
        store(to + kLanes, fma(to_float(high[g]), splat(units[g]), load(to + kLanes) * decay[g]));
      }
    }
  }

  // Of every kRowWords sums the low pairs stand before the high ones: brings them into the order of dims.
  static void straighten(float* sums, int64_t width) {
#define TANDEM_FOUR(l) ((l) / 4)
#define TANDEM_STRAIGHT(l) (TANDEM_FOUR(l) % 2 * kLanes + TANDEM_FOUR(l) / 2 * 4 + (l) % 4)
#define TANDEM_STRAIGHT_AFTER(l) TANDEM_STRAIGHT((l) + kLanes)
    for (int64_t d = 0; d < width; d += kRowWords) {
      const F32 low = load(sums + d), high = load(sums + d + kLanes);
      store(sums + d, __builtin_shufflevector(low, high, TANDEM_EACH_LANE(TANDEM_STRAIGHT)));
      store(sums + d + kLanes, __builtin_shufflevector(low, high, TANDEM_EACH_LANE(TANDEM_STRAIGHT_AFTER)));
    }
  }

 private:
  // Rounds weights to words, pairs of tokens; units[g] becomes what one of head g's stands for. Compared as
  // integers, where what is no number is the largest: so it stays no number.
  template <int kGroup>
  void round_weights(const float* weights, int64_t count, float* units) {
    I32 top = bit_cast<I32>(splat(kSmallestRow));
    for (int64_t i = 0; i < count * kGroup; i += kLanes) top = max(top, bit_cast<I32>(load(weights + i)));
    const F32 largest = bit_cast<F32>(highest_of_groups<kGroup>(top)), factor = kLargestWord / largest;
    store(units, largest * (1 / kLargestWord));
    for (int64_t i = 0; i < count * kGroup; i += kLanes) {
      const I32 rounded = to_int(load(weights + i) * factor);
      memcpy(weights_ + i, &rounded, sizeof rounded);
    }
    if (count % 2) memset(weights_ + count * kGroup, 0, kGroup * sizeof(int32_t));
    for (int64_t t = 0; t < count; t += 2)
      for (int g = 0; g < kGroup; ++g) {
        const int32_t* pair = weights_ + t * kGroup + g;
        pairs_[t / 2 * kGroup + g] = int32_t(uint32_t(pair[0]) & 0xffff) | int32_t(uint32_t(pair[kGroup]) << 16);
      }
  }
};

}  // namespace
