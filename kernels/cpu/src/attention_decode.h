// Decode attention: one query token of a seq against its blocks, read in place.
//
// A unit is a share of one seq's keys for some KV heads (flash-decoding). The cut depends on the seq's
// length alone; whoever finishes a seq's last share merges the shares in order. So a result depends
// neither on the batch nor on the number of threads.
//
// Weights are kept as [tokens, kGroup]: kGroup query heads of one KV head, a power of two, in
// neighbouring lanes. Maxima and totals then go lane by lane, and across lanes once per kTokens. Scores
// of quantized keys are multiplied by their scales, and so are weights before they meet the values. With
// AMX tiles (bfloat16, dims in 32s, up to 16 heads to a KV head) the lanes hold the heads of as many
// KV heads as fit in 16, a set; and the weights are rounded to bfloat16 to meet the values on tiles.

#pragma once

#include "attention_bytes.h"
#include "attention_decode_pairs.h"
#include "attention_floats.h"
#include "attention_pairs.h"

namespace {

// Keys in one share of a seq that sees `keys` keys: a quarter, but 320 to 512. Each share has a start and a merge to pay.
inline int64_t share_of(int64_t keys) { return least(512, most(320, round_up((keys + 3) / 4, kTokens))); }

// What multiplies for decode.
template <typename T, typename K>
struct DecodeProducts {
  using Type = Floats<T, K>;
};
#if defined(TANDEM_BF16_PAIRS)
template <>
struct DecodeProducts<Bf16, Bf16> {
  using Type = DecodePairs;
};
#endif
template <>
struct DecodeProducts<Bf16, Int8> {
#if defined(__AVX512VNNI__)
  using Type = Bytes;
#else
  using Type = Words;
#endif
};

template <typename Form>
class Decode {
  using T = typename KvForm<Form>::Computed;
  using K = typename KvForm<Form>::Stored;
  using Products = typename DecodeProducts<T, K>::Type;  // without sets
  static constexpr bool kExact = !kIsBf16<T>;
  static constexpr int64_t kStats = 2;
  static constexpr int64_t kPairRows = 48;  // two per lane, and as many as a tile may read past them

  const AttendArgs& a_;
  const int64_t dims_, width_, group_;  // D; padded to whole vectors; G
  float* partials_;                     // [partial, H, width + kStats]: sums, maximum, total
  int32_t* pending_;                    // [split seq, Hkv]: shares not yet finished; all of them again at the end
  const Unit *unit_ = nullptr, *fetched_ = nullptr;
  // Scratch.
  const K** rows_;     // [kTokens] of K, KV head 0
  float* scales_;      // quantized: [kTokens + kLanes] of one KV head and side
  Products products_;
  Fetch<K> fetch_;       // of what comes next, while these are used
  float* weights_;     // [kTokens, 4], of a set [kTokens + 16, 16]
  uint32_t* queries_;  // of sets, per KV head [D / 32 tiles of words]
  uint32_t* pairs_;    // of a set [kTokens / 16 + 1, kPairRows, 16 tokens]: see tile_values_of_heads
  float* squares_;     // of a set [D / 32, 16, 16]: products
  T* copies_;          // [Hkv, but at least kTokens / 16 + 1, 16, D]: a set's rows that do not lie evenly
  float* sums_;        // [H, width]; of sets, each 32 dims as 16 even and 16 odd ones
  float* maxima_;      // [H, kLanes]: of a run of heads at the first one's place, repeating every kGroup lanes
  float* totals_;      // [H, kLanes]: likewise, yet to be summed over the repeats

  char* carve(char* base) {
    Carver carver{base};
    rows_ = carver.take<const K*>(kTokens);
    fetch_.carve(carver);
    scales_ = carver.take<float>(kHasScales<K> ? kTokens + kLanes : 0);
    products_.carve(carver, has_sets() ? 0 : a_.num_heads, width_);
    weights_ = carver.take<float>((kTokens + 16) * 16);
    pairs_ = carver.take<uint32_t>(has_sets() ? (kTokens / 16 + 1) * kPairRows * 16 : 0);
    squares_ = carver.take<float>(has_sets() ? dims_ / 32 * 256 : 0);
    queries_ = carver.take<uint32_t>(has_sets() ? a_.num_kv_heads * dims_ / 2 * 16 : 0);
    copies_ = carver.take<T>(most(a_.num_kv_heads, kTokens / 16 + 1) * 16 * dims_);
    sums_ = carver.take<float>(a_.num_heads * width_);
    maxima_ = carver.take<float>(a_.num_heads * kLanes);
    totals_ = carver.take<float>(a_.num_heads * kLanes);
    return carver.at;
  }

