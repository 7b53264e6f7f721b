// A team of threads that work through one program of phases together.
//
// A job is a function that every member of the team runs. It consists of phases, each of so many units, and a phase
// begins when all units of the one before are finished. Each member has a share of a phase's units, neighbours, of
// which it takes some at a time, in order: so it reads memory by rising addresses. Once its share is used up it takes of
// the others'. Nobody waits for a member, only for units: one that has lost its processor while it held none is not missed,
// and finds its way from phase to phase when it is back. Units of `begin_backed` that such a member holds are computed
// again by whoever waits for them.
// Whoever waits for others spins for some microseconds, then sleeps.

#pragma once

#include <stdint.h>

// Those who sleep at it, and what changes when they are woken.
struct TandemBell {
  uint32_t rung, sleepers;
};

// What is taken of a member's share: of an earlier phase while nobody has taken any in the one under way.
struct TandemShare {
  alignas(64) uint64_t next;  // phase << kUnitBits | the first of the share's units that nobody has taken
};

// Units that a member took in `Phases::begin_backed`.
struct TandemHeld {
  alignas(64) uint64_t phase;  // 1 + their phase; 0 once their results are, or soon will be, where they belong
  int64_t first, last;
};

// What the members of a team share. Plain data: kernels of every tier read it.
struct TandemTeam {
  alignas(64) uint64_t phase;    // under way
  alignas(64) uint64_t done;     // units of that phase that are finished
  alignas(64) uint64_t gate;     // see team.cpp
  alignas(64) TandemBell bell;
  alignas(64) void (*job)(void* context, TandemTeam* team);  // as the three below, written before a job begins
  void* context;
  uint64_t first_phase;
  int64_t size;  // members, the owner of the team and guests included
  TandemShare* shares;  // [size]
  TandemHeld* held;     // [size]
  uint64_t num_joined;  // members that have begun
};

#pragma GCC visibility push(default)  // each tier is a library of its own
extern "C" {
// Threads that work called from here would use at most: those of OpenMP's setting (torch's) or what was taken of them,
// and guests; 1 within a job.
int64_t tandem_threads();
// Number of the calling thread among the members of its team; 0 is the owner.
int64_t tandem_member();
int64_t tandem_now_ns();
// Not 0 once the core on which the calling thread is a guest is wanted back; null for all who are no guests.
const uint32_t* tandem_recall();
// Runs job(context, team) on the calling thread and on the other members of its team, as many threads as
// `tandem_threads` says; returns when all units are finished and no member is in it any more.
void tandem_team_run(void (*job)(void* context, TandemTeam* team), void* context);
// Returns when `phase` has begun.
void tandem_team_wait(TandemTeam* team, uint64_t phase);
// Spins until the phase after `phase` has begun; false if somebody is late with units of it: `worked_ns` is how long the
// caller was at work in it.
bool tandem_team_is_past(const TandemTeam* team, uint64_t phase, int64_t worked_ns);
// Wakes those who wait for the team.
void tandem_team_ring(TandemTeam* team);
}
#pragma GCC visibility pop

namespace {

constexpr int kUnitBits = 24;
constexpr int64_t kUnitMask = (int64_t{1} << kUnitBits) - 1;

// One member's way through the phases of a job. All members name the same phases with the same units.
class Phases {
  TandemTeam* team_;
  uint64_t phase_;
  const int64_t member_ = tandem_member();
  const uint32_t* recall_;
  bool is_leaving_ = false;
  int64_t began_ns_ = 0;  // of `begin_backed`

 public:
  explicit Phases(TandemTeam* team) : Phases(team, team->first_phase) {}
  Phases(TandemTeam* team, uint64_t phase) : team_(team), phase_(phase), recall_(tandem_recall()) {}

  TandemTeam* team() const { return team_; }
  uint64_t phase() const { return phase_; }

  // Whether this member is a guest whose core was wanted back at any time. It takes no units any more, and may leave the
  // job between any two phases.
  bool is_recalled() {
    if (recall_ != nullptr && __atomic_load_n(recall_, __ATOMIC_ACQUIRE)) is_leaving_ = true;
    return is_leaving_;
  }

  // The next phase; its units are to be taken now. Phases without units must be left out. Who takes none does not wait.
  void begin() {
    if (__atomic_load_n(&team_->phase, __ATOMIC_ACQUIRE) < phase_ && !is_recalled()) tandem_team_wait(team_, phase_);
  }

  // Takes units *first … *last of `units`, from `least` to `most` while there are so many: long stretches of a share
  // first, so that the last ones to finish are short. False if none are left for this member.
  bool take(int64_t units, int64_t least, int64_t most, int64_t* first, int64_t* last) {
    for (int64_t i = 0; i < team_->size && !is_past(); ++i) {
      const int64_t of = (member_ + i) % team_->size;
      if (take_of(of, begin_of(of, units), begin_of(of + 1, units), least, most, first, last)) return true;
    }
    return false;
  }

  // Likewise one unit, in the order of all members.
  bool take_in_order(int64_t units, int64_t* unit) {
    int64_t last;
    return take_of(0, 0, units, 1, 1, unit, &last);
  }

