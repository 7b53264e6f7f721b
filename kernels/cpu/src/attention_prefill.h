// Prefill attention: chunks and prompts against the paged cache, after FlashAttention-2 (arXiv 2307.08691).
//
// A unit is a run of query rows of one seq and KV head; row r is query r / G, head r % G of the group,
// so K and V are read once for the whole group. It walks over blocks of kKeys positions, packs their
// keys and values into scratch once, and updates each tile of kTile rows by an online softmax.
// Blocks start at multiples of kKeys whatever the unit, and each row has its own lane: a row's result
// depends on its own query, keys and window, not on where units or chunks are cut.

#pragma once

#include "attention_pairs.h"

namespace {

constexpr int64_t kKeys = 256;
constexpr int64_t kTokenStep = 32;  // keys of a tile are padded to a multiple of this, and masked by it

template <typename Kv>
class Prefill {
  using T = typename KvForm<Kv>::Computed;
  using K = typename KvForm<Kv>::Stored;
  using Form = typename FormOf<T>::Form;
  using Element = typename Form::Element;
  using Word = typename Form::Word;
  static constexpr bool kExact = !kIsBf16<T>;
  static constexpr int kTile = Form::kTile, kVectors = Form::kVectors;

  const AttendArgs& a_;
  const int64_t dims_, depth_, out_dims_, group_;  // D; padded as K wants it; padded as V wants it; G
  // Of the unit.
  int64_t seq_, head_, begin_, end_, context_;
  // Scratch.
  const K** rows_;      // [kKeys] of K or V
  K* zeros_;            // [D]
  float* scales_;       // quantized: [kKeys] of those rows
  Element* keys_;       // [kKeys, depth]
  Element* values_;     // pairs: [out_dims, kKeys], else [kKeys, out_dims]
  float* scores_;       // [kKeys, kTile], then the weights
  float* next_scores_;  // likewise of the next tile, if products overlap
  float* staging_;      // [kTile, words]
  Word* queries_;       // per tile [words, kTile]
  float* sums_;         // per tile [out_dims, kTile], the output before division
  float* maxima_;       // per tile [kTile], in units of log2
  float* totals_;       // per tile [kTile]
  int32_t* positions_;  // per tile [kTile]

  int64_t words() const { return Form::kPairs ? depth_ / 2 : depth_; }
  int64_t tiles() const { return (end_ - begin_ + kTile - 1) / kTile; }
  int64_t position(int64_t row) const { return context_ + row / group_; }
  int64_t first_position(int64_t tile) const { return position(begin_ + tile * kTile); }
  int64_t last_position(int64_t tile) const { return position(least(begin_ + (tile + 1) * kTile, end_) - 1); }
  int64_t first_key(int64_t position) const { return first_seen(a_, position); }

  char* carve(char* base, int64_t rows) {
    Carver carver{base};
    const int64_t tiles = (rows + kTile - 1) / kTile;
    rows_ = carver.take<const K*>(kKeys);
    zeros_ = carver.take<K>(dims_);
    scales_ = carver.take<float>(kHasScales<K> ? kKeys : 0);
    keys_ = carver.take<Element>(kKeys * depth_);
    values_ = carver.take<Element>(kKeys * out_dims_);
    scores_ = carver.take<float>(kKeys * kTile);
    next_scores_ = carver.take<float>(Form::kOverlaps ? kKeys * kTile : 0);
    staging_ = carver.take<float>(kTile * words());
    queries_ = carver.take<Word>(tiles * words() * kTile);
    sums_ = carver.take<float>(tiles * out_dims_ * kTile);
    maxima_ = carver.take<float>(tiles * kTile);
    totals_ = carver.take<float>(tiles * kTile);
    positions_ = carver.take<int32_t>(tiles * kTile);
    return carver.at;
  }

 public:
  explicit Prefill(const AttendArgs& a)
      : a_(a),
        dims_(a.head_dim),
        depth_(round_up(a.head_dim, Form::kDimStep)),
        out_dims_(round_up(a.head_dim, 16)),
        group_(a.num_heads / a.num_kv_heads) {}

