// A linear map over a packed weight, on all threads; and the packing.
//
// Few tokens: each thread reads one stretch of the weights, once. Many: work is cut into rectangles of tokens by
// outputs, which threads take one after the other.

#include "parallel.h"
#include "product.h"

namespace {

constexpr int64_t kFewTokens = 128;
#if defined(__AMX_BF16__)
constexpr int64_t kTokens = 512;           // of one rectangle
constexpr int64_t kWeightBytes = 1 << 18;  // of one rectangle: they stay in the second cache while the tokens pass
constexpr int64_t kMostUnits = 16;         // of one rectangle
#else
constexpr int64_t kTokens = 192;
constexpr int64_t kWeightBytes = 1 << 20;  // the tokens stay in the second cache while the weights pass
constexpr int64_t kMostUnits = 64;
#endif

thread_local Arena arena;

template <typename T>
void many_tokens(const Product& p, const T* x, int64_t x_stride, int64_t tokens, T* out) {
  const int64_t units = product_units(p), threads = tandem_threads();
  const int64_t unit_bytes = product_unit_bytes<T>(p);
  // Four rectangles for each thread, or more: one that is held up leaves the others to the rest.
  const int64_t share = (units + 4 * threads - 1) / (4 * threads);
  const int64_t wide = least(most(least(kWeightBytes / unit_bytes, share), 1), kMostUnits);
  const int64_t columns = (units + wide - 1) / wide, count = columns * ((tokens + kTokens - 1) / kTokens);
  over_units(count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t from = i / columns * kTokens, first = i % columns * wide;
      multiply_units(p, x + from * x_stride, x_stride, least(kTokens, tokens - from),
                     product::result_at(p, out, from * p.out), p.out, first, least(first + wide, units), arena,
                     (i + 1) % columns * wide);
    }
  });
}

template <typename T>
void linear(const Product& p, const T* x, int64_t x_stride, int64_t tokens, T* out) {
  if (tokens > kFewTokens) return many_tokens(p, x, x_stride, tokens, out);
  const int64_t bytes = product_units(p) * product_unit_bytes<T>(p);
  over_tokens(product_units(p), bytes * ((tokens + 15) / 16), [&](int64_t first, int64_t last) {
    multiply_units(p, x, x_stride, tokens, out, p.out, first, last, arena);
  });
}

thread_local Arena waiting_arena;

// Where the sums of one level of a tree lie: rows `stride` apart.
struct Level {
  float* sums;
  int64_t stride;
};

// Units first … last of the sum of wide products of some segments of x, from `starts` on, added in pairs, the sums in
// pairs again. The sum of the first segments lies in out; what is to be added to it waits beside.
template <typename T>
void add_segments(const Product* const* parts, const int64_t* starts, int64_t count, const T* x, int64_t x_stride,
                  int64_t tokens, float* out, int64_t first, int64_t last) {
  const int64_t all = parts[0]->out, column = first * 2 * product::kBlock;
  const int64_t width = least(last * 2 * product::kBlock, all) - column;
  int64_t levels = 0, depth = 0;  // of the tree beside out; sums under way
  for (int64_t of = 1; of < count; of *= 2) ++levels;
  float* waiting = reinterpret_cast<float*>(waiting_arena.reserve(levels * tokens * width * int64_t(sizeof(float))));
  const auto level = [&](int64_t at) {
    return at ? Level{waiting + (at - 1) * tokens * width, width} : Level{out + column, all};
  };
  for (int64_t s = 0; s < count; ++s) {
    const Level here = level(depth);
    T* to = reinterpret_cast<T*>(here.sums - column);  // units count from the first
    multiply_units(*parts[s], x + starts[s], x_stride, tokens, to, here.stride, first, last, arena);
    for (int64_t pairs = s; pairs & 1; pairs >>= 1, --depth) {
      const Level left = level(depth - 1), right = level(depth);
      for (int64_t t = 0; t < tokens; ++t)
        for (int64_t i = 0; i < width; i += kLanes) {
          const int n = int(least(kLanes, width - i));
          float* sum = left.sums + t * left.stride + i;
          store_n(sum, load_n(sum, n) + load_n(right.sums + t * right.stride + i, n), n);
        }
    }
    ++depth;
  }
}

