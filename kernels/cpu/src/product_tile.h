// Tiles of a product in bfloat16 on AMX: 16 tokens by 16 outputs, summed in float32 over the whole input.
//
// Tokens are read as they lie, weights as in product_weight.h. Each sum runs over the inputs in one order, whatever
// the number of tokens.

#pragma once

#include "gates.h"
#include "product_weight.h"
#include "tiles.h"

#if defined(__AMX_BF16__)

namespace {
namespace product {

constexpr int kTile = 16;  // tokens, outputs, and pairs of inputs of one tile

// Memory that is wanted soon, fetched into the second cache a few lines at a time, as far as `end`.
struct Fetch {
  const char* at;
  const char* end;
  int lines;

  TANDEM_INLINE void some() {
    if (at >= end) return;
    // A step that the compiler does not know keeps the loop as it stands: unrolled, 1 to 64 tokens took 4 to 8 % longer.
    int64_t step = 1;
    __asm__ volatile("" : "+r"(step));
    for (int64_t i = 0; i < lines; i += step) _mm_prefetch(at + i * 64, _MM_HINT_T1);
    at += lines * 64;
  }
};

// Tiles 0 to 3 hold sums (tokens by outputs, 2 by 2), 4 and 5 up to 16 tokens each, 6 and 7 weights. Blocks of tokens
// and of outputs are 1 or 2 each; in memory sums are tiles [Blocks][Outputs].

template <int Blocks, int Outputs>
TANDEM_INLINE void zero_sums() {
  _tile_zero(0);
  if (Outputs > 1) _tile_zero(1);
  if (Blocks > 1) _tile_zero(2);
  if (Blocks > 1 && Outputs > 1) _tile_zero(3);
}

template <int Blocks, int Outputs>
TANDEM_INLINE void load_sums(const float* sums) {
  _tile_loadd(0, sums, 64);
  if (Outputs > 1) _tile_loadd(1, sums + kTileWords, 64);
  if (Blocks > 1) _tile_loadd(2, sums + Outputs * kTileWords, 64);
  if (Blocks > 1 && Outputs > 1) _tile_loadd(3, sums + 3 * kTileWords, 64);
}

template <int Blocks, int Outputs>
TANDEM_INLINE void store_sums(float* sums) {
  _tile_stored(0, sums, 64);
  if (Outputs > 1) _tile_stored(1, sums + kTileWords, 64);
  if (Blocks > 1) _tile_stored(2, sums + Outputs * kTileWords, 64);
  if (Blocks > 1 && Outputs > 1) _tile_stored(3, sums + 3 * kTileWords, 64);
}

// Adds the products of 32 inputs: tokens x, rows `stride` apart, and the packed weights of each block of outputs.
template <int Blocks, int Outputs>
TANDEM_INLINE void add_product(const Bf16* x, int64_t stride, const uint32_t* packed) {
  _tile_loadd(4, x, stride * 2);
  _tile_loadd(6, packed, 64);
  _tile_dpbf16ps(0, 4, 6);
  if (Outputs > 1) {
    _tile_loadd(7, packed + kTileWords, 64);
    _tile_dpbf16ps(1, 4, 7);
  }
  if (Blocks > 1) {
    _tile_loadd(5, x + kTile * stride, stride * 2);
    _tile_dpbf16ps(2, 5, 6);
    if (Outputs > 1) _tile_dpbf16ps(3, 5, 7);
  }
}

// sums of tokens x, rows `stride` apart, and packed weights, over `count` inputs; adds to what is in sums, if `add`.
template <int Blocks, int Outputs>
TANDEM_INLINE void multiply(const Bf16* x, int64_t stride, const uint32_t* packed, int64_t count, bool add,
                            float* sums, Fetch& fetch) {
  // The intrinsics don't tell the compiler that they read and write memory.
  __asm__ volatile("" ::: "memory");
  if (add) load_sums<Blocks, Outputs>(sums);
  else zero_sums<Blocks, Outputs>();
  for (int64_t k = 0; k < count; k += 2 * kTile) {
    add_product<Blocks, Outputs>(x + k, stride, packed + k / 2 * kTile * Outputs);
    fetch.some();
  }
  store_sums<Blocks, Outputs>(sums);
  __asm__ volatile("" ::: "memory");
}

// sums [Outputs][16 tokens][16 outputs] -> the first `width` columns of out [count tokens], rows `stride` apart.
template <int Outputs>
TANDEM_INLINE void put_tiles(const float* sums, const Bf16* bias, Bf16* out, int64_t stride, int count, int width) {
  const int low_width = width < kTile ? width : kTile;
  const F32 low_bias = bias ? load_n(bias, low_width) : F32{};
  const F32 high_bias = bias && Outputs > 1 ? load_n(bias + kTile, width - kTile) : F32{};
  for (int i = 0; i < count; ++i) {
    const F32 low = load(sums + i * kTile) + low_bias;
    if (Outputs == 1) {
      store_n(out + i * stride, low, low_width);
      continue;
    }
    const F32 high = load(sums + kTileWords + i * kTile) + high_bias;
    const __m512i both = bit_cast<__m512i>(_mm512_cvtne2ps_pbh(bit_cast<__m512>(high), bit_cast<__m512>(low)));
    _mm512_mask_storeu_epi16(out + i * stride, __mmask32(0xffffffffu >> (2 * kTile - width)), both);
  }
}

// As put_tiles, not rounded.
template <int Outputs>
TANDEM_INLINE void put_wide(const float* sums, const Bf16* bias, float* out, int64_t stride, int count, int width) {
  for (int block = 0; block < Outputs; ++block, sums += kTileWords, out += kTile, width -= kTile) {
    const int columns = width < kTile ? width : kTile;
    const F32 more = bias ? load_n(bias + block * kTile, columns) : F32{};
    for (int i = 0; i < count; ++i) store_n(out + i * stride, load(sums + i * kTile) + more, columns);
  }
}

// sums [2: gate, up][16 tokens][16 outputs] -> the gates' activations times ups, the first `width` columns of out
// [count tokens].
TANDEM_INLINE void put_gated(const Product& p, const float* sums, const Bf16* gate_bias, const Bf16* up_bias, Bf16* out,
                             int64_t stride, int count, int width) {
  const F32 gate_more = gate_bias ? load_n(gate_bias, width) : F32{};
  const F32 up_more = up_bias ? load_n(up_bias, width) : F32{};
  for (int i = 0; i < count; ++i) {
    const F32 gate = load(sums + i * kTile) + gate_more;
    const F32 up = load(sums + kTileWords + i * kTile) + up_more;
    store_n(out + i * stride, gate_mul<Bf16>(p.gated, p.alpha, p.limit, gate, up), width);
  }
}

}  // namespace product
}  // namespace

#endif  // __AMX_BF16__
