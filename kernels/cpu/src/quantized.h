// Products of quantised weights in vector registers: some tokens by one or two blocks of outputs at a time.
//
// Values are exact in bfloat16 and float32, and activations stay as they are. A sum is made of the partial sums of some
// inputs each, all of one scale, from zero and in the order of the inputs, times their scale; these are added in the
// order of the inputs, to what the offsets give: each times the sum of its group of activations. So a result depends
// neither on the number of tokens nor on how threads share the units.

#pragma once

#include <type_traits>

#include "product_panel.h"
#include "quantized_stretches.h"
#include "quantized_tiles.h"

namespace {
namespace product {

// Whether T is multiplied in pairs of bfloat16, else as float32.
template <typename T>
constexpr bool kInPairs = false;
#if defined(TANDEM_BF16_PAIRS)
template <>
constexpr bool kInPairs<Bf16> = true;
#endif

constexpr int64_t kPartBytes = 20 << 10;  // of a unit's weights at a time: they stay in the first cache for all tokens
constexpr int kMostQuantized = kMostTokens < 8 ? kMostTokens : 8;  // tokens at a time; partial sums need registers, too
constexpr int kQuantizedSums = kMostSums - 4;                     // vectors of them, with which nothing is spilled
constexpr int kTableTokens = 4;  // so many leave registers for tables, with which values are taken apart faster

// Whether T is multiplied in tiles, of 32 inputs.
template <typename T>
TANDEM_INLINE bool is_tiled([[maybe_unused]] const Product& p) {
#if defined(__AMX_BF16__)
  return kInPairs<T> && p.group % 32 == 0;
#else
  return false;
#endif
}

// Inputs of a partial sum. Few cost many tokens more; with many, one token's product in vector registers waits for its
// two sums, which takes longer than to take values apart in INT4 alone.
template <typename T>
TANDEM_INLINE int64_t stretch_inputs(const Product& p) {
  if (is_int4(p) && !is_tiled<T>(p)) return 32;
  const int64_t sizes[] = {192, 128, 64, 32};
  for (int64_t inputs : sizes)
    if (p.group % inputs == 0) return inputs;
  return 16;
}

// part [Tokens][Blocks] += a row of weights by x [words of a row][Tokens].
template <typename Q, bool Pairs, int Tokens, int Blocks, typename Word>
TANDEM_INLINE void add_row(const char* weights, const Word* x, F32 (&part)[Tokens][Blocks][kVectors]) {
  constexpr int kSteps = Q::kRowInputs / (Pairs ? 2 : 1);
#pragma GCC unroll 8
  for (int k = 0; k < kSteps; ++k, x += Tokens) {
    F32 weight[Blocks][kVectors];
#pragma GCC unroll 2
    for (int b = 0; b < Blocks; ++b)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        I32 words;
        memcpy(static_cast<void*>(&words), weights + b * kRowBytes + v * kLanes * 4, sizeof words);
        if constexpr (Pairs) weight[b][v] = Q::template pair<(Tokens <= kTableTokens)>(words, k);
        else if constexpr (Q::kIsShifted) weight[b][v] = Q::shifted(words, k);
        else weight[b][v] = Q::value(words, k);
      }
#pragma GCC unroll 12
    for (int i = 0; i < Tokens; ++i)
#pragma GCC unroll 2
      for (int b = 0; b < Blocks; ++b)
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
          F32& to = part[i][b][v];
          if constexpr (Pairs) to = Dot<Bf16>::add(weight[b][v], x[i], to);
          else to = fma(weight[b][v], splat(x[i]), to);
        }
  }
}

