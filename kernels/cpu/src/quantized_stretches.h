// How the weights of a unit are cut: into stretches of inputs that share a scale.

#pragma once

#include "quantized_forms.h"

namespace {
namespace product {

constexpr int64_t kUnitOutputs = 2 * kBlock;
constexpr int64_t kUnitRowBytes = 2 * kRowBytes;

TANDEM_INLINE bool is_int4(const Product& p) { return (p.form & ~kHalfScales) == kInt4; }

TANDEM_INLINE int64_t unit_bytes(const Product& p) {
  const bool has_four_bits = is_int4(p) || (p.form & ~kHalfScales) == kFp4;
  return p.in / (has_four_bits ? Int4::kRowInputs : Int8::kRowInputs) * kUnitRowBytes;
}

// Some stretches of one unit: where their weights lie, [count][rows][two blocks], and the scales of the first,
// [groups][kUnitOutputs].
struct Stretches {
  const char* weights;
  const char* scales;
  int64_t count, rows;
  int64_t per_group, left;  // stretches with the first one's scales
  bool has_half_scales;

  TANDEM_INLINE F32 scale(int64_t output) const {
    return has_half_scales ? load(reinterpret_cast<const Half*>(scales) + output)
                           : load(reinterpret_cast<const float*>(scales) + output);
  }
  TANDEM_INLINE void step() {
    if (--left) return;
    left = per_group;
    scales += kUnitOutputs * (has_half_scales ? 2 : 4);
  }
};

}  // namespace product
}  // namespace
