// Attention over a paged KV cache: cuts a ragged batch into units and runs them on all members of a team.

#include <unistd.h>

#include "ahead.h"
#include "attention_batch.h"
#include "attention_decode.h"
#include "attention_prefill.h"
#include "attention_sets.h"
#include "team.h"
#include "tiles.h"

namespace {

// Of the calling thread: a call's plan. Of each computing thread: scratch.
thread_local Arena plan_arena;
thread_local Arena work_arena;
// Of the calling thread: the plans of a step's layers, one for each window that they have.
constexpr int kPlans = 2;
thread_local Arena step_arenas[kPlans];

constexpr int64_t kUnitsPerThread = 4;
constexpr int64_t kFewestRows = 64;

// Rows of a prefill unit and KV heads of a decode unit: fewer where threads would be left without work.
struct Cut {
  int64_t rows, kv_heads;
};

struct Counts {
  int64_t prefill_units = 0, decode_units = 0, partials = 0, split_seqs = 0;
};

// Good for every call with the same shape: the calls of one step's layers.
struct Plan {
  Pieces ahead;  // first, for those who know nothing else of a plan
  Unit* units;
  int64_t num_units;
  int32_t* pending;  // what `Decode` leaves as it was
  float* partials;
};

inline int64_t query_len(const AttendArgs& a, int64_t seq) { return a.starts[seq + 1] - a.starts[seq]; }
// Keys that decode cuts into shares: those that the seq sees, from a multiple of kTokens on.
inline int64_t decode_keys(const AttendArgs& a, int64_t seq) {
  return a.seq_lens[seq] - first_seen(a, a.seq_lens[seq] - 1) / kTokens * kTokens;
}
// The last one may have kTokens more: one of a few keys would have a start and a merge to pay, too.
inline int64_t num_shares(int64_t keys) { return most(1, (keys - kTokens + share_of(keys) - 1) / share_of(keys)); }

inline Counts count_units(const AttendArgs& a, const Cut& cut) {
  Counts counts;
  const int64_t group = a.num_heads / a.num_kv_heads;
  for (int64_t seq = 0; seq < a.num_seqs; ++seq) {
    const int64_t len = query_len(a, seq);
    if (len != 1) {
      counts.prefill_units += (len * group + cut.rows - 1) / cut.rows * a.num_kv_heads;
      continue;
    }
    const int64_t shares = num_shares(decode_keys(a, seq));
    counts.decode_units += shares * ((a.num_kv_heads + cut.kv_heads - 1) / cut.kv_heads);
    if (shares > 1) counts.partials += shares, ++counts.split_seqs;
  }
  return counts;
}

template <typename T>
Cut choose_cut(const AttendArgs& a, int64_t threads) {
  Cut cut{Prefill<T>::most_rows(a), a.num_kv_heads};
  if (threads == 1) return cut;
  const int64_t wanted = kUnitsPerThread * threads;
  while (cut.rows > kFewestRows && count_units(a, cut).prefill_units < wanted) cut.rows = round_up(cut.rows / 2, 32);
  while (cut.kv_heads > 1 && count_units(a, cut).decode_units < wanted) cut.kv_heads = (cut.kv_heads + 1) / 2;
  return cut;
}

inline Unit* add_prefill(const AttendArgs& a, const Cut& cut, int64_t seq, Unit* to) {
  const int64_t group = a.num_heads / a.num_kv_heads, rows = query_len(a, seq) * group;
  const int64_t context = a.seq_lens[seq] - query_len(a, seq);
  for (int64_t begin = 0; begin < rows; begin += cut.rows)
    for (int64_t head = 0; head < a.num_kv_heads; ++head, ++to) {
      const int64_t end = least(rows, begin + cut.rows), seen = context + (begin + end) / 2 / group;
      *to = Unit{};
      to->seq = int32_t(seq), to->kv_head = int32_t(head);
      to->begin = int32_t(begin), to->end = int32_t(end);
      to->cost = (end - begin) * (a.window ? least(seen, a.window) : seen);
    }
  return to;
}

inline Unit* add_decode(const AttendArgs& a, const Cut& cut, int64_t seq, const Counts& used, Unit* to) {
  const int64_t keys = decode_keys(a, seq), share = share_of(keys), shares = num_shares(keys);
  const int64_t first = a.seq_lens[seq] - keys;
  for (int64_t part = 0; part < shares; ++part)
    for (int64_t head = 0; head < a.num_kv_heads; head += cut.kv_heads, ++to) {
      *to = Unit{};
      to->seq = int32_t(seq);
      to->kv_head = int32_t(head), to->kv_head_end = int32_t(least(a.num_kv_heads, head + cut.kv_heads));
      to->begin = int32_t(most(first + part * share, first_seen(a, a.seq_lens[seq] - 1)));
      to->end = int32_t(first + (part + 1 < shares ? (part + 1) * share : keys));
      to->part = int32_t(part), to->num_parts = int32_t(shares);
      to->partial = used.partials, to->split = used.split_seqs;
    }
  return to;
}

int by_falling_cost(const void* a, const void* b) {
  const int64_t x = static_cast<const Unit*>(a)->cost, y = static_cast<const Unit*>(b)->cost;
  return x > y ? -1 : x < y;
}

// Bytes of blocks that are fetched before a layer's attention begins: as many as the third cache keeps beside weights. A
// virtual machine may name one that is ten times as large as it is.
inline int64_t ahead_bytes() {
#ifdef _SC_LEVEL3_CACHE_SIZE
  static const int64_t bytes = most(0, least(16 << 20, sysconf(_SC_LEVEL3_CACHE_SIZE) / 2));
  return bytes;
#else
  return 0;
#endif
}

// What decode units read first, in their order, keys and values of a head of a block being one piece; none of quantised KV, whose attention is bound by arithmetic.
template <typename K>
void list_pieces(const AttendArgs& a, int64_t most_pieces, int64_t* offsets, Pieces* to) {
  *to = {offsets, 0, 2 * a.side_stride * int64_t(sizeof(K))};
  if (kHasScales<K>) return;
  for (int64_t seq = 0; seq < a.num_seqs; ++seq) {
    if (query_len(a, seq) != 1) continue;
    const int32_t* table = a.block_tables + seq * a.table_stride;
    const int64_t first = first_seen(a, a.seq_lens[seq] - 1) / a.block_size;
    for (int64_t i = first; i * a.block_size < a.seq_lens[seq]; ++i) {
      for (int64_t head = 0; head < a.num_kv_heads; ++head) {
        if (to->count == most_pieces) return;
        offsets[to->count++] = (table[i] * a.block_stride + head * a.head_stride) * int64_t(sizeof(K));
      }
    }
  }
}

// Prefill units first, the longest ahead, so that the last to finish are short. The plan lies at the arena's begin.
template <typename T>
Plan* make_plan(const AttendArgs& a, int64_t threads, Arena& arena) {
  const Cut cut = choose_cut<T>(a, threads);
  const Counts counts = count_units(a, cut);
  Plan plan;
  using K = typename KvForm<T>::Stored;
  const int64_t most_pieces = ahead_bytes() / (2 * a.side_stride * int64_t(sizeof(K)));
  int64_t* offsets = nullptr;
  plan.num_units = counts.prefill_units + counts.decode_units;
  const auto carve = [&](char* base) {
    Carver carver{base};
    Plan* self = carver.take<Plan>(1);
    plan.units = carver.take<Unit>(plan.num_units);
    offsets = carver.take<int64_t>(most_pieces);
    plan.pending = carver.take<int32_t>(counts.split_seqs * a.num_kv_heads);
    plan.partials = carver.take<float>(counts.partials * Decode<T>::partial_size(a));
    if (base != nullptr) *self = plan;
    return carver.at;
  };
  char* base = arena.reserve(intptr_t(carve(nullptr)));
  carve(base);
  list_pieces<K>(a, most_pieces, offsets, &reinterpret_cast<Plan*>(base)->ahead);
  Unit* to = plan.units;
  for (int64_t seq = 0; seq < a.num_seqs; ++seq)
    if (query_len(a, seq) > 1) to = add_prefill(a, cut, seq, to);
  if (to > plan.units) qsort(plan.units, size_t(to - plan.units), sizeof(Unit), by_falling_cost);
  Counts used;
  for (int64_t seq = 0; seq < a.num_seqs; ++seq) {
    if (query_len(a, seq) != 1) continue;
    to = add_decode(a, cut, seq, used, to);
    const int64_t shares = num_shares(decode_keys(a, seq));
    if (shares == 1) continue;
    for (int64_t head = 0; head < a.num_kv_heads; ++head)
      plan.pending[used.split_seqs * a.num_kv_heads + head] = int32_t(shares);
    used.partials += shares, ++used.split_seqs;
  }
  return reinterpret_cast<Plan*>(base);
}

// One member's part: takes units by `take()`, which returns null when none are left, and tells each by `finish()`.
template <typename T, typename Take, typename Finish>
void work(const AttendArgs& a, const Plan& plan, const Take& take, const Finish& finish) {
  const Unit* unit = take();
  if (unit == nullptr) return;
  Prefill<T> prefill(a);
  Decode<T> decode(a, plan.partials, plan.pending);
  tile_configure();
  while (unit != nullptr) {
    if (unit->num_parts == 0) {
      prefill.run(*unit, work_arena);
      finish();
      unit = take();
      continue;
    }
    const Unit* then = take();  // early, to know what to fetch; decode units are short, and last in line
    decode.run(*unit, then, work_arena);
    finish();
    unit = then;
  }
  tile_release();
}

// A phase of a team's job.
template <typename T>
void attend_phase(const AttendArgs& a, const Plan& plan, Phases phases) {
  phases.begin();
  const auto take = [&]() -> const Unit* {
    int64_t unit;
    return phases.take_in_order(plan.num_units, &unit) ? plan.units + unit : nullptr;
  };
  work<T>(a, plan, take, [&] { phases.finish(plan.num_units, 1); });
}

template <typename T>
void attend(const AttendArgs& a) {
  const Plan& plan = *make_plan<T>(a, tandem_threads(), plan_arena);
  if (tandem_threads() == 1 || plan.num_units <= 1) {
    int64_t next = 0;
    return work<T>(
        a, plan, [&] { return next < plan.num_units ? plan.units + next++ : nullptr; }, [] {});
  }
  struct Call {
    const AttendArgs& args;
    const Plan& plan;
  } call = {a, plan};
  tandem_team_run(
      [](void* context, TandemTeam* team) {
        const Call& its = *static_cast<const Call*>(context);
        attend_phase<T>(its.args, its.plan, Phases(team));
      },
      &call);
}

}  // namespace

