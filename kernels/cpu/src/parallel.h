// Loops over tokens or units of work, on a team of threads where that is worth it.

#pragma once

#include "team.h"

namespace {

// Waking a team and waiting for it takes as long as this many bytes of row work on one core (a few microseconds).
constexpr int64_t kBytesWorthATeam = 256 * 1024;

// Calls body(first, last) for stretches of 0 … units, of at least `minimum` each but for the last, on the calling
// thread's team; on that thread alone if there is no more than one stretch, or within a job.
template <typename Body>
void over_units(int64_t units, int64_t minimum, const Body& body) {
  if (units <= minimum || tandem_threads() == 1) {
    if (units > 0) body(int64_t{0}, units);
    return;
  }
  struct Loop {
    int64_t units, minimum;
    const Body& body;
  } loop = {units, minimum, body};
  tandem_team_run(
      [](void* context, TandemTeam* team) {
        const Loop& its = *static_cast<const Loop*>(context);
        Phases(team).each(its.units, its.minimum, its.body);
      },
      &loop);
}

// Likewise for parts of 0 … count that together touch `bytes`; on this thread alone if that is little.
template <typename Body>
void over_tokens(int64_t count, int64_t bytes, const Body& body) {
  const bool few = bytes < kBytesWorthATeam || count < 2;
  over_units(count, few ? count : 1 + count * (kBytesWorthATeam / 4) / bytes, body);
}

}  // namespace
