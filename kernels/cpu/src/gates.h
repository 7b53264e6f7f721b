// What a gate becomes before it multiplies its up: x times the sigmoid of x (SiLU) or of what each kind makes of x.
// Exact for float32, and cheaper for what is rounded to bfloat16.

#pragma once

#include "attention_math.h"

namespace {

enum Gate : int64_t { kNoGate = 0, kSilu = 1, kGeluTanh = 2, kClampedSwiglu = 3 };

// x / (1 + e^-at). As `exp` is: relative error below 1e-6.
template <typename T>
TANDEM_INLINE F32 by_sigmoid(F32 x, F32 at) {
  return x / (exp(-at) + 1.0f);
}

// Relative error below 2e-4, a tenth of half a unit in the last place; NaN at NaN and an x of -inf, 0 at the least of
// others.
template <>
TANDEM_INLINE F32 by_sigmoid<Bf16>(F32 x, F32 at) {
  F32 power = at * -1.44269504f;
  power = max(splat(-126.0f), power);                  // this order lets NaN through
  power = power > 127.0f ? splat(127.0f) : power;
  const F32 below = exp2_of<false>(power) + 1.0f;
#if defined(__AVX512F__)
  return x * bit_cast<F32>(_mm512_rcp14_ps(bit_cast<__m512>(below)));
#else
  return x / below;
#endif
}

template <typename T>
TANDEM_INLINE F32 silu(F32 x) {
  return by_sigmoid<T>(x, x);
}

// By its approximation with tanh: (1 + tanh(y)) / 2 is the sigmoid of 2 y.
template <typename T>
TANDEM_INLINE F32 gelu_tanh(F32 x) {
  return by_sigmoid<T>(x, x * fma(x * x, splat(0.0713548163f), splat(1.5957691216f)));
}

// kind, not kNoGate, of gates times ups. alpha and limit: of kClampedSwiglu (gpt-oss), which computes in float32.
template <typename T>
TANDEM_INLINE F32 gate_mul(int64_t kind, float alpha, float limit, F32 gate, F32 up) {
  if (kind == kSilu) return silu<T>(gate) * up;
  if (kind == kGeluTanh) return gelu_tanh<T>(gate) * up;
  gate = gate > limit ? splat(limit) : gate;
  up = up > limit ? splat(limit) : up;
  up = up < -limit ? splat(-limit) : up;
  return by_sigmoid<float>(gate, gate * alpha) * (up + 1.0f);
}

}  // namespace
