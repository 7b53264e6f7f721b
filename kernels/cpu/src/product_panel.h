// Products of plain weights in vector registers: some tokens by one or two blocks of outputs at a time.
//
// Activations are packed first, so that those of one input lie together. Each sum runs over the inputs in one order:
// kChunk tiles in registers, from zero, then added to what came before. So it depends neither on the number of tokens
// nor on how threads share the units, and errs less than one long sum.

#pragma once

#include "ahead.h"
#include "gates.h"
#include "product_weight.h"

namespace {
namespace product {

constexpr int kVectors = kBlock / kLanes;  // of a block's row
#if defined(__AVX512F__)
constexpr int kMostTokens = 12, kMostSums = 24;  // vectors that registers hold beside weights and activations
#elif defined(__AVX2__)
constexpr int kMostTokens = 6, kMostSums = 12;
#elif defined(__aarch64__)
constexpr int kMostTokens = 6, kMostSums = 24;
#else
constexpr int kMostTokens = 2, kMostSums = 8;
#endif

// Bytes of weights that are fetched ahead, into the second cache: measured best from 1 to 64 tokens.
constexpr int64_t kAhead = 8192;
constexpr int64_t kXBytes = 640 << 10;  // of packed activations at a time: they stay in the second cache

// What is fetched while weights are read: from `wanted` to `end`, 1 / 2^shift of what is read.
struct Fetched {
  const char *weights, *wanted, *end;
  int shift;

  TANDEM_INLINE void beside(const char* at) const {
    const char* from = wanted + ((at - weights) >> shift);
    __builtin_prefetch(from < end ? from : at, 0, 2);
  }
};

// How T is multiplied: as float32, one input at a time; bfloat16 in pairs where the processor has that.
template <typename T>
struct Dot {
  using Word = float;                           // of packed activations
  static constexpr int kWordInputs = 1;
  static constexpr int kParts = kRowInputs<T>;  // words of a row
  static constexpr int64_t kChunk = kForm<T> == kFloat32 ? 4 : 8;

  static TANDEM_INLINE F32 weight(const char* row, int part, int v) {
    const T* from = reinterpret_cast<const T*>(row) + v * kLanes;
    if constexpr (kForm<T> == kFloat32) return load(from);
    if constexpr (kForm<T> == kFloat16) return load(from + part * kBlock);
    U32 pairs;
    memcpy(&pairs, row + v * kLanes * 4, sizeof pairs);
    return bit_cast<F32>(part ? pairs & 0xffff0000 : pairs << 16);
  }
  static TANDEM_INLINE F32 add(F32 weight, Word x, F32 to) { return fma(weight, splat(x), to); }

  static TANDEM_INLINE F32 load_words(const T* x) { return load(x); }
};

#if defined(TANDEM_BF16_PAIRS)
template <>
struct Dot<Bf16> {
  using Word = int32_t;
  static constexpr int kWordInputs = 2;
  static constexpr int kParts = 1;
  static constexpr int64_t kChunk = 8;

  static TANDEM_INLINE F32 weight(const char* row, int, int v) {
    return load(reinterpret_cast<const float*>(row) + v * kLanes);
  }
  static TANDEM_INLINE F32 add(F32 weight, Word x, F32 to) {
    return add_bf16_pairs(to, bit_cast<U32>(weight), bit_cast<U32>(splat_int(x)));
  }
  static TANDEM_INLINE F32 load_words(const Bf16* x) { return load(reinterpret_cast<const float*>(x)); }
};
#endif

// Adds to sums [Tokens] rows of [Blocks][kBlock], `row` apart: weights of `tiles` tiles, `step` bytes from each to the
// next, by x [words][Tokens].
template <typename T, int Tokens, int Blocks>
void add_panel(const char* weights, int64_t step, int64_t tiles, const Fetched& fetched,
               const typename Dot<T>::Word* x, float* sums, int64_t row) {
  using D = Dot<T>;
  F32 sum[Tokens][Blocks][kVectors] = {};
  const auto add_row = [&](int b, int k) {
#pragma GCC unroll 2
    for (int part = 0; part < D::kParts; ++part) {
      F32 weight[kVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v)
        weight[v] = D::weight(weights + b * kPackedTileBytes + k * kRowBytes, part, v);
      const auto* values = x + (k * D::kParts + part) * Tokens;
#pragma GCC unroll 12
      for (int i = 0; i < Tokens; ++i)
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) sum[i][b][v] = D::add(weight[v], values[i], sum[i][b][v]);
    }
  };
  // Lines are fetched in the order of their addresses: else the processor does not fetch ahead, and memory is half as
  // fast. With few sums, each of which waits for the one before, both blocks' rows go in turns.
  constexpr bool kInTurns = Blocks == 2 && D::kParts > 1;
  for (int64_t t = 0; t < tiles; ++t, weights += step, x += kTileRows * D::kParts * Tokens)
    if constexpr (kInTurns) {
#pragma GCC unroll 1
      for (int k = 0; k < kTileRows; ++k) {
        fetched.beside(weights + 2 * k * kRowBytes), fetched.beside(weights + (2 * k + 1) * kRowBytes);
        add_row(0, k), add_row(1, k);
      }
    } else {
#pragma GCC unroll 2
      for (int b = 0; b < Blocks; ++b)
#pragma GCC unroll 1
        for (int k = 0; k < kTileRows; ++k) {
          fetched.beside(weights + b * kPackedTileBytes + k * kRowBytes);
          add_row(b, k);
        }
    }
#pragma GCC unroll 12
  for (int i = 0; i < Tokens; ++i)
#pragma GCC unroll 2
    for (int b = 0; b < Blocks; ++b)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        float* to = sums + i * row + b * kBlock + v * kLanes;
        store(to, load(to) + sum[i][b][v]);
      }
}

