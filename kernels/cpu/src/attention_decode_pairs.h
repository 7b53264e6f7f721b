// Decode's products over bfloat16 KV two at a time, summed in float32, where the processor has them.
//
// Scores by pairs of dims, values by pairs of tokens; so weights are rounded to bfloat16.

#pragma once

#include "attention_words.h"

namespace {

#if defined(TANDEM_BF16_PAIRS)

TANDEM_INLINE U32 load_row(const Bf16* from) {
  U32 x;
  memcpy(&x, from, sizeof x);
  return x;
}
TANDEM_INLINE U32 load_row_n(const Bf16* from, int64_t n) {
#if defined(__AVX512BW__)
  return bit_cast<U32>(_mm512_maskz_loadu_epi16(__mmask32((uint64_t{1} << n) - 1), from));
#else
  U32 x = {};
  memcpy(&x, from, size_t(n) * sizeof(Bf16));
  return x;
#endif
}

// As `Floats`.
class DecodePairs {
  Bf16* queries_;  // [H, width], zeros behind the dims

 public:
  static constexpr int kWidth = kRowWords;

  void carve(Carver& carver, int64_t heads, int64_t width) { queries_ = carver.take<Bf16>(heads * width); }

  void start_head(int64_t head, const Bf16* query, int64_t dims, int64_t width) {
    Bf16* to = queries_ + head * width;
    memcpy(static_cast<void*>(to), query, size_t(dims) * sizeof(Bf16));
    memset(static_cast<void*>(to + dims), 0, size_t(width - dims) * sizeof(Bf16));
  }

  template <int kGroup, int kHeads>
  void score(const Bf16* const* rows, int64_t offset, const float*, int64_t head, int64_t count, int64_t dims,
             int64_t width, float* scores, Fetch<Bf16>& fetch) const {
    const Bf16* queries = queries_ + head * width;
    constexpr int kAtOnce = kLanes / kGroup;
    for (int64_t t = 0; t < count; t += kAtOnce) {
      const Bf16* keys[kAtOnce];
      for (int i = 0; i < kAtOnce; ++i) keys[i] = rows[t + i] + offset;
      F32 sum[kLanes] = {};
      for (int64_t d = 0; d < dims; d += kRowWords) {
        const bool whole = d + kRowWords <= dims;
        fetch.beside(kAtOnce * 64);
        U32 query[kHeads];
        for (int g = 0; g < kHeads; ++g) query[g] = load_row(queries + g * width + d);
#pragma GCC unroll 16
        for (int i = 0; i < kAtOnce; ++i) {
          const U32 key = whole ? load_row(keys[i] + d) : load_row_n(keys[i] + d, dims - d);
#pragma GCC unroll 4
          for (int g = 0; g < kHeads; ++g) sum[i * kGroup + g] = add_bf16_pairs(sum[i * kGroup + g], key, query[g]);
        }
      }
      store(scores + t * kGroup, sums(sum));
    }
  }

  // Leaves `weights` as pairs.
  template <int kGroup, int kHeads>
  void add_values(const Bf16* const* rows, int64_t offset, const float*, int64_t count, int64_t dims, float* weights,
                  const float* decay, float* sums, int64_t width, Fetch<Bf16>& fetch) const {
    constexpr int kSteps = 2;
    pair_weights<kGroup>(weights, count);
    int64_t d = 0;
    for (; d + kSteps * kRowWords <= dims; d += kSteps * kRowWords)
      add_some_values<kGroup, kHeads, kSteps, false>(rows, offset + d, count, 0, weights, decay, sums + d, width, fetch);
    for (; d + kRowWords <= dims; d += kRowWords)
      add_some_values<kGroup, kHeads, 1, false>(rows, offset + d, count, 0, weights, decay, sums + d, width, fetch);
    if (d < dims)
      add_some_values<kGroup, kHeads, 1, true>(rows, offset + d, count, dims - d, weights, decay, sums + d, width,
                                               fetch);
  }

  static void straighten(float* sums, int64_t width) { straighten_pairs(sums, width); }

 private:
  // Weights [tokens, kGroup] as words of two tokens each, [tokens / 2, kGroup], in their place.
  template <int kGroup>
  static void pair_weights(float* weights, int64_t count) {
    const int64_t size = count * kGroup;
    for (int64_t i = 0; i < size; i += 2 * kLanes) {
      const U32 first = bit_cast<U32>(load(weights + i)) + 0x8000;
      const U32 second = i + kLanes < size ? bit_cast<U32>(load(weights + i + kLanes)) + 0x8000 : U32{};
      const U32 even = __builtin_shufflevector(first, second, TANDEM_EACH_LANE(TANDEM_EVEN));
      const U32 odd = __builtin_shufflevector(first, second, TANDEM_EACH_LANE(TANDEM_ODD));
      store(weights + i / 2, bit_cast<F32>(even >> 16 | (odd & 0xffff0000)));
    }
  }

  // sums [kHeads] rows of `width` = sums * decay + weights times values, of kSteps * kRowWords dims, or of the `rest`.
  template <int kGroup, int kHeads, int kSteps, bool kTail>
  static void add_some_values(const Bf16* const* rows, int64_t offset, int64_t count, int64_t rest, const float* pairs,
                              const float* decay, float* sums, int64_t width, Fetch<Bf16>& fetch) {
    F32 low[kHeads][kSteps], high[kHeads][kSteps];
#pragma GCC unroll 4
    for (int g = 0; g < kHeads; ++g)
#pragma GCC unroll 2
      for (int j = 0; j < kSteps; ++j) {
        low[g][j] = load(sums + g * width + j * kRowWords) * decay[g];
        high[g][j] = load(sums + g * width + j * kRowWords + kLanes) * decay[g];
      }
    for (int64_t t = 0; t < count; t += 2) {
      fetch.beside(2 * kSteps * 64);
      const Bf16 *from = rows[t] + offset, *next = rows[t + 1] + offset;
      U32 first[kSteps], second[kSteps];
#pragma GCC unroll 2
      for (int j = 0; j < kSteps; ++j) {
        const U32 even = kTail ? load_row_n(from, rest) : load_row(from + j * kRowWords);
        const U32 odd = kTail ? load_row_n(next, rest) : load_row(next + j * kRowWords);
        first[j] = bit_cast<U32>(pair_low(bit_cast<I16>(even), bit_cast<I16>(odd)));
        second[j] = bit_cast<U32>(pair_high(bit_cast<I16>(even), bit_cast<I16>(odd)));
      }
#pragma GCC unroll 4
      for (int g = 0; g < kHeads; ++g) {
        const U32 pair = bit_cast<U32>(splat(pairs[t / 2 * kGroup + g]));
#pragma GCC unroll 2
        for (int j = 0; j < kSteps; ++j) {
          low[g][j] = add_bf16_pairs(low[g][j], first[j], pair);
          high[g][j] = add_bf16_pairs(high[g][j], second[j], pair);
        }
      }
    }
#pragma GCC unroll 4
    for (int g = 0; g < kHeads; ++g)
#pragma GCC unroll 2
      for (int j = 0; j < kSteps; ++j) {
        store(sums + g * width + j * kRowWords, low[g][j]);
        store(sums + g * width + j * kRowWords + kLanes, high[g][j]);
      }
  }
};

#endif  // TANDEM_BF16_PAIRS

}  // namespace