 public:
  Decode(const AttendArgs& a, float* partials, int32_t* pending)
      : a_(a),
        dims_(a.head_dim),
        width_(width_of(a)),
        group_(a.num_heads / a.num_kv_heads),
        partials_(partials),
        pending_(pending),
        fetch_(a, has_sets() ? set_size() : 1) {}

  // Floats of one partial result.
  static int64_t partial_size(const AttendArgs& a) { return a.num_heads * (width_of(a) + kStats); }

  // Meanwhile fetches what `then`, the same thread's next unit, begins with; it may be null.
  void run(const Unit& unit, const Unit* then, Arena& arena) {
    unit_ = &unit;
    carve(arena.reserve(intptr_t(carve(nullptr))));
    if (&unit != fetched_) fetch_.start(unit);
    fetch_.follow(then);
    if (has_sets()) memset(queries_, 0, a_.num_kv_heads * dims_ / 2 * 16 * sizeof *queries_);
    for (int64_t head = first_head(); head < end_head(); ++head) start_head(head);
    if (a_.sinks != nullptr && unit.part == 0)
      for (int64_t head = first_head(); head < end_head(); ++head) start_sink(head);
    for (int64_t first = unit.begin, count = 0; first < unit.end; first += count) {
      count = count_from(unit, first);
      if (has_sets()) key_rows(a_, unit.seq, first, count, rows_);  // rows of a tile follow each other
      else decode_rows(a_, unit.seq, first, count, rows_);
      for (int64_t t = count; t % kLanes; ++t) rows_[t] = rows_[count - 1];
      fetch_.owe(unit, count);
      if (has_sets())
        for (int64_t kv_head = unit.kv_head; kv_head < unit.kv_head_end; kv_head += set_size())
          update_set(kv_head, least(kv_head + set_size(), unit.kv_head_end), first, count);
      else
        for (int64_t kv_head = unit.kv_head; kv_head < unit.kv_head_end; ++kv_head) update_group(kv_head, first, count);
      fetch_.rest();
    }
    fetched_ = then;
    if (unit.num_parts == 1)
      write_whole();
    else
      write_share();
  }

 private:
  static int64_t width_of(const AttendArgs& a) { return round_up(a.head_dim, Products::kWidth); }
#if defined(__AMX_BF16__)
  bool has_sets() const { return !kHasScales<K> && kIsBf16<T> && dims_ % 32 == 0 && group_ <= 16; }
#else
  static constexpr bool has_sets() { return false; }
#endif
  int64_t set_size() const { return 16 / group_; }  // KV heads of a set

  int64_t first_head() const { return unit_->kv_head * group_; }
  int64_t end_head() const { return unit_->kv_head_end * group_; }
  float* partial(int64_t part, int64_t head) const {
    return partials_ + ((unit_->partial + part) * a_.num_heads + head) * (width_ + kStats);
  }

  void start_head(int64_t head) {
    const T* query = static_cast<const T*>(a_.q) + a_.starts[unit_->seq] * a_.q_stride + head * dims_;
    memset(sums_ + head * width_, 0, size_t(width_) * sizeof(float));
    store(maxima_ + head * kLanes, splat(kHidden));
    store(totals_ + head * kLanes, F32{});
    if (!has_sets()) {
      products_.start_head(head, query, dims_, width_);
    } else {
      const int64_t kv_head = head / group_, lane = (head - first_head()) % (set_size() * group_);
      uint32_t* to = queries_ + kv_head * dims_ / 2 * 16 + lane;
      for (int64_t word = 0; word < dims_ / 2; ++word) memcpy(to + word * 16, query + 2 * word, 4);
    }
  }

