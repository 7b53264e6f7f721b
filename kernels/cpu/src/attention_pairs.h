// The products of attention_panel.h in bfloat16, summed in float32, where the processor has them.
//
// Neighbours along K share one 32-bit word, as AMX tiles, vdpbf16ps and BFDOT take them: A's rows are plain
// rows, B is [K / 2, kTile] words.

#pragma once

#include "attention_panel.h"

#if defined(__AMX_BF16__)
#include "attention_tiles.h"
#endif

namespace {

#if defined(TANDEM_BF16_PAIRS)

struct Pairs {
  using Element = Bf16;
  using Word = uint32_t;
  static constexpr bool kPairs = true;
  static constexpr int kDimStep = 32;

#if defined(__AMX_BF16__)
  static constexpr bool kOverlaps = true;
  static constexpr int kVectors = 1;
  static constexpr int kTile = kLanes;

  // C [tokens, kTile] = keys [tokens, dims] · queries [dims / 2, kTile] words; dims a multiple of 32.
  static void scores(const Bf16* keys, int64_t tokens, int64_t dims, const uint32_t* queries, float* c) {
    tile_scores(keys, tokens, dims, queries, c);
  }

  // C [dims, kTile] += values [dims, row] · weights [tokens / 2, kTile] words; row >= tokens.
  static void add_values(const Bf16* values, int64_t row, int64_t tokens, int64_t dims, const uint32_t* weights,
                         float* c) {
    tile_add_values(values, row, tokens, dims, weights, c);
  }
#else
  static constexpr bool kOverlaps = false;
  static constexpr int kVectors = 2;
  static constexpr int kTile = kVectors * kLanes;
  static constexpr int kRows = 8;

  // A [rows, 2 * depth], `row` elements from row to row; rows a multiple of 8.
  template <bool kAdd>
  static TANDEM_INLINE void multiply(const Bf16* a, int64_t row, int64_t rows, int64_t depth, const uint32_t* b,
                                     float* c) {
    for (int64_t m = 0; m < rows; m += kRows, a += kRows * row, c += kRows * kTile) {
      F32 sum[kRows][kVectors];
      for (int i = 0; i < kRows; ++i)
        for (int j = 0; j < kVectors; ++j) sum[i][j] = kAdd ? load(c + i * kTile + j * kLanes) : F32{};
      for (int64_t k = 0; k < depth; ++k) {
        U32 right[kVectors];
        memcpy(right, b + k * kTile, sizeof right);
#pragma GCC unroll 8
        for (int i = 0; i < kRows; ++i) {
          int32_t pair;
          memcpy(&pair, a + i * row + 2 * k, sizeof pair);
          const U32 left = bit_cast<U32>(splat_int(pair));
          for (int j = 0; j < kVectors; ++j) sum[i][j] = add_bf16_pairs(sum[i][j], left, right[j]);
        }
      }
      for (int i = 0; i < kRows; ++i)
        for (int j = 0; j < kVectors; ++j) store(c + i * kTile + j * kLanes, sum[i][j]);
    }
  }

  static void scores(const Bf16* keys, int64_t tokens, int64_t dims, const uint32_t* queries, float* c) {
    multiply<false>(keys, dims, tokens, dims / 2, queries, c);
  }

  static void add_values(const Bf16* values, int64_t row, int64_t tokens, int64_t dims, const uint32_t* weights,
                         float* c) {
    multiply<true>(values, row, dims, tokens / 2, weights, c);
  }
#endif
};

#endif  // TANDEM_BF16_PAIRS

template <typename T>
struct FormOf {
  using Form = Wide;
};
#if defined(TANDEM_BF16_PAIRS)
template <>
struct FormOf<Bf16> {
  using Form = Pairs;
};
#endif

}  // namespace