template <typename T, int Blocks, int Tokens = kMostTokens>
TANDEM_INLINE void add_panels(int64_t tokens, const char* weights, int64_t tiles, const Fetched& fetched,
                              const typename Dot<T>::Word* x, float* sums) {
  if (tokens == Tokens) {
    constexpr int kAtOnce = Blocks * Tokens * kVectors <= kMostSums ? Blocks : 1;
    for (int b = 0; b < Blocks; b += kAtOnce)
      add_panel<T, Tokens, kAtOnce>(weights + b * kPackedTileBytes, Blocks * kPackedTileBytes, tiles, fetched, x,
                                    sums + b * kBlock, 2 * kBlock);
  } else if constexpr (Tokens > 1) {
    add_panels<T, Blocks, Tokens - 1>(tokens, weights, tiles, fetched, x, sums);
  }
}

// One call of multiply_units, and the tokens under way: what all forms of weights share.
template <typename T>
class TokenPanels {
 protected:
  using Word = typename Dot<T>::Word;

  const Product& p_;
  const int64_t words_, extra_;  // of a token: packed words, none if it is read as it lies; floats of the form's own
  const int64_t most_;           // tokens of a group
  int64_t tokens_ = 0, groups_ = 0;
  Word* x_ = nullptr;            // per group of tokens [words][tokens of it]
  float* sums_ = nullptr;        // [tokens][2 * kBlock]
  float* extra_sums_ = nullptr;  // [tokens][extra]

  TokenPanels(const Product& p, int64_t inputs, int64_t extra, int64_t most)
      : p_(p), words_(inputs / Dot<T>::kWordInputs), extra_(extra), most_(most) {}

  int64_t begin_of(int64_t group) const { return tokens_ * group / groups_; }

  void open(const T* x, int64_t x_stride, int64_t tokens, Arena& scratch, bool is_packed) {
    tokens_ = tokens, groups_ = (tokens + most_ - 1) / most_;
    const auto carve = [&](char* base) {
      Carver carver{base};
      x_ = carver.take<Word>(tokens * words_ + kLanes);
      sums_ = carver.take<float>(tokens * 2 * kBlock);
      extra_sums_ = carver.take<float>(tokens * extra_);
      return carver.at;
    };
    carve(scratch.reserve(intptr_t(carve(nullptr))));
    for (int64_t group = 0; group < groups_ && words_ && !is_packed; ++group) {
      const int64_t begin = begin_of(group);
      pack(x + begin * x_stride, x_stride, begin_of(group + 1) - begin, x_ + begin * words_);
    }
  }

  // x of a group of `count` tokens -> to [words][count]; zeros beyond the inputs.
  void pack(const T* x, int64_t x_stride, int64_t count, Word* to) const {
    constexpr int kSquares = (kMostTokens + kLanes - 1) / kLanes;
    int64_t word = 0;
    for (; (word + kLanes) * Dot<T>::kWordInputs <= p_.in; word += kLanes) {
      const T* from = x + word * Dot<T>::kWordInputs;
      if (count == 1) {
        store(reinterpret_cast<float*>(to + word), Dot<T>::load_words(from));
        continue;
      }
      F32 squares[kSquares][kLanes];
      for (int s = 0; s < kSquares; ++s) {
        for (int i = 0; i < kLanes; ++i)
          squares[s][i] = s * kLanes + i < count ? Dot<T>::load_words(from + (s * kLanes + i) * x_stride) : F32{};
        transpose(squares[s]);
      }
      // What a store writes beyond its row, the next ones write over.
      for (int i = 0; i < kLanes; ++i)
        for (int64_t s = 0; s * kLanes < count; ++s)
          store(reinterpret_cast<float*>(to + (word + i) * count) + s * kLanes, squares[s][i]);
    }
    memset(static_cast<void*>(to + word * count), 0, size_t((words_ - word) * count) * sizeof(Word));
    for (int64_t input = word * Dot<T>::kWordInputs; input < p_.in; ++input)
      for (int64_t i = 0; i < count; ++i) put_input(x[i * x_stride + input], input, to, count, i);
  }

  TANDEM_INLINE void put_input(T x, int64_t input, Word* to, int64_t count, int64_t token) const {
    Word* word = to + input / Dot<T>::kWordInputs * count + token;
    if constexpr (Dot<T>::kWordInputs == 2) memcpy(reinterpret_cast<T*>(word) + input % 2, &x, sizeof x);
    else *word = widen(x);
  }