  // `count` taken units of the phase's `units` are finished. The last ones begin the next phase.
  void finish(int64_t units, int64_t count) {
    if (__atomic_add_fetch(&team_->done, uint64_t(count), __ATOMIC_ACQ_REL) != uint64_t(units)) return;
    __atomic_store_n(&team_->done, uint64_t{0}, __ATOMIC_RELAXED);
    __atomic_store_n(&team_->phase, phase_ + 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&team_->bell.sleepers, __ATOMIC_SEQ_CST)) tandem_team_ring(team_);
  }

  void end() { ++phase_; }

  // A whole phase: body(first, last) for stretches of 0 … units.
  template <typename Body>
  void each(int64_t units, int64_t minimum, const Body& body) {
    if (units <= 0) return;
    begin();
    for (int64_t first, last; take(units, minimum, units, &first, &last);) {
      body(first, last);
      finish(units, last - first);
    }
    end();
  }

  // As `each`, in two calls, for units of some microseconds of which at most `most` are taken at once. compute(first,
  // last) keeps the results to this thread, whatever has become of its inputs meanwhile; put(first, last) brings them
  // where they belong.
  template <typename Compute, typename Put>
  void begin_backed(int64_t units, int64_t most, const Compute& compute, const Put& put) {
    begin();
    began_ns_ = tandem_now_ns();
    TandemHeld* own = team_->held + member_;
    for (int64_t first, last; take(units, 1, most, &first, &last);) {
      __atomic_store_n(&own->first, first, __ATOMIC_RELEASE);  // after the 0 of the stretch before
      __atomic_store_n(&own->last, last, __ATOMIC_RELEASE);
      __atomic_store_n(&own->phase, phase_ + 1, __ATOMIC_RELEASE);
      compute(first, last);
      put_if_held(own, units, first, last, put);
    }
  }

  // The second call: what a member holds that is late, this one computes.
  template <typename Compute, typename Put>
  void end_backed(int64_t units, const Compute& compute, const Put& put) {
    if (!is_recalled() && !tandem_team_is_past(team_, phase_, tandem_now_ns() - began_ns_)) back_up(units, compute, put);
    end();
  }

 private:
  bool is_past() const { return __atomic_load_n(&team_->phase, __ATOMIC_ACQUIRE) > phase_; }
  int64_t begin_of(int64_t share, int64_t units) const { return units * share / team_->size; }

  // Of a share of units begin … end. INVARIANT: a phase ends when all of its units were taken, so that whoever is late
  // finds none of it.
  bool take_of(int64_t share, int64_t begin, int64_t end, int64_t least, int64_t most, int64_t* first, int64_t* last) {
    if (begin == end || is_recalled()) return false;
    uint64_t* const taken = &team_->shares[share].next;
    uint64_t next = __atomic_load_n(taken, __ATOMIC_ACQUIRE);
    for (;;) {
      const uint64_t from = next >> kUnitBits < phase_ ? phase_ << kUnitBits : next;
      const int64_t at = begin + int64_t(from & uint64_t(kUnitMask)), left = end - at;
      if (from >> kUnitBits != phase_ || left <= 0) return false;
      int64_t count = left / 4;
      count = count < least ? least : count > most ? most : count;
      count = count < left ? count : left;
      if (__atomic_compare_exchange_n(taken, &next, from + uint64_t(count), true, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
        *first = at, *last = at + count;
        return true;
      }
    }
  }

  // Whether every unit of the phase was taken.
  bool is_taken(int64_t units) const {
    for (int64_t i = 0; i < team_->size; ++i) {
      const uint64_t next = __atomic_load_n(&team_->shares[i].next, __ATOMIC_ACQUIRE);
      const int64_t size = begin_of(i + 1, units) - begin_of(i, units);
      if (size && (next >> kUnitBits != phase_ || int64_t(next & uint64_t(kUnitMask)) < size)) return false;
    }
    return true;
  }

  // INVARIANT: of those who have computed a stretch, one finds it held, and that one alone puts and finishes it.
  template <typename Put>
  void put_if_held(TandemHeld* held, int64_t units, int64_t first, int64_t last, const Put& put) {
    uint64_t expected = phase_ + 1;
    if (!__atomic_compare_exchange_n(&held->phase, &expected, uint64_t{0}, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
      return;
    put(first, last);
    finish(units, last - first);
  }

  // Computes what others hold, once no unit is left to take: then a member that holds some takes no more in this phase.
  template <typename Compute, typename Put>
  void back_up(int64_t units, const Compute& compute, const Put& put) {
    if (!is_taken(units)) return;
    for (int64_t i = 0; i < team_->size && !is_recalled(); ++i) {
      TandemHeld* held = team_->held + i;
      if (__atomic_load_n(&held->phase, __ATOMIC_ACQUIRE) != phase_ + 1) continue;
      const int64_t first = __atomic_load_n(&held->first, __ATOMIC_ACQUIRE);
      const int64_t last = __atomic_load_n(&held->last, __ATOMIC_ACQUIRE);
      if (__atomic_load_n(&held->phase, __ATOMIC_ACQUIRE) != phase_ + 1) continue;  // the two may be of a later phase
      compute(first, last);
      put_if_held(held, units, first, last, put);
    }
  }
};

}  // namespace