  // As many rows as keep a unit's sums (256 KiB) and the rest of its scratch within a second-level cache.
  static int64_t most_rows(const AttendArgs& a) {
    return most(2 * kTile, 65536 / round_up(a.head_dim, 16) / kTile * kTile);
  }

  void run(const Unit& unit, Arena& arena) {
    seq_ = unit.seq, head_ = unit.kv_head, begin_ = unit.begin, end_ = unit.end;
    context_ = a_.seq_lens[seq_] - (a_.starts[seq_ + 1] - a_.starts[seq_]);
    carve(arena.reserve(intptr_t(carve(nullptr, end_ - begin_))), end_ - begin_);
    memset(static_cast<void*>(zeros_), 0, dims_ * sizeof(K));
    for (int64_t tile = 0; tile < tiles(); ++tile) start_tile(tile);
    const int64_t keys_end = position(end_ - 1) + 1;
    for (int64_t first = first_key(position(begin_)) / kKeys * kKeys; first < keys_end; first += kKeys) {
      const int64_t count = least(kKeys, keys_end - first);
      pack_block(first, count);
      if constexpr (Form::kOverlaps)
        this->update_overlapped(first, count);
      else
        for (int64_t tile = 0; tile < tiles(); ++tile) update_tile(tile, first, count);
    }
    for (int64_t tile = 0; tile < tiles(); ++tile) finish_tile(tile);
  }

 private:
  const T* query(int64_t row) const {
    return static_cast<const T*>(a_.q) + (a_.starts[seq_] + row / group_) * a_.q_stride +
           (head_ * group_ + row % group_) * dims_;
  }
  T* output(int64_t row) const {
    return static_cast<T*>(a_.out) +
           ((a_.starts[seq_] + row / group_) * a_.num_heads + head_ * group_ + row % group_) * dims_;
  }

  // Packs the tile's queries, a column per row; rows past the end are zeros at the last row's position.
  void start_tile(int64_t tile) {
    memset(staging_, 0, kTile * words() * 4);
    int32_t* positions = positions_ + tile * kTile;
    for (int lane = 0; lane < kTile; ++lane) {
      const int64_t row = begin_ + tile * kTile + lane;
      positions[lane] = int32_t(position(least(row, end_ - 1)));
      if (row < end_) copy_row(reinterpret_cast<Element*>(staging_ + lane * words()), query(row));
    }
    float* to = reinterpret_cast<float*>(queries_ + tile * words() * kTile);
    for (int j = 0; j < kTile; j += kLanes)
      for (int64_t word = 0; word < words(); word += kLanes) {
        const int count = int(least(kLanes, words() - word));
        F32 square[kLanes];
        for (int i = 0; i < kLanes; ++i) square[i] = load_n(staging_ + (j + i) * words() + word, count);
        transpose(square);
        for (int i = 0; i < count; ++i) store(to + (word + i) * kTile + j, square[i]);
      }
    memset(sums_ + tile * out_dims_ * kTile, 0, out_dims_ * kTile * sizeof(float));
    for (int j = 0; j < kTile; j += kLanes) {
      store(maxima_ + tile * kTile + j, splat(kHidden));
      store(totals_ + tile * kTile + j, F32{});
    }
    // A sink is a key that each row has seen, and whose value is zero.
    for (int64_t i = tile * kTile; a_.sinks != nullptr && i < (tile + 1) * kTile; ++i)
      maxima_[i] = a_.sinks[head_ * group_ + (begin_ + i) % group_] * kLog2E, totals_[i] = 1;
  }

  template <typename Row>
  void copy_row(Element* to, const Row* from, float scale = 1) const {
    if constexpr (kHasScales<Row>) {
      for (int64_t d = 0; d < dims_; d += kLanes) {
        const int n = int(least(kLanes, dims_ - d));
        store_n(to + d, load_n(from + d, n) * scale, n);
      }
    } else if constexpr (sizeof(Element) == sizeof(T)) {
      memcpy(static_cast<void*>(to), from, dims_ * sizeof(T));
    } else {
      int64_t d = 0;
      for (; d + kLanes <= dims_; d += kLanes) store(to + d, load(from + d));
      if (d < dims_) store_n(to + d, load_n(from + d, int(dims_ - d)), int(dims_ - d));
    }
  }

