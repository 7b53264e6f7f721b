// A step of a decoder as one job of a team: from token ids to logits. Compiled once; what computes belongs to a tier
// and a dtype and is called by address.
//
// T tokens, R rows whose logits are wanted, E hidden, I intermediate, A = H * D. Activations are rows without gaps.
// The structs stand in kernels/cpu/decoder.py too.

#include <stdlib.h>
#include <string.h>

#include "ahead.h"
#include "experts.h"
#include "phase_clock.h"
#include "rotate_shape.h"
#include "team.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

struct Product;

namespace {

struct AttendShape;

// Exported functions of one tier and dtype.
struct Calls {
  void (*rms_norm)(const void* x, int64_t x_stride, const void* weight, void* out, int64_t tokens, int64_t width,
                   float eps);
  void (*add_rms_norm)(const void* x, int64_t x_stride, void* residual, int64_t residual_stride, const void* weight,
                       void* out, int64_t tokens, int64_t width, float eps);
  void (*scale)(void* x, int64_t count, float factor);
  void (*add)(const void* x, void* residual, int64_t count);
  void (*multiply_units)(const Product* product, const void* x, int64_t x_stride, int64_t tokens, void* out,
                         int64_t out_stride, int64_t first, int64_t last, int64_t same_x, Ahead* ahead);
  void (*unpack_rows)(const Product* product, const int64_t* ids, int64_t count, void* out);
  void (*rotate_and_store)(void* qkv, void* kv, const RotateShape* shape, const HeadNorm* norm);
  const void* (*attend_plan)(const AttendShape* shape, int64_t slot);
  void (*attend_phase)(const void* q, const void* kv, void* out, const AttendShape* shape, const float* sinks,
                       const void* plan, TandemTeam* team, uint64_t phase);
  int64_t (*experts_bytes)(const Experts* experts, int64_t tokens);
  void (*experts_phases)(const Experts* experts, const void* x, int64_t tokens, void* out, char* memory,
                         TandemTeam* team, uint64_t phase);
  void (*product_units)(const Product* product, int64_t* units, int64_t* columns, int64_t* tokens);
};

// Norms are null where there is none.
struct Layer {
  const void* attention_norm;  // of what attention takes
  const Product* qkv;
  const HeadNorm* head_norm;
  const float* sinks;          // [H] or null
  const Product* output;
  const void* attention_post_norm;  // of what attention gives, before it is added
  const void* mlp_norm;
  const Product *gate_up, *down;  // null if the layer has experts
  const Experts* experts;         // or null
  const void* mlp_post_norm;
  int64_t attend_slot, rotate_slot;  // which of the step's shapes are this layer's
};

struct Decoder {
  Calls calls;
  const Layer* layers;
  const void* embedding;  // [V, E]; null: the rows of lm_head
  const void* norm;
  const Product* lm_head;
  int64_t num_layers, vocab, hidden, qkv, attended, intermediate;  // widths
  int64_t element_bytes;
  float eps, embedding_scale, residual_scale;  // residual_scale: of what attention and MLP give, before it is added
};

struct Step {
  const int64_t* token_ids;                  // [T]
  const int64_t* rows;                       // [R], ascending
  const AttendShape* const* attend_shapes;   // [kShapes at most]
  const RotateShape* const* rotate_shapes;
  char* kv;                                  // layer 0 of the pool
  void* hidden;                              // [R, E] out: last hidden states; null if logits are wanted
  void* logits;                              // [R, V] out, or null
  int64_t num_tokens, num_rows, num_slots, num_attend_shapes, num_rotate_shapes;
  int64_t layer_bytes;                       // from one layer of the pool to the next
  int64_t* spent_ns;                         // null, or [kPhaseKinds][2]: what the calling thread takes is added
};

thread_local bool is_caller = false;  // of the step under way

constexpr int64_t kFewTokens = 4;  // of one unit of row work, at least
constexpr int64_t kMostBackedTokens = 64;  // of a product whose units may be computed again
// Of units that are taken at once there: results, and weights for every eight tokens. Whoever computes them again cannot
// stop when they are put in place after all.
constexpr int64_t kMostAsideBytes = 192 << 10;
constexpr int64_t kMostWeightBytes = 1 << 20;
constexpr int64_t kShapes = 2;

// Activations. Of the calling thread; grows only.
struct Workspace {
  char* base = nullptr;
  int64_t size = 0;

  ~Workspace() { free(base); }

