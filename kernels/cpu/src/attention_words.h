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

// ---- products ----

class Words {
  int16_t* queries_;  // without VNNI [H, width]
  float* units_;      // [H + kLanes]: what one of a query's words stands for
  uint8_t* bytes_;    // with VNNI [H, 2, width]: bits of a query's words from 7 on, and below, of words made positive
  int32_t* pairs_;    // [tokens / 2, kGroup]: words of two tokens each
#if defined(__AVX512VNNI__)
  static constexpr bool kHasBytes = true;
#else
  static constexpr bool kHasBytes = false;
#endif
  static constexpr int kBytes = 64;  // of a vector

 public:
  // What rows of sums and queries are padded to a multiple of.
  static constexpr int kWidth = kHasBytes ? kBytes : kRowWords;

  void carve(Carver& carver, int64_t heads, int64_t width, int64_t tokens) {
    queries_ = carver.take<int16_t>(kHasBytes ? 0 : heads * width);
    units_ = carver.take<float>(heads + kLanes);
    bytes_ = carver.take<uint8_t>(kHasBytes ? heads * 2 * width : 0);
    pairs_ = carver.take<int32_t>(heads ? tokens * 2 + kLanes : 0);
  }

  // Rounds the query [dims] of a head, zeros up to `width`.
  template <typename T>
  void start_head(int64_t head, const T* query, int64_t dims, int64_t width) {
    I32 top = bit_cast<I32>(splat(kSmallestRow));
    for (int64_t d = 0; d < dims; d += kLanes)
      top = max(top, bit_cast<I32>(load_n(query + d, int(least(kLanes, dims - d)))) & 0x7fffffff);
    const float largest = bit_cast<F32>(highest_of_groups<1>(top))[0];
    units_[head] = largest / kLargestWord;
    for (int64_t d = 0; d < width; d += kLanes) {
      const int n = int(most(0, least(kLanes, dims - d)));
      const I32 rounded = to_int(load_n(query + d, n) * (kLargestWord / largest));
      if constexpr (kHasBytes) {
        store_bytes_n(bytes_ + 2 * head * width + d, (rounded + kOffset) >> 7, kLanes);
        store_bytes_n(bytes_ + (2 * head + 1) * width + d, (rounded + kOffset) & 127, kLanes);
      } else {
        for (int i = 0; i < kLanes; ++i) queries_[head * width + d + i] = int16_t(rounded[i]);
      }
    }
  }

  // Scores [tokens, kGroup] of kHeads heads from `head` on; `scales` of the keys.
  template <int kGroup, int kHeads>
  void score(const Int8* const* rows, int64_t offset, const float* scales, int64_t head, int64_t count, int64_t dims,
             int64_t width, float* scores, Fetch& fetch) const {
#if defined(__AVX512VNNI__)
    for (int64_t t = 0; t < count; t += kLanes, scores += kLanes * kGroup)
      score_bytes<kGroup, kHeads>(rows + t, least(kLanes, count - t), offset, load(scales + t), head, dims, width,
                                  scores, fetch);
#else
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
#endif
  }

  // sums [kHeads, width] = sums * decay + weights [tokens, kGroup] times values; see `straighten` for their order.
  // `weights` are multiplied by the values' scales on the way.
  template <int kGroup, int kHeads>
  void add_values(const Int8* const* rows, int64_t offset, const float* scales, int64_t count, int64_t dims,
                  float* weights, const float* decay, float* sums, int64_t width, Fetch& fetch) {
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
  static constexpr int kOffset = 16384;

#if defined(__AVX512VNNI__)
  // 16 tokens, one to a lane: their keys turned over, four dims to a lane, times the queries' bytes. Sums may
  // pass 2^31 on the way: what is left of them in the end does not.
  template <int kGroup, int kHeads>
  TANDEM_INLINE void score_bytes(const Int8* const* rows, int64_t count, int64_t offset, F32 scales, int64_t head,
                                 int64_t dims, int64_t width, float* scores, Fetch& fetch) const {
    __m512i upper[kHeads], lower[kHeads], keys_sum = _mm512_setzero_si512();
    for (int g = 0; g < kHeads; ++g) upper[g] = lower[g] = _mm512_setzero_si512();
    const __m512i ones = _mm512_set1_epi8(1);
    for (int64_t d = 0; d < dims; d += kBytes) {
      const __mmask64 present = dims - d < kBytes ? (__mmask64{1} << (dims - d)) - 1 : ~__mmask64{0};
      F32 square[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i)
        square[i] = bit_cast<F32>(_mm512_maskz_loadu_epi8(present, rows[least(i, count - 1)] + offset + d));
      fetch.some(4);
      transpose(square);
      const uint8_t* queries = bytes_ + 2 * head * width + d;
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
        const __m512i keys = bit_cast<__m512i>(square[i]);
        keys_sum = _mm512_dpbusd_epi32(keys_sum, ones, keys);
#pragma GCC unroll 4
        for (int g = 0; g < kHeads; ++g) {
          int32_t four[2];
          memcpy(four, queries + 2 * g * width + 4 * i, 4);
          memcpy(four + 1, queries + (2 * g + 1) * width + 4 * i, 4);
          upper[g] = _mm512_dpbusd_epi32(upper[g], _mm512_set1_epi32(four[0]), keys);
          lower[g] = _mm512_dpbusd_epi32(lower[g], _mm512_set1_epi32(four[1]), keys);
        }
      }
    }
    F32 score[4] = {};
    for (int g = 0; g < kHeads; ++g) {
      const I32 sum = (bit_cast<I32>(upper[g]) << 7) + bit_cast<I32>(lower[g]) - (bit_cast<I32>(keys_sum) << 14);
      score[g] = to_float(sum) * units_[head + g] * scales;
    }
    if constexpr (kGroup == 1) return store(scores, score[0]);
    if constexpr (kGroup == 2) return store_in_turn(scores, score[0], score[1]);
    float evens[2 * kLanes], odds[2 * kLanes];
    store_in_turn(evens, score[0], score[2]);
    store_in_turn(odds, score[1], score[3]);
    store_in_turn(scores, load(evens), load(odds));
    if (count > kLanes / 2) store_in_turn(scores + 2 * kLanes, load(evens + kLanes), load(odds + kLanes));
  }

