// A mixture of experts: each token's gated MLPs, chosen by a router, added by their shares. All products of all experts
// are the units of two phases, so that many small weights keep every thread busy as one large one does.
//
//   scores and choice → rows by expert → gathered → gate and up of all → down of all → each token's sum
//
// T tokens, X experts, K of each token, R = T * K rows, E hidden, I intermediate, the highest. An expert that every
// token has is the last of X, and of each token's K. A token's result is the same to the bit whatever tokens are with it:
// softmax, choice and sum in one order, in float32.

#include "experts.h"

#include "parallel.h"
#include "product.h"

namespace {

constexpr int64_t kMostTokens = 192;  // of an expert at a time: they stay in the second cache while its weights pass
constexpr int64_t kRouteTokens = 4;   // of a unit
constexpr int64_t kGatherRows = 16;   // of a unit, at least

thread_local Arena product_arena;

// Some rows of one expert, and where its units begin among those of a phase.
struct Segment {
  int64_t expert, row, count, gate_up_unit, down_unit;
};

// What one call computes with. Nothing but `Found` changes once it is made.
template <typename T>
struct Mixture {
  struct Found {
    int64_t segments, gate_up_units, down_units;
  };

  const Experts& layer;
  const T* x;  // [T, E], rows x_stride apart
  int64_t x_stride, tokens, shared, experts, active, hidden, inner;  // shared: 1 if there is such an expert
  void* out;  // [T, E] float32, or T
  bool out_is_wide;
  Found* found;
  Segment* segment;            // by their rows; one more at the end
  int64_t *starts, *ids;       // [X + 1], [T, K] ascending
  int64_t *row_of, *token_of;  // [R], [R]
  float* shares;               // [T, K]
  T *scores, *shared_scores;   // [T, X], [T]
  T *gathered, *inside, *done; // [R, E], [R, I], [R, E]

  Mixture(const Experts& of, const void* from, int64_t stride, int64_t count, void* to, bool is_wide)
      : layer(of),
        x(static_cast<const T*>(from)),
        x_stride(stride),
        tokens(count),
        shared(of.shared_gate != nullptr),
        experts(of.experts + shared),
        active(of.active + shared),
        hidden(of.down[0]->out),
        inner(most(of.down[0]->in, of.down[experts - 1]->in)),
        out(to),
        out_is_wide(is_wide) {}

  int64_t rows() const { return tokens * active; }

  // Where it all lies from `base` on; returns how many bytes that takes.
  int64_t carve(char* base) {
    Carver carver = {base};
    found = carver.take<Found>(1);
    segment = carver.take<Segment>(experts + rows() / kMostTokens + 1);
    starts = carver.take<int64_t>(experts + 1);
    ids = carver.take<int64_t>(rows());
    row_of = carver.take<int64_t>(rows());
    token_of = carver.take<int64_t>(rows());
    shares = carver.take<float>(rows());
    scores = carver.take<T>(tokens * layer.experts);
    shared_scores = carver.take<T>(tokens * shared);
    gathered = carver.take<T>(rows() * hidden);
    inside = carver.take<T>(rows() * inner);
    done = carver.take<T>(rows() * hidden);
    return carver.at - base;
  }

  void route(int64_t first, int64_t last) const {
    multiply_units(*layer.router, x + first * x_stride, x_stride, last - first, scores + first * layer.experts,
                   layer.experts, 0, product_units(*layer.router), product_arena);
    if (shared)
      multiply_units(*layer.shared_gate, x + first * x_stride, x_stride, last - first, shared_scores + first, 1, 0, 1,
                     product_arena);
    for (int64_t t = first; t < last; ++t) choose(t);
  }

  // Softmax over all experts, then the highest K; of equal ones the first.
  void choose(int64_t token) const {
    const int64_t count = layer.experts, chosen = layer.active;
    const T* score = scores + token * count;
    float* share = shares + token * active;
    int64_t* id = ids + token * active;
    F32 most = splat(-__builtin_inff());
    for (int64_t i = 0; i < count; ++i) most = max(splat(as_float(score[i])), most);
    float total = 0.0f;
    for (int64_t i = 0; i < count; ++i) total += power(score[i], most);
    for (int64_t k = 0; k < chosen; ++k) {
      int64_t best = -1;
      for (int64_t i = 0; i < count; ++i) {
        bool is_taken = false;
        for (int64_t j = 0; j < k; ++j) is_taken |= id[j] == i;
        if (!is_taken && (best < 0 || as_float(score[i]) > as_float(score[best]))) best = i;
      }
      id[k] = best;
    }
    for (int64_t k = 1; k < chosen; ++k)
      for (int64_t j = k; j > 0 && id[j] < id[j - 1]; --j) {
        const int64_t lower = id[j];
        id[j] = id[j - 1], id[j - 1] = lower;
      }
    float of_chosen = 0.0f;
    for (int64_t k = 0; k < chosen; ++k) of_chosen += share[k] = power(score[id[k]], most) / total;
    if (layer.adds_to_one)
      for (int64_t k = 0; k < chosen; ++k) share[k] /= of_chosen;
    if (!shared) return;
    id[chosen] = count;
    share[chosen] = by_sigmoid<float>(splat(1.0f), splat(as_float(shared_scores[token])))[0];
  }

  static TANDEM_INLINE float as_float(T x) { return load_n(&x, 1)[0]; }
  static TANDEM_INLINE float power(T score, F32 most) { return exp(splat(as_float(score)) - most)[0]; }