  // Row i of rows_.
  void copy_padded(Element* to, int64_t i, int64_t width) const {
    copy_row(to, rows_[i], kHasScales<K> ? scales_[i] : 1);
    if (width > dims_) memset(static_cast<void*>(to + dims_), 0, (width - dims_) * sizeof(Element));
  }

  // Keys and values of `count` positions into scratch, quantized ones rounded to elements; zeros up to the next
  // multiple of kTokenStep.
  void pack_block(int64_t first, int64_t count) {
    const int64_t padded = round_up(count, kTokenStep), head = head_ * a_.head_stride;
    const int64_t unseen = most(0, first_key(position(begin_)) - first);  // before the window: perhaps freed
    key_rows(a_, seq_, first + unseen, count - unseen, rows_ + unseen);
    for (int64_t i = 0; i < padded; ++i) rows_[i] = i >= unseen && i < count ? rows_[i] + head : zeros_;
    read_scales(first, unseen, count, head);
    for (int64_t i = 0; i < padded; ++i) copy_padded(keys_ + i * depth_, i, depth_);
    for (int64_t i = unseen; i < count; ++i) rows_[i] += a_.side_stride;
    read_scales(first, unseen, count, head + a_.side_stride);
    if constexpr (Form::kPairs)
      transpose_values(padded);
    else
      for (int64_t i = 0; i < padded; ++i) copy_padded(values_ + i * out_dims_, i, out_dims_);
  }

  // Those of the zeros are zero.
  void read_scales(int64_t first, int64_t unseen, int64_t count, int64_t offset) {
    if constexpr (kHasScales<K>) {
      memset(scales_, 0, kKeys * sizeof(float));
      row_scales(a_, seq_, first + unseen, count - unseen, offset, scales_ + unseen);
    }
  }

  // Dims d to d + n of row i, as an element that was widened.
  F32 widened(int64_t i, int64_t d, int n) const {
    const F32 x = load_n(rows_[i] + d, n);
    if constexpr (kHasScales<K>) return rounded_to<T>(x * scales_[i]);
    else return x;
  }

  // values_ [out_dims, kKeys] from rows_: words of two tokens each, then squares of words turned over.
  void transpose_values(int64_t tokens) {
    for (int64_t t = 0; t < tokens; t += 2 * kLanes)
      for (int64_t d = 0; d < out_dims_; d += kLanes) {
        const int count = int(most(0, least(kLanes, dims_ - d)));
        F32 square[kLanes];
        for (int i = 0; i < kLanes; ++i) {
          const U32 even = bit_cast<U32>(widened(t + 2 * i, d, count)) >> 16;
          square[i] = bit_cast<F32>(bit_cast<U32>(widened(t + 2 * i + 1, d, count)) | even);
        }
        transpose(square);
        for (int i = 0; i < kLanes; ++i) store(reinterpret_cast<float*>(values_ + (d + i) * kKeys + t), square[i]);
      }
  }

  // How many of the block's keys the tile needs, in whole steps.
  int64_t tokens_for(int64_t tile, int64_t first, int64_t count) const {
    const int64_t last = last_position(tile);
    if (first > last || first + count <= first_key(first_position(tile))) return 0;
    return round_up(least(count, last + 1 - first), kTokenStep);
  }

  // How many of those, from the first on and in whole steps, every row of the tile sees.
  int64_t clear_tokens(int64_t tile, int64_t first, int64_t tokens) const {
    if (first < first_key(last_position(tile))) return 0;
    return least(tokens, most(0, first_position(tile) + 1 - first) / kTokenStep * kTokenStep);
  }

  const Word* queries(int64_t tile) const { return queries_ + tile * words() * kTile; }
  float* sums(int64_t tile) const { return sums_ + tile * out_dims_ * kTile; }
  float factor() const { return (a_.soft_cap != 0 ? 1.0f : a_.scale) * kLog2E; }

  void update_tile(int64_t tile, int64_t first, int64_t count) {
    const int64_t tokens = tokens_for(tile, first, count);
    if (tokens == 0) return;
    Form::scores(keys_, tokens, depth_, queries(tile), scores_);
    softmax(tile, first, tokens);
    add_values(tile, 0, tokens);
  }