template <typename T>
void segments(const Product* const* parts, const int64_t* starts, int64_t count, const T* x, int64_t x_stride,
              int64_t tokens, float* out) {
  const Product& p = *parts[0];
  const int64_t units = product_units(p);
  int64_t bytes = 0;
  for (int64_t s = 0; s < count; ++s) bytes += units * product_unit_bytes<T>(*parts[s]);
  for (int64_t t = 0; t < tokens; t += kFewTokens) {
    const int64_t some = least(kFewTokens, tokens - t);
    over_tokens(units, bytes * ((some + 15) / 16), [&](int64_t first, int64_t last) {
      add_segments(parts, starts, count, x + t * x_stride, x_stride, some, out + t * p.out, first, last);
    });
  }
}

template <typename T>
void pack(const Product& p, const T* weight, int64_t stride, T* packed) {
  const int64_t blocks = product::num_blocks(p);
  over_tokens(blocks, blocks * product::num_tiles<T>(p) * product::kPackedTileBytes, [&](int64_t first, int64_t last) {
    product::pack_blocks(p, weight, stride, packed, first, last);
  });
}

}  // namespace

// tandem_packed_bytes: how many a weight of this form and these sizes takes.
TANDEM_EXPORT(void, tandem_packed_bytes)(const Product* p, int64_t* bytes) {
  const int64_t tiles = p->form == product::kFloat32 ? product::num_tiles<float>(*p) : product::num_tiles<Bf16>(*p);
  *bytes = product::num_blocks(*p) * tiles * product::kPackedTileBytes;
}

// Pieces of its outputs that may be shared out, columns of each but the last, and how many tokens to multiply at a time.
TANDEM_EXPORT(void, tandem_product_units)(const Product* p, int64_t* units, int64_t* columns, int64_t* tokens) {
  *units = product_units(*p), *columns = product::kBlock * (p->gated ? 1 : 2), *tokens = kTokens;
}

// tandem_pack_<type>: weight [out, or twice that if gated, in], rows `stride` apart -> packed.
// tandem_linear_<type>: x [tokens, in], rows x_stride apart -> out [tokens, out], of its type or wide, on all threads.
// tandem_segments_<type>: x [tokens, in] -> out [tokens, out] float32, the tree of `count` wide products, on all threads.
// tandem_multiply_units_<type>: as multiply_units, on this thread.
// tandem_unpack_rows_<type>: as unpack_rows, on this thread.
#define TANDEM_LINEAR(suffix, T)                                                                                  \
  TANDEM_EXPORT(void, tandem_pack_##suffix)(const Product* p, const T* weight, int64_t stride, T* packed) {       \
    pack(*p, weight, stride, packed);                                                                             \
  }                                                                                                               \
  TANDEM_EXPORT(void, tandem_linear_##suffix)                                                                     \
  (const Product* p, const T* x, int64_t x_stride, int64_t tokens, T* out) {                                      \
    if (tokens) linear(*p, x, x_stride, tokens, out);                                                             \
  }                                                                                                               \
  TANDEM_EXPORT(void, tandem_segments_##suffix)                                                                   \
  (const Product* const* parts, const int64_t* starts, int64_t count, const T* x, int64_t x_stride,               \
   int64_t tokens, float* out) {                                                                                  \
    segments(parts, starts, count, x, x_stride, tokens, out);                                                     \
  }                                                                                                               \
  TANDEM_EXPORT(void, tandem_multiply_units_##suffix)                                                             \
  (const Product* p, const T* x, int64_t x_stride, int64_t tokens, T* out, int64_t out_stride, int64_t first,     \
   int64_t last, int64_t same_x, Ahead* ahead) {                                                                  \
    multiply_units(*p, x, x_stride, tokens, out, out_stride, first, last, arena, -1, same_x != 0, ahead);         \
  }                                                                                                               \
  TANDEM_EXPORT(void, tandem_unpack_rows_##suffix)                                                                \
  (const Product* p, const int64_t* ids, int64_t count, T* out) {                                                 \
    product::unpack_rows(*p, ids, count, out);                                                                    \
  }

TANDEM_LINEAR(f32, float)
TANDEM_LINEAR(bf16, Bf16)
TANDEM_LINEAR(f16, Half)
