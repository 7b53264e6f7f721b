// Decode's products of bfloat16 over int8 KV as products of 16-bit words, two to a 32-bit lane, with exact sums in 32 bits.
//
// A query is rounded to 15 bits of its largest element, and the weights of kTokens values, scales included, to
// 15 bits of the largest: a hundredth of what rounding to bfloat16 costs. Processors with VNNI compute the same in
// attention_bytes.h.

#pragma once

#include "attention_fetch.h"
#include "attention_math.h"

namespace {

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

TANDEM_INLINE I16 load_words(const int16_t* from) {
  I16 x;
  memcpy(&x, from, sizeof x);
  return x;
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
#elif defined(__aarch64__)
  const int16x8_t x = bit_cast<int16x8_t>(a), y = bit_cast<int16x8_t>(b);
  return sum + bit_cast<I32>(vpaddq_s32(vmull_s16(vget_low_s16(x), vget_low_s16(y)), vmull_high_s16(x, y)));
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

// Sums of products by pairs of words, where of every kRowWords the low pairs stand before the high ones: brings them
// into the order of dims.
inline void straighten_pairs(float* sums, int64_t width) {
#define TANDEM_FOUR(l) ((l) / 4)
#define TANDEM_STRAIGHT(l) (TANDEM_FOUR(l) % 2 * kLanes + TANDEM_FOUR(l) / 2 * 4 + (l) % 4)
#define TANDEM_STRAIGHT_AFTER(l) TANDEM_STRAIGHT((l) + kLanes)
  for (int64_t d = 0; d < width; d += kRowWords) {
    const F32 low = load(sums + d), high = load(sums + d + kLanes);
    store(sums + d, __builtin_shufflevector(low, high, TANDEM_EACH_LANE(TANDEM_STRAIGHT)));
    store(sums + d + kLanes, __builtin_shufflevector(low, high, TANDEM_EACH_LANE(TANDEM_STRAIGHT_AFTER)));
  }
}

// ---- rounding ----

// The largest magnitude of a query [dims], or kSmallestRow. Compared as integers, where what is no number is the largest:
// so it stays no number.
template <typename T>
TANDEM_INLINE float largest_of(const T* query, int64_t dims) {
  I32 top = bit_cast<I32>(splat(kSmallestRow));
  for (int64_t d = 0; d < dims; d += kLanes)
    top = max(top, bit_cast<I32>(load_n(query + d, int(least(kLanes, dims - d)))) & 0x7fffffff);
  return bit_cast<F32>(highest_of_groups<1>(top))[0];
}

// Multiplies weights [tokens, kGroup] by the scales; the largest of each head, likewise.
template <int kGroup>
TANDEM_INLINE F32 scale_and_find_largest(float* weights, const float* scales, int64_t count) {
  I32 top = bit_cast<I32>(splat(kSmallestRow));
  for (int64_t i = 0; i < count * kGroup; i += kLanes) {
    const F32 scaled = load(weights + i) * spread<kGroup>(load(scales + i / kGroup));
    store(weights + i, scaled);
    top = max(top, bit_cast<I32>(scaled));
  }
  return bit_cast<F32>(highest_of_groups<kGroup>(top));
}

// ---- products ----

// As `Floats`.
class Words {
  int16_t* queries_;  // [H, width]
  float* units_;      // [H + kLanes]: what one of a query's words stands for
  int32_t* pairs_;    // [kTokens / 2, kGroup]: words of two tokens each

 public:
  static constexpr int kWidth = kRowWords;

  void carve(Carver& carver, int64_t heads, int64_t width) {
    queries_ = carver.take<int16_t>(heads * width);
    units_ = carver.take<float>(heads + kLanes);
    pairs_ = carver.take<int32_t>(kTokens * 2 + kLanes);
  }

  template <typename T>
  void start_head(int64_t head, const T* query, int64_t dims, int64_t width) {
    const float largest = largest_of(query, dims);
    units_[head] = largest / kLargestWord;
    for (int64_t d = 0; d < width; d += kLanes) {
      const F32 some = load_n(query + d, int(most(0, least(kLanes, dims - d))));
      const I32 rounded = to_int(some * (kLargestWord / largest));
      for (int i = 0; i < kLanes; ++i) queries_[head * width + d + i] = int16_t(rounded[i]);
    }
  }

  template <int kGroup, int kHeads>
  void score(const Int8* const* rows, int64_t offset, const float* scales, int64_t head, int64_t count, int64_t dims,
             int64_t width, float* scores, Fetch<Int8>& fetch) const {
    constexpr int kAtOnce = kLanes / kGroup;
    F32 units = {};
    for (int i = 0; i < kLanes; ++i) units[i] = units_[head + least(i % kGroup, kHeads - 1)];
    for (int64_t t = 0; t < count; t += kAtOnce) {
      const Int8* keys[kAtOnce];
      for (int i = 0; i < kAtOnce; ++i) keys[i] = rows[t + i] + offset;
      fetch.beside(kAtOnce * dims);
      I32 sum[kLanes] = {};
      for (int64_t d = 0; d < dims; d += kRowWords) {
        const bool whole = d + kRowWords <= dims;
        I16 query[kHeads];
        for (int g = 0; g < kHeads; ++g) query[g] = load_words(queries_ + (head + g) * width + d);
#pragma GCC unroll 16
        for (int i = 0; i < kAtOnce; ++i) {
          const I16 key = whole ? load_words(keys[i] + d) : load_words_n(keys[i] + d, dims - d);
#pragma GCC unroll 4
          for (int g = 0; g < kHeads; ++g) sum[i * kGroup + g] = add_pairs(sum[i * kGroup + g], key, query[g]);
        }
      }
      store(scores + t * kGroup, to_float(sums(sum)) * units * spread<kGroup>(load(scales + t)));
    }
  }

  template <int kGroup, int kHeads>
  void add_values(const Int8* const* rows, int64_t offset, const float* scales, int64_t count, int64_t dims,
                  float* weights, const float* decay, float* sums, int64_t width, Fetch<Int8>& fetch) {
    constexpr int kSteps = kLanes == 16 ? 2 : 1;  // vectors of words at once
    float units[kLanes];
    round_weights<kGroup>(weights, scales, count, units);
    int64_t d = 0;
    for (; d + kSteps * kRowWords <= dims; d += kSteps * kRowWords)
      add_some_values<kGroup, kHeads, kSteps, false>(rows, offset + d, count, 0, decay, units, sums + d, width, fetch);
    for (; d < dims; d += kRowWords)
      if (d + kRowWords <= dims)
        add_some_values<kGroup, kHeads, 1, false>(rows, offset + d, count, 0, decay, units, sums + d, width, fetch);
      else
        add_some_values<kGroup, kHeads, 1, true>(rows, offset + d, count, dims - d, decay, units, sums + d, width,
                                                 fetch);
  }

  static void straighten(float* sums, int64_t width) { straighten_pairs(sums, width); }

 private:
  template <int kGroup, int kHeads, int kSteps, bool kTail>
  void add_some_values(const Int8* const* rows, int64_t offset, int64_t count, int64_t rest, const float* decay,
                       const float* units, float* sums, int64_t width, Fetch<Int8>& fetch) const {
    I32 low[kHeads][kSteps] = {}, high[kHeads][kSteps] = {};
    for (int64_t t = 0; t < count; t += 2) {
      fetch.beside(2 * kSteps * kRowWords);
      const Int8 *from = rows[t] + offset, *next = rows[t + 1] + offset;
      I16 first[kSteps], second[kSteps];
#pragma GCC unroll 2
      for (int j = 0; j < kSteps; ++j) {
        const I16 even = kTail ? load_words_n(from, rest) : load_words(from + j * kRowWords);
        const I16 odd = kTail ? load_words_n(next, rest) : load_words(next + j * kRowWords);
        first[j] = pair_low(even, odd), second[j] = pair_high(even, odd);
      }
#pragma GCC unroll 4
      for (int g = 0; g < kHeads; ++g) {
        const I16 pair = bit_cast<I16>(splat_int(pairs_[t / 2 * kGroup + g]));
#pragma GCC unroll 2
        for (int j = 0; j < kSteps; ++j) {
          low[g][j] = add_pairs(low[g][j], first[j], pair);
          high[g][j] = add_pairs(high[g][j], second[j], pair);
        }
      }
    }
#pragma GCC unroll 4
    for (int g = 0; g < kHeads; ++g)
#pragma GCC unroll 2
      for (int j = 0; j < kSteps; ++j) {
        float* to = sums + g * width + j * kRowWords;
        store(to, fma(to_float(low[g][j]), splat(units[g]), load(to) * decay[g]));
        store(to + kLanes, fma(to_float(high[g][j]), splat(units[g]), load(to + kLanes) * decay[g]));
      }
  }

  // Rounds weights times scales to words, pairs of tokens; units[g] becomes what one of head g's stands for.
  template <int kGroup>
  void round_weights(float* weights, const float* scales, int64_t count, float* units) {
#define TANDEM_EVEN(l) ((l) / kGroup * 2 * kGroup + (l) % kGroup)
#define TANDEM_ODD(l) (TANDEM_EVEN(l) + kGroup)
    const F32 largest = scale_and_find_largest<kGroup>(weights, scales, count), factor = kLargestWord / largest;
    const int64_t size = count * kGroup;
    store(units, largest * (1 / kLargestWord));
    for (int64_t i = 0; i < size; i += 2 * kLanes) {
      const I32 first = to_int(load(weights + i) * factor);
      const I32 second = i + kLanes < size ? to_int(load(weights + i + kLanes) * factor) : I32{};
      const I32 even = __builtin_shufflevector(first, second, TANDEM_EACH_LANE(TANDEM_EVEN));
      const I32 odd = __builtin_shufflevector(first, second, TANDEM_EACH_LANE(TANDEM_ODD));
      const I32 pairs = (even & 0xffff) | odd << 16;
      memcpy(pairs_ + i / 2, &pairs, sizeof pairs);
    }
  }
};

}  // namespace
