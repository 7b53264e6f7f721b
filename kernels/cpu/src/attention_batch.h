// What one attention call gets, how it is cut into units of work, and each thread's scratch memory.
//
// Dimensions as in kernels/attention.py. A unit is what one thread computes alone; which thread gets
// which unit is left to chance, so no result depends on it.

#pragma once

#include "arena.h"
#include "kv_elements.h"

namespace {

// What the layers of one step share; the same struct stands in kernels/cpu/attention.py. Strides count elements.
// Of quantized KV, the scales of a head's slots lie behind its block_size * head_dim elements, of a byte each.
struct AttendShape {
  int64_t num_seqs, num_tokens, num_heads, num_kv_heads, head_dim, block_size, num_blocks, max_blocks;
  int64_t q_stride, table_stride, block_stride, side_stride, head_stride, slot_stride;
  int64_t window;               // 0 = none
  const int32_t* starts;        // [B + 1]: first token of each seq
  const int32_t* seq_lens;      // [B]
  const int32_t* block_tables;  // [B, max_blocks]
  float scale;
  float soft_cap;  // 0 = none
};

struct AttendArgs : AttendShape {
  const void* q;       // [T, H, D], heads contiguous
  const void* kv;      // [N, 2, Hkv, S, D], dims contiguous; as T or quantized
  void* out;           // [T, H, D], contiguous
  const float* sinks;  // [H]; null = none
};

constexpr float kLog2E = 1.44269504088896341f;
// Stands for minus infinity in maxima and masked scores: differences of it stay numbers.
constexpr float kHidden = -1e30f;
constexpr float kHiddenBelow = -1e29f;

struct Unit {
  int32_t seq;
  int32_t kv_head, kv_head_end;
  int32_t begin, end;       // prefill: rows (query, head of the group); decode: positions of keys
  int32_t part, num_parts;  // decode: which share of the keys; 0 of 0 for prefill
  int64_t partial, split;   // decode: index of the seq's first partial result, and of the seq among those split
  int64_t cost;             // prefill: keys times rows
};

// The first key that the query at `position` sees.
TANDEM_INLINE int64_t first_seen(const AttendShape& s, int64_t position) {
  return s.window ? most(0, position - s.window + 1) : 0;
}

constexpr int64_t kTokens = 64;  // that decode takes at once

// Of a decode unit's positions from `first` on, up to the next multiple of kTokens: a group.
inline int64_t count_from(const Unit& unit, int64_t first) {
  return least(unit.end, first / kTokens * kTokens + kTokens) - first;
}

// Keys of `count` positions from `first` on, of KV head 0: to[i] is a row [D].
template <typename T>
void key_rows(const AttendArgs& a, int64_t seq, int64_t first, int64_t count, const T** to) {
  const int32_t* table = a.block_tables + seq * a.table_stride;
  const T* kv = static_cast<const T*>(a.kv);
  int64_t block = first / a.block_size, slot = first % a.block_size;
  for (int64_t i = 0; i < count; ++block, slot = 0) {
    const T* row = kv + table[block] * a.block_stride + slot * a.slot_stride;
    for (; slot < a.block_size && i < count; ++slot, ++i, row += a.slot_stride) to[i] = row;
  }
}

// Calls visit(scales, how many) block by block for the same positions, of the side and KV head whose elements begin at
// `offset` of a block's.
template <typename Visit>
TANDEM_INLINE void visit_scales(const AttendArgs& a, int64_t seq, int64_t first, int64_t count, int64_t offset,
                                const Visit& visit) {
  const int32_t* table = a.block_tables + seq * a.table_stride;
  const char* scales = static_cast<const char*>(a.kv) + offset + a.block_size * a.head_dim;
  int64_t block = first / a.block_size, slot = first % a.block_size;
  for (int64_t slots; count > 0; count -= slots, ++block, slot = 0) {
    slots = least(count, a.block_size - slot);
    visit(reinterpret_cast<const float*>(scales + table[block] * a.block_stride) + slot, slots);
  }
}

inline void row_scales(const AttendArgs& a, int64_t seq, int64_t first, int64_t count, int64_t offset, float* to) {
  visit_scales(a, seq, first, count, offset, [&](const float* scales, int64_t slots) {
    memcpy(to, scales, size_t(slots) * sizeof(float));
    to += slots;
  });
}

// ---- the order of a group's rows ----
//
// Rows of several blocks in turn, 256 bytes of each: the processor then reads ahead in all of these blocks. One by one,
// each ends too soon for it to begin.

template <typename K>
inline int64_t run_of(const AttendShape& a) {
  const int64_t row_bytes = a.head_dim * int64_t(sizeof(K));
  return row_bytes <= 64 ? 4 : row_bytes <= 128 ? 2 : 1;
}

// Blocks whose rows stand in turn in this group; 1 if they do not.
template <typename K>
inline int64_t blocks_in_turn(const AttendShape& a, int64_t first, int64_t count) {
  const bool even = count == kTokens && first % kTokens == 0 && kTokens % a.block_size == 0;
  return even && a.block_size % run_of<K>(a) == 0 ? kTokens / a.block_size : 1;
}

// As key_rows, of a group.
template <typename K>
void decode_rows(const AttendArgs& a, int64_t seq, int64_t first, int64_t count, const K** to) {
  const int64_t blocks = blocks_in_turn<K>(a, first, count), run = run_of<K>(a);
  if (blocks == 1) return key_rows(a, seq, first, count, to);
  const int32_t* table = a.block_tables + seq * a.table_stride + first / a.block_size;
  for (int64_t block = 0; block < blocks; ++block) {
    const K* row = static_cast<const K*>(a.kv) + table[block] * a.block_stride;
    const K** at = to + block * run;
    for (int64_t slot = 0; slot < a.block_size; slot += run, at += blocks * run)
      for (int64_t i = 0; i < run; ++i, row += a.slot_stride) at[i] = row;
  }
}

// As row_scales, of a group.
template <typename K>
void decode_scales(const AttendArgs& a, int64_t seq, int64_t first, int64_t count, int64_t offset, float* to) {
  const int64_t blocks = blocks_in_turn<K>(a, first, count), run = run_of<K>(a);
  if (blocks == 1) return row_scales(a, seq, first, count, offset, to);
  visit_scales(a, seq, first, count, offset, [&](const float* scales, int64_t) {
    float* at = to;
    for (int64_t slot = 0; slot < a.block_size; slot += run, at += blocks * run)
      if (run == 4) memcpy(at, scales + slot, 4 * sizeof(float));
      else memcpy(at, scales + slot, size_t(run) * sizeof(float));
    to += run;
  });
}

}  // namespace