// sums [Tokens][kUnitOutputs] += the stretches' products by x [words][Tokens], for Blocks from block `first` on.
// zeros [stretches][Tokens]: what the values' zeros have added to each partial sum, for shifted values.
template <typename Q, bool Pairs, int Tokens, int Blocks, typename Word>
void add_stretches(Stretches at, int first, const Word* x, const float* zeros, float* sums) {
  constexpr int kRowWords = Q::kRowInputs / (Pairs ? 2 : 1);
  F32 sum[Tokens][Blocks][kVectors];
  const auto each = [&](const auto& visit) {
#pragma GCC unroll 12
    for (int i = 0; i < Tokens; ++i)
#pragma GCC unroll 2
      for (int b = 0; b < Blocks; ++b)
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v)
          visit(sum[i][b][v], sums + i * kUnitOutputs + (first + b) * kBlock + v * kLanes);
  };
  each([](F32& here, const float* there) { here = load(there); });
  const auto end_stretch = [&](const auto& part) {
#pragma GCC unroll 2
    for (int b = 0; b < Blocks; ++b)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        const F32 scale = at.scale((first + b) * kBlock + v * kLanes) * Q::kUnit;
#pragma GCC unroll 12
        for (int i = 0; i < Tokens; ++i) {
          F32 all = part[i][b][v];
          if constexpr (Q::kIsShifted && !Pairs) all -= splat(zeros[i]);
          sum[i][b][v] = fma(all, scale, sum[i][b][v]);
        }
      }
    if constexpr (Q::kIsShifted && !Pairs) zeros += Tokens;
    --at.count, at.step();
  };
  if constexpr (Tokens == 1 && Q::kIsShifted && !Pairs)  // each sum waits for itself: those of two stretches in turns
    while (at.count > 1) {
      const int64_t bytes = at.rows * kUnitRowBytes, words = at.rows * kRowWords;
      F32 part[2][Tokens][Blocks][kVectors] = {};
      for (int64_t row = 0; row < at.rows; ++row, at.weights += kUnitRowBytes, x += kRowWords)
#pragma GCC unroll 2
        for (int s = 0; s < 2; ++s) {
          for (int b = 0; b < Blocks; ++b) __builtin_prefetch(at.weights + s * bytes + (first + b) * kRowBytes + kAhead, 0, 2);
          add_row<Q, Pairs, Tokens, Blocks>(at.weights + s * bytes + first * kRowBytes, x + s * words, part[s]);
        }
      at.weights += bytes, x += words;
      end_stretch(part[0]), end_stretch(part[1]);
    }
  while (at.count) {
    F32 part[Tokens][Blocks][kVectors] = {};
    for (int64_t row = 0; row < at.rows; ++row, at.weights += kUnitRowBytes, x += kRowWords * Tokens) {
      for (int b = 0; b < Blocks; ++b) __builtin_prefetch(at.weights + (first + b) * kRowBytes + kAhead, 0, 2);
      add_row<Q, Pairs, Tokens, Blocks>(at.weights + first * kRowBytes, x, part);
    }
    end_stretch(part);
  }
  each([](const F32& here, float* there) { store(there, here); });
}

template <typename Q, bool Pairs, typename Word, int Tokens = kMostQuantized>
TANDEM_INLINE void add_to_unit(int64_t tokens, const Stretches& at, const Word* x, const float* zeros, float* sums) {
  if (tokens == Tokens) {
    constexpr int kAtOnce = 2 * Tokens * kVectors <= kQuantizedSums ? 2 : 1;
    for (int b = 0; b < 2; b += kAtOnce) add_stretches<Q, Pairs, Tokens, kAtOnce>(at, b, x, zeros, sums);
  } else if constexpr (Tokens > 1) {
    add_to_unit<Q, Pairs, Word, Tokens - 1>(tokens, at, x, zeros, sums);
  }
}

template <typename T>
class QuantizedPanels : TokenPanels<T> {
  using Base = TokenPanels<T>;
  using Base::begin_of, Base::extra_sums_, Base::groups_, Base::p_, Base::sums_, Base::tokens_;
  using Base::words_, Base::x_;

  const T* rows_ = nullptr;  // of the tokens under way, as they lie
  int64_t stride_ = 0;
  const int64_t num_sums_, num_zeros_;  // of a token: groups with offsets; stretches of shifted values

  static int64_t sums_of(const Product& p) { return p.offsets ? p.in / p.group : 0; }
  static int64_t zeros_of(const Product& p) { return is_int4(p) && !kInPairs<T> ? p.in / stretch_inputs<T>(p) : 0; }

  // Of `inputs` of a token, from `first` on.
  TANDEM_INLINE float sum_of(int64_t token, int64_t first, int64_t inputs) const {
    F32 all = {};
    for (int64_t i = 0; i < inputs; i += kLanes) all += load(rows_ + token * stride_ + first + i);
    return sum(all);
  }

  // extra_sums_ [tokens][groups] = the sums of the groups of x.
  void sum_groups() {
    for (int64_t t = 0; t < tokens_; ++t)
      for (int64_t g = 0; g < num_sums_; ++g) extra_sums_[t * num_sums_ + g] = sum_of(t, g * p_.group, p_.group);
  }

  // Of a group of tokens: [stretches][tokens of it].
  float* zeros_from(int64_t begin) const { return extra_sums_ + tokens_ * num_sums_ + begin * num_zeros_; }

