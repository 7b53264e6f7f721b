// The two matrix products of prefill attention in float32: C [M, kTile] (+)= A [M, K] B [K, kTile].
//
// kTile columns are query rows. For the scores A is keys [tokens, dims] and B the queries; for the
// output A is values [dims, tokens] and B the weights. So whatever belongs to one query row stays in
// one lane: its maximum and total need no shuffle. attention_pairs.h has the same in bfloat16.

#pragma once

#include "attention_batch.h"
#include "attention_math.h"

namespace {

struct Wide {
  using Element = float;
  using Word = float;  // 32 bits of a row of K or q
  static constexpr bool kPairs = false;
  static constexpr bool kOverlaps = false;  // tiles multiply while vectors compute the softmax
  static constexpr int kVectors = 2;
  static constexpr int kTile = kVectors * kLanes;
  static constexpr int kDimStep = 1;
  static constexpr int kRows = kLanes == 16 ? 8 : 4;  // kRows * kVectors accumulators stay in registers

  // A's element (m, k) is at a[m * a_row + k * a_column]; rows a multiple of 8.
  template <bool kAdd>
  static TANDEM_INLINE void multiply(const float* a, int64_t a_row, int64_t a_column, int64_t rows, int64_t depth,
                                     const float* b, float* c) {
    for (int64_t m = 0; m < rows; m += kRows, a += kRows * a_row, c += kRows * kTile) {
      F32 sum[kRows][kVectors];
      for (int i = 0; i < kRows; ++i)
        for (int j = 0; j < kVectors; ++j) sum[i][j] = kAdd ? load(c + i * kTile + j * kLanes) : F32{};
      for (int64_t k = 0; k < depth; ++k) {
        const float* column = a + k * a_column;
        F32 right[kVectors];
        for (int j = 0; j < kVectors; ++j) right[j] = load(b + k * kTile + j * kLanes);
#pragma GCC unroll 8
        for (int i = 0; i < kRows; ++i) {
          const F32 left = splat(column[i * a_row]);
          for (int j = 0; j < kVectors; ++j) sum[i][j] = fma(left, right[j], sum[i][j]);
        }
      }
      for (int i = 0; i < kRows; ++i)
        for (int j = 0; j < kVectors; ++j) store(c + i * kTile + j * kLanes, sum[i][j]);
    }
  }

  // C [tokens, kTile] = keys [tokens, dims] · queries [dims, kTile].
  static void scores(const float* keys, int64_t tokens, int64_t dims, const float* queries, float* c) {
    multiply<false>(keys, dims, 1, tokens, dims, queries, c);
  }

  // C [dims, kTile] += values [tokens, dims]ᵀ · weights [tokens, kTile].
  static void add_values(const float* values, int64_t tokens, int64_t dims, const float* weights, float* c) {
    multiply<true>(values, 1, dims, dims, tokens, weights, c);
  }
};

}  // namespace
