// Products of quantised weights on AMX: values are taken apart into tiles of bfloat16 once for all tokens.
//
// A partial sum is made in tiles, over inputs of one scale, and then scaled in vector registers; so a token's result
// is the same to the bit whatever tokens are with it. Up to 32 tokens: tiles are multiplied while the next ones are made.

#pragma once

#include "product_tile.h"
#include "quantized_stretches.h"

#if defined(__AMX_BF16__)

namespace {
namespace product {

constexpr int64_t kMostTiledInputs = 192;  // of a stretch: its tiles and what they are made of stay in the first cache

// `rows` rows of both blocks -> for each 32 inputs a tile of the first block, then one of the second.
template <typename Q>
void unpack_tiles(const char* weights, int64_t rows, char* tiles) {
  constexpr int kPairs = Q::kRowInputs / 2;
  for (int64_t row = 0; row < rows; ++row, weights += kUnitRowBytes)
    for (int b = 0; b < 2; ++b) {
      __builtin_prefetch(weights + b * kRowBytes + kAhead, 0, 2);
      const I32 words = bit_cast<I32>(_mm512_loadu_si512(weights + b * kRowBytes));
#pragma GCC unroll 4
      for (int k = 0; k < kPairs; ++k) {
        const int64_t at = row * kPairs + k;
        char* to = tiles + (at / kTile * 2 + b) * kPackedTileBytes + at % kTile * kRowBytes;
        store(reinterpret_cast<float*>(to), Q::template pair<true>(words, k));
      }
    }
}

// sums of `count` tokens += part [tokens up to 16, the others][two blocks][16 tokens][16 outputs], times the scales.
template <typename Q>
TANDEM_INLINE void add_scaled(const Stretches& at, const float* part, int64_t count, float* sums) {
  const F32 scales[2] = {at.scale(0) * Q::kUnit, at.scale(kBlock) * Q::kUnit};
  for (int64_t i = 0; i < count; ++i)
    for (int b = 0; b < 2; ++b) {
      float* to = sums + i * kUnitOutputs + b * kBlock;
      const float* sum = part + (i / kTile * 2 + b) * kTileWords + i % kTile * kTile;
      store(to, fma(load(sum), scales[b], load(to)));
    }
}

// As add_tiles, of up to 16 tokens for each of `Blocks`.
template <typename Q, int Blocks>
void add_few_tiles(Stretches at, const Bf16* x, int64_t stride, int64_t tokens, float* sums) {
  constexpr int64_t kRows = 2 * kTile / Q::kRowInputs;  // of a pair of tiles, one of each block
  alignas(64) char tiles[2][2 * kPackedTileBytes];
  alignas(64) float part[Blocks * 2 * kTileWords];
  const int64_t depth = at.rows / kRows, pairs = at.count * depth;
  const char* weights = at.weights;
  const auto multiply_pair = [&](int64_t pair, int64_t k) {
    const char* packed = tiles[pair % 2];
    // The intrinsics don't tell the compiler that they read and write memory.
    __asm__ volatile("" ::: "memory");
    if (k == 0) {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    }
    _tile_loadd(4, x, stride * 2);
    _tile_loadd(6, packed, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, packed + kPackedTileBytes, 64);
    _tile_dpbf16ps(1, 4, 7);
    if (Blocks > 1) {
      _tile_loadd(5, x + kTile * stride, stride * 2);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    x += 2 * kTile;
    if (k + 1 < depth) return;
    _tile_stored(0, part, 64);
    _tile_stored(1, part + kTileWords, 64);
    if (Blocks > 1) {
      _tile_stored(2, part + 2 * kTileWords, 64);
      _tile_stored(3, part + 3 * kTileWords, 64);
    }
    __asm__ volatile("" ::: "memory");
    add_scaled<Q>(at, part, tokens, sums);
    at.step();
  };
  tile_configure(int(least(tokens, kTile)), int(most(0, tokens - kTile)));
  for (int64_t pair = 0, k = 0; pair < pairs; ++pair, weights += kRows * kUnitRowBytes) {
    unpack_tiles<Q>(weights, kRows, tiles[pair % 2]);
    if (pair == 0) continue;
    multiply_pair(pair - 1, k);
    if (++k == depth) k = 0;
  }
  if (pairs) multiply_pair(pairs - 1, depth - 1);
  tile_release();
}

// sums [tokens][kUnitOutputs] += the stretches' products by x [tokens, in], rows `stride` apart.
template <typename Q>
void add_tiles(Stretches at, const Bf16* x, int64_t stride, int64_t tokens, float* sums) {
  if (tokens <= kTile) return add_few_tiles<Q, 1>(at, x, stride, tokens, sums);
  if (tokens <= 2 * kTile) return add_few_tiles<Q, 2>(at, x, stride, tokens, sums);
  alignas(64) char tiles[kMostTiledInputs / 32 * 2 * kPackedTileBytes];
  alignas(64) float part[4 * kTileWords];
  Fetch nothing = {nullptr, nullptr, 0};
  const int64_t inputs = at.rows * Q::kRowInputs;
  int low = 0, high = 0;  // as the tiles are open
  for (; at.count; --at.count, at.weights += at.rows * kUnitRowBytes, x += inputs, at.step()) {
    unpack_tiles<Q>(at.weights, at.rows, tiles);
    const uint32_t* packed = reinterpret_cast<const uint32_t*>(tiles);
    for (int64_t token = 0; token < tokens; token += 2 * kTile) {
      const int count = int(least(2 * kTile, tokens - token)), now_low = count < kTile ? count : kTile;
      if (now_low != low || count - now_low != high) tile_configure(low = now_low, high = count - now_low);
      const Bf16* from = x + token * stride;
      if (high) multiply<2, 2>(from, stride, packed, inputs, false, part, nothing);
      else multiply<1, 2>(from, stride, packed, inputs, false, part, nothing);
      add_scaled<Q>(at, part, count, sums + token * kUnitOutputs);
    }
  }
  tile_release();
}

}  // namespace product
}  // namespace

#endif  // __AMX_BF16__
