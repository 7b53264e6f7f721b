// One packed weight of a linear map, and how its rows lie.
//
// Outputs come in blocks of 16, two of which share one forward stream over the inputs: a unit, what one thread
// computes alone. If gated, its two blocks are the gates and the ups of the same 16 columns of the result; the last
// unit may hold one block. A tile is 16 rows of 64 bytes of one block, a row one or two inputs of 16 outputs:
//   stream of a unit = tile 0 of the first block, tile 0 of the second, tile 1 of the first, …
// Inputs are filled up with zeros to whole tiles.

#pragma once

#include "arena.h"
#include "simd.h"

// Built by kernels/cpu/linear.py, field by field.
struct Product {
  int64_t form;          // of product::Form
  int64_t in, out;       // out of the result
  int64_t gated;         // kind of Gate; with one the weight has 2 * out rows, gates and then ups: see `gate_mul`
  int64_t group;         // inputs that share a scale, 0 for plain forms
  const void* packed;    // as above
  const float* scales;   // null for plain forms
  const float* offsets;  // or null: w = scale * q + offset
  const void* bias;      // [out, or twice that if gated], of the activations' type; or null
  float alpha, limit;    // of kClampedSwiglu
  int64_t wide;          // sums stay float32, whatever the activations are: none with a gate
};

namespace {
namespace product {

enum Form : int64_t { kFloat32 = 0, kBfloat16 = 1, kFloat16 = 2 };

constexpr int kBlock = 16;       // outputs
constexpr int kTileRows = 16;
constexpr int kRowBytes = 64;
constexpr int kPackedTileBytes = kTileRows * kRowBytes;

template <typename T>
constexpr int64_t kForm = kFloat32;
template <>
constexpr int64_t kForm<Bf16> = kBfloat16;
template <>
constexpr int64_t kForm<Half> = kFloat16;

// Inputs of a row and of a tile of a plain form.
template <typename T>
constexpr int kRowInputs = 4 / int(sizeof(T));
template <typename T>
constexpr int kTileInputs = kTileRows * kRowInputs<T>;

// Element `index` from `out` on, of a result that is float32 if `wide`.
template <typename T>
TANDEM_INLINE T* result_at(const Product& p, T* out, int64_t index) {
  return p.wide ? reinterpret_cast<T*>(reinterpret_cast<float*>(out) + index) : out + index;
}

TANDEM_INLINE int64_t num_blocks(const Product& p) { return (p.out + kBlock - 1) / kBlock * (p.gated ? 2 : 1); }
template <typename T>
TANDEM_INLINE int64_t num_tiles(const Product& p) {
  return (p.in + kTileInputs<T> - 1) / kTileInputs<T>;
}

// Tile 0 of a unit, for all units but the last as many bytes apart.
template <typename T>
TANDEM_INLINE const char* stream_of(const Product& p, int64_t unit) {
  return static_cast<const char*>(p.packed) + unit * 2 * num_tiles<T>(p) * kPackedTileBytes;
}

// Elements of a tile lie row by row, in a row output by output: so AMX takes pairs of bfloat16 inputs. A row of
// float16 holds its first inputs of all outputs and then the second ones.
template <typename T>
TANDEM_INLINE int64_t place_in_tile(int output, int input) {
  const int row = input / kRowInputs<T>, part = input % kRowInputs<T>;
  const int in_row = kForm<T> == kFloat16 ? part * kBlock + output : output * kRowInputs<T> + part;
  return row * kBlock * kRowInputs<T> + in_row;
}

// weight, rows `stride` apart -> packed; for blocks first … last.
template <typename T>
void pack_blocks(const Product& p, const T* weight, int64_t stride, T* packed, int64_t first, int64_t last) {
  const int64_t tiles = num_tiles<T>(p), blocks = num_blocks(p), elements = kPackedTileBytes / int64_t(sizeof(T));
  for (int64_t b = first; b < last; ++b) {
    const int64_t column = (p.gated ? b / 2 : b) * kBlock, gate_or_up = p.gated ? b % 2 * p.out : 0;
    const bool alone = b % 2 == 0 && b + 1 == blocks;
    T* to = packed + (b / 2 * 2 * tiles + b % 2) * elements;
    for (int64_t t = 0; t < tiles; ++t, to += (alone ? 1 : 2) * elements) {
      memset(static_cast<void*>(to), 0, kPackedTileBytes);
      const int64_t input = t * kTileInputs<T>, count = least(kTileInputs<T>, p.in - input);
      for (int output = 0; output < least(kBlock, p.out - column); ++output) {
        const T* from = weight + (gate_or_up + column + output) * stride + input;
        for (int i = 0; i < count; ++i) to[place_in_tile<T>(output, i)] = from[i];
      }
    }
  }
}

// Rows `ids` of a packed plain weight without a gate -> out [count, in]: as they were before.
template <typename T>
void unpack_rows(const Product& p, const int64_t* ids, int64_t count, T* out) {
  const int64_t tiles = num_tiles<T>(p), blocks = num_blocks(p), elements = kPackedTileBytes / int64_t(sizeof(T));
  for (int64_t i = 0; i < count; ++i, out += p.in) {
    const int64_t b = ids[i] / kBlock;
    const int output = int(ids[i] % kBlock);
    const bool alone = b % 2 == 0 && b + 1 == blocks;
    const T* from = reinterpret_cast<const T*>(stream_of<T>(p, b / 2)) + b % 2 * elements;
    for (int64_t t = 0; t < tiles; ++t, from += (alone ? 1 : 2) * elements) {
      const int64_t input = t * kTileInputs<T>, inputs = least(kTileInputs<T>, p.in - input);
      for (int k = 0; k < inputs; ++k) out[input + k] = from[place_in_tile<T>(output, k)];
    }
  }
}

}  // namespace product
}  // namespace
