// Linear map in bfloat16 on AMX, over weights packed once; with silu(gate) * up of the result, if asked.
//
// Few tokens: each thread reads one stretch of the weights, once. Many: work is cut into rectangles of tokens by
// outputs, which threads take one after the other. A token's result is the same to the bit whatever tokens are
// with it. `in` is a multiple of 32.

#include "linear_tiles.h"
#include "parallel.h"

#if defined(__AMX_BF16__)

namespace {

// Sizes were tried on an AMX machine, at 1 to 2048 tokens.
constexpr int64_t kPair = 2 * kTile;
constexpr int64_t kFewTokens = 128;
constexpr int64_t kFewDepth = 192;         // inputs at a time: their weights stay in the first cache for all few tokens
constexpr int64_t kAhead = 16 << 10;       // bytes of weights that few tokens fetch ahead
constexpr int64_t kTokens = 512;           // of one rectangle
constexpr int64_t kWeightBytes = 1 << 18;  // of one rectangle: they stay in the second cache while the tokens pass
constexpr int64_t kDepth = 320;            // inputs at a time: those of 32 tokens stay in the first cache
constexpr int64_t kMaxPairs = 16;          // of tiles of outputs of one rectangle

// Weights are `blocks` of 16 outputs. If gated, even blocks are gates and odd ones the ups of the same columns.
struct Map {
  const Bf16* x;
  const uint32_t* packed;
  const Bf16* bias;  // or null
  Bf16* out;
  int64_t x_stride, tokens, in, width, blocks;  // width of out

  TANDEM_INLINE int64_t pairs() const { return (blocks + 1) / 2; }
  TANDEM_INLINE int64_t pair_words() const { return kPair * in / 2; }
  TANDEM_INLINE const char* pair_bytes(int64_t pair) const {
    return reinterpret_cast<const char*>(packed + pair * pair_words());
  }
};

TANDEM_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

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
    Bf16* out = map.out + (at.token + block * kTile) * map.width + column;
    const float* from = sums + block * Outputs * kTileWords;
    const int count = block ? at.high : at.low;
    if (Gated)
      put_gated(from, bias, bias ? bias + map.width : nullptr, out, map.width, count, width);
    else
      put_tiles<Outputs>(from, bias, out, map.width, count, width);
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
  Fetch fetch = {map.pair_bytes(first), end, int(kAhead / 64)};
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
void many_tokens(const Map& map, int64_t threads) {
  const int64_t pairs = map.pairs();
  // Four rectangles for each thread, or more: one that is held up leaves the others to the rest.
  int64_t wide = least(kWeightBytes / (4 * map.pair_words()), (pairs + 4 * threads - 1) / (4 * threads));
  wide = wide < 1 ? 1 : least(wide, kMaxPairs);
  const int64_t columns = (pairs + wide - 1) / wide;
  const int64_t count = columns * ((map.tokens + kTokens - 1) / kTokens);
  int64_t next = 0;
#pragma omp parallel
  {
    for (int64_t i; (i = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED)) < count;) {
      const int64_t from = i / columns * kTokens, first = i % columns * wide;
      const int64_t soon = (i + threads) % columns * wide;
      rectangle<Gated>(map, from, least(from + kTokens, map.tokens), first, least(first + wide, pairs), soon);
    }
    tile_release();
  }
}

template <bool Gated>
void linear(const Map& map) {
  if (map.tokens > kFewTokens) {
    many_tokens<Gated>(map, omp_get_max_threads());
    return;
  }
  const int64_t work = map.pairs() * map.pair_words() * 4 * ((map.tokens + kTile - 1) / kTile);
  over_tokens(map.pairs(), work, [&](int64_t first, int64_t last) { stretch<Gated>(map, first, last); });
}

}  // namespace

// weight [outputs, in], rows `stride` apart -> packed [outputs rounded up to 16, in]. If gated, the outputs are as
// many gates and then ups, each rounded up.
TANDEM_EXPORT(void, tandem_pack_linear_bf16)
(const Bf16* weight, int64_t stride, uint32_t* packed, int64_t outputs, int64_t in, int64_t gated) {
  const int64_t width = gated ? outputs / 2 : outputs;
  const int64_t blocks = (width + kTile - 1) / kTile * (gated ? 2 : 1);
  over_tokens(blocks, blocks * kTile * in * 2, [=](int64_t first, int64_t last) {
    for (int64_t b = first; b < last; ++b) {
      const int64_t row = (gated ? b / 2 : b) * kTile;
      const bool alone = b % 2 == 0 && b + 1 == blocks;
      pack_outputs(weight + (row + (gated ? b % 2 * width : 0)) * stride, stride, int(least(width - row, kTile)), in,
                   packed + b / 2 * kPair * (in / 2) + b % 2 * kTileWords, alone ? kTileWords : 2 * kTileWords);
    }
  });
}

// x [tokens, in], rows x_stride apart; packed weight; bias [width, or twice that if gated] or null ->
// out [tokens, width].
TANDEM_EXPORT(void, tandem_linear_bf16)
(const Bf16* x, int64_t x_stride, const uint32_t* packed, const Bf16* bias, Bf16* out, int64_t tokens, int64_t in,
 int64_t width, int64_t gated) {
  if (tokens == 0) return;
  const int64_t blocks = (width + kTile - 1) / kTile;
  if (gated)
    linear<true>(Map{x, packed, bias, out, x_stride, tokens, in, width, 2 * blocks});
  else
    linear<false>(Map{x, packed, bias, out, x_stride, tokens, in, width, blocks});
}

#endif  // __AMX_BF16__
