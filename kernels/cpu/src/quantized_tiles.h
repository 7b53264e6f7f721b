// Products of quantised weights on AMX: values are taken apart into tiles of bfloat16 once for all tokens.
//
// A partial sum is made in tiles, over inputs of one scale, and then scaled in vector registers; so a token's result
// is the same to the bit whatever tokens are with it. Up to 32 tokens: tiles are multiplied while the next ones are made.
// One token: as tiles would, but in vector registers, with nothing stored between.

#pragma once

#include <type_traits>

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
__attribute__((noinline)) void add_few_tiles(Stretches at, const Bf16* x, int64_t stride, int64_t tokens, float* sums) {
  constexpr int64_t kRows = 2 * kTile / Q::kRowInputs;  // of a pair of tiles, one of each block
  alignas(64) char tiles[2][2 * kPackedTileBytes];
  alignas(64) float part[Blocks * 2 * kTileWords];
  const int64_t depth = at.rows / kRows, pairs = at.count * depth;
  const char* weights = at.weights;
  const auto multiply_pair = [&](int64_t pair, int64_t k) {
    // The intrinsics don't tell the compiler that they read and write memory.
    __asm__ volatile("" ::: "memory");
    if (k == 0) zero_sums<Blocks, 2>();
    add_product<Blocks, 2>(x, stride, reinterpret_cast<const uint32_t*>(tiles[pair % 2]));
    x += 2 * kTile;
    if (k + 1 < depth) return;
    store_sums<Blocks, 2>(part);
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

// Input `i` of each word, as `pair` makes it.
template <typename Q>
TANDEM_INLINE F32 value_of(I32 words, int i) {
  if constexpr (std::is_same_v<Q, Int8>) return Int8::value(words, i);  // the same in fewer instructions
  const U32 pair = bit_cast<U32>(Q::template pair<true>(words, i / 2));
  return bit_cast<F32>(i % 2 ? pair & 0xffff0000u : pair << 16);
}

// As add_tiles, of one token. A tile product adds up even and odd inputs of 32 apart, from zero, then both to its sum
// (TDPBF16PS in Intel's manual); it takes denormals as zero, as vector registers do here.
template <typename Q>
__attribute__((noinline)) void add_token(Stretches at, const Bf16* x, float* sums) {
  constexpr int kRows = 2 * kTile / Q::kRowInputs;
  alignas(64) float inputs[2 * kTile];
  F32 sum[2] = {};
  const int64_t depth = at.rows / kRows;
  for (int64_t k = 0; at.count; x += 2 * kTile) {
    for (int i = 0; i < 2; ++i) store(inputs + i * kTile, load(x + i * kTile));
    // From memory each is spread over a register at no cost, from registers at that of two instructions.
    __asm__ volatile("" ::: "memory");
    F32 part[2][2] = {};
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row, at.weights += kUnitRowBytes)
#pragma GCC unroll 2
      for (int b = 0; b < 2; ++b) {
        __builtin_prefetch(at.weights + b * kRowBytes + kAhead, 0, 2);
        const I32 words = bit_cast<I32>(_mm512_loadu_si512(at.weights + b * kRowBytes));
#pragma GCC unroll 8
        for (int i = 0; i < Q::kRowInputs; ++i)
          part[b][i % 2] = fma(value_of<Q>(words, i), splat(inputs[row * Q::kRowInputs + i]), part[b][i % 2]);
      }
    for (int b = 0; b < 2; ++b) sum[b] += part[b][0] + part[b][1];
    if (++k < depth) continue;
    for (int b = 0; b < 2; ++b) {
      float* to = sums + b * kBlock;
      store(to, fma(sum[b], at.scale(b * kBlock) * Q::kUnit, load(to)));
      sum[b] = F32{};
    }
    k = 0, --at.count, at.step();
  }
}

// As add_tiles, of more than 32 tokens.
template <typename Q>
__attribute__((noinline)) void add_many_tiles(Stretches at, const Bf16* x, int64_t stride, int64_t tokens, float* sums) {
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

// sums [tokens][kUnitOutputs] += the stretches' products by x [tokens, in], rows `stride` apart. Denormals are taken as
// zero, in vector registers too: while the functions that are called here run, which are not inlined for that.
template <typename Q>
void add_tiles(const Stretches& at, const Bf16* x, int64_t stride, int64_t tokens, float* sums) {
  const unsigned before = _mm_getcsr();
  _mm_setcsr(before | _MM_FLUSH_ZERO_ON | _MM_DENORMALS_ZERO_ON);
  if (tokens == 1) add_token<Q>(at, x, sums);
  else if (tokens <= kTile) add_few_tiles<Q, 1>(at, x, stride, tokens, sums);
  else if (tokens <= 2 * kTile) add_few_tiles<Q, 2>(at, x, stride, tokens, sums);
  else add_many_tiles<Q>(at, x, stride, tokens, sums);
  _mm_setcsr(before);
}

}  // namespace product
}  // namespace

#endif  // __AMX_BF16__
