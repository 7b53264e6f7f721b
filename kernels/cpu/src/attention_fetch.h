// Memory that a thread reads next, brought into its second cache a few lines at a time.
//
// Spread over the work on what came before: a burst of fetches stops that work until it is served, and a
// long stretch without any leaves the memory idle. Pieces keep the order of addresses, as memory likes it.

#pragma once

#include "attention_batch.h"

namespace {

class Fetch {
  struct Piece {
    const char *at, *end;
  };
  Piece* pieces_ = nullptr;
  int64_t num_ = 0, next_ = 0;
  const char *at_ = nullptr, *end_ = nullptr;  // what is left of the piece under way

 public:
  // Most pieces of `tokens` keys and values.
  static int64_t most_pieces(const AttendArgs& a, int64_t tokens) { return tokens * a.num_kv_heads * 4; }

  // Takes its scratch; what was planned is forgotten.
  void carve(Carver& carver, int64_t pieces) {
    pieces_ = carver.take<Piece>(pieces);
    num_ = next_ = 0;
    at_ = end_ = nullptr;
  }

  // Plans keys and values of `count` positions of the unit's seq, for its heads; and their scales, if they have any.
  template <typename K>
  void plan(const AttendArgs& a, const Unit& unit, int64_t first, int64_t count) {
    num_ = next_ = 0;
    const int32_t* table = a.block_tables + unit.seq * a.table_stride;
    const bool dense = a.slot_stride == a.head_dim;
    for (int64_t block = first / a.block_size, slot = first % a.block_size; count > 0; ++block, slot = 0) {
      const int64_t slots = least(count, a.block_size - slot);
      const K* row = static_cast<const K*>(a.kv) + table[block] * a.block_stride + slot * a.slot_stride;
      for (int64_t side = 0; side < 2; ++side)
        for (int64_t head = unit.kv_head; head < unit.kv_head_end; ++head) {
          const K* from = row + side * a.side_stride + head * a.head_stride;
          const int64_t runs = dense ? 1 : slots, length = dense ? slots * a.head_dim : a.head_dim;
          const char* scales = reinterpret_cast<const char*>(from) + (a.block_size - slot) * a.head_dim;
          for (int64_t i = 0; i < runs; ++i, from += a.slot_stride) add(from, from + length);
          if constexpr (kHasScales<K>) add(scales + slot * 4, scales + (slot + slots) * 4);
        }
      count -= slots;
    }
  }

  // The next four lines of 64 bytes, `times` over.
  TANDEM_INLINE void some(int64_t times) {
    for (; times > 0; --times) {
      if (at_ >= end_) {
        if (next_ == num_) return;
        at_ = pieces_[next_].at, end_ = pieces_[next_].end, ++next_;
      }
      for (int i = 0; i < 256; i += 64) __builtin_prefetch(at_ + i, 0, 2);
      at_ += 256;
    }
  }

  void rest() {
    while (at_ < end_ || next_ < num_) some(1);
  }

 private:
  void add(const void* from, const void* to) {
    const char *at = static_cast<const char*>(from), *end = static_cast<const char*>(to);
    if (num_ > 0 && pieces_[num_ - 1].end == at) pieces_[num_ - 1].end = end;
    else pieces_[num_++] = Piece{at, end};
  }
};

}  // namespace
