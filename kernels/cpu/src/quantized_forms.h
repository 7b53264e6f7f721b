// Quantised values as they lie in a packed weight, and how they become numbers again: exactly, in registers.
//
// A row is 64 bytes: a word of 32 bits for each of 16 outputs, with 4 inputs of 8 bits or 8 of 4 bits. Two such rows, of
// both blocks of a unit (product_weight.h), follow one another, then the rows of the next inputs.
// INT8: input i of a word is byte i. INT4: input i is nibble i / 2 of the lower half if i is even, else of the upper
// half, plus 8. FP8 (e4m3): bytes are inputs 0, 2, 1, 3. FP4 (e2m1): as INT4, sign and magnitude.

#pragma once

#include "product_weight.h"

namespace {
namespace product {

// kHalfScales is added to a form whose scales are float16, as is exact; else they are float32.
enum QuantizedForm : int64_t { kInt8 = 16, kInt4 = 17, kFp8 = 18, kFp4 = 19, kHalfScales = 64 };

TANDEM_INLINE bool is_quantized(const Product& p) { return p.form >= kInt8; }

// Each form has: the inputs of a row; `value`, one input of each word as float32; and `pair`, two of them as words of
// bfloat16, the first in the lower half (HasTables: registers are left for them). Both are to be multiplied by kUnit.
// A form with kIsShifted has `shifted` too, one instruction less: kZero more than the value, times 1 / `factor(input)`.
// Values of these forms have at most eight bits of mantissa: the lower halves of float32 are zero.
template <typename Form>
TANDEM_INLINE F32 pair_of_values(I32 words, int pair) {
  const F32 even = Form::value(words, 2 * pair), odd = Form::value(words, 2 * pair + 1);
  return bit_cast<F32>(bit_cast<U32>(even) >> 16 | bit_cast<U32>(odd));
}

struct Int8 {
  static constexpr int kRowInputs = 4;
  static constexpr bool kIsShifted = false;
  static constexpr float kUnit = 0x1p-24f;  // a value stands in the upper byte of what is converted

  static TANDEM_INLINE F32 value(I32 words, int input) {
    return __builtin_convertvector((words << (24 - 8 * input)) & int32_t(0xff000000), F32);
  }
  template <bool HasTables>
  static TANDEM_INLINE F32 pair(I32 words, int pair) {
#if defined(__AVX512BF16__)
    if (!HasTables) return pair_of_values<Int8>(words, pair);
    // The same in fewer instructions, by tables in registers.
    const __m512i middle = _mm512_broadcast_i32x4(
        pair ? _mm_setr_epi8(-1, -1, -1, 2, -1, -1, -1, 6, -1, -1, -1, 10, -1, -1, -1, 14)
             : _mm_setr_epi8(-1, -1, -1, 1, -1, -1, -1, 5, -1, -1, -1, 9, -1, -1, -1, 13));
    const I32 shuffled = bit_cast<I32>(_mm512_shuffle_epi8(bit_cast<__m512i>(words), middle));
    const F32 even = __builtin_convertvector(pair ? shuffled : words << 24, F32);
    const F32 odd = __builtin_convertvector(pair ? words & int32_t(0xff000000) : shuffled, F32);
    const __m512i upper_halves = _mm512_set_epi16(  //
        63, 31, 61, 29, 59, 27, 57, 25, 55, 23, 53, 21, 51, 19, 49, 17, 47, 15, 45, 13, 43, 11, 41, 9, 39, 7, 37, 5, 35,
        3, 33, 1);
    return bit_cast<F32>(_mm512_permutex2var_epi16(bit_cast<__m512i>(even), upper_halves, bit_cast<__m512i>(odd)));
#else
    return pair_of_values<Int8>(words, pair);
#endif
  }
};

struct Int4 {
  static constexpr int kRowInputs = 8;
  static constexpr float kUnit = 1.0f, kZero = 8.0f;
  static constexpr bool kIsShifted = true;

  static constexpr int shift(int input) { return input / 2 * 4 + input % 2 * 16; }

