// Memory that a thread reads next, brought into its second cache a few lines at a time.
//
// Spread over the work on what came before: a burst of fetches stops that work until it is served, and a
// long stretch without any leaves the memory idle. So as many bytes are fetched as the work under way reads, always
// the same number of keys ahead of it, from one unit on into the next. Pieces keep the order of addresses, as memory
// likes it.

#pragma once

#include "attention_batch.h"

namespace {

class Fetch {
  struct Piece {
    const char *at, *end;
  };
  static constexpr int64_t kPositions = 64;  // planned at a time

  const AttendArgs& a_;
  const int64_t element_bytes_;
  const bool has_scales_;
  Piece* pieces_ = nullptr;
  int64_t num_ = 0, next_ = 0;
  const char *at_ = nullptr, *end_ = nullptr;  // what is left of the piece under way
  const Unit *unit_ = nullptr, *then_ = nullptr;
  int64_t position_ = 0;  // of unit_'s keys: the first that is not among the pieces
  int64_t owed_ = 0;      // bytes that are to be fetched by now

 public:
  Fetch(const AttendArgs& a, int64_t element_bytes, bool has_scales)
      : a_(a), element_bytes_(element_bytes), has_scales_(has_scales) {}

  // Takes its scratch, where it lay before.
  void carve(Carver& carver) { pieces_ = carver.take<Piece>(kPositions * a_.num_kv_heads * 4); }

  // Fetches the first `count` positions of a unit, at once; what was planned is forgotten.
  void start(const Unit& unit, int64_t count) {
    num_ = next_ = owed_ = 0;
    at_ = end_ = nullptr;
    unit_ = &unit, then_ = nullptr, position_ = unit.begin;
    owe(unit, count);
    rest();
  }

  // What to go on with after the last unit that was named; null if nothing is known.
  void follow(const Unit* then) { then_ = then; }

  // As much as `count` positions of this unit are to be fetched until `rest` returns.
  void owe(const Unit& unit, int64_t count) {
    owed_ += count * (unit.kv_head_end - unit.kv_head) * 2 * (a_.head_dim * element_bytes_ + (has_scales_ ? 4 : 0));
  }

  // The next four lines of 64 bytes, `times` over, as far as they are owed.
  TANDEM_INLINE void some(int64_t times) {
    for (; times > 0 && owed_ > 0; --times) {
      if (at_ >= end_ && !open_piece()) return;
      for (int i = 0; i < 256; i += 64) __builtin_prefetch(at_ + i, 0, 2);
      at_ += 256, owed_ -= 256;
    }
  }

  void rest() {
    while (owed_ > 0 && (at_ < end_ || open_piece())) some(1);
  }

 private:
  __attribute__((noinline)) bool open_piece() {
    if (next_ == num_ && !plan()) return false;
    at_ = pieces_[next_].at, end_ = pieces_[next_].end, ++next_;
    return true;
  }

  // Makes pieces of the next positions. False if there are none.
  bool plan() {
    if (position_ >= unit_->end) {
      if (then_ == nullptr) return false;
      unit_ = then_, then_ = nullptr, position_ = unit_->begin;
    }
    const int64_t count = least(kPositions, unit_->end - position_);
    plan(position_, count);
    position_ += count;
    return true;
  }

  // Keys and values of `count` positions of the unit's seq, for its heads; and their scales, if they have any.
  void plan(int64_t first, int64_t count) {
    num_ = next_ = 0;
    const int32_t* table = a_.block_tables + unit_->seq * a_.table_stride;
    const bool dense = a_.slot_stride == a_.head_dim;
    for (int64_t block = first / a_.block_size, slot = first % a_.block_size; count > 0; ++block, slot = 0) {
      const int64_t slots = least(count, a_.block_size - slot);
      const char* begin = elements_on(static_cast<const char*>(a_.kv), table[block] * a_.block_stride);
      for (int64_t side = 0; side < 2; ++side)
        for (int64_t head = unit_->kv_head; head < unit_->kv_head_end; ++head) {
          const char* from = elements_on(begin, side * a_.side_stride + head * a_.head_stride + slot * a_.slot_stride);
          const int64_t runs = dense ? 1 : slots, length = dense ? slots * a_.head_dim : a_.head_dim;
          const char* scales = elements_on(from, (a_.block_size - slot) * a_.head_dim);
          for (int64_t i = 0; i < runs; ++i, from = elements_on(from, a_.slot_stride))
            add(from, elements_on(from, length));
          if (has_scales_) add(scales + slot * 4, scales + (slot + slots) * 4);
        }
      count -= slots;
    }
  }

  const char* elements_on(const char* from, int64_t count) const { return from + count * element_bytes_; }

  void add(const char* from, const char* to) {
    if (num_ > 0 && pieces_[num_ - 1].end == from) pieces_[num_ - 1].end = to;
    else pieces_[num_++] = Piece{from, to};
  }
};

}  // namespace