  // Rows in the order of their experts, those of one in the order of their tokens.
  void sort_rows() const {
    memset(starts, 0, size_t(experts + 1) * sizeof *starts);
    for (int64_t i = 0; i < rows(); ++i) ++starts[ids[i] + 1];
    Found all = {0, 0, 0};
    for (int64_t e = 0; e < experts; ++e) {
      const int64_t count = starts[e + 1];
      for (int64_t from = 0; from < count; from += kMostTokens) {
        segment[all.segments++] = {e, starts[e] + from, least(kMostTokens, count - from), all.gate_up_units,
                                   all.down_units};
        all.gate_up_units += product_units(*layer.gate_up[e]), all.down_units += product_units(*layer.down[e]);
      }
      starts[e + 1] += starts[e];
    }
    segment[all.segments] = {0, 0, 0, all.gate_up_units, all.down_units};
    for (int64_t i = 0; i < rows(); ++i) {
      const int64_t row = starts[ids[i]]++;
      row_of[i] = row, token_of[row] = i / active;
    }
    *found = all;
  }

  void gather(int64_t first, int64_t last) const {
    for (int64_t r = first; r < last; ++r)
      memcpy(static_cast<void*>(gathered + r * hidden), x + token_of[r] * x_stride, size_t(hidden) * sizeof(T));
  }

  // Units first … last of the phase that kUnit counts.
  template <int64_t Segment::*kUnit>
  void multiply(const Product* const* weights, const T* from, int64_t width, T* to, int64_t out_width, int64_t first,
                int64_t last) const {
    int64_t low = 0, high = found->segments;
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      (segment[middle].*kUnit <= first ? low : high) = middle;
    }
    for (const Segment* s = segment + low; first < last; ++s) {
      const int64_t begin = s->*kUnit, end = least(last, s[1].*kUnit);
      multiply_units(*weights[s->expert], from + s->row * width, width, s->count, to + s->row * out_width, out_width,
                     first - begin, end - begin, product_arena);
      first = end;
    }
  }

  // In ascending order of a token's experts.
  template <typename Out>
  void add_up(Out* to, int64_t first, int64_t last) const {
    for (int64_t t = first; t < last; ++t)
      for (int64_t i = 0; i < hidden; i += kLanes) {
        const int count = int(least(kLanes, hidden - i));
        F32 total = {};
        for (int64_t k = t * active; k < (t + 1) * active; ++k)
          total = fma(splat(shares[k]), load_n(done + row_of[k] * hidden + i, count), total);
        store_n(to + t * hidden + i, total, count);
      }
  }

  // One member's part in kExpertPhases phases.
  void run(Phases phases) const {
    phases.each((tokens + kRouteTokens - 1) / kRouteTokens, 1, [&](int64_t first, int64_t last) {
      route(first * kRouteTokens, least(last * kRouteTokens, tokens));
    });
    phases.each(1, 1, [&](int64_t, int64_t) { sort_rows(); });
    phases.each(rows(), kGatherRows, [&](int64_t first, int64_t last) { gather(first, last); });
    phases.each(found->gate_up_units, 1, [&](int64_t first, int64_t last) {
      multiply<&Segment::gate_up_unit>(layer.gate_up, gathered, hidden, inside, inner, first, last);
    });
    phases.each(found->down_units, 1, [&](int64_t first, int64_t last) {
      multiply<&Segment::down_unit>(layer.down, inside, inner, done, hidden, first, last);
    });
    phases.each(tokens, 1, [&](int64_t first, int64_t last) {
      if (out_is_wide) add_up(static_cast<float*>(out), first, last);
      else add_up(static_cast<T*>(out), first, last);
    });
  }
};

thread_local Arena rows_arena;

template <typename T>
void experts(const Experts& layer, const T* x, int64_t x_stride, int64_t tokens, float* out) {
  Mixture<T> all(layer, x, x_stride, tokens, out, true);
  all.carve(rows_arena.reserve(all.carve(nullptr)));
  tandem_team_run([](void* context, TandemTeam* team) { static_cast<Mixture<T>*>(context)->run(Phases(team)); }, &all);
}

}  // namespace

// tandem_experts_<type>: x [tokens, E], rows x_stride apart -> out [tokens, E] float32, on all threads.
// tandem_experts_bytes_<type>: of memory that the phases need for so many tokens.
// tandem_experts_phases_<type>: x without gaps -> out [tokens, E] of its type; one member's part, from `phase` on.
#define TANDEM_EXPERTS(suffix, T)                                                                               \
  TANDEM_EXPORT(void, tandem_experts_##suffix)                                                                  \
  (const Experts* layer, const T* x, int64_t x_stride, int64_t tokens, float* out) {                            \
    if (tokens) experts(*layer, x, x_stride, tokens, out);                                                      \
  }                                                                                                             \
  TANDEM_EXPORT(int64_t, tandem_experts_bytes_##suffix)(const Experts* layer, int64_t tokens) {                 \
    return Mixture<T>(*layer, nullptr, 0, tokens, nullptr, false).carve(nullptr);                               \
  }                                                                                                             \
  TANDEM_EXPORT(void, tandem_experts_phases_##suffix)                                                           \
  (const Experts* layer, const void* x, int64_t tokens, void* out, char* memory, TandemTeam* team, uint64_t phase) { \
    Mixture<T> all(*layer, x, layer->down[0]->out, tokens, out, false);                                         \
    all.carve(memory);                                                                                          \
    all.run(Phases(team, phase));                                                                               \
  }

TANDEM_EXPERTS(f32, float)
TANDEM_EXPERTS(bf16, Bf16)
TANDEM_EXPERTS(f16, Half)
