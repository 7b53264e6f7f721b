// Decode on AMX tiles: scores, weights and values of a set, the heads of several KV heads in 16 lanes.
//
// Members of the class in attention_decode.h, for bfloat16 alone.

#pragma once

#include "attention_decode.h"

#if defined(__AMX_BF16__)

namespace {

// The heads of KV heads kv_head … kv_head_end in 16 lanes.
template <typename Form>
void Decode<Form>::update_set(int64_t kv_head, int64_t kv_head_end, int64_t first, int64_t count) {
  // Tiles begin at multiples of 16: so they stay within blocks whose size is one.
  const int64_t lead = a_.block_size % 16 == 0 ? first % 16 : 0, head = kv_head * group_;
  const uint32_t* queries = queries_ + kv_head * dims_ / 2 * 16;
  for (int64_t t = -lead; t < count;) {
    const int64_t kv_heads = kv_head_end - kv_head;
    float* to = weights_ + (t + lead) * 16;
    const Bf16* keys[4];
    if (a_.block_size % 16 == 0 && t + 64 <= round_up(count, 16)) {
      for (int i = 0; i < 4; ++i) keys[i] = even_rows(t + 16 * i, kv_head);
      tile_scores_of_heads<true>(keys, kv_heads, a_.head_stride, a_.slot_stride, dims_ / 32, queries, to, fetch_);
      t += 64;
    } else if (a_.block_size % 16 == 0) {
      keys[0] = even_rows(t, kv_head);
      tile_scores_of_heads<false>(keys, kv_heads, a_.head_stride, a_.slot_stride, dims_ / 32, queries, to, fetch_);
      t += 16;
    } else {
      keys[0] = copied_rows(t, count, kv_head, kv_head_end);
      tile_scores_of_heads<false>(keys, kv_heads, 16 * dims_, dims_, dims_ / 32, queries, to, fetch_);
      t += 16;
    }
  }
  alignas(64) float decay[kLanes];
  store(decay, weigh_set(head, lead, count));
  for (; kv_head < kv_head_end; ++kv_head) add_set_values(kv_head, kv_head * group_ - head, lead, count, decay);
}

// Scores of a set become weights, as pairs; returns the factor, lane by lane, for what was summed before.
template <typename Form>
F32 Decode<Form>::weigh_set(int64_t head, int64_t lead, int64_t count) {
  const int64_t tokens = round_up(lead + count, 16);
  for (int64_t t = 0; t < lead; ++t) store(weights_ + t * 16, splat(kHidden));
  for (int64_t t = lead + count; t < tokens; ++t) store(weights_ + t * 16, splat(kHidden));
  F32 top, total;
  const F32 decay = raise_maximum<16>(weights_, head, tokens * 16, &top, &total);
  for (int64_t t = 0; t < tokens; t += 16) {
    F32 square[kLanes], sums[4] = {};
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
      square[i] = weight_of(load(weights_ + (t + i) * 16), top);
      sums[i % 4] += square[i];
    }
    total += (sums[0] + sums[1]) + (sums[2] + sums[3]);
    fetch_.beside(1024);
    transpose(square);
    float* to = reinterpret_cast<float*>(pairs_ + t * kPairRows);
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
      const U32 rounded = bit_cast<U32>(square[i]) + 0x8000;
      store(to + i * 32, bit_cast<F32>(rounded >> 16));
      store(to + i * 32 + 16, bit_cast<F32>(rounded & 0xffff0000));
    }
    fetch_.beside(1024);
  }
  store(totals_ + head * kLanes, total);
  return decay;
}

// What the heads of one KV head, in lanes from `lane` on, make of its values.
template <typename Form>
void Decode<Form>::add_set_values(int64_t kv_head, int64_t lane, int64_t lead, int64_t count, const float* decay) {
  const Bf16* values[kTokens / 16 + 1];
  int64_t row[kTokens / 16 + 1], num = 0;
  T* copies = copies_;
  for (int64_t t = -lead; t < count; t += 16, ++num) values[num] = whole_rows(t, count, kv_head, &copies, row + num);
  for (int64_t g = 0; g < group_; g += 8) {
    const uint32_t* pairs = pairs_ + (lane + g) * 32;
    for (int64_t d = 0; d < dims_; d += 64) {
      const int64_t wide = least(2, (dims_ - d) / 32);
      tile_values_of_heads(values, row, num, d, wide, pairs, kPairRows * 16, squares_, fetch_);
      for (int64_t i = 0; i < least(8, group_ - g); ++i) {
        float* sums = sums_ + (kv_head * group_ + g + i) * width_ + d;
        const F32 before = splat(decay[lane + g + i]);
        for (int64_t j = 0; j < wide; ++j, sums += 32)
          for (int odd = 0; odd < 2; ++odd) {
            const F32 product = load(squares_ + j * 256 + (2 * i + odd) * 16);
            store(sums + odd * 16, fma(load(sums + odd * 16), before, product));
          }
      }
    }
  }
}

// 16 rows of values from row t on. Where not all are present or they do not lie evenly, a copy with zeros
// for the others: weights of zero would not hide what is no number.
template <typename Form>
const Bf16* Decode<Form>::whole_rows(int64_t t, int64_t count, int64_t kv_head, T** copies,
                                       int64_t* row) const {
  const int64_t offset = kv_head * a_.head_stride + a_.side_stride;
  if (t >= 0 && t + 16 <= count && a_.block_size % 16 == 0) {
    *row = a_.slot_stride;
    return reinterpret_cast<const Bf16*>(rows_[t] + offset);
  }
  T* to = *copies;
  *copies += 16 * dims_, *row = dims_;
  memset(static_cast<void*>(to), 0, 16 * dims_ * sizeof(T));
  for (int64_t i = most(0, -t); i < least(16, count - t); ++i)
    memcpy(static_cast<void*>(to + i * dims_), rows_[t + i] + offset, dims_ * sizeof(T));
  return reinterpret_cast<const Bf16*>(to);
}

// Row t of 16 evenly spaced ones, of which those before row 0 and past the last stand in the same block.
template <typename Form>
const Bf16* Decode<Form>::even_rows(int64_t t, int64_t kv_head) const {
  const int64_t present = most(0, t);
  return reinterpret_cast<const Bf16*>(rows_[present] - (present - t) * a_.slot_stride + kv_head * a_.head_stride);
}

template <typename Form>
const Bf16* Decode<Form>::copied_rows(int64_t t, int64_t count, int64_t kv_head, int64_t kv_head_end) {
  T* to = copies_;
  for (; kv_head < kv_head_end; ++kv_head)
    for (int64_t i = t; i < t + 16; ++i, to += dims_)
      memcpy(static_cast<void*>(to), rows_[least(i, count - 1)] + kv_head * a_.head_stride, dims_ * sizeof(T));
  return reinterpret_cast<const Bf16*>(copies_);
}

}  // namespace

#endif  // __AMX_BF16__
