// Linear map in bfloat16 on AMX, over weights packed once.
//
// Work is cut into rectangles of tokens by outputs, which threads take one after the other. A token's
// result is the same to the bit whatever tokens are with it. `in` is a multiple of 32.

#include "linear_tiles.h"
#include "parallel.h"

#if defined(__AMX_BF16__)

namespace {

// Sizes were tried on one core of an AMX machine, at 128 to 2048 tokens.
constexpr int64_t kPair = 2 * kTile;
constexpr int64_t kTokens = 512;           // of one rectangle
constexpr int64_t kWeightBytes = 1 << 18;  // of one rectangle: they stay in the second cache while the tokens pass
constexpr int64_t kDepth = 320;            // inputs at a time: those of 32 tokens stay in the first cache
constexpr int64_t kMaxPairs = 16;          // of outputs of one rectangle

struct Map {
  const Bf16* x;
  const uint32_t* packed;
  const Bf16* bias;  // or null
  Bf16* out;
  int64_t x_stride, tokens, in, outputs;
};

TANDEM_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// Where a corner of a rectangle begins, and how much of it there is: up to 32 tokens (`low` and `high` of them
// in each tile) by up to 32 outputs, over `depth` inputs.
struct Corner {
  int64_t token, output, input, depth;
  int low, high;
};

// Adds to sums; puts them out with the last inputs.
template <int Blocks, int Outputs>
TANDEM_INLINE void corner(const Map& map, const Corner& at, float* sums, Fetch& fetch) {
  const Bf16* x = map.x + at.token * map.x_stride + at.input;
  const uint32_t* packed = map.packed + at.output * (map.in / 2) + at.input / 2 * kTile;
  multiply<Blocks, Outputs>(x, map.x_stride, packed, map.in / 2 * kTile, at.depth, at.input > 0, sums, fetch);
  if (at.input + at.depth < map.in) return;
  const Bf16* bias = map.bias ? map.bias + at.output : nullptr;
  Bf16* out = map.out + at.token * map.outputs + at.output;
  const int width = int(least(map.outputs - at.output, Outputs * kTile));
  put_tiles<Outputs>(sums, bias, out, map.outputs, at.low, width);
  if (Blocks > 1)
    put_tiles<Outputs>(sums + Outputs * kTileWords, bias, out + kTile * map.outputs, map.outputs, at.high, width);
}

// Tokens from … to by outputs first … last; meanwhile fetches the weights of as many outputs from `soon` on.
void rectangle(const Map& map, int64_t from, int64_t to, int64_t first, int64_t last, int64_t soon) {
  alignas(64) float sums[kMaxPairs][4 * kTileWords];
  // Weights that pass only once are better read in one stream.
  const int64_t parts = to - from <= kPair ? 1 : (map.in + kDepth - 1) / kDepth;
  const int64_t depth = (map.in / parts + kPair - 1) / kPair * kPair;
  // A step reads 32 lines of weights; so each pass over the weights fetches its share of the next ones.
  const int64_t passes = (to - from + kPair - 1) / kPair;
  const int lines = passes == 1 ? 0 : int((2 * kTile + passes - 1) / passes);
  Fetch fetch = {reinterpret_cast<const char*>(map.packed + soon * (map.in / 2)), lines};
  for (int64_t m = from; m < to; m += kPair) {
    const int low = int(least(to - m, kTile)), high = int(least(to - m, kPair)) - low;
    if (m == from || to - m < kPair) open_tiles(low, high);
    for (int64_t k = 0; k < map.in; k += depth)
      for (int64_t n = first; n < last; n += kPair) {
        const Corner at = {m, n, k, least(depth, map.in - k), low, high};
        float* partial = sums[(n - first) / kPair];
        if (last - n > kTile)
          high ? corner<2, 2>(map, at, partial, fetch) : corner<1, 2>(map, at, partial, fetch);
        else
          high ? corner<2, 1>(map, at, partial, fetch) : corner<1, 1>(map, at, partial, fetch);
      }
  }
}

void linear(const Map& map) {
  const int64_t pairs = (map.outputs + kPair - 1) / kPair;
  const int64_t work = map.outputs * map.in * 2 * ((map.tokens + kTile - 1) / kTile);
  const int64_t threads = work < kBytesWorthATeam ? 1 : omp_get_max_threads();
  // Four rectangles for each thread, or more: one that is held up leaves the others to the rest.
  int64_t wide = least(kWeightBytes / (2 * map.in * kPair), (pairs + 4 * threads - 1) / (4 * threads));
  wide = wide < 1 ? 1 : least(wide, kMaxPairs);
  const int64_t columns = (pairs + wide - 1) / wide;
  const int64_t count = columns * ((map.tokens + kTokens - 1) / kTokens);
  int64_t next = 0;
  const auto work_off = [&] {
    for (int64_t i; (i = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED)) < count;) {
      const int64_t from = i / columns * kTokens, first = i % columns * wide * kPair;
      const int64_t soon = (i + threads) % columns * wide * kPair;
      rectangle(map, from, least(from + kTokens, map.tokens), first, least(first + wide * kPair, map.outputs), soon);
    }
    close_tiles();
  };
  if (threads == 1) {
    work_off();
    return;
  }
#pragma omp parallel
  work_off();
}

}  // namespace

// weight [outputs, in], rows `stride` apart -> packed [outputs rounded up to 16, in].
TANDEM_EXPORT(void, tandem_pack_linear_bf16)
(const Bf16* weight, int64_t stride, uint32_t* packed, int64_t outputs, int64_t in) {
  const int64_t blocks = (outputs + kTile - 1) / kTile;
  over_tokens(blocks, blocks * kTile * in * 2, [=](int64_t first, int64_t last) {
    for (int64_t b = first; b < last; ++b)
      pack_outputs(weight + b * kTile * stride, stride, int(least(outputs - b * kTile, kTile)), in,
                   packed + b * kTile * (in / 2));
  });
}

// x [tokens, in], rows x_stride apart; packed weight; bias [outputs] or null -> out [tokens, outputs].
TANDEM_EXPORT(void, tandem_linear_bf16)
(const Bf16* x, int64_t x_stride, const uint32_t* packed, const Bf16* bias, Bf16* out, int64_t tokens, int64_t in,
 int64_t outputs) {
  if (tokens > 0) linear(Map{x, packed, bias, out, x_stride, tokens, in, outputs});
}

#endif  // __AMX_BF16__
