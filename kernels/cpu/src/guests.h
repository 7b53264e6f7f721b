// Guests: threads of one process that help its team on cores of another one, while nobody computes there. For team.cpp.
//
// They are called to a job one by one, if their core is free when it begins; until then they sleep at a bell of their own,
// so that no job wakes them in vain. A core's owner that wants it back sleeps until the guest there has left. Else the
// guest, which has run on that core until now, waits for its processor behind the owner's whole job where the system
// thinks that fair, and its own team waits for the guest.

#pragma once

#include "team.h"
#include "waiting.h"

#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

// A core's entry in the shared memory; all zero is a core that nobody computes on.
struct TandemCoreUse {
  alignas(64) uint32_t is_busy;  // within a job of its owner, who alone writes this
  uint32_t visit;                // of a guest, within a job of another team: see below
  int64_t busy_until_ns;         // of the monotonic clock: end of the owner's last job
};

namespace {

// A core is free once no job of its owner's has run for so long: between two steps of a stream lies less.
constexpr int64_t kFreeAfter_ns = 5000000;

// A guest leaves once it has computed what it holds. The owner waits no longer than this: the guest may sleep until a
// phase ends, or its process have died.
constexpr int64_t kMostLeaving_ns = 5000000;

// Of `TandemCoreUse::visit`. The guest writes kNobody and kGuest; the owner kAwaited, and kNobody where it gives up.
enum : uint32_t { kNobody, kGuest, kAwaited };

// What the calling thread lends and borrows. `uses` null = neither.
struct Loan {
  TandemCoreUse* uses = nullptr;  // by core
  int64_t num_uses = 0;
  int32_t *own = nullptr, *others = nullptr;
  int64_t num_own = 0, num_others = 0;

  ~Loan() {
#if defined(__linux__)
    if (uses != nullptr) munmap(uses, size_t(num_uses) * sizeof *uses);
#endif
    free(own), free(others);
  }
};

thread_local Loan loan;
thread_local const uint32_t* recall = nullptr;  // of a guest: `is_busy` of its core

// A core's owner, who may be of another process.
void wake_owner([[maybe_unused]] uint32_t* visit) {
#if defined(__linux__)
  syscall(SYS_futex, visit, FUTEX_WAKE, 1, nullptr, nullptr, 0);
#endif
}

struct Guest {
  alignas(64) uint64_t called;  // to this job
  TandemBell bell;
  TandemTeam* team;
  TandemCoreUse* core;
  pthread_t thread;
  bool is_dismissed;  // by the last call

  bool is_core_free(int64_t at_ns) const {
    return !__atomic_load_n(&core->is_busy, __ATOMIC_ACQUIRE) &&
           at_ns - __atomic_load_n(&core->busy_until_ns, __ATOMIC_RELAXED) >= kFreeAfter_ns;
  }

  void call(uint64_t job) {
    __atomic_store_n(&called, job, __ATOMIC_SEQ_CST);
    ring_if_awaited(&bell);
  }

  // Whether it may go to the job: it is called, and its core is still free. `leave` follows.
  // INVARIANT: a guest says that it is there first and looks for the owner then; an owner says that it computes first and
  // looks for a guest then. So one of the two sees the other.
  bool enter(uint64_t job) {
    if (__atomic_load_n(&called, __ATOMIC_SEQ_CST) != job) return false;
    if (is_dismissed) return true;
    if (__atomic_load_n(&core->is_busy, __ATOMIC_SEQ_CST)) return false;
    __atomic_store_n(&core->visit, kGuest, __ATOMIC_SEQ_CST);
    if (!__atomic_load_n(&core->is_busy, __ATOMIC_SEQ_CST)) return true;
    leave();
    return false;
  }

  void leave() {
    if (__atomic_exchange_n(&core->visit, kNobody, __ATOMIC_SEQ_CST) == kAwaited) wake_owner(&core->visit);
  }
};

// Returns once no guest is on this core of the caller's, or it has waited for long enough.
void await_leaving([[maybe_unused]] TandemCoreUse* use) {
#if defined(__linux__)
  uint32_t visit = kGuest;
  __atomic_compare_exchange_n(&use->visit, &visit, kAwaited, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
  if (visit == kNobody) return;
  const int64_t end_ns = now_ns() + kMostLeaving_ns;
  while (__atomic_load_n(&use->visit, __ATOMIC_SEQ_CST) != kNobody) {
    const int64_t left_ns = end_ns - now_ns();
    if (left_ns <= 0) return __atomic_store_n(&use->visit, kNobody, __ATOMIC_SEQ_CST);
    const timespec left{0, left_ns};
    syscall(SYS_futex, &use->visit, FUTEX_WAIT, kAwaited, &left, nullptr, 0);
  }
#endif
}

// Says for the calling thread's own cores that a job begins or has ended.
void set_busy(bool is_busy) {
  if (loan.uses == nullptr) return;
  const int64_t at_ns = is_busy ? 0 : now_ns();
  for (int64_t i = 0; i < loan.num_own; ++i) {
    TandemCoreUse* use = loan.uses + loan.own[i];
    if (!is_busy) __atomic_store_n(&use->busy_until_ns, at_ns, __ATOMIC_RELAXED);
    __atomic_store_n(&use->is_busy, uint32_t(is_busy), __ATOMIC_SEQ_CST);
  }
  for (int64_t i = 0; is_busy && i < loan.num_own; ++i) await_leaving(loan.uses + loan.own[i]);
}

}  // namespace