  char* reserve(int64_t bytes) {
    if (bytes > size) {
      free(base);
      base = static_cast<char*>(aligned_alloc(4096, size_t(bytes + 4095) / 4096 * 4096));
      if (base == nullptr) abort();
      size = bytes;
    }
    return base;
  }
};
thread_local Workspace workspace;
// Of each computing thread: results of units that are not yet where they belong.
thread_local Workspace aside;

struct Rows {
  char *residual, *normed, *qkv, *attended, *activated, *delta, *experts;
};

// One member's part of a step.
class Work {
  const Decoder& decoder_;
  const Calls& calls_;
  const Step& step_;
  const void* const* plans_;
  Phases phases_;
  Clock clock_;
  Rows at_, last_;  // of all tokens; of the wanted rows
  int64_t tokens_;  // of the phases to come
  Ahead ahead_;     // what the next layer's attention reads

 public:
  Work(const Decoder& decoder, const Step& step, const void* const* plans, const Rows& at, const Rows& last,
       TandemTeam* team)
      : decoder_(decoder),
        calls_(decoder.calls),
        step_(step),
        plans_(plans),
        phases_(team),
        clock_(is_caller ? step.spent_ns : nullptr),
        at_(at),
        last_(last),
        tokens_(step.num_tokens) {}

  void run() {
    embed();
    for (int64_t i = 0; i < decoder_.num_layers; ++i) {
      if (phases_.is_recalled()) return;
      const Layer& layer = decoder_.layers[i];
      if (i > 0) add_norm(decoder_.layers[i - 1].mlp_post_norm, layer.attention_norm, at_.normed);
      multiply(kQkv, layer.qkv, input_of(layer.attention_norm), decoder_.hidden, at_.qkv, decoder_.qkv);
      rotate(layer, kv_of(i));
      const bool is_last = i + 1 == decoder_.num_layers;
      if (is_last && step_.num_rows == 0) return;
      attend(layer, kv_of(i));
      look_ahead(i + 1);
      if (is_last && step_.num_rows < tokens_) keep_rows();
      multiply(kOutput, layer.output, at_.attended, decoder_.attended, at_.delta, decoder_.hidden);
      add_norm(layer.attention_post_norm, layer.mlp_norm, at_.normed);
      const char* x = input_of(layer.mlp_norm);
      if (layer.experts) {
        mix(layer.experts, x);
        continue;
      }
      multiply(kGateUp, layer.gate_up, x, decoder_.hidden, at_.activated, decoder_.intermediate);
      multiply(kDown, layer.down, at_.activated, decoder_.intermediate, at_.delta, decoder_.hidden);
    }
    char* hidden = step_.hidden ? static_cast<char*>(step_.hidden) : at_.normed;
    add_norm(decoder_.layers[decoder_.num_layers - 1].mlp_post_norm, decoder_.norm, hidden);
    if (step_.logits) multiply(kHead, decoder_.lm_head, hidden, decoder_.hidden, step_.logits, decoder_.vocab);
  }

 private:
  char* kv_of(int64_t layer) const { return step_.kv + layer * step_.layer_bytes; }
  // Of a part whose norm before is `norm`; what stands in the residual stream if there is none.
  const char* input_of(const void* norm) const { return norm ? at_.normed : at_.residual; }
  int64_t hidden_bytes() const { return decoder_.hidden * decoder_.element_bytes; }

  // A phase: body(first, last) for runs of its units.
  template <typename Body>
  void over(PhaseKind kind, int64_t units, int64_t minimum, const Body& body) {
    clock_.begin(kind, &phases_);
    phases_.each(units, minimum, body);
    clock_.end();
  }

  void embed() {
    const int64_t bytes = hidden_bytes();
    over(kEmbed, tokens_, kFewTokens, [&](int64_t first, int64_t last) {
      char* rows = at_.residual + first * bytes;
      if (decoder_.embedding) {
        const char* table = static_cast<const char*>(decoder_.embedding);
        for (int64_t t = first; t < last; ++t)
          memcpy(at_.residual + t * bytes, table + step_.token_ids[t] * bytes, size_t(bytes));
      } else {
        calls_.unpack_rows(decoder_.lm_head, step_.token_ids + first, last - first, rows);
      }
      if (decoder_.embedding_scale != 1.0f)
        calls_.scale(rows, (last - first) * decoder_.hidden, decoder_.embedding_scale);
      norm(rows, decoder_.layers[0].attention_norm, at_.normed + first * bytes, last - first);
    });
  }

  // In place if out is x.
  void norm(const char* x, const void* weight, char* out, int64_t tokens) const {
    if (weight) calls_.rms_norm(x, decoder_.hidden, weight, out, tokens, decoder_.hidden, decoder_.eps);
  }

