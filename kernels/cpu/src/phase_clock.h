// What the phases of a decoder's step take, by their kind.

#pragma once

#include <stdint.h>
#include <time.h>

#include "team.h"

namespace {

// In the order of kernels/cpu/decoder.py.
enum PhaseKind { kEmbed, kNorm, kQkv, kRotate, kAttend, kOutput, kGateUp, kDown, kExperts, kHead, kKeepRows };

// Of the thread that called for the step; elsewhere it is off. At work in a phase: from its begin until no unit is left
// to take. Waiting for it: from there until the next one begins.
class Clock {
  int64_t* spent_ns_;
  int64_t since_ns_ = 0;
  PhaseKind kind_ = kEmbed;

  void note(int64_t is_waiting) {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    const int64_t now_ns = int64_t{now.tv_sec} * 1000000000 + now.tv_nsec;
    if (since_ns_) spent_ns_[2 * kind_ + is_waiting] += now_ns - since_ns_;
    since_ns_ = now_ns;
  }

 public:
  explicit Clock(int64_t* spent_ns) : spent_ns_(spent_ns) {}

  // The next phase is of this kind. Waits for its begin.
  void begin(PhaseKind kind, Phases* phases) {
    if (spent_ns_ == nullptr) return;
    phases->begin();
    note(1);
    kind_ = kind;
  }

  void end() {
    if (spent_ns_) note(0);
  }
};

}  // namespace
