// Decode's products in float32, of whatever attention computes in and the pool holds.
//
// What multiplies for decode has the members of this class, from kWidth to `straighten`: for a run of kHeads heads of one
// KV head, in kGroup lanes. There are rows for whole vectors of tokens, the last ones again.

#pragma once

#include "attention_fetch.h"
#include "attention_math.h"

namespace {

template <typename T, typename K>
class Floats {
  float* queries_;  // [H, width]
  static constexpr int kWide = kLanes == 16 ? 4 : 2;  // vectors of dims whose sums stay in registers at once

 public:
  // What rows of sums and queries are padded to a multiple of.
  static constexpr int kWidth = kLanes;

  void carve(Carver& carver, int64_t heads, int64_t width) { queries_ = carver.take<float>(heads * width); }

  // Takes the query [dims] of a head; zeros up to `width`.
  void start_head(int64_t head, const T* query, int64_t dims, int64_t width) {
    for (int64_t d = 0; d < width; d += kLanes)
      store(queries_ + head * width + d, load_n(query + d, int(most(0, least(kLanes, dims - d)))));
  }

  // Scores [tokens, kGroup] of heads from `head` on with the rows at `offset`; `scales` are the rows' own, if they have
  // any.
  template <int kGroup, int kHeads>
  void score(const K* const* rows, int64_t offset, const float* scales, int64_t head, int64_t count, int64_t dims,
             int64_t width, float* scores, Fetch<K>& fetch) const {
    constexpr int kAtOnce = kLanes / kGroup;
    const float* queries = queries_ + head * width;
    for (int64_t t = 0; t < count; t += kAtOnce) {
      const K* keys[kAtOnce];
      for (int i = 0; i < kAtOnce; ++i) keys[i] = rows[t + i] + offset;
      fetch.beside(kAtOnce * dims * int64_t(sizeof(K)));
      F32 sum[kLanes] = {};
      int64_t d = 0;
      for (; d + kLanes <= dims; d += kLanes) {
        F32 query[kHeads];
        for (int g = 0; g < kHeads; ++g) query[g] = load(queries + g * width + d);
#pragma GCC unroll 16
        for (int i = 0; i < kAtOnce; ++i) {
          const F32 key = load(keys[i] + d);
#pragma GCC unroll 4
          for (int g = 0; g < kHeads; ++g) sum[i * kGroup + g] = fma(key, query[g], sum[i * kGroup + g]);
        }
      }
      if (d < dims)
#pragma GCC unroll 16
        for (int i = 0; i < kAtOnce; ++i) {
          const F32 key = load_n(keys[i] + d, int(dims - d));
#pragma GCC unroll 4
          for (int g = 0; g < kHeads; ++g)
            sum[i * kGroup + g] = fma(key, load(queries + g * width + d), sum[i * kGroup + g]);
        }
      store(scores + t * kGroup, sums(sum));
    }
    scale<kGroup>(scores, scales, count);
  }

  // sums [kHeads, width] = sums * decay + weights [tokens, kGroup] times the rows at `offset`; see `straighten` for their
  // order. May change the weights.
  template <int kGroup, int kHeads>
  void add_values(const K* const* rows, int64_t offset, const float* scales, int64_t count, int64_t dims,
                  float* weights, const float* decay, float* sums, int64_t width, Fetch<K>& fetch) const {
    scale<kGroup>(weights, scales, count);
    int64_t d = 0;
    for (; d + kWide * kLanes <= dims; d += kWide * kLanes)
      add_some_values<kGroup, kHeads, kWide, false>(rows, offset + d, count, 0, weights, decay, sums + d, width, fetch);
    for (; d + kLanes <= dims; d += kLanes)
      add_some_values<kGroup, kHeads, 1, false>(rows, offset + d, count, 0, weights, decay, sums + d, width, fetch);
    if (d < dims)
      add_some_values<kGroup, kHeads, 1, true>(rows, offset + d, count, int(dims - d), weights, decay, sums + d, width,
                                               fetch);
  }

  // Brings sums into the order of dims.
  static void straighten(float*, int64_t) {}

 private:
  // Multiplies scores or weights by the scales; there is room for whole vectors.
  template <int kGroup>
  static void scale(float* weights, const float* scales, int64_t count) {
    if constexpr (kHasScales<K>)
      for (int64_t i = 0; i < count * kGroup; i += kLanes)
        store(weights + i, load(weights + i) * spread<kGroup>(load(scales + i / kGroup)));
  }

  // Memory is fetched between the sums.
  template <int kGroup, int kHeads, int kVectors, bool kTail>
  void add_some_values(const K* const* rows, int64_t offset, int64_t count, int rest, const float* weights,
                       const float* decay, float* sums, int64_t width, Fetch<K>& fetch) const {
    F32 sum[kHeads][kVectors];
#pragma GCC unroll 4
    for (int g = 0; g < kHeads; ++g)
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) sum[g][j] = load(sums + g * width + j * kLanes) * decay[g];
    for (int64_t t = 0; t < count; ++t) {
      fetch.beside(kVectors * kLanes * int64_t(sizeof(K)));
      const K* row = rows[t] + offset;
      F32 value[kVectors];
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) value[j] = kTail ? load_n(row, rest) : load(row + j * kLanes);
#pragma GCC unroll 4
      for (int g = 0; g < kHeads; ++g) {
        const F32 weight = splat(weights[t * kGroup + g]);
#pragma GCC unroll 4
        for (int j = 0; j < kVectors; ++j) sum[g][j] = fma(weight, value[j], sum[g][j]);
      }
    }
#pragma GCC unroll 4
    for (int g = 0; g < kHeads; ++g)
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) store(sums + g * width + j * kLanes, sum[g][j]);
  }
};

}  // namespace
