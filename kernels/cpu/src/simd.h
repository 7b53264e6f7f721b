// One float32 vector type as wide as the tier's registers, over float, bfloat16 and float16 memory.
//
// kLanes is 16 with AVX-512, 8 with AVX2, else 4 (SSE2, NEON). Arithmetic is the compiler's own on
// vector types: a * b, a < b ? a : b. Loads and stores need no alignment. `_n` variants touch only the
// first n of kLanes elements, 0 <= n <= kLanes, and load zero for the others.

#pragma once

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "tier.h"

namespace {

#if defined(__AVX512F__)
#define TANDEM_LANES 16
#elif defined(__AVX2__)
#define TANDEM_LANES 8
#else
#define TANDEM_LANES 4
#endif

constexpr int kLanes = TANDEM_LANES;

// Of a constant shuffle.
#if TANDEM_LANES == 16
#define TANDEM_EACH_LANE(f) \
  f(0), f(1), f(2), f(3), f(4), f(5), f(6), f(7), f(8), f(9), f(10), f(11), f(12), f(13), f(14), f(15)
#elif TANDEM_LANES == 8
#define TANDEM_EACH_LANE(f) f(0), f(1), f(2), f(3), f(4), f(5), f(6), f(7)
#else
#define TANDEM_EACH_LANE(f) f(0), f(1), f(2), f(3)
#endif

#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define TANDEM_BF16_PAIRS  // add_bf16_pairs
#endif

typedef float F32 __attribute__((vector_size(TANDEM_LANES * 4)));
typedef int32_t I32 __attribute__((vector_size(TANDEM_LANES * 4)));
typedef uint32_t U32 __attribute__((vector_size(TANDEM_LANES * 4)));
typedef uint16_t U16 __attribute__((vector_size(TANDEM_LANES * 2)));

// A bfloat16 as it lies in memory: the upper half of a float32.
struct Bf16 {
  uint16_t bits;
};

// A float16 as it lies in memory (IEEE 754 binary16).
struct Half {
  uint16_t bits;
};

template <typename T>
constexpr bool kIsBf16 = false;
template <>
constexpr bool kIsBf16<Bf16> = true;

TANDEM_INLINE F32 splat(float x) { return x - F32{}; }
TANDEM_INLINE I32 splat_int(int32_t x) { return x - I32{}; }

template <typename To, typename From>
TANDEM_INLINE To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "a cast keeps all bits");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

// ---- scalars ----

TANDEM_INLINE float widen(float x) { return x; }
TANDEM_INLINE float widen(Bf16 x) { return bit_cast<float>(uint32_t{x.bits} << 16); }

// Round to nearest, ties to even; NaN stays NaN.
TANDEM_INLINE Bf16 narrow_bf16(float x) {
  const uint32_t bits = bit_cast<uint32_t>(x);
  if (x != x) return Bf16{uint16_t(bits >> 16 | 0x40)};
  return Bf16{uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

TANDEM_INLINE void put(float* to, float x) { *to = x; }
TANDEM_INLINE void put(Bf16* to, float x) { *to = narrow_bf16(x); }

// ---- bfloat16 vectors ----

TANDEM_INLINE F32 widen(U16 x) {
#if defined(__AVX512F__)
  // GCC 12 would convert in two halves, five instructions for one.
  return bit_cast<F32>(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bit_cast<__m256i>(x)), 16));
#elif defined(__AVX2__)
  return bit_cast<F32>(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bit_cast<__m128i>(x)), 16));
#else
  return bit_cast<F32>(__builtin_convertvector(x, U32) << 16);
#endif
}

// Round to nearest, ties to even; NaN stays NaN. The AVX-512 instruction takes denormals for zero.
TANDEM_INLINE U16 narrow(F32 x) {
#if defined(__AVX512BF16__)
  return bit_cast<U16>(_mm512_cvtneps_pbh(bit_cast<__m512>(x)));
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  return bit_cast<U16>(vcvt_bf16_f32(bit_cast<float32x4_t>(x)));
#else
  const U32 bits = bit_cast<U32>(x);
  const U32 rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  const U32 nan = bits >> 16 | 0x40;
  return __builtin_convertvector(x == x ? rounded : nan, U16);
#endif
}

// ---- float16 vectors ----