  // What the weights of `tokens` keys make of the values' dims from `dim` on.
  void add_values(int64_t tile, int64_t dim, int64_t tokens) {
    if constexpr (Form::kPairs)
      Form::add_values(values_ + dim * kKeys, kKeys, tokens, out_dims_ - dim, reinterpret_cast<const Word*>(scores_),
                       sums(tile) + dim * kTile);
    else
      Form::add_values(values_, tokens, out_dims_, scores_, sums(tile));
  }

#if defined(__AMX_BF16__)
  // All tiles of the unit; while vectors weigh one tile's scores, AMX adds its values and computes the next one's.
  void update_overlapped(int64_t first, int64_t count) {
    int64_t tile = next_tile(0, first, count), tokens = 0;
    if (tile < tiles()) {
      tokens = tokens_for(tile, first, count);
      Form::scores(keys_, tokens, depth_, queries(tile), scores_);
    }
    while (tile < tiles()) {
      const int64_t next = next_tile(tile + 1, first, count);
      const int64_t next_tokens = next < tiles() ? tokens_for(next, first, count) : 0;
      overlap(tile, first, tokens, next, next_tokens);
      float* used = scores_;
      scores_ = next_scores_, next_scores_ = used;
      tile = next, tokens = next_tokens;
    }
  }

  int64_t next_tile(int64_t tile, int64_t first, int64_t count) const {
    while (tile < tiles() && tokens_for(tile, first, count) == 0) ++tile;
    return tile;
  }

  void overlap(int64_t tile, int64_t first, int64_t tokens, int64_t next, int64_t next_tokens) {
    const int64_t clear = clear_tokens(tile, first, tokens);
    F32 decay;
    const F32 top = raise_maximum(tile, 0, first, clear, tokens, &decay);
    tile_open_sums(out_dims_, sums(tile));
    F32 total = load(totals_ + tile * kTile) * decay;
    const Word* weights = reinterpret_cast<const Word*>(scores_);
    for (int64_t t = 0; t < tokens; t += kTokenStep) {
      if (t < next_tokens) tile_scores_of_32(keys_ + t * depth_, depth_, queries(next), next_scores_ + t * kTile);
      total += weigh_step(t >= clear, scores_ + t * kTile, scores_ + t / 2 * kTile, top);
      // Those of the step before: their weights have reached the cache by now.
      if (t > 0) tile_add_32_values(values_ + t - 32, kKeys, out_dims_, weights + (t - 32) / 2 * kTile);
    }
    tile_add_32_values(values_ + tokens - 32, kKeys, out_dims_, weights + (tokens - 32) / 2 * kTile);
    for (int64_t t = tokens; t < next_tokens; t += 32)
      tile_scores_of_32(keys_ + t * depth_, depth_, queries(next), next_scores_ + t * kTile);
    tile_close_sums(out_dims_, sums(tile));
    store(totals_ + tile * kTile, total);
    if (out_dims_ > 64) add_values(tile, 64, tokens);
  }
#else
  void update_overlapped(int64_t first, int64_t count);  // named in a branch that is left out
#endif

  void cap(float* scores, int64_t tokens) const {
    const float inner = a_.scale / a_.soft_cap;
    for (int64_t t = 0; t < tokens; ++t, scores += kTile) store(scores, tanh_of(load(scores) * inner) * a_.soft_cap);
  }

  // Scores become weights 2^(score * factor - maximum), in place; what was summed before is scaled to match.
  void softmax(int64_t tile, int64_t first, int64_t tokens) {
    const int64_t clear = clear_tokens(tile, first, tokens);
    for (int j = 0; j < kTile; j += kLanes) {
      F32 decay;
      const F32 top = raise_maximum(tile, j, first, clear, tokens, &decay);
      F32 total = load(totals_ + tile * kTile + j) * decay;
      for (int64_t t = 0; t < tokens; t += kTokenStep) {
        float* to = scores_ + (Form::kPairs ? t / 2 : t) * kTile + j;
        total += weigh_step(t >= clear, scores_ + t * kTile + j, to, top);
      }
      store(totals_ + tile * kTile + j, total);
    }
  }

