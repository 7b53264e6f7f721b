// Memory that a thread reads next, brought into its caches a few lines at a time.
//
// Spread over the work on what came before: a burst of fetches stops that work until it is served, and a long stretch
// without any leaves the memory idle. So wherever keys or values are read, as many bytes are fetched, always as far
// ahead, from one unit on into the next, and in the order in which they will be read.
//
// As far ahead as a group of positions, and into the second cache. With AMX, if rows are short: twice
// what a KV head has of a side, into the first cache. That was faster with heads of 64 dims, and slower with 128, which fill that cache.

#pragma once

#include "attention_batch.h"

namespace {

// Of K, what the pool holds.
template <typename K>
class Fetch {
#if defined(__AMX_BF16__)
  static constexpr bool kMayBeNear = kIsBf16<K> || sizeof(K) == 1;
#else
  static constexpr bool kMayBeNear = false;
#endif
  static constexpr int64_t kNearRowBytes = 128;  // at most
  const AttendArgs& a_;
  const int64_t run_, grain_bytes_;  // rows, and their bytes, that are fetched at once
  const bool is_near_;               // into the first cache
  const int64_t set_size_;           // KV heads of a set, whose keys are read before the first one's values
  const K** rows_ = nullptr;         // [kTokens] of KV head 0: of one group of positions
  int64_t next_ = 0, end_ = 0;       // of the rows: where to go on, and as far as is owed
  int64_t offset_ = 0;               // from there to the KV head and side under way
  const Unit *unit_ = nullptr, *then_ = nullptr;
  int64_t first_ = 0, num_ = 0;      // the group: positions of the unit
  int64_t set_ = 0, kv_head_ = 0, side_ = 0;  // the set: its first KV head
  int64_t left_ = 0;                 // rows that may be fetched until `rest` returns, besides those before end_
  int64_t due_ = 0;                  // bytes that are to be fetched by now

 public:
  Fetch(const AttendArgs& a, int64_t set_size)
      : a_(a),
        run_(a.slot_stride == a.head_dim ? run_of<K>(a) : 1),
        grain_bytes_(run_ * a.head_dim * int64_t(sizeof(K))),
        is_near_(kMayBeNear && a.head_dim * int64_t(sizeof(K)) <= kNearRowBytes),
        set_size_(set_size) {}

  // Takes its scratch, where it lay before.
  void carve(Carver& carver) { rows_ = carver.take<const K*>(kTokens); }

  // Fetches what a unit begins with at once; what was to follow is forgotten.
  void start(const Unit& unit) {
    left_ = 0;
    open(unit, unit.begin);
    end_ = next_;
    if (is_near_) left_ = 2 * num_;
    else owe(unit, num_);
    rest();
  }

  // What to go on with after the last unit that was named; null if nothing is known.
  void follow(const Unit* then) { then_ = then; }

  // As much as `count` positions of this unit may be fetched until `rest` returns.
  void owe(const Unit& unit, int64_t count) {
    left_ += count * (unit.kv_head_end - unit.kv_head) * 2;
    due_ = 0;
  }

  // Fetches as much as is read meanwhile.
  TANDEM_INLINE void beside(int64_t bytes) {
    int64_t due = due_ + bytes;
    for (; due > 0; due -= grain_bytes_) {
      if (next_ >= end_ && !go_on()) {
        due = INT64_MIN / 2;
        break;
      }
      const char* from = reinterpret_cast<const char*>(rows_[next_] + offset_);
      if (kMayBeNear && is_near_)
        for (int64_t i = 0; i < grain_bytes_; i += 64) __builtin_prefetch(from + i, 0, 3);
      else
        for (int64_t i = 0; i < grain_bytes_; i += 64) __builtin_prefetch(from + i, 0, 2);
      next_ += run_;
    }
    due_ = due;
  }

  void rest() {
    for (due_ = 0; due_ == 0;) beside(grain_bytes_);
  }

 private:
  // Makes more of the rows due. False if no more are owed, or known.
  __attribute__((noinline)) bool go_on() {
    if (left_ <= 0 || (next_ >= num_ && !open_next())) return false;
    const int64_t count = least(left_, num_ - next_);
    left_ -= count, end_ = next_ + count;
    return true;
  }

  bool open_next() {
    const int64_t set_end = least(set_ + set_size_, unit_->kv_head_end);
    if (kv_head_ + 1 < set_end) return open(kv_head_ + 1, side_), true;
    if (side_ == 0) return open(set_, 1), true;
    if (set_end < unit_->kv_head_end) return open(set_ = set_end, 0), true;
    if (first_ + num_ < unit_->end) return open(*unit_, first_ + num_), true;
    if (then_ == nullptr) return false;
    const Unit* then = then_;
    then_ = nullptr;
    return open(*then, then->begin), true;
  }

  void open(const Unit& unit, int64_t first) {
    unit_ = &unit, first_ = first, num_ = count_from(unit, first);
    decode_rows(a_, unit.seq, first, num_, rows_);
    open(set_ = unit.kv_head, 0);
  }

  void open(int64_t kv_head, int64_t side) {
    kv_head_ = kv_head, side_ = side, next_ = 0;
    offset_ = side * a_.side_stride + kv_head * a_.head_stride;
    if constexpr (kHasScales<K>)
      visit_scales(a_, unit_->seq, first_, num_, offset_, [](const float* scales, int64_t slots) {
        for (int64_t i = 0; i < slots; i += 16) __builtin_prefetch(scales + i, 0, 2);
      });
  }
};

}  // namespace
