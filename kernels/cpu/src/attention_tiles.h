// Attention's products on AMX tiles.
//
// One step multiplies [16, 32] by [32, 16] bfloat16 into [16, 16] float32. B's rows are words of two
// neighbours along K. Tile numbers must be literals, hence macros.

#pragma once

#include "attention_fetch.h"
#include "tiles.h"

namespace {

// The "memory" clobbers keep loads after the stores that they read.
#define TILE_LOAD(tile, from, stride) \
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"(from), "r"(int64_t(stride)) : "memory")
#define TILE_STORE(tile, to, stride) \
  __asm__ volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"(to), "r"(int64_t(stride)) : "memory")
#define TILE_ZERO(tile) __asm__ volatile("tilezero %%tmm" #tile ::)
#define TILE_MULTIPLY(c, a, b) __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c ::)

constexpr int64_t kFetchBytesPerTile = 768;  // while 16 lines are multiplied: an even pace, with those of the softmax

// One pass over kDepth * 32 of the dims, whose queries stay in tiles 4 to 7.
template <int kDepth, bool kAdd>
void tile_scores_pass(const Bf16* keys, int64_t tokens, int64_t dims, const uint32_t* queries, float* c) {
  const int64_t row = dims * 2;  // bytes
  TILE_LOAD(4, queries, kTileBytes);
  if constexpr (kDepth > 1) TILE_LOAD(5, queries + kTileWords, kTileBytes);
  if constexpr (kDepth > 2) TILE_LOAD(6, queries + 2 * kTileWords, kTileBytes);
  if constexpr (kDepth > 3) TILE_LOAD(7, queries + 3 * kTileWords, kTileBytes);
  for (int64_t t = 0; t < tokens; t += 32, keys += 32 * dims, c += 2 * kTileWords) {
    const Bf16* more = keys + 16 * dims;
    if constexpr (kAdd) {
      TILE_LOAD(0, c, kTileBytes);
      TILE_LOAD(1, c + kTileWords, kTileBytes);
    } else {
      TILE_ZERO(0);
      TILE_ZERO(1);
    }
    TILE_LOAD(2, keys, row);
    TILE_MULTIPLY(0, 2, 4);
    TILE_LOAD(3, more, row);
    TILE_MULTIPLY(1, 3, 4);
    if constexpr (kDepth > 1) {
      TILE_LOAD(2, keys + 32, row);
      TILE_MULTIPLY(0, 2, 5);
      TILE_LOAD(3, more + 32, row);
      TILE_MULTIPLY(1, 3, 5);
    }
    if constexpr (kDepth > 2) {
      TILE_LOAD(2, keys + 64, row);
      TILE_MULTIPLY(0, 2, 6);
      TILE_LOAD(3, more + 64, row);
      TILE_MULTIPLY(1, 3, 6);
    }
    if constexpr (kDepth > 3) {
      TILE_LOAD(2, keys + 96, row);
      TILE_MULTIPLY(0, 2, 7);
      TILE_LOAD(3, more + 96, row);
      TILE_MULTIPLY(1, 3, 7);
    }
    TILE_STORE(0, c, kTileBytes);
    TILE_STORE(1, c + kTileWords, kTileBytes);
  }
}

template <bool kAdd>
void tile_scores_some(int64_t depth, const Bf16* keys, int64_t tokens, int64_t dims, const uint32_t* queries,
                      float* c) {
  if (depth >= 4) return tile_scores_pass<4, kAdd>(keys, tokens, dims, queries, c);
  if (depth == 3) return tile_scores_pass<3, kAdd>(keys, tokens, dims, queries, c);
  if (depth == 2) return tile_scores_pass<2, kAdd>(keys, tokens, dims, queries, c);
  return tile_scores_pass<1, kAdd>(keys, tokens, dims, queries, c);
}

// C [tokens, 16] = keys [tokens, dims] · queries [dims / 2, 16] words; multiples of 32.
inline void tile_scores(const Bf16* keys, int64_t tokens, int64_t dims, const uint32_t* queries, float* c) {
  tile_scores_some<false>(dims / 32, keys, tokens, dims, queries, c);
  for (int64_t d = 128; d < dims; d += 128)
    tile_scores_some<true>((dims - d) / 32, keys + d, tokens, dims, queries + d / 32 * kTileWords, c);
}

// kTiles * 16 of the dims, whose sums stay in tiles 0 to 3.
template <int kTiles>
void tile_add_values_pass(const Bf16* values, int64_t row, int64_t tokens, const uint32_t* weights, float* c) {
  TILE_LOAD(0, c, kTileBytes);
  if constexpr (kTiles > 1) TILE_LOAD(1, c + kTileWords, kTileBytes);
  if constexpr (kTiles > 2) TILE_LOAD(2, c + 2 * kTileWords, kTileBytes);
  if constexpr (kTiles > 3) TILE_LOAD(3, c + 3 * kTileWords, kTileBytes);
  for (int64_t t = 0; t < tokens; t += 32, values += 32, weights += kTileWords) {
    TILE_LOAD(4, weights, kTileBytes);
    TILE_LOAD(5, values, row * 2);
    TILE_MULTIPLY(0, 5, 4);
    if constexpr (kTiles > 1) {
      TILE_LOAD(6, values + 16 * row, row * 2);
      TILE_MULTIPLY(1, 6, 4);
    }
    if constexpr (kTiles > 2) {
      TILE_LOAD(7, values + 32 * row, row * 2);
      TILE_MULTIPLY(2, 7, 4);
    }
    if constexpr (kTiles > 3) {
      TILE_LOAD(5, values + 48 * row, row * 2);
      TILE_MULTIPLY(3, 5, 4);
    }
  }
  TILE_STORE(0, c, kTileBytes);
  if constexpr (kTiles > 1) TILE_STORE(1, c + kTileWords, kTileBytes);
  if constexpr (kTiles > 2) TILE_STORE(2, c + 2 * kTileWords, kTileBytes);
  if constexpr (kTiles > 3) TILE_STORE(3, c + 3 * kTileWords, kTileBytes);
}

// C [dims, 16] += values [dims, row] · weights [tokens / 2, 16] words; dims a multiple of 16, tokens of 32.
inline void tile_add_values(const Bf16* values, int64_t row, int64_t tokens, int64_t dims, const uint32_t* weights,
                            float* c) {
  for (; dims >= 64; dims -= 64, values += 64 * row, c += 4 * kTileWords)
    tile_add_values_pass<4>(values, row, tokens, weights, c);
  if (dims >= 48) return tile_add_values_pass<3>(values, row, tokens, weights, c);
  if (dims >= 32) return tile_add_values_pass<2>(values, row, tokens, weights, c);
  if (dims >= 16) tile_add_values_pass<1>(values, row, tokens, weights, c);
}

// Scores of 32 tokens like tile_scores, but in tiles 4 to 7 alone: for use between the next two.
inline void tile_scores_of_32(const Bf16* keys, int64_t dims, const uint32_t* queries, float* c) {
  const int64_t row = dims * 2;  // bytes
  TILE_ZERO(6);
  TILE_ZERO(7);
  for (int64_t d = 0; d < dims; d += 32, queries += kTileWords) {
    TILE_LOAD(4, queries, kTileBytes);
    TILE_LOAD(5, keys + d, row);
    TILE_MULTIPLY(6, 5, 4);
    TILE_LOAD(5, keys + 16 * dims + d, row);
    TILE_MULTIPLY(7, 5, 4);
  }
  TILE_STORE(6, c, kTileBytes);
  TILE_STORE(7, c + kTileWords, kTileBytes);
}

// tile_add_values for the first 64 of the dims in three parts: sums into tiles 0 to 3, 32 tokens, sums out.
inline void tile_open_sums(int64_t dims, const float* c) {
  TILE_LOAD(0, c, kTileBytes);
  if (dims > 16) TILE_LOAD(1, c + kTileWords, kTileBytes);
  if (dims > 32) TILE_LOAD(2, c + 2 * kTileWords, kTileBytes);
  if (dims > 48) TILE_LOAD(3, c + 3 * kTileWords, kTileBytes);
}

inline void tile_add_32_values(const Bf16* values, int64_t row, int64_t dims, const uint32_t* weights) {
  TILE_LOAD(4, weights, kTileBytes);
  TILE_LOAD(5, values, row * 2);
  TILE_MULTIPLY(0, 5, 4);
  if (dims > 16) {
    TILE_LOAD(5, values + 16 * row, row * 2);
    TILE_MULTIPLY(1, 5, 4);
  }
  if (dims > 32) {
    TILE_LOAD(5, values + 32 * row, row * 2);
    TILE_MULTIPLY(2, 5, 4);
  }
  if (dims > 48) {
    TILE_LOAD(5, values + 48 * row, row * 2);
    TILE_MULTIPLY(3, 5, 4);
  }
}

inline void tile_close_sums(int64_t dims, float* c) {
  TILE_STORE(0, c, kTileBytes);
  if (dims > 16) TILE_STORE(1, c + kTileWords, kTileBytes);
  if (dims > 32) TILE_STORE(2, c + 2 * kTileWords, kTileBytes);
  if (dims > 48) TILE_STORE(3, c + 3 * kTileWords, kTileBytes);
}

// Decode: scores of 16 tokens, 64 if kFour, for the heads in 16 lanes: C [tokens, 16] = the sum over KV heads
// of their keys times their queries. A head's queries [dims / 32 tiles] are zero but in its own lanes.
template <bool kFour, typename K>
void tile_scores_of_heads(const Bf16* const* keys, int64_t kv_heads, int64_t head_stride, int64_t row_stride,
                          int64_t depth, const uint32_t* queries, float* c, Fetch<K>& fetch) {
  const int64_t row = row_stride * 2;  // bytes
  TILE_ZERO(0);
  if constexpr (kFour) {
    TILE_ZERO(1);
    TILE_ZERO(2);
    TILE_ZERO(3);
  }
  for (int64_t head = 0; head < kv_heads; ++head)
    for (int64_t d = 0; d < depth; ++d, queries += kTileWords) {
      const int64_t at = head * head_stride + d * 32;
      TILE_LOAD(4, queries, kTileBytes);
      TILE_LOAD(5, keys[0] + at, row);
      TILE_MULTIPLY(0, 5, 4);
      fetch.beside(kFetchBytesPerTile);
      if constexpr (kFour) {
        TILE_LOAD(6, keys[1] + at, row);
        TILE_MULTIPLY(1, 6, 4);
        fetch.beside(kFetchBytesPerTile);
        TILE_LOAD(7, keys[2] + at, row);
        TILE_MULTIPLY(2, 7, 4);
        fetch.beside(kFetchBytesPerTile);
        TILE_LOAD(5, keys[3] + at, row);
        TILE_MULTIPLY(3, 5, 4);
        fetch.beside(kFetchBytesPerTile);
      }
    }
  TILE_STORE(0, c, kTileBytes);
  if constexpr (kFour) {
    TILE_STORE(1, c + kTileWords, kTileBytes);
    TILE_STORE(2, c + 2 * kTileWords, kTileBytes);
    TILE_STORE(3, c + 3 * kTileWords, kTileBytes);
  }
}

// Decode: what 8 heads make of `num` times 16 values, for `wide` times 32 dims from `dim` on; wide is 1 or 2,
// C [wide, 16, 16].
//
// A row of values is 16 words of an even and an odd dim. So each head takes two rows of the weights, 16 words
// of one token each: in the first the weight meets the even dim and zero the odd one, in the second the
// other way round. Thus values are multiplied as they lie, at the price of every second product.
template <typename K>
void tile_values_of_heads(const Bf16* const* values, const int64_t* row, int64_t num, int64_t dim, int64_t wide,
                                 const uint32_t* pairs, int64_t pairs_step, float* c, Fetch<K>& fetch) {
  TILE_ZERO(0);
  TILE_ZERO(1);
  for (int64_t i = 0; i < num; ++i, pairs += pairs_step) {
    TILE_LOAD(4, pairs, kTileBytes);
    TILE_LOAD(5, values[i] + dim, row[i] * 2);
    TILE_MULTIPLY(0, 4, 5);
    fetch.beside(kFetchBytesPerTile);
    if (wide > 1) {
      TILE_LOAD(6, values[i] + dim + 32, row[i] * 2);
      TILE_MULTIPLY(1, 4, 6);
      fetch.beside(kFetchBytesPerTile);
    }
  }
  TILE_STORE(0, c, kTileBytes);
  if (wide > 1) TILE_STORE(1, c + kTileWords, kTileBytes);
}

}  // namespace