// attend: out of q [T, H, D] and the blocks of one layer, out [T, H, D]; sinks [H] or null. The shape has passed
// `tandem_attend_check`.
// attend_plan: a plan for all calls with this shape, valid until the calling thread makes another one in the same
// `slot` of kPlans.
// attend_phase: `attend` as a phase of a team's job, with a plan for the shape; there must be tokens.
#define TANDEM_ATTENTION(suffix, ...)                                                                           \
  TANDEM_EXPORT(void, tandem_attend_##suffix)                                                                   \
  (const void* q, const void* kv, void* out, const AttendShape* shape, const float* sinks) {                    \
    attend<__VA_ARGS__>(AttendArgs{*shape, q, kv, out, sinks});                                                 \
  }                                                                                                             \
  TANDEM_EXPORT(const void*, tandem_attend_plan_##suffix)(const AttendShape* shape, int64_t slot) {             \
    const AttendArgs args{*shape, nullptr, nullptr, nullptr, nullptr};                                          \
    return make_plan<__VA_ARGS__>(args, tandem_threads(), step_arenas[slot]);                                   \
  }                                                                                                             \
  TANDEM_EXPORT(void, tandem_attend_phase_##suffix)                                                             \
  (const void* q, const void* kv, void* out, const AttendShape* shape, const float* sinks, const void* plan,    \
   TandemTeam* team, uint64_t phase) {                                                                          \
    const AttendArgs args{*shape, q, kv, out, sinks};                                                           \
    attend_phase<__VA_ARGS__>(args, *static_cast<const Plan*>(plan), Phases(team, phase));                      \
  }

TANDEM_ATTENTION(f32, float)
TANDEM_ATTENTION(bf16, Bf16)
TANDEM_ATTENTION(f16, Half)

// Over quantized KV.
TANDEM_ATTENTION(f32_int8, Quantized<float, Int8>)
TANDEM_ATTENTION(f32_fp8, Quantized<float, Fp8>)
TANDEM_ATTENTION(bf16_int8, Quantized<Bf16, Int8>)
TANDEM_ATTENTION(bf16_fp8, Quantized<Bf16, Fp8>)
TANDEM_ATTENTION(f16_int8, Quantized<Half, Int8>)
TANDEM_ATTENTION(f16_fp8, Quantized<Half, Fp8>)

// What is wrong with a step's lengths and tables: *fault becomes 0 nothing, 1 starts, 2 seq_lens,
// 3 block_tables; *seq the first seq that has it.
TANDEM_EXPORT(void, tandem_attend_check)(const AttendShape* shape, int64_t* fault, int64_t* seq) {
  const AttendShape& s = *shape;
  *fault = s.starts[0] != 0 || s.starts[s.num_seqs] != s.num_tokens;
  for (*seq = 0; *seq < s.num_seqs && !*fault; *seq += !*fault) {
    const int64_t query_len = s.starts[*seq + 1] - s.starts[*seq], seq_len = s.seq_lens[*seq];
    const int64_t blocks = (seq_len + s.block_size - 1) / s.block_size;
    if (query_len < 0) *fault = 1;
    else if (seq_len < query_len) *fault = 2;
    else if (blocks > s.max_blocks) *fault = 3;
    const int32_t* table = s.block_tables + *seq * s.table_stride;
    for (int64_t i = first_seen(s, seq_len - query_len) / s.block_size; i < blocks && !*fault; ++i)
      if (table[i] < 0 || table[i] >= s.num_blocks) *fault = 3;
  }
}
