// Decode's products of bfloat16 over int8 KV where the processor has VNNI: of bytes, four to a 32-bit lane.
//
// Words as in attention_words.h, in two parts of a byte each: so keys and values are multiplied as they lie, and sums
// are the same.

#pragma once

#include "attention_words.h"

namespace {

#if defined(__AVX512VNNI__)

// As `Floats`.
class Bytes {
  int8_t* queries_;  // [H, width / 4, 2, 4]: bits of the words from 7 on, and below
  float* units_;     // [H + kLanes]: what one of a query's words stands for
  int32_t* excess_;  // [H]: of scores of keys that are made positive
  int32_t* fours_;   // [2, kFours, kGroup]: of weights of four tokens, bits of the words from 7 on, and below
  static constexpr int kRow = 64;  // bytes of a vector
  static constexpr int64_t kFours = kTokens / 4;

 public:
  static constexpr int kWidth = kRow;

  void carve(Carver& carver, int64_t heads, int64_t width) {
    queries_ = carver.take<int8_t>(heads * 2 * width);
    units_ = carver.take<float>(heads + kLanes);
    excess_ = carver.take<int32_t>(heads);
    fours_ = carver.take<int32_t>(2 * kFours * 4);
  }

  template <typename T>
  void start_head(int64_t head, const T* query, int64_t dims, int64_t width) {
    const float largest = largest_of(query, dims);
    units_[head] = largest / kLargestWord;
    uint32_t total = 0;
    for (int64_t d = 0; d < width; d += kLanes) {
      const F32 some = load_n(query + d, int(most(0, least(kLanes, dims - d))));
      const I32 rounded = to_int(some * (kLargestWord / largest));
      int8_t upper[kLanes], lower[kLanes], *to = queries_ + 2 * (head * width + d);
      store_bytes_n(upper, rounded >> 7, kLanes);
      store_bytes_n(lower, rounded & 127, kLanes);
      for (int i = 0; i < kLanes; i += 4) {
        memcpy(to + 2 * i, upper + i, 4);
        memcpy(to + 2 * i + 4, lower + i, 4);
      }
      for (int i = 0; i < kLanes; ++i) total += uint32_t(rounded[i]);
    }
    excess_[head] = int32_t(total << 7);
  }

  template <int kGroup, int kHeads>
  void score(const Int8* const* rows, int64_t offset, const float* scales, int64_t head, int64_t count, int64_t dims,
             int64_t width, float* scores, Fetch<Int8>& fetch) const {
    for (int64_t t = 0; t < count; t += kLanes, scores += kLanes * kGroup)
      score_some<kGroup, kHeads>(rows + t, least(kLanes, count - t), offset, load(scales + t), head, dims, width, scores,
                                 fetch);
  }

  template <int kGroup, int kHeads>
  void add_values(const Int8* const* rows, int64_t offset, const float* scales, int64_t count, int64_t dims,
                  float* weights, const float* decay, float* sums, int64_t width, Fetch<Int8>& fetch) {
    float units[kLanes];
    round_weights<kGroup>(weights, scales, count, units);
    for (int64_t d = 0; d < dims; d += kRow) {
      const int64_t rest = least(kRow, dims - d);
      add_some_values<kGroup, kHeads, false>(rows, offset + d, count, rest, decay, units, sums + d, width, fetch);
      add_some_values<kGroup, kHeads, true>(rows, offset + d, count, rest, decay, units, sums + d, width, fetch);
    }
  }

  // A vector has four dims of every sixteen, of 64 sums.
  static void straighten(float* sums, int64_t width) {
    for (int64_t d = 0; d < width; d += kRow) {
      float fours[kRow];
      memcpy(fours, sums + d, sizeof fours);
      for (int i = 0; i < kRow; i += 4) memcpy(sums + d + i, fours + i / 4 % 4 * kLanes + i / 16 * 4, 16);
    }
  }