TANDEM_INLINE F32 widen_half(U16 x) {
#if defined(__AVX512F__)
  return bit_cast<F32>(_mm512_cvtph_ps(bit_cast<__m256i>(x)));
#elif defined(__F16C__)
  return bit_cast<F32>(_mm256_cvtph_ps(bit_cast<__m128i>(x)));
#elif defined(__aarch64__)
  return bit_cast<F32>(vcvt_f32_f16(bit_cast<float16x4_t>(x)));
#else
  const U32 bits = __builtin_convertvector(x, U32);
  // The product moves the exponent's bias from 15 to 127, of denormals too.
  const F32 finite = bit_cast<F32>((bits & 0x7fff) << 13) * 0x1p112f;
  const U32 magnitude = (bits & 0x7c00) == 0x7c00 ? (bits & 0x7fff) << 13 | 0x7f800000 : bit_cast<U32>(finite);
  return bit_cast<F32>(magnitude | (bits & 0x8000) << 16);
#endif
}

// Round to nearest, ties to even; infinite from 65520 on, NaN stays NaN.
TANDEM_INLINE U16 narrow_half(F32 x) {
#if defined(__AVX512F__)
  return bit_cast<U16>(_mm512_cvtps_ph(bit_cast<__m512>(x), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(__F16C__)
  return bit_cast<U16>(_mm256_cvtps_ph(bit_cast<__m256>(x), _MM_FROUND_TO_NEAREST_INT));
#elif defined(__aarch64__)
  return bit_cast<U16>(vcvt_f16_f32(bit_cast<float32x4_t>(x)));
#else
  const U32 bits = bit_cast<U32>(x), magnitude = bits & 0x7fffffff;
  const U32 normal = (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13;
  // 1/2 has a float32 step of 2^-24, as float16's denormals have.
  const U32 denormal = bit_cast<U32>(bit_cast<F32>(magnitude) + 0.5f) - 0x3f000000;
  U32 rounded = bit_cast<I32>(magnitude) < 0x38800000 ? denormal : normal;
  rounded = bit_cast<I32>(magnitude) >= 0x47800000 ? U32{} + 0x7c00 : rounded;
  rounded = x == x ? rounded : (magnitude >> 13 | 0x7e00) & 0x7fff;
  return __builtin_convertvector(rounded | (bits >> 16 & 0x8000), U16);
#endif
}

TANDEM_INLINE float widen(Half x) {
  U16 all = {};
  all[0] = x.bits;
  return widen_half(all)[0];
}

TANDEM_INLINE void put(Half* to, float x) { *to = Half{narrow_half(splat(x))[0]}; }

// x as it would be read back after a store to T: float stays, bfloat16 and float16 round.
template <typename T>
F32 rounded_to(F32 x);
template <>
TANDEM_INLINE F32 rounded_to<float>(F32 x) {
  return x;
}
template <>
TANDEM_INLINE F32 rounded_to<Bf16>(F32 x) {
  return widen(narrow(x));
}
template <>
TANDEM_INLINE F32 rounded_to<Half>(F32 x) {
  return widen_half(narrow_half(x));
}

// ---- memory ----

TANDEM_INLINE F32 load(const float* from) {
  F32 x;
  memcpy(&x, from, sizeof x);
  return x;
}

TANDEM_INLINE F32 load(const Bf16* from) {
  U16 x;
  memcpy(&x, from, sizeof x);
  return widen(x);
}

TANDEM_INLINE F32 load(const Half* from) {
  U16 x;
  memcpy(&x, from, sizeof x);
  return widen_half(x);
}

TANDEM_INLINE void store(float* to, F32 x) { memcpy(to, &x, sizeof x); }

TANDEM_INLINE void store(Bf16* to, F32 x) {
  const U16 narrowed = narrow(x);
  memcpy(to, &narrowed, sizeof narrowed);
}

TANDEM_INLINE void store(Half* to, F32 x) {
  const U16 narrowed = narrow_half(x);
  memcpy(to, &narrowed, sizeof narrowed);
}

TANDEM_INLINE F32 load_n(const float* from, int n) {
#if defined(__AVX512F__)
  return bit_cast<F32>(_mm512_maskz_loadu_ps(__mmask16((1u << n) - 1), from));
#else
  F32 x = {};
  for (int i = 0; i < n; ++i) x[i] = from[i];
  return x;
#endif
}

TANDEM_INLINE F32 load_n(const Bf16* from, int n) {
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  return widen(bit_cast<U16>(_mm256_maskz_loadu_epi16(__mmask16((1u << n) - 1), from)));
#else
  F32 x = {};
  for (int i = 0; i < n; ++i) x[i] = widen(from[i]);
  return x;
#endif
}

TANDEM_INLINE F32 load_n(const Half* from, int n) {
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  return widen_half(bit_cast<U16>(_mm256_maskz_loadu_epi16(__mmask16((1u << n) - 1), from)));
#else
  U16 x = {};
  memcpy(&x, from, size_t(n) * 2);
  return widen_half(x);
#endif
}

TANDEM_INLINE void store_n(float* to, F32 x, int n) {
#if defined(__AVX512F__)
  _mm512_mask_storeu_ps(to, __mmask16((1u << n) - 1), bit_cast<__m512>(x));
#else
  for (int i = 0; i < n; ++i) to[i] = x[i];
#endif
}

TANDEM_INLINE void store_n(Bf16* to, F32 x, int n) {
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  _mm256_mask_storeu_epi16(to, __mmask16((1u << n) - 1), bit_cast<__m256i>(narrow(x)));
#else
  for (int i = 0; i < n; ++i) put(to + i, x[i]);
#endif
}

TANDEM_INLINE void store_n(Half* to, F32 x, int n) {
  const U16 narrowed = narrow_half(x);
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  _mm256_mask_storeu_epi16(to, __mmask16((1u << n) - 1), bit_cast<__m256i>(narrowed));
#else
  memcpy(to, &narrowed, size_t(n) * 2);
#endif
}

// ---- arithmetic ----

TANDEM_INLINE F32 fma(F32 a, F32 b, F32 c) {
#if defined(__AVX512F__)
  return bit_cast<F32>(_mm512_fmadd_ps(bit_cast<__m512>(a), bit_cast<__m512>(b), bit_cast<__m512>(c)));
#elif defined(__AVX2__)
  return bit_cast<F32>(_mm256_fmadd_ps(bit_cast<__m256>(a), bit_cast<__m256>(b), bit_cast<__m256>(c)));
#else
  return a * b + c;
#endif
}

#if defined(TANDEM_BF16_PAIRS)
// sum + a * b of the two bfloat16 of each word.
TANDEM_INLINE F32 add_bf16_pairs(F32 sum, U32 a, U32 b) {
#if defined(__AVX512BF16__)
  return bit_cast<F32>(_mm512_dpbf16_ps(bit_cast<__m512>(sum), bit_cast<__m512bh>(a), bit_cast<__m512bh>(b)));
#else
  return bit_cast<F32>(vbfdotq_f32(bit_cast<float32x4_t>(sum), bit_cast<bfloat16x8_t>(a), bit_cast<bfloat16x8_t>(b)));
#endif
}
#endif

// b where either is NaN.
TANDEM_INLINE F32 max(F32 a, F32 b) { return a > b ? a : b; }
TANDEM_INLINE I32 max(I32 a, I32 b) { return a > b ? a : b; }

TANDEM_INLINE float sum(F32 x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps(bit_cast<__m512>(x));
#else
  float lanes[kLanes];
  memcpy(lanes, &x, sizeof x);
  for (int step = kLanes / 2; step > 0; step /= 2)
    for (int i = 0; i < step; ++i) lanes[i] += lanes[i + step];
  return lanes[0];
#endif
}

TANDEM_INLINE float highest(F32 x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps(bit_cast<__m512>(x));
#else
  float lanes[kLanes];
  memcpy(lanes, &x, sizeof x);
  for (int step = kLanes / 2; step > 0; step /= 2)
    for (int i = 0; i < step; ++i) lanes[i] = lanes[i] > lanes[i + step] ? lanes[i] : lanes[i + step];
  return lanes[0];
#endif
}

// e^x, relative error below 2e-7; 0 below -87.3 (so e^-inf = 0), inf above 88.7, NaN stays NaN.
// x = n ln 2 + r, |r| <= ln 2 / 2; e^r by a polynomial of degree 6 (Cephes' expf), 2^n by its exponent bits.
TANDEM_INLINE F32 exp(F32 x) {
  const F32 magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, in the low bits
  const F32 shifted = fma(x, splat(1.44269504088896341f), magic);
  const F32 n = shifted - magic;
  F32 r = fma(n, splat(-0.693359375f), x);
  r = fma(n, splat(2.12194440e-4f), r);
  F32 p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p, r * r, r + 1.0f);
#if defined(__AVX512F__)
  // Scales by 2^n with the right overflow; r of an infinite x is NaN, hence the two ends below.
  const F32 result = bit_cast<F32>(_mm512_scalef_ps(bit_cast<__m512>(p), bit_cast<__m512>(n)));
#else
  // In two halves, so that n = 128 does not overflow: 2^n = 2^(n / 2) * 2^(n - n / 2).
  const I32 exponent = bit_cast<I32>(shifted) - 0x4b400000;
  const I32 half = exponent >> 1;
  const F32 result = p * bit_cast<F32>((half + 127) << 23) * bit_cast<F32>((exponent - half + 127) << 23);
#endif
  const F32 bounded = x > 88.72283f ? splat(__builtin_inff()) : result;
  return x < -87.33654f ? F32{} : bounded;
}

}  // namespace