  // Adds what the part before computed, normed by `post_weight` and scaled, to the residual stream; out is the sum's
  // norm, if there is one.
  void add_norm(const void* post_weight, const void* weight, char* out) {
    const int64_t bytes = hidden_bytes(), width = decoder_.hidden;
    over(kNorm, tokens_, kFewTokens, [&](int64_t first, int64_t last) {
      char *delta = at_.delta + first * bytes, *residual = at_.residual + first * bytes;
      const int64_t tokens = last - first;
      norm(delta, post_weight, delta, tokens);
      if (decoder_.residual_scale != 1.0f) calls_.scale(delta, tokens * width, decoder_.residual_scale);
      if (weight)
        calls_.add_rms_norm(delta, width, residual, width, weight, out + first * bytes, tokens, width, decoder_.eps);
      else
        calls_.add(delta, residual, tokens * width);
    });
  }

  void multiply(PhaseKind kind, const Product* product, const void* x, int64_t in, void* out, int64_t width) {
    int64_t units = 0, columns = 0, tile_tokens = 0;
    calls_.product_units(product, &units, &columns, &tile_tokens);
    if (tokens_ <= kMostBackedTokens && phases_.team()->size > 1)
      return multiply_backed(kind, product, x, in, out, width, units, columns);
    const int64_t tiles = (tokens_ + tile_tokens - 1) / tile_tokens;
    int64_t packed = -1;  // the tile whose tokens this thread multiplied last
    over(kind, units * tiles, 1, [&](int64_t first, int64_t last) {
      while (first < last) {
        const int64_t tile = first / units, begin = first % units, token = tile * tile_tokens;
        const int64_t end = begin + last - first < units ? begin + last - first : units;
        const int64_t count = tokens_ - token < tile_tokens ? tokens_ - token : tile_tokens;
        calls_.multiply_units(product, static_cast<const char*>(x) + token * in * decoder_.element_bytes, in, count,
                              static_cast<char*>(out) + token * width * decoder_.element_bytes, width, begin, end,
                              tile == packed, &ahead_);
        packed = tile;
        first += end - begin;
      }
    });
  }

  // Of few tokens.
  void multiply_backed(PhaseKind kind, const Product* product, const void* x, int64_t in, void* out, int64_t width,
                       int64_t units, int64_t columns) {
    const int64_t bytes = columns * decoder_.element_bytes, row_bytes = width * decoder_.element_bytes;
    const int64_t most_aside = kMostAsideBytes / (tokens_ * bytes) + 1;
    const int64_t most_read = kMostWeightBytes / ((tokens_ + 7) / 8 * in * bytes) + 1;
    const int64_t most = most_aside < most_read ? most_aside : most_read;
    char* to = aside.reserve(most * tokens_ * bytes);
    bool is_packed = false;
    const auto compute = [&](int64_t first, int64_t last) {
      calls_.multiply_units(product, x, in, tokens_, to - first * bytes, (last - first) * columns, first, last, is_packed,
                            &ahead_);
      is_packed = true;
    };
    const auto put = [&](int64_t first, int64_t last) {
      const int64_t end = last * bytes < row_bytes ? last * bytes : row_bytes;
      for (int64_t t = 0; t < tokens_; ++t)
        memcpy(static_cast<char*>(out) + t * row_bytes + first * bytes, to + t * (last - first) * bytes,
               size_t(end - first * bytes));
    };
    clock_.begin(kind, &phases_);
    phases_.begin_backed(units, most, compute, put);
    clock_.end();
    phases_.end_backed(units, compute, put);
  }

  void rotate(const Layer& layer, char* kv) {
    const int64_t bytes = decoder_.qkv * decoder_.element_bytes;
    over(kRotate, tokens_, kFewTokens, [&](int64_t first, int64_t last) {
      RotateShape shape = *step_.rotate_shapes[layer.rotate_slot];
      shape.tokens = last - first;
      shape.cos += first * shape.cos_token, shape.sin += first * shape.sin_token, shape.slots += first;
      calls_.rotate_and_store(at_.qkv + first * bytes, kv, &shape, layer.head_norm);
    });
  }

  void attend(const Layer& layer, const char* kv) {
    const int64_t slot = layer.attend_slot;
    clock_.begin(kAttend, &phases_);
    calls_.attend_phase(at_.qkv, kv, at_.attended, step_.attend_shapes[slot], layer.sinks, plans_[slot],
                        phases_.team(), phases_.phase());
    phases_.end();
    clock_.end();
  }