 private:
  // 16 tokens, one to a lane: their keys plus 128, turned over, four dims to a lane, times the queries' bytes. Sums may
  // pass 2^31 on the way: what is left of them in the end does not.
  template <int kGroup, int kHeads>
  TANDEM_INLINE void score_some(const Int8* const* rows, int64_t count, int64_t offset, F32 scales, int64_t head,
                                int64_t dims, int64_t width, float* scores, Fetch<Int8>& fetch) const {
    __m512i upper[kHeads], lower[kHeads];
#pragma GCC unroll 4
    for (int g = 0; g < kHeads; ++g) upper[g] = lower[g] = _mm512_setzero_si512();
    const __m512i sign = _mm512_set1_epi8(-128);
    for (int64_t d = 0; d < dims; d += kRow) {
      const __mmask64 present = dims - d < kRow ? (__mmask64{1} << (dims - d)) - 1 : ~__mmask64{0};
      F32 square[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i)
        square[i] = bit_cast<F32>(_mm512_maskz_loadu_epi8(present, rows[i] + offset + d));
      transpose(square);
      const int8_t* queries[kHeads];
#pragma GCC unroll 4
      for (int g = 0; g < kHeads; ++g) queries[g] = queries_ + 2 * ((head + g) * width + d);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
        const __m512i keys = _mm512_xor_si512(bit_cast<__m512i>(square[i]), sign);
        if (i % 4 == 0) fetch.beside(4 * kRow);
#pragma GCC unroll 4
        for (int g = 0; g < kHeads; ++g) {
          int32_t four[2];
          memcpy(four, queries[g] + 8 * i, 4);
          memcpy(four + 1, queries[g] + 8 * i + 4, 4);
          upper[g] = _mm512_dpbusd_epi32(upper[g], keys, _mm512_set1_epi32(four[0]));
          lower[g] = _mm512_dpbusd_epi32(lower[g], keys, _mm512_set1_epi32(four[1]));
        }
      }
    }
    F32 score[4] = {};
#pragma GCC unroll 4
    for (int g = 0; g < kHeads; ++g) {
      const I32 sum = (bit_cast<I32>(upper[g]) << 7) + bit_cast<I32>(lower[g]) - excess_[head + g];
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

  // Of up to 64 dims from `offset` on, the first or the last eight of every sixteen: four tokens to a lane.
  template <int kGroup, int kHeads, bool kLast>
  TANDEM_INLINE void add_some_values(const Int8* const* rows, int64_t offset, int64_t count, int64_t dims,
                                     const float* decay, const float* units, float* sums, int64_t width,
                                     Fetch<Int8>& fetch) const {
    const __mmask64 present = dims < kRow ? (__mmask64{1} << dims) - 1 : ~__mmask64{0};
    const auto zip = [](__m512i a, __m512i b) { return kLast ? _mm512_unpackhi_epi8(a, b) : _mm512_unpacklo_epi8(a, b); };
    __m512i upper[kHeads][2], lower[kHeads][2];
#pragma GCC unroll 4
    for (int g = 0; g < kHeads; ++g)
#pragma GCC unroll 2
      for (int j = 0; j < 2; ++j) upper[g][j] = lower[g][j] = _mm512_setzero_si512();
    const int32_t* fours = fours_;
    for (int64_t t = 0; t < count; t += 4, fours += kGroup) {
      fetch.beside(2 * kRow);
      const auto row = [&](int i) { return _mm512_maskz_loadu_epi8(present, rows[t + i] + offset); };
      const __m512i first = zip(row(0), row(1)), second = zip(row(2), row(3));
      const __m512i values[2] = {_mm512_unpacklo_epi16(first, second), _mm512_unpackhi_epi16(first, second)};
#pragma GCC unroll 4
      for (int g = 0; g < kHeads; ++g) {
        const __m512i by = _mm512_set1_epi32(fours[g]), and_by = _mm512_set1_epi32(fours[kFours * kGroup + g]);
#pragma GCC unroll 2
        for (int j = 0; j < 2; ++j) {
          upper[g][j] = _mm512_dpbusd_epi32(upper[g][j], by, values[j]);
          lower[g][j] = _mm512_dpbusd_epi32(lower[g][j], and_by, values[j]);
        }
      }
    }
#pragma GCC unroll 4
    for (int g = 0; g < kHeads; ++g)
#pragma GCC unroll 2
      for (int j = 0; j < 2; ++j) {
        float* to = sums + g * width + (kLast ? j + 2 : j) * kLanes;
        const F32 more = to_float((bit_cast<I32>(upper[g][j]) << 7) + bit_cast<I32>(lower[g][j]));
        store(to, fma(more, splat(units[g]), load(to) * decay[g]));
      }
  }

  // Rounds weights times scales to words, and cuts these up; units[g] becomes what one of head g's stands for.
  template <int kGroup>
  void round_weights(float* weights, const float* scales, int64_t count, float* units) {
    const F32 largest = scale_and_find_largest<kGroup>(weights, scales, count), factor = kLargestWord / largest;
    store(units, largest * (1 / kLargestWord));
    int32_t *upper = fours_, *lower = fours_ + kFours * kGroup;
    for (int64_t i = 0; i < count * kGroup; i += kLanes, upper += 4, lower += 4) {
      const I32 words = to_int(load(weights + i) * factor);
      put_fours<kGroup>(words >> 7, upper), put_fours<kGroup>(words & 127, lower);
    }
  }

  // Words [tokens, kGroup] of one vector as bytes of four tokens each, [tokens / 4, kGroup].
  template <int kGroup>
  static TANDEM_INLINE void put_fours(I32 words, int32_t* to) {
    alignas(16) int8_t order[16];
    for (int i = 0; i < 16; ++i) order[i] = int8_t((i / 4 / kGroup * 4 + i % 4) * kGroup + i / 4 % kGroup);
    const __m128i bytes = _mm512_cvtepi32_epi8(bit_cast<__m512i>(words));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to),
                     _mm_shuffle_epi8(bytes, _mm_load_si128(reinterpret_cast<const __m128i*>(order))));
  }

  static TANDEM_INLINE void store_in_turn(float* to, F32 a, F32 b) {
#define TANDEM_IN_TURN(l) ((l) % 2 * kLanes + (l) / 2)
#define TANDEM_IN_TURN_AFTER(l) TANDEM_IN_TURN((l) + kLanes)
    store(to, __builtin_shufflevector(a, b, TANDEM_EACH_LANE(TANDEM_IN_TURN)));
    store(to + kLanes, __builtin_shufflevector(a, b, TANDEM_EACH_LANE(TANDEM_IN_TURN_AFTER)));
  }
};

#endif

}  // namespace
