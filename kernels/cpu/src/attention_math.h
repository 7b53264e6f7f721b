// Exponentials, tanh and lane shuffles of attention, on vectors of simd.h.

#pragma once

#include "simd.h"

namespace {

// 2^x for x <= 127; below 2^-126 the result is that or 0. kExact: relative error 1e-7 (degree 6), else 8e-5
// (degree 3), a twentieth of what rounding the result to bfloat16 costs.
template <bool kExact>
TANDEM_INLINE F32 exp2_of(F32 x) {
#if !defined(__AVX512F__)
  x = max(splat(-126.0f), x);
#endif
  const F32 magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, in the low bits
  const F32 shifted = x + magic;
  const F32 n = shifted - magic;
  const F32 f = x - n;
  F32 p;
  if constexpr (kExact) {
    p = splat(1.53458107e-4f);
    p = fma(p, f, splat(1.33999315e-3f));
    p = fma(p, f, splat(9.61848896e-3f));
    p = fma(p, f, splat(5.55032878e-2f));
    p = fma(p, f, splat(2.40226469e-1f));
    p = fma(p, f, splat(6.93147206e-1f));
    p = fma(p, f, splat(1.0f));
  } else {
    p = splat(0.05517166f);
    p = fma(p, f, splat(0.24261114f));
    p = fma(p, f, splat(0.69326099f));
    p = fma(p, f, splat(0.99992807f));
  }
#if defined(__AVX512F__)
  return bit_cast<F32>(_mm512_scalef_ps(bit_cast<__m512>(p), bit_cast<__m512>(n)));
#else
  const F32 power = bit_cast<F32>(bit_cast<I32>(p) + (bit_cast<I32>(shifted) << 23));
  return x == x ? power : x;  // some NaNs would become numbers
#endif
}

// tanh, relative error below 1e-6: a series near 0, where the quotient would cancel.
TANDEM_INLINE F32 tanh_of(F32 x) {
  const F32 square = x * x;
  F32 series = fma(square, splat(-17.0f / 315), splat(2.0f / 15));
  series = fma(series, square, splat(-1.0f / 3));
  series = fma(series * square, x, x);
  const F32 quotient = 1.0f - 2.0f / (exp(x + x) + 1.0f);
  return square < 0.0625f ? series : quotient;
}

// low_halves: lanes without bit kStep from a, those with it from b's lanes without it.
// high_halves: lanes without it from a's lanes with it, those with it from b.
#define TANDEM_LOW(l) ((l) & kStep ? kLanes + ((l) ^ kStep) : (l))
#define TANDEM_HIGH(l) ((l) & kStep ? kLanes + (l) : (l) ^ kStep)

template <int kStep, typename V>
TANDEM_INLINE V low_halves(V a, V b) {
  return __builtin_shufflevector(a, b, TANDEM_EACH_LANE(TANDEM_LOW));
}
template <int kStep, typename V>
TANDEM_INLINE V high_halves(V a, V b) {
  return __builtin_shufflevector(a, b, TANDEM_EACH_LANE(TANDEM_HIGH));
}

template <int kStep>
TANDEM_INLINE void transpose_step(F32* rows) {
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) {
    if (i & kStep) continue;
    const F32 a = rows[i], b = rows[i | kStep];
    rows[i] = low_halves<kStep>(a, b);
    rows[i | kStep] = high_halves<kStep>(a, b);
  }
  if constexpr (kStep * 2 < kLanes) transpose_step<kStep * 2>(rows);
}

// rows[i][j] and rows[j][i] change places; kLanes rows.
TANDEM_INLINE void transpose(F32* rows) { transpose_step<1>(rows); }

template <int kStep, typename V>
TANDEM_INLINE void sum_step(V* rows) {
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; i += 2 * kStep)
    rows[i] = low_halves<kStep>(rows[i], rows[i + kStep]) + high_halves<kStep>(rows[i], rows[i + kStep]);
  if constexpr (kStep * 2 < kLanes) sum_step<kStep * 2>(rows);
}

// Lane i of the result is the sum of rows[i], of kLanes rows; destroys them.
template <typename V>
TANDEM_INLINE V sums(V* rows) {
  sum_step<1>(rows);
  return rows[0];
}

// Lane i of the result is lane i / kGroup of x.
#define TANDEM_SPREAD(l) ((l) / kGroup)
template <int kGroup>
TANDEM_INLINE F32 spread(F32 x) {
  return __builtin_shufflevector(x, x, TANDEM_EACH_LANE(TANDEM_SPREAD));
}

// In each lane the highest of all lanes whose numbers are equal to its own modulo kGroup.
template <int kGroup, typename V>
TANDEM_INLINE V highest_of_groups(V x) {
  if constexpr (kGroup < kLanes) {
    x = highest_of_groups<kGroup * 2>(x);
    return max(low_halves<kGroup>(x, x), high_halves<kGroup>(x, x));
  } else {
    return x;
  }
}

}  // namespace