  // A sink is a key of the first share, whose value is zero.
  void start_sink(int64_t head) {
    const Stats stats = stats_of(head);
    for (int64_t i = stats.at; i < stats.end; i += stats.step) maxima_[i] = a_.sinks[head] * kLog2E;
    totals_[stats.at] = 1;
  }

#if defined(__AMX_BF16__)
  // See attention_sets.h.
  void update_set(int64_t kv_head, int64_t kv_head_end, int64_t first, int64_t count);
  F32 weigh_set(int64_t head, int64_t lead, int64_t count);
  void add_set_values(int64_t kv_head, int64_t lane, int64_t lead, int64_t count, const float* decay);
  const Bf16* whole_rows(int64_t t, int64_t count, int64_t kv_head, T** copies, int64_t* row) const;
  const Bf16* even_rows(int64_t t, int64_t kv_head) const;
  const Bf16* copied_rows(int64_t t, int64_t count, int64_t kv_head, int64_t kv_head_end);
#else
  void update_set(int64_t, int64_t, int64_t, int64_t) {}
#endif

  // Lanes of the run of heads that begins with number g of the group.
  int run_lanes(int64_t g) const { return group_ - g >= 3 ? 4 : group_ - g >= 2 ? 2 : 1; }

  void update_group(int64_t kv_head, int64_t first, int64_t count) {
    for (int64_t g = 0; g < group_; g += run_lanes(g)) {
      const int64_t head = kv_head * group_ + g, left = group_ - g;
      if (left >= 4) update_heads<4, 4>(kv_head, head, first, count);
      else if (left == 3) update_heads<4, 3>(kv_head, head, first, count);
      else if (left == 2) update_heads<2, 2>(kv_head, head, first, count);
      else update_heads<1, 1>(kv_head, head, first, count);
    }
  }

  // kHeads heads of one KV head, in kGroup lanes.
  template <int kGroup, int kHeads>
  void update_heads(int64_t kv_head, int64_t head, int64_t first, int64_t count) {
    const int64_t keys = kv_head * a_.head_stride, values = keys + a_.side_stride;
    read_scales(first, count, keys);
    products_.template score<kGroup, kHeads>(rows_, keys, scales_, head, count, dims_, width_, weights_, fetch_);
    float decay[kLanes];
    store(decay, softmax<kGroup>(weights_, head, count));
    read_scales(first, count, values);
    products_.template add_values<kGroup, kHeads>(rows_, values, scales_, count, dims_, weights_, decay,
                                                  sums_ + head * width_, width_, fetch_);
  }

  // Of the rows at `offset`, and zeros behind them.
  void read_scales(int64_t first, int64_t count, int64_t offset) {
    if constexpr (kHasScales<K>) {
      decode_scales<K>(a_, unit_->seq, first, count, offset, scales_);
      store(scales_ + count, F32{});
    }
  }

  // Scores become weights in place; returns the factor, lane by lane, for what was summed before.
  template <int kGroup>
  F32 softmax(float* weights, int64_t head, int64_t count) {
    const int64_t size = count * kGroup, whole = round_up(size, kLanes);
    for (int64_t i = size; i < whole; ++i) weights[i] = kHidden;
    F32 top, total;
    const F32 decay = raise_maximum<kGroup>(weights, head, whole, &top, &total);
    for (int64_t i = 0; i < whole; i += kLanes) {
      const F32 weight = weight_of(load(weights + i), top);
      store(weights + i, weight);
      total += weight;
    }
    store(totals_ + head * kLanes, total);
    return decay;
  }

  float factor() const { return (a_.soft_cap != 0 ? 1.0f : a_.scale) * kLog2E; }

  TANDEM_INLINE F32 weight_of(F32 score, F32 top) const {
    const F32 weight = exp2_of<kExact>(fma(score, splat(factor()), -top));
    return score < kHiddenBelow ? F32{} : weight;  // NaN stays
  }

  // Caps `size` scores; *top is the new maximum, *total what was summed before, scaled by the factor returned.
  template <int kGroup>
  F32 raise_maximum(float* scores, int64_t head, int64_t size, F32* top, F32* total) {
    if (a_.soft_cap != 0)
      for (int64_t i = 0; i < size; i += kLanes) {
        const F32 capped = tanh_of(load(scores + i) * (a_.scale / a_.soft_cap)) * a_.soft_cap;
        store(scores + i, load(scores + i) < kHiddenBelow ? splat(kHidden) : capped);
      }
    const F32 highest = highest_of(scores, size);
    const F32 before = load(maxima_ + head * kLanes);
    *top = max(before, highest_of_groups<kGroup>(highest) * factor());
    const F32 decay = exp2_of<true>(before - *top);
    *total = load(totals_ + head * kLanes) * decay;
    store(maxima_ + head * kLanes, *top);
    return decay;
  }

