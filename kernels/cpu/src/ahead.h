// Memory that a later phase of a job reads, fetched into the caches while products compute: these leave memory idle
// where many tokens pass by the same weights.

#pragma once

#include <stdint.h>

namespace {

// Of one layer's part of the pool: so many bytes from each offset on, in the order in which they are read.
struct Pieces {
  const int64_t* offsets;
  int64_t count, bytes;
};

// What one member fetches of them: every `step`th.
struct Ahead {
  const char* base = nullptr;  // of the layer's part; null: nothing is known
  Pieces of = {};
  int64_t next = 0, step = 1;
  int64_t done = 0;  // bytes of the next one

  // Where the next `most` bytes or fewer begin, and in *end where they end; null if nothing is left.
  const char* take(int64_t most, const char** end) {
    if (base == nullptr || next >= of.count) return nullptr;
    const char* from = base + of.offsets[next] + done;
    const int64_t left = of.bytes - done, bytes = left < most ? left : most;
    done += bytes;
    if (done == of.bytes) next += step, done = 0;
    *end = from + bytes;
    return from;
  }
};

}  // namespace
