// How a thread waits for what another one stores: it spins for some microseconds, then sleeps. For team.cpp.

#pragma once

#include "team.h"

#include <sched.h>
#include <stdint.h>
#include <time.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

// A wait spins this long before it sleeps: more after each one that was short, asleep or not, less after each long one.
// Between two calls from Python lie some tens of microseconds; waking a sleeper takes as long again.
constexpr int64_t kMostSpin_ns = 100000;
constexpr int64_t kLeastSpin_ns = 2000;
constexpr int64_t kShort_ns = 2 * kMostSpin_ns;

thread_local int64_t spin_ns = kMostSpin_ns;

int64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{now.tv_sec} * 1000000000 + now.tv_nsec;
}

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

// Sleeps while *word is `value`; may return early.
void sleep_on(uint32_t* word, uint32_t value) {
#if defined(__linux__)
  syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
#else
  if (__atomic_load_n(word, __ATOMIC_SEQ_CST) == value) sched_yield();
#endif
}

template <typename Condition>
bool spin_until(const Condition& holds, int64_t end_ns) {
  do {
    for (int i = 0; i < 16; ++i) {
      if (holds()) return true;
      relax();
    }
  } while (now_ns() < end_ns);
  return false;
}

// INVARIANT: whoever makes a condition true stores it first and looks at `sleepers` then; a sleeper counts itself
// first and looks at the condition then. So one of the two sees the other.
template <typename Condition>
void wait_until(TandemBell* bell, const Condition& holds) {
  const int64_t began_ns = now_ns();
  if (spin_until(holds, began_ns + spin_ns)) return;
  __atomic_add_fetch(&bell->sleepers, 1u, __ATOMIC_SEQ_CST);
  for (;;) {
    const uint32_t rung = __atomic_load_n(&bell->rung, __ATOMIC_SEQ_CST);
    if (holds()) break;
    sleep_on(&bell->rung, rung);
  }
  __atomic_sub_fetch(&bell->sleepers, 1u, __ATOMIC_SEQ_CST);
  const int64_t wanted_ns = now_ns() - began_ns < kShort_ns ? 2 * spin_ns : spin_ns / 2;
  spin_ns = wanted_ns < kLeastSpin_ns ? kLeastSpin_ns : wanted_ns < kMostSpin_ns ? wanted_ns : kMostSpin_ns;
}

void ring(TandemBell* bell) {
  __atomic_add_fetch(&bell->rung, 1u, __ATOMIC_SEQ_CST);
#if defined(__linux__)
  syscall(SYS_futex, &bell->rung, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
#endif
}

void ring_if_awaited(TandemBell* bell) {
  if (__atomic_load_n(&bell->sleepers, __ATOMIC_SEQ_CST)) ring(bell);
}

}  // namespace