  // Caps the scores of columns j to j + kLanes and masks them from token `clear` on; returns their new maximum
  // and how the old sums decay.
  F32 raise_maximum(int64_t tile, int64_t j, int64_t first, int64_t clear, int64_t tokens, F32* decay) {
    float* scores = scores_ + j;
    if (a_.soft_cap != 0) cap(scores, tokens);
    hide(positions_ + tile * kTile + j, first + clear, tokens - clear, scores + clear * kTile);
    F32 highest[4];
    for (int i = 0; i < 4; ++i) highest[i] = load(scores + i * kTile);
    for (int64_t t = 4; t < tokens; t += 4)
      for (int i = 0; i < 4; ++i) highest[i] = max(load(scores + (t + i) * kTile), highest[i]);
    float* at = maxima_ + tile * kTile + j;
    const F32 before = load(at);
    const F32 top = max(before, max(max(highest[0], highest[1]), max(highest[2], highest[3])) * factor());
    *decay = exp2_of<true>(before - top);  // 1 where nothing rose: `scale_sums` may be left out
    if (memcmp(&before, &top, sizeof top) != 0) {
      store(at, top);
      scale_sums(sums(tile) + j, *decay);
    }
    return top;
  }

  // Weighs kTokenStep scores of one vector of columns; returns their sums. Pairs take half the rows, from `to` on.
  F32 weigh_step(bool masked, const float* scores, float* to, F32 top) const {
    return masked ? weigh<true>(scores, to, top) : weigh<false>(scores, to, top);
  }

  template <bool kMasked>
  TANDEM_INLINE F32 weigh(const float* scores, float* to, F32 top) const {
    const F32 scale = splat(factor());
    F32 total[2] = {};
#pragma GCC unroll 2
    for (int64_t t = 0; t < kTokenStep; t += 2) {
      F32 weight[2];
      for (int i = 0; i < 2; ++i) {
        const F32 score = load(scores + (t + i) * kTile);
        weight[i] = exp2_of<kExact>(fma(score, scale, -top));
        if constexpr (kMasked) weight[i] = score < kHiddenBelow ? F32{} : weight[i];
        total[i] += weight[i];
      }
      if constexpr (Form::kPairs) {
        const U32 even = (bit_cast<U32>(weight[0]) + 0x8000) >> 16;
        const U32 odd = (bit_cast<U32>(weight[1]) + 0x8000) & 0xffff0000;
        store(to + t / 2 * kTile, bit_cast<F32>(even | odd));
      } else {
        for (int i = 0; i < 2; ++i) store(to + (t + i) * kTile, weight[i]);
      }
    }
    return total[0] + total[1];
  }

  void hide(const int32_t* positions, int64_t first, int64_t tokens, float* scores) const {
    I32 highest;
    memcpy(&highest, positions, sizeof highest);
    const I32 lowest = a_.window ? highest - int32_t(a_.window) : splat_int(-1);
    for (int64_t t = 0; t < tokens; ++t, scores += kTile) {
      const I32 key = splat_int(int32_t(first + t));
      store(scores, ((key <= highest) & (key > lowest)) ? load(scores) : splat(kHidden));
    }
  }

  void scale_sums(float* sums, F32 decay) const {
    for (int64_t d = 0; d < dims_; ++d, sums += kTile) store(sums, load(sums) * decay);
  }

  // Divides by the totals and turns [dims, kTile] into rows of the output.
  void finish_tile(int64_t tile) {
    const float* sums = sums_ + tile * out_dims_ * kTile;
    for (int j = 0; j < kTile; j += kLanes) {
      const F32 share = 1.0f / load(totals_ + tile * kTile + j);
      for (int64_t d = 0; d < dims_; d += kLanes) {
        F32 square[kLanes];
        for (int i = 0; i < kLanes; ++i) square[i] = load(sums + (d + i) * kTile + j) * share;
        transpose(square);
        const int64_t row = begin_ + tile * kTile + j, rows = least(kLanes, end_ - row);
        for (int64_t i = 0; i < rows; ++i) store_n(output(row + i) + d, square[i], int(least(kLanes, dims_ - d)));
      }
    }
  }
};

}  // namespace
