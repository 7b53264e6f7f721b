// Decode's products over bfloat16 KV two at a time, summed in float32, where the processor has them.
//
// Scores by pairs of dims, values by pairs of tokens; so weights are rounded to bfloat16.

#pragma once

#include "attention_bytes.h"

namespace {

template <typename T, typename K>
constexpr bool kHasPairs = false;

// A head's query [dims], and zeros up to `width`.
template <typename T>
void start_pairs(const T* query, int64_t dims, int64_t width, T* to) {
  memcpy(static_cast<void*>(to), query, size_t(dims) * sizeof(T));
  memset(static_cast<void*>(to + dims), 0, size_t(width - dims) * sizeof(T));
}

// Defined where there are pairs.
template <int kGroup, int kHeads>
void score_pairs(const Bf16* const* rows, int64_t offset, const Bf16* queries, int64_t count, int64_t dims,
                 int64_t width, float* scores, Fetch& fetch);
template <int kGroup, int kHeads>
void add_value_pairs(const Bf16* const* rows, int64_t offset, int64_t count, int64_t dims, float* weights,
                     const float* decay, float* sums, int64_t width, Fetch& fetch);

#if defined(TANDEM_BF16_PAIRS)

template <>
constexpr bool kHasPairs<Bf16, Bf16> = true;

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

// Scores [tokens, kGroup] of kHeads heads with `queries` [kHeads, width], zeros from dim `dims` on.
template <int kGroup, int kHeads>
void score_pairs(const Bf16* const* rows, int64_t offset, const Bf16* queries, int64_t count, int64_t dims,
                 int64_t width, float* scores, Fetch& fetch) {
  constexpr int kAtOnce = kLanes / kGroup;
  for (int64_t t = 0; t < count; t += kAtOnce) {
    const Bf16* keys[kAtOnce];
    for (int i = 0; i < kAtOnce; ++i) keys[i] = rows[least(t + i, count - 1)] + offset;
    fetch.some((kAtOnce + 1) / 2);
    F32 sum[kLanes] = {};
    for (int64_t d = 0; d < dims; d += kRowWords) {
      const bool whole = d + kRowWords <= dims;
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

// Weights [tokens, kGroup] as words of two tokens each, [tokens / 2, kGroup], in their place.
template <int kGroup>
void pair_weights(float* weights, int64_t count) {
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
void add_some_pairs(const Bf16* const* rows, int64_t offset, int64_t count, int64_t rest, const float* pairs,
                    const float* decay, float* sums, int64_t width, Fetch& fetch) {
  F32 low[kHeads][kSteps], high[kHeads][kSteps];
#pragma GCC unroll 4
  for (int g = 0; g < kHeads; ++g)
#pragma GCC unroll 2
    for (int j = 0; j < kSteps; ++j) {
      low[g][j] = load(sums + g * width + j * kRowWords) * decay[g];
      high[g][j] = load(sums + g * width + j * kRowWords + kLanes) * decay[g];
    }
  for (int64_t t = 0; t < count; t += 2) {
    fetch.some(1);
    const Bf16 *from = rows[t] + offset, *next = rows[least(t + 1, count - 1)] + offset;
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

// The same over all dims, in the order that `straighten_pairs` puts right; leaves `weights` as pairs.
template <int kGroup, int kHeads>
void add_value_pairs(const Bf16* const* rows, int64_t offset, int64_t count, int64_t dims, float* weights,
                     const float* decay, float* sums, int64_t width, Fetch& fetch) {
  constexpr int kSteps = 2;
  pair_weights<kGroup>(weights, count);
  int64_t d = 0;
  for (; d + kSteps * kRowWords <= dims; d += kSteps * kRowWords)
    add_some_pairs<kGroup, kHeads, kSteps, false>(rows, offset + d, count, 0, weights, decay, sums + d, width, fetch);
  for (; d + kRowWords <= dims; d += kRowWords)
    add_some_pairs<kGroup, kHeads, 1, false>(rows, offset + d, count, 0, weights, decay, sums + d, width, fetch);
  if (d < dims)
    add_some_pairs<kGroup, kHeads, 1, true>(rows, offset + d, count, dims - d, weights, decay, sums + d, width, fetch);
}

#endif  // TANDEM_BF16_PAIRS

}  // namespace