  // Lane by lane, of a multiple of kLanes. Four maxima: one alone would wait for itself.
  static F32 highest_of(const float* scores, int64_t size) {
    F32 highest[4] = {load(scores), load(scores), load(scores), load(scores)};
    int64_t i = kLanes;
    for (; i + 4 * kLanes <= size; i += 4 * kLanes)
      for (int j = 0; j < 4; ++j) highest[j] = max(load(scores + i + j * kLanes), highest[j]);
    for (; i < size; i += kLanes) highest[0] = max(load(scores + i), highest[0]);
    return max(max(highest[0], highest[1]), max(highest[2], highest[3]));
  }

  // Where a head's maximum and total stand: at, at + step, … before end.
  struct Stats {
    int64_t at, step, end;
  };

  Stats stats_of(int64_t head) const {
    if (has_sets()) {
      const int64_t lane = (head - first_head()) % (set_size() * group_), at = (head - lane) * kLanes + lane;
      return {at, 1, at + 1};
    }
    const int64_t g = head % group_;
    int64_t start = 0;
    while (start + run_lanes(start) <= g) start += run_lanes(start);
    const int64_t run = (head - g + start) * kLanes;
    return {run + g - start, run_lanes(start), run + kLanes};
  }

  // Maximum (in units of log2) and total of one head, from the lanes of its run.
  void read_stats(int64_t head, float* maximum, float* total) const {
    const Stats stats = stats_of(head);
    *maximum = maxima_[stats.at], *total = 0;
    for (int64_t i = stats.at; i < stats.end; i += stats.step) *total += totals_[i];
  }

  void write_head(int64_t head, float total) {
    const float share = 1.0f / total;
    const float* sums = sums_ + head * width_;
    T* to = static_cast<T*>(a_.out) + (int64_t(a_.starts[unit_->seq]) * a_.num_heads + head) * dims_;
    if (has_sets()) {
      for (int64_t d = 0; d < dims_; d += 32) {
        const U32 even = bit_cast<U32>(rounded_to<T>(load(sums + d) * share));
        const U32 odd = bit_cast<U32>(rounded_to<T>(load(sums + d + kLanes) * share));
        const U32 both = even >> 16 | odd;
        memcpy(static_cast<void*>(to + d), &both, sizeof both);
      }
      return;
    }
    Products::straighten(sums_ + head * width_, width_);
    for (int64_t d = 0; d < dims_; d += kLanes) store_n(to + d, load(sums + d) * share, int(least(kLanes, dims_ - d)));
  }

  void write_whole() {
    for (int64_t head = first_head(); head < end_head(); ++head) {
      float maximum, total;
      read_stats(head, &maximum, &total);
      write_head(head, total);
    }
  }

  // Leaves the share's result to whoever finishes last, and that is perhaps this unit.
  void write_share() {
    for (int64_t head = first_head(); head < end_head(); ++head) {
      float* to = partial(unit_->part, head);
      memcpy(to, sums_ + head * width_, width_ * sizeof(float));
      read_stats(head, to + width_, to + width_ + 1);
    }
    for (int64_t kv_head = unit_->kv_head; kv_head < unit_->kv_head_end; ++kv_head) {
      int32_t* pending = pending_ + unit_->split * a_.num_kv_heads + kv_head;
      if (__atomic_sub_fetch(pending, 1, __ATOMIC_ACQ_REL) != 0) continue;
      *pending = unit_->num_parts;  // for the next layer
      for (int64_t g = 0; g < group_; ++g) merge_head(kv_head * group_ + g);
    }
  }

  // The shares' sums, brought to their common maximum, added in order.
  void merge_head(int64_t head) {
    float top = kHidden, total = 0;
    for (int64_t i = 0; i < unit_->num_parts; ++i) {
      const float maximum = partial(i, head)[width_];
      top = maximum > top ? maximum : top;
    }
    float* sums = sums_ + head * width_;
    memset(sums, 0, width_ * sizeof(float));
    for (int64_t i = 0; i < unit_->num_parts; ++i) {
      const float* from = partial(i, head);
      const F32 share = exp2_of<true>(splat(from[width_] - top));
      total += share[0] * from[width_ + 1];
      for (int64_t d = 0; d < width_; d += kLanes) store(sums + d, fma(load(from + d), share, load(sums + d)));
    }
    write_head(head, total);
  }
};

}  // namespace