  // Makes x fit shifted values: zeros, and x times the factors.
  void shift() {
    const int64_t inputs = stretch_inputs<T>(p_);
    for (int64_t group = 0; group < groups_ && num_zeros_; ++group) {
      const int64_t begin = begin_of(group), count = begin_of(group + 1) - begin;
      for (int64_t s = 0; s < num_zeros_; ++s)
        for (int64_t i = 0; i < count; ++i)
          zeros_from(begin)[s * count + i] = Int4::kZero * sum_of(begin + i, s * inputs, inputs);
      auto* x = x_ + begin * words_;
      for (int64_t input = 0; input < p_.in; ++input)
        for (int64_t i = 0; i < count; ++i) *x++ *= Int4::factor(int(input % Int4::kRowInputs));
    }
  }

  // sums_ = what the offsets give.
  void add_offsets(int64_t unit) {
    memset(sums_, 0, size_t(tokens_) * kUnitOutputs * sizeof(float));
    const float* offsets = p_.offsets + unit * num_sums_ * kUnitOutputs;
    for (int64_t t = 0; t < tokens_; ++t)
      for (int64_t g = 0; g < num_sums_; ++g)
        for (int64_t output = 0; output < kUnitOutputs; output += kLanes) {
          float* to = sums_ + t * kUnitOutputs + output;
          const F32 offset = load(offsets + g * kUnitOutputs + output);
          store(to, fma(offset, splat(extra_sums_[t * num_sums_ + g]), load(to)));
        }
  }

  // Stretches s … s + count of a unit, of so many inputs each.
  template <typename Q>
  Stretches stretches_of(int64_t unit, int64_t inputs, int64_t s, int64_t count) const {
    const bool is_half = p_.form & kHalfScales;
    const int64_t per_group = p_.group / inputs, rows = inputs / Q::kRowInputs;
    const int64_t scale = (unit * (p_.in / p_.group) + s / per_group) * kUnitOutputs;
    const char* weights = static_cast<const char*>(p_.packed) + unit * unit_bytes(p_) + s * rows * kUnitRowBytes;
    const char* scales = reinterpret_cast<const char*>(p_.scales) + scale * (is_half ? 2 : 4);
    return {weights, scales, count, rows, per_group, per_group - s % per_group, is_half};
  }

  // sums_ of a unit.
  template <typename Q>
  void add_up(int64_t unit) {
    add_offsets(unit);
    const int64_t inputs = stretch_inputs<T>(p_), count = p_.in / inputs;
#if defined(__AMX_BF16__)
    if constexpr (kInPairs<T>)
      if (is_tiled<T>(p_)) return add_tiles<Q>(stretches_of<Q>(unit, inputs, 0, count), rows_, stride_, tokens_, sums_);
#endif
    const int64_t row_bytes = inputs / Q::kRowInputs * kUnitRowBytes, stretch_words = words_ / count;
    const int64_t at_once = most(kPartBytes / row_bytes, 1);
    for (int64_t s = 0; s < count; s += at_once) {
      const Stretches part = stretches_of<Q>(unit, inputs, s, least(at_once, count - s));
      for (int64_t group = 0; group < groups_; ++group) {
        const int64_t begin = begin_of(group), tokens = begin_of(group + 1) - begin;
        const auto* x = x_ + begin * words_ + s * stretch_words * tokens;
        add_to_unit<Q, kInPairs<T>>(tokens, part, x, zeros_from(begin) + s * tokens, sums_ + begin * kUnitOutputs);
      }
    }
  }

 public:
  explicit QuantizedPanels(const Product& p)
      : Base(p, is_tiled<T>(p) ? 0 : p.in, sums_of(p) + zeros_of(p), kMostQuantized),
        num_sums_(sums_of(p)),
        num_zeros_(zeros_of(p)) {}

  void multiply(const T* x, int64_t x_stride, int64_t tokens, T* out, int64_t out_stride, int64_t first, int64_t last,
                Arena& scratch, bool same_x) {
    const auto opened = [=](const T* from, bool has_sums) {
      rows_ = from, stride_ = x_stride;
      if (has_sums) return;
      sum_groups();
      if constexpr (!kInPairs<T>) shift();
    };
    const auto sum_unit = [this](int64_t unit) {
      switch (p_.form & ~kHalfScales) {
        case kInt8: return add_up<Int8>(unit);
        case kInt4: return add_up<Int4>(unit);
        case kFp4: return add_up<Fp4>(unit);
        default: return add_up<Fp8>(unit);
      }
    };
    Base::multiply_by(x, x_stride, tokens, out, out_stride, first, last, scratch, same_x, opened, sum_unit);
  }
};

}  // namespace product
}  // namespace
