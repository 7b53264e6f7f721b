// Products of quantised weights on AMX: values are taken apart into tiles of bfloat16 once for all tokens.
//
// A partial sum is made in tiles, over inputs of one scale, and then scaled in vector registers; so a token's result
// is the same to the bit whatever tokens are with it.

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

// sums [tokens][kUnitOutputs] += the stretches' products by x [tokens, in], rows `stride` apart.
template <typename Q>
void add_tiles(Stretches at, const Bf16* x, int64_t stride, int64_t tokens, float* sums) {
  alignas(64) char tiles[kMostTiledInputs / 32 * 2 * kPackedTileBytes];
  alignas(64) float part[4 * kTileWords];  // [tokens up to 16, the others][two blocks][16 tokens][16 outputs]
  Fetch nothing = {nullptr, nullptr, 0};
  const int64_t inputs = at.rows * Q::kRowInputs;
  int low = 0, high = 0;  // as the tiles are open
  for (; at.count; --at.count, at.weights += at.rows * kUnitRowBytes, x += inputs, at.step()) {
    unpack_tiles<Q>(at.weights, at.rows, tiles);
    const uint32_t* packed = reinterpret_cast<const uint32_t*>(tiles);
    const F32 scales[2] = {at.scale(0) * Q::kUnit, at.scale(kBlock) * Q::kUnit};
    for (int64_t token = 0; token < tokens; token += 2 * kTile) {
      const int count = int(least(2 * kTile, tokens - token)), now_low = count < kTile ? count : kTile;
      if (now_low != low || count - now_low != high) tile_configure(low = now_low, high = count - now_low);
      const Bf16* from = x + token * stride;
      if (high) multiply<2, 2>(from, stride, packed, inputs, false, part, nothing);
      else multiply<1, 2>(from, stride, packed, inputs, false, part, nothing);
      for (int i = 0; i < count; ++i)
        for (int b = 0; b < 2; ++b) {
          float* to = sums + (token + i) * kUnitOutputs + b * kBlock;
          const float* sum = part + (i / kTile * 2 + b) * kTileWords + i % kTile * kTile;
          store(to, fma(load(sum), scales[b], load(to)));
        }
    }
  }
  tile_release();
}

}  // namespace product
}  // namespace

#endif  // __AMX_BF16__
