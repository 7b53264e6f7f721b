// Products of packed weights on the calling thread: the door for whoever shares out the work.
//
// A token's result is the same to the bit whatever tokens are with it and however units are shared out: float32 sums
// in one fixed order over the inputs, bias and gate applied, rounded once.

#pragma once

#include "product_panel.h"
#include "product_tiles.h"
#include "quantized.h"

namespace {

// Pieces of the outputs that threads may share out.
TANDEM_INLINE int64_t product_units(const Product& p) { return (product::num_blocks(p) + 1) / 2; }

// Bytes of a unit's weights, for those who share out the work; T as below.
template <typename T>
TANDEM_INLINE int64_t product_unit_bytes(const Product& p) {
  return product::is_quantized(p) ? product::unit_bytes(p) : 2 * product::num_tiles<T>(p) * product::kPackedTileBytes;
}

// x [tokens, in] -> the columns of units first … last of out [tokens, out], rows so far apart. T is float, Bf16 or
// Half, and a plain weight's type. Meanwhile may fetch the weights of as many units from
// `soon` on, without it from `last` on. With `same_x`, the scratch is as a call with the same weight, x and tokens left
// it: x need not be packed again. Plain weights in vector registers: many tokens fetch of `ahead`, too.
template <typename T>
void multiply_units(const Product& p, const T* x, int64_t x_stride, int64_t tokens, T* out, int64_t out_stride,
                    int64_t first, int64_t last, Arena& scratch, [[maybe_unused]] int64_t soon = -1,
                    bool same_x = false, [[maybe_unused]] Ahead* ahead = nullptr) {
  if (product::is_quantized(p))
    return product::QuantizedPanels<T>(p).multiply(x, x_stride, tokens, out, out_stride, first, last, scratch,
                                                   same_x);
#if defined(__AMX_BF16__)
  if constexpr (sizeof(T) == 2 && product::kForm<T> == product::kBfloat16)
    return product::multiply_tiles(p, x, x_stride, tokens, out, out_stride, first, last, scratch,
                                   soon < 0 ? last : soon);
#endif
  product::Panels<T>(p, ahead).multiply(x, x_stride, tokens, out, out_stride, first, last, scratch, same_x);
}

}  // namespace
