// When a loop over tokens is worth a team of threads.

#pragma once

#include <stdint.h>

extern "C" int omp_get_max_threads(void);

namespace {

// Waking a team and waiting for it takes as long as this many bytes of row work on one core (a few microseconds).
constexpr int64_t kBytesWorthATeam = 256 * 1024;

// Calls body(first, last) for parts of 0 … count that together touch `bytes`; on this thread alone if that is little.
template <typename Body>
void over_tokens(int64_t count, int64_t bytes, const Body& body) {
  if (bytes < kBytesWorthATeam || count < 2 || omp_get_max_threads() == 1) {
    body(int64_t{0}, count);
    return;
  }
  const int64_t threads = omp_get_max_threads();
  const int64_t parts = count < threads ? count : threads;
#pragma omp parallel for schedule(static, 1)
  for (int64_t part = 0; part < parts; ++part) body(count * part / parts, count * (part + 1) / parts);
}

}  // namespace