  static TANDEM_INLINE F32 value(I32 words, int input) {
    const I32 signed_words = words ^ int32_t(0x88888888);
    return __builtin_convertvector((signed_words << (28 - shift(input))) >> 28, F32);
  }
  // Where it stands; the highest one would be a sign there.
  static TANDEM_INLINE F32 shifted(I32 words, int input) {
    const I32 alone = shift(input) == 28 ? bit_cast<I32>(bit_cast<U32>(words) >> 28) : words & (15 << shift(input));
    return __builtin_convertvector(alone, F32);
  }
  static constexpr float factor(int input) { return shift(input) == 28 ? 1.0f : 1.0f / float(1 << shift(input)); }
  template <bool>
  static TANDEM_INLINE F32 pair(I32 words, int pair) {
#if defined(__AVX512BF16__)
    // -8 … 7, twice: the instruction looks at five bits.
    const __m512i table = _mm512_broadcast_i64x4(_mm256_setr_epi16(
        int16_t(0xc100), int16_t(0xc0e0), int16_t(0xc0c0), int16_t(0xc0a0), int16_t(0xc080), int16_t(0xc040),
        int16_t(0xc000), int16_t(0xbf80), 0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0));
    const __m512i index = _mm512_srli_epi16(bit_cast<__m512i>(words), unsigned(4 * pair));
    return bit_cast<F32>(_mm512_permutexvar_epi16(index, table));
#else
    return pair_of_values<Int4>(words, pair);
#endif
  }
};

struct Fp8 {
  static constexpr int kRowInputs = 4;
  static constexpr bool kIsShifted = false;
  static constexpr float kUnit = 1.0f;

  static TANDEM_INLINE F32 value(I32 words, int input) {
    const I32 top = words << (24 - 8 * (input % 2 * 2 + input / 2));
    // The product moves the exponent's bias from 7 to 127, of denormals too.
    return bit_cast<F32>(((top >> 4) & 0x07f00000) | (top & int32_t(0x80000000))) * 0x1p120f;
  }
  template <bool>
  static TANDEM_INLINE F32 pair(I32 words, int pair) {
#if defined(__AVX512BF16__)
    const __m512i both = bit_cast<__m512i>(words);
    const __m512i top = pair ? both : _mm512_slli_epi16(both, 8);  // what is left in the lower bytes does no harm
    const __m512i sign_and_rest = _mm512_and_si512(_mm512_srai_epi16(top, 4), _mm512_set1_epi16(int16_t(0x87f0)));
    __m512i result = _mm512_add_epi16(sign_and_rest, _mm512_set1_epi16(120 << 7));
    if (__builtin_expect(_mm512_testn_epi8_mask(both, _mm512_set1_epi8(0x78)) != 0, 0)) {
      // Zero and denormals, multiples of 2^-9, which are normal numbers in bfloat16.
      const __mmask32 is_denormal = _mm512_testn_epi16_mask(top, _mm512_set1_epi16(0x7800));
      const __m512i table =
          _mm512_broadcast_i32x4(_mm_setr_epi16(0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60));
      const __m512i magnitude = _mm512_permutexvar_epi16(_mm512_srli_epi16(top, 8), table);
      const __m512i sign = _mm512_and_si512(top, _mm512_set1_epi16(int16_t(0x8000)));
      result = _mm512_mask_mov_epi16(result, is_denormal, _mm512_or_si512(sign, magnitude));
    }
    return bit_cast<F32>(result);
#else
    return pair_of_values<Fp8>(words, pair);
#endif
  }
};

struct Fp4 {
  static constexpr int kRowInputs = Int4::kRowInputs;
  static constexpr bool kIsShifted = false;
  static constexpr float kUnit = 1.0f;

  static TANDEM_INLINE F32 value(I32 words, int input) {
    const I32 top = words << (28 - Int4::shift(input));
    // The product moves the exponent's bias from 1 to 127, of the denormal too.
    return bit_cast<F32>(((top >> 6) & 0x01c00000) | (top & int32_t(0x80000000))) * 0x1p126f;
  }
  template <bool>
  static TANDEM_INLINE F32 pair(I32 words, int pair) {
#if defined(__AVX512BF16__)
    const __m512i table = _mm512_broadcast_i64x4(_mm256_setr_epi16(
        0, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0, int16_t(0x8000), int16_t(0xbf00), int16_t(0xbf80),
        int16_t(0xbfc0), int16_t(0xc000), int16_t(0xc040), int16_t(0xc080), int16_t(0xc0c0)));
    const __m512i index = _mm512_srli_epi16(bit_cast<__m512i>(words), unsigned(4 * pair));
    return bit_cast<F32>(_mm512_permutexvar_epi16(index, table));
#else
    return pair_of_values<Fp4>(words, pair);
#endif
  }
};

}  // namespace product
}  // namespace
