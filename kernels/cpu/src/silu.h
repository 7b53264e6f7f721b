// silu(x) = x / (1 + e^-x): exact for float32, and one that is cheaper for what is rounded to bfloat16.

#pragma once

#include "attention_math.h"

namespace {

// As `exp` is: relative error below 1e-6.
template <typename T>
TANDEM_INLINE F32 silu(F32 x) {
  return x / (exp(-x) + 1.0f);
}

// Relative error below 2e-4, a tenth of half a unit in the last place; NaN at -inf and NaN, 0 at the least of others.
template <>
TANDEM_INLINE F32 silu<Bf16>(F32 x) {
  F32 power = x * -1.44269504f;
  power = max(splat(-126.0f), power);                  // this order lets NaN through
  power = power > 127.0f ? splat(127.0f) : power;
  const F32 below = exp2_of<false>(power) + 1.0f;
#if defined(__AVX512F__)
  return x * bit_cast<F32>(_mm512_rcp14_ps(bit_cast<__m512>(below)));
#else
  return x / below;
#endif
}

}  // namespace