  // Products from now on fetch what this layer's attention reads.
  void look_ahead(int64_t layer) {
    ahead_ = {};
    if (layer == decoder_.num_layers) return;
    const Pieces& pieces = *static_cast<const Pieces*>(plans_[decoder_.layers[layer].attend_slot]);
    ahead_ = {kv_of(layer), pieces, tandem_member(), phases_.team()->size, 0};
  }

  void mix(const Experts* experts, const char* x) {
    clock_.begin(kExperts, &phases_);
    calls_.experts_phases(experts, x, tokens_, at_.delta, at_.experts, phases_.team(), phases_.phase());
    for (int i = 0; i < kExpertPhases; ++i) phases_.end();
    clock_.end();
  }

  // After the last layer's KV only the wanted rows matter.
  void keep_rows() {
    const int64_t bytes = hidden_bytes(), attended_bytes = decoder_.attended * decoder_.element_bytes;
    over(kKeepRows, step_.num_rows, kFewTokens, [&](int64_t first, int64_t last) {
      for (int64_t r = first; r < last; ++r) {
        memcpy(last_.residual + r * bytes, at_.residual + step_.rows[r] * bytes, size_t(bytes));
        memcpy(last_.attended + r * attended_bytes, at_.attended + step_.rows[r] * attended_bytes,
               size_t(attended_bytes));
      }
    });
    at_.residual = last_.residual, at_.attended = last_.attended;
    tokens_ = step_.num_rows;
  }
};

// Rows of all tokens, and behind them what the wanted ones need of their own; the bytes of both.
int64_t carve(const Decoder& d, const Step& step, char* base, Rows* at, Rows* last) {
  char* to = base;
  const auto take = [&](int64_t rows, int64_t width) {
    char* taken = to;
    to += (rows * width * d.element_bytes + 63) / 64 * 64;
    return taken;
  };
  const int64_t tokens = step.num_tokens;
  *at = Rows{take(tokens, d.hidden),   take(tokens, d.hidden),       take(tokens, d.qkv),
             take(tokens, d.attended), take(tokens, d.intermediate), take(tokens, d.hidden),
             nullptr};
  int64_t experts = 0;
  for (int64_t i = 0; i < d.num_layers; ++i)
    if (d.layers[i].experts) {
      const int64_t bytes = d.calls.experts_bytes(d.layers[i].experts, tokens);
      experts = bytes > experts ? bytes : experts;
    }
  at->experts = to;
  to += (experts + 63) / 64 * 64;
  *last = *at;
  last->residual = take(step.num_rows, d.hidden);
  last->attended = take(step.num_rows, d.attended);
  return to - base;
}

bool are_below(const int64_t* values, int64_t count, int64_t least, int64_t end) {
  for (int64_t i = 0; i < count; ++i)
    if (values[i] < least || values[i] >= end) return false;
  return true;
}

}  // namespace

// Computes a step of one token or more, whose lengths and tables have passed `tandem_attend_check`. *fault becomes 0, or
// if nothing was computed, what is out of range: 1 token_ids, 2 rows, 3 the slots.
EXPORT void tandem_decoder_step(const Decoder* decoder, const Step* step, int64_t* fault) {
  *fault = 0;
  if (!are_below(step->token_ids, step->num_tokens, 0, decoder->vocab)) *fault = 1;
  else if (!are_below(step->rows, step->num_rows, 0, step->num_tokens)) *fault = 2;
  for (int64_t i = 0; i < step->num_rotate_shapes && !*fault; ++i)
    if (!are_below(step->rotate_shapes[i]->slots, step->num_tokens, INT64_MIN, step->num_slots)) *fault = 3;
  if (*fault) return;
  struct Job {
    const Decoder& decoder;
    const Step& step;
    const void* plans[kShapes];
    Rows at, last;
  } job = {*decoder, *step, {}, {}, {}};
  const int64_t bytes = carve(*decoder, *step, nullptr, &job.at, &job.last);
  carve(*decoder, *step, workspace.reserve(bytes), &job.at, &job.last);
  for (int64_t i = 0; i < step->num_attend_shapes; ++i)
    job.plans[i] = decoder->calls.attend_plan(step->attend_shapes[i], i);
  is_caller = true;
  tandem_team_run(
      [](void* context, TandemTeam* team) {
        const Job& its = *static_cast<const Job*>(context);
        Work(its.decoder, its.step, its.plans, its.at, its.last, team).run();
      },
      &job);
  is_caller = false;
}
