// Products in bfloat16 on AMX: which tiles meet in what order.
//
// Few tokens: a stretch of the weights is read once. Many: rectangles of tokens by units, whose weights stay in the
// second cache while the tokens pass.

#pragma once

#include "product_tile.h"

#if defined(__AMX_BF16__)

namespace {
namespace product {

// Sizes were tried on an AMX machine, at 1 to 2048 tokens.
constexpr int64_t kPair = 2 * kTile;
constexpr int64_t kFewTokens = 128;
constexpr int64_t kFewDepth = 192;       // inputs at a time: their weights stay in the first cache for all few tokens
constexpr int64_t kFewAhead = 16 << 10;  // bytes of weights that few tokens fetch ahead
constexpr int64_t kDepth = 320;          // inputs at a time: those of 32 tokens stay in the first cache
constexpr int64_t kMaxPairs = 16;        // units of one rectangle

// Weights are `blocks` of 16 outputs. If gated, even blocks are gates and odd ones the ups of the same columns.
struct Map {
  const Product& product;
  const Bf16* x;
  const uint32_t* packed;
  const Bf16* bias;  // or null
  Bf16* out;
  int64_t x_stride, out_stride, tokens, in, width, blocks;  // width of out

  TANDEM_INLINE int64_t pairs() const { return (blocks + 1) / 2; }
  TANDEM_INLINE int64_t pair_words() const { return kPair * in / 2; }
  TANDEM_INLINE const char* pair_bytes(int64_t pair) const {
    return reinterpret_cast<const char*>(packed + pair * pair_words());
  }
};

// Where a corner of a rectangle begins, and how much of it there is: up to 32 tokens (`low` and `high` of them
// in each tile) by a pair of tiles of outputs, over `depth` inputs.
struct Corner {
  int64_t token, pair, input, depth;
  int low, high;
};

// Adds bias and gate to the sums of a corner, and puts them out.
template <int Blocks, int Outputs, bool Gated>
TANDEM_INLINE void put_corner(const Map& map, const Corner& at, const float* sums) {
  const int64_t column = at.pair * (Gated ? kTile : kPair);
  const int width = int(least(map.width - column, Gated ? kTile : Outputs * kTile));
  const Bf16* bias = map.bias ? map.bias + column : nullptr;
  for (int block = 0; block < Blocks; ++block) {
    Bf16* out = result_at(map.product, map.out, (at.token + block * kTile) * map.out_stride + column);
    const float* from = sums + block * Outputs * kTileWords;
    const int count = block ? at.high : at.low;
    if (Gated)
      put_gated(map.product, from, bias, bias ? bias + map.width : nullptr, out, map.out_stride, count, width);
    else if (map.product.wide)
      put_wide<Outputs>(from, bias, reinterpret_cast<float*>(out), map.out_stride, count, width);
    else
      put_tiles<Outputs>(from, bias, out, map.out_stride, count, width);
  }
}

// Adds to sums; puts them out with the last inputs.
template <int Blocks, int Outputs, bool Gated>
TANDEM_INLINE void corner(const Map& map, const Corner& at, float* sums, Fetch& fetch) {
  const Bf16* x = map.x + at.token * map.x_stride + at.input;
  const uint32_t* packed = map.packed + at.pair * map.pair_words() + at.input / 2 * kTile * Outputs;
  multiply<Blocks, Outputs>(x, map.x_stride, packed, at.depth, at.input > 0, sums, fetch);
  if (at.input + at.depth == map.in) put_corner<Blocks, Outputs, Gated>(map, at, sums);
}

template <bool Gated>
TANDEM_INLINE void any_corner(const Map& map, const Corner& at, float* sums, Fetch& fetch) {
  if (Gated || map.blocks - 2 * at.pair > 1)
    at.high ? corner<2, 2, Gated>(map, at, sums, fetch) : corner<1, 2, Gated>(map, at, sums, fetch);
  else
    at.high ? corner<2, 1, false>(map, at, sums, fetch) : corner<1, 1, false>(map, at, sums, fetch);
}

// All of the few tokens by the outputs of pairs first … last, whose weights pass once.
template <bool Gated>
void stretch(const Map& map, int64_t first, int64_t last) {
  alignas(64) float sums[kFewTokens / kPair][4 * kTileWords];
  const int64_t passes = (map.tokens + kPair - 1) / kPair;
  const int64_t depth = passes == 1 ? map.in : least(kFewDepth, map.in);
  const char* end = map.pair_bytes(last);
  // A step reads 32 lines of weights; so each pass over them fetches its share of those that are to come.
  Fetch fetch = {map.pair_bytes(first), end, int(kFewAhead / 64)};
  fetch.some();
  fetch.lines = int((2 * kTile + passes - 1) / passes);
  int low = 0, high = 0;  // as the tiles are open
  for (int64_t pair = first; pair < last; ++pair)
    for (int64_t k = 0; k < map.in; k += depth)
      for (int64_t token = 0; token < map.tokens; token += kPair) {
        const int64_t left = map.tokens - token;
        const int now_low = int(least(left, kTile)), now_high = int(least(left, kPair)) - now_low;
        if (now_low != low || now_high != high) tile_configure(low = now_low, high = now_high);
        const Corner at = {token, pair, k, least(depth, map.in - k), low, high};
        any_corner<Gated>(map, at, sums[token / kPair], fetch);
      }
  tile_release();
}

// Tokens from … to by the outputs of pairs first … last; meanwhile fetches the weights of as many pairs from `soon` on.
template <bool Gated>
void rectangle(const Map& map, int64_t from, int64_t to, int64_t first, int64_t last, int64_t soon) {
  alignas(64) float sums[kMaxPairs][4 * kTileWords];
  const int64_t parts = (map.in + kDepth - 1) / kDepth;
  const int64_t depth = (map.in / parts + kPair - 1) / kPair * kPair;
  // A step reads 32 lines of weights; so each pass over the weights fetches its share of the next ones.
  const int64_t passes = (to - from + kPair - 1) / kPair;
  const char* end = map.pair_bytes(least(soon + last - first, map.pairs()));
  Fetch fetch = {map.pair_bytes(soon), end, int((2 * kTile + passes - 1) / passes)};
  for (int64_t m = from; m < to; m += kPair) {
    const int low = int(least(to - m, kTile)), high = int(least(to - m, kPair)) - low;
    if (m == from || to - m < kPair) tile_configure(low, high);
    for (int64_t k = 0; k < map.in; k += depth)
      for (int64_t pair = first; pair < last; ++pair)
        any_corner<Gated>(map, {m, pair, k, least(depth, map.in - k), low, high}, sums[pair - first], fetch);
  }
}

template <bool Gated>
void multiply_map(const Map& map, int64_t first, int64_t last, int64_t soon) {
  if (map.tokens <= kFewTokens) return stretch<Gated>(map, first, last);
  for (; first < last; first += kMaxPairs)
    rectangle<Gated>(map, 0, map.tokens, first, least(first + kMaxPairs, last), soon);
  tile_release();
}

// As multiply_units.
inline void multiply_tiles(const Product& p, const Bf16* x, int64_t x_stride, int64_t tokens, Bf16* out,
                           int64_t out_stride, int64_t first, int64_t last, Arena& scratch, int64_t soon) {
  const int64_t in = num_tiles<Bf16>(p) * kTileInputs<Bf16>;
  if (in != p.in) {
    Bf16* padded = reinterpret_cast<Bf16*>(scratch.reserve(tokens * in * int64_t(sizeof(Bf16))));
    memset(static_cast<void*>(padded), 0, size_t(tokens * in) * sizeof(Bf16));
    for (int64_t t = 0; t < tokens; ++t)
      memcpy(static_cast<void*>(padded + t * in), x + t * x_stride, size_t(p.in) * sizeof(Bf16));
    x = padded, x_stride = in;
  }
  const uint32_t* packed = static_cast<const uint32_t*>(p.packed);
  const Map map = {p,      x,  packed, static_cast<const Bf16*>(p.bias), out, x_stride, out_stride,
                   tokens, in, p.out,  num_blocks(p)};
  if (p.gated) multiply_map<true>(map, first, last, soon);
  else multiply_map<false>(map, first, last, soon);
}

}  // namespace product
}  // namespace

#endif  // __AMX_BF16__