  static TANDEM_INLINE void store_in_turn(float* to, F32 a, F32 b) {
#define TANDEM_IN_TURN(l) ((l) % 2 * kLanes + (l) / 2)
#define TANDEM_IN_TURN_AFTER(l) TANDEM_IN_TURN((l) + kLanes)
    store(to, __builtin_shufflevector(a, b, TANDEM_EACH_LANE(TANDEM_IN_TURN)));
    store(to + kLanes, __builtin_shufflevector(a, b, TANDEM_EACH_LANE(TANDEM_IN_TURN_AFTER)));
  }
#endif

  template <int kGroup, int kHeads, int kSteps, bool kTail>
  void add_some_values(const Int8* const* rows, int64_t offset, int64_t count, int64_t rest, const float* decay,
                       const float* units, float* sums, int64_t width, Fetch& fetch) const {
    I32 low[kHeads][kSteps] = {}, high[kHeads][kSteps] = {};
    for (int64_t t = 0; t < count; t += 2) {
      fetch.some(t >> 1 & 1);
      const Int8 *from = rows[t] + offset, *next = rows[least(t + 1, count - 1)] + offset;
      I16 first[kSteps], second[kSteps];
      for (int j = 0; j < kSteps; ++j) {
        const I16 even = kTail ? load_words_n(from, rest) : load_words(from + j * kRowWords);
        const I16 odd = kTail ? load_words_n(next, rest) : load_words(next + j * kRowWords);
        first[j] = pair_low(even, odd), second[j] = pair_high(even, odd);
      }
#pragma GCC unroll 4
      for (int g = 0; g < kHeads; ++g) {
        const I16 pair = bit_cast<I16>(splat_int(pairs_[t / 2 * kGroup + g]));
        for (int j = 0; j < kSteps; ++j) {
          low[g][j] = add_pairs(low[g][j], first[j], pair);
          high[g][j] = add_pairs(high[g][j], second[j], pair);
        }
      }
    }
    for (int g = 0; g < kHeads; ++g)
      for (int j = 0; j < kSteps; ++j) {
        float* to = sums + g * width + j * kRowWords;
        store(to, fma(to_float(low[g][j]), splat(units[g]), load(to) * decay[g]));
        store(to + kLanes, fma(to_float(high[g][j]), splat(units[g]), load(to + kLanes) * decay[g]));
      }
  }

  // Rounds weights times scales to words, pairs of tokens; units[g] becomes what one of head g's stands for. Compared
  // as integers, where what is no number is the largest: so it stays no number.
  template <int kGroup>
  void round_weights(float* weights, const float* scales, int64_t count, float* units) {
#define TANDEM_EVEN(l) ((l) / kGroup * 2 * kGroup + (l) % kGroup)
#define TANDEM_ODD(l) (TANDEM_EVEN(l) + kGroup)
    I32 top = bit_cast<I32>(splat(kSmallestRow));
    const int64_t size = count * kGroup;
    for (int64_t i = 0; i < size; i += kLanes) {
      const F32 scaled = load(weights + i) * spread<kGroup>(load(scales + i / kGroup));
      store(weights + i, scaled);
      top = max(top, bit_cast<I32>(scaled));
    }
    const F32 largest = bit_cast<F32>(highest_of_groups<kGroup>(top)), factor = kLargestWord / largest;
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
