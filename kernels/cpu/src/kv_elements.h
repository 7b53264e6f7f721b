// Elements of quantized KV: int8 and e4m3, to and from float32 vectors, and how a row is rounded.
//
// A row's scale is its largest magnitude over the largest element; kernels/quantized_kv.py has the same formula.

#pragma once

#include "simd.h"

namespace {

struct Int8 {
  int8_t bits;
};
struct Fp8 {
  uint8_t bits;  // sign, 4 of exponent, 3 of mantissa
};

template <typename K>
constexpr bool kHasScales = false;
template <>
constexpr bool kHasScales<Int8> = true;
template <>
constexpr bool kHasScales<Fp8> = true;

template <typename K>
constexpr float kLargest = 0;
template <>
constexpr float kLargest<Int8> = 127;
template <>
constexpr float kLargest<Fp8> = 448;
constexpr float kSmallestRow = 1e-30f;

// What attention computes in, and what the pool holds. A form is T itself, or Quantized<T, K>.
template <typename T, typename K>
struct Quantized {};
template <typename Form>
struct KvForm {
  using Computed = Form;
  using Stored = Form;
};
template <typename T, typename K>
struct KvForm<Quantized<T, K>> {
  using Computed = T;
  using Stored = K;
};

typedef int8_t S8 __attribute__((vector_size(TANDEM_LANES)));

// ---- memory ----

TANDEM_INLINE I32 load_bytes(const void* from) {
  S8 x;
  memcpy(&x, from, sizeof x);
#if defined(__AVX512F__)
  return bit_cast<I32>(_mm512_cvtepi8_epi32(bit_cast<__m128i>(x)));
#elif defined(__AVX2__)
  return bit_cast<I32>(_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(bit_cast<int64_t>(x))));
#else
  return __builtin_convertvector(x, I32);
#endif
}

TANDEM_INLINE I32 load_bytes_n(const void* from, int n) {
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  return bit_cast<I32>(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(__mmask16((1u << n) - 1), from)));
#else
  int8_t bytes[kLanes] = {};
  memcpy(bytes, from, size_t(n));
  return load_bytes(bytes);
#endif
}

TANDEM_INLINE void store_bytes_n(void* to, I32 x, int n) {
#if defined(__AVX512F__)
  const __m128i bytes = _mm512_cvtepi32_epi8(bit_cast<__m512i>(x));
#else
  const S8 bytes = __builtin_convertvector(x, S8);
#endif
  memcpy(to, &bytes, size_t(n));
}

TANDEM_INLINE F32 to_float(I32 x) { return __builtin_convertvector(x, F32); }

// To nearest, ties to even; |x| < 2^31. No sum, which the compiler might fuse with the product before it.
TANDEM_INLINE I32 to_int(F32 x) {
#if defined(__AVX512F__)
  return bit_cast<I32>(_mm512_cvtps_epi32(bit_cast<__m512>(x)));
#elif defined(__AVX2__)
  return bit_cast<I32>(_mm256_cvtps_epi32(bit_cast<__m256>(x)));
#elif defined(__SSE2__)
  return bit_cast<I32>(_mm_cvtps_epi32(bit_cast<__m128>(x)));
#elif defined(__aarch64__)
  return bit_cast<I32>(vcvtnq_s32_f32(bit_cast<float32x4_t>(x)));
#else
  I32 rounded;
  for (int i = 0; i < kLanes; ++i) rounded[i] = int32_t(__builtin_rintf(x[i]));
  return rounded;
#endif
}

// ---- elements ----

// The exponent's bits go where float32 has its lowest ones; 2^120 makes up for the difference, denormals too.
TANDEM_INLINE F32 widen_fp8(I32 bits) { return bit_cast<F32>((bits << 20) & int32_t(0x87f00000)) * 0x1p120f; }

TANDEM_INLINE F32 load(const Int8* from) { return to_float(load_bytes(from)); }
TANDEM_INLINE F32 load_n(const Int8* from, int n) { return to_float(load_bytes_n(from, n)); }
TANDEM_INLINE F32 load(const Fp8* from) { return widen_fp8(load_bytes(from)); }
TANDEM_INLINE F32 load_n(const Fp8* from, int n) { return widen_fp8(load_bytes_n(from, n)); }

TANDEM_INLINE I32 narrow_to(const Int8*, F32 x) { return to_int(x); }

// |x| < 464; to nearest, ties to even.
TANDEM_INLINE I32 narrow_to(const Fp8*, F32 x) {
  const I32 bits = bit_cast<I32>(x), magnitude = bits & 0x7fffffff;
  const I32 normal = ((magnitude + 0x7ffff + (magnitude >> 20 & 1)) >> 20) - (120 << 3);
  const I32 denormal = to_int(bit_cast<F32>(magnitude) * 512.0f);
  const I32 code = magnitude < (121 << 23) ? denormal : normal;
  return code | (bits >> 24 & 0x80);
}

// ---- rows ----

// Rounds a row of n elements to `to`; returns its scale. Magnitudes are compared as integers, where NaN is the largest.
template <typename K, typename T>
float quantize_row(const T* row, K* to, int64_t n) {
  I32 top = bit_cast<I32>(splat(kSmallestRow));
  for (int64_t i = 0; i < n; i += kLanes) {
    const F32 x = n - i < kLanes ? load_n(row + i, int(n - i)) : load(row + i);
    top = max(top, bit_cast<I32>(x) & 0x7fffffff);
  }
  int32_t highest = top[0];
  for (int i = 1; i < kLanes; ++i) highest = top[i] > highest ? top[i] : highest;
  const float largest = bit_cast<float>(highest), factor = kLargest<K> / largest;
  for (int64_t i = 0; i < n; i += kLanes) {
    const int count = n - i < kLanes ? int(n - i) : kLanes;
    const F32 x = count < kLanes ? load_n(row + i, count) : load(row + i);
    store_bytes_n(to + i, narrow_to(to, x * factor), count);
  }
  return largest / kLargest<K>;
}

}  // namespace