  void put(int64_t unit, T* out, int64_t out_stride) const {
    const T* bias = static_cast<const T*>(p_.bias);
    const int64_t column = unit * kBlock * (p_.gated ? 1 : 2);
    const int64_t width = least(p_.gated ? kBlock : 2 * kBlock, p_.out - column);
    for (int64_t d = 0; d < width; d += kLanes) {
      const int count = int(least(kLanes, width - d));
      const F32 more = bias ? load_n(bias + column + d, count) : F32{};
      const F32 up_more = bias && p_.gated ? load_n(bias + p_.out + column + d, count) : F32{};
      T* to = out + column + d;
      const float* from = sums_ + d;
      for (int64_t i = 0; i < tokens_; ++i, from += 2 * kBlock, to += out_stride) {
        F32 sum = load(from) + more;
        if (p_.gated) sum = gate_mul<T>(p_.gated, p_.alpha, p_.limit, sum, load(from + kBlock) + up_more);
        if (count == kLanes) store(to, sum);
        else store_n(to, sum, count);
      }
    }
  }

  // Calls opened(x, is_packed) for some tokens at a time, and sum(unit) for each unit, which fills sums_.
  template <typename Opened, typename Sum>
  void multiply_by(const T* x, int64_t x_stride, int64_t tokens, T* out, int64_t out_stride, int64_t first,
                   int64_t last, Arena& scratch, bool same_x, const Opened& opened, const Sum& sum) {
    const int64_t most_tokens = most(kXBytes / (most(words_, 1) * int64_t(sizeof(Word))) / most_, 4) * most_;
    const bool is_packed = same_x && tokens <= most_tokens;
    for (int64_t token = 0; token < tokens; token += most_tokens) {
      open(x + token * x_stride, x_stride, least(most_tokens, tokens - token), scratch, is_packed);
      opened(x + token * x_stride, is_packed);
      for (int64_t unit = first; unit < last; ++unit) {
        sum(unit);
        put(unit, out + token * out_stride, out_stride);
      }
    }
  }
};

template <typename T>
class Panels : TokenPanels<T> {
  using Base = TokenPanels<T>;
  using Base::begin_of, Base::groups_, Base::p_, Base::sums_, Base::tokens_, Base::words_, Base::x_;
  const int64_t tiles_;
  const char* end_ = nullptr;  // of this call's weights: what follows is another thread's
  Ahead* const ahead_;         // or null

  // Sums of a unit of one or two blocks.
  template <int Blocks>
  void sum(const char* weights) {
    memset(sums_, 0, size_t(tokens_) * 2 * kBlock * sizeof(float));
    for (int64_t t = 0; t < tiles_; t += Dot<T>::kChunk) {
      const char* from = weights + t * Blocks * kPackedTileBytes;
      const int64_t tiles = least(Dot<T>::kChunk, tiles_ - t);
      for (int64_t group = 0; group < groups_; ++group) {
        const int64_t begin = begin_of(group), tokens = begin_of(group + 1) - begin;
        const auto* x = x_ + begin * words_ + t * kTileRows * Dot<T>::kParts * tokens;
        add_panels<T, Blocks>(tokens, from, tiles, fetched_by(group, from, tiles * Blocks * kPackedTileBytes), x,
                              sums_ + begin * 2 * kBlock);
      }
    }
  }

  // The first group fetches weights, for all of them. The others together fetch half as much to two and a half times:
  // what comes faster than memory gives it holds up the products. Where bfloat16 is not multiplied in pairs, attention is
  // bound by arithmetic, and nothing is gained.
  Fetched fetched_by(int64_t group, const char* weights, int64_t bytes) const {
    const int shift = groups_ == 3 ? 0 : groups_ <= 6 ? 1 : groups_ <= 11 ? 2 : 3;
    const char* end;
    if (Dot<T>::kWordInputs == 2 && group > 0 && ahead_)
      if (const char* wanted = ahead_->take(bytes >> shift, &end)) return {weights, wanted, end, shift};
    return {weights, weights + kAhead, end_, 0};
  }

 public:
  explicit Panels(const Product& p, Ahead* ahead)
      : Base(p, num_tiles<T>(p) * kTileInputs<T>, 0, kMostTokens), tiles_(num_tiles<T>(p)), ahead_(ahead) {}

  void multiply(const T* x, int64_t x_stride, int64_t tokens, T* out, int64_t out_stride, int64_t first, int64_t last,
                Arena& scratch, bool same_x) {
    end_ = stream_of<T>(p_, last);
    const auto sum_unit = [this](int64_t unit) {
      if (unit * 2 + 1 < num_blocks(p_)) sum<2>(stream_of<T>(p_, unit));
      else sum<1>(stream_of<T>(p_, unit));
    };
    Base::multiply_by(x, x_stride, tokens, out, out_stride, first, last, scratch, same_x, [](const T*, bool) {},
                      sum_unit);
  }
};

}  // namespace product
}  // namespace
