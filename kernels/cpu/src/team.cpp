// Teams: one per thread that calls for one, opened at its first job, ended with that thread. Compiled once.
//
// The gate counts jobs and lets members in: job << kJobShift | kOpen | members inside. The owner opens it, works, closes
// it, and waits until nobody is inside. A member that wakes up too late finds it closed and has missed nothing.

#include "team.h"

#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <sched.h>
#endif

#define EXPORT extern "C" __attribute__((visibility("default")))

extern "C" int omp_get_max_threads(void);
extern "C" void omp_set_num_threads(int);

namespace {

constexpr int kJobShift = 16;
constexpr uint64_t kOpen = uint64_t{1} << 15;
constexpr uint64_t kInside = kOpen - 1;

// A wait spins this long before it sleeps: more after each one that was short, asleep or not, less after each long one.
// Between two calls from Python lie some tens of microseconds; waking a sleeper takes as long again.
constexpr int64_t kMostPatience_ns = 100000;
constexpr int64_t kLeastPatience_ns = 2000;
constexpr int64_t kShort_ns = 2 * kMostPatience_ns;

thread_local bool is_inside = false;
thread_local int64_t taken_threads = 0;  // by tandem_take_threads
thread_local int64_t patience_ns = kMostPatience_ns;

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
void wait_until(TandemTeam* team, const Condition& holds) {
  const int64_t began_ns = now_ns();
  if (spin_until(holds, began_ns + patience_ns)) return;
  __atomic_add_fetch(&team->sleepers, 1u, __ATOMIC_SEQ_CST);
  for (;;) {
    const uint32_t bell = __atomic_load_n(&team->bell, __ATOMIC_SEQ_CST);
    if (holds()) break;
    sleep_on(&team->bell, bell);
  }
  __atomic_sub_fetch(&team->sleepers, 1u, __ATOMIC_SEQ_CST);
  const int64_t wanted_ns = now_ns() - began_ns < kShort_ns ? 2 * patience_ns : patience_ns / 2;
  patience_ns = wanted_ns < kLeastPatience_ns ? kLeastPatience_ns : wanted_ns < kMostPatience_ns ? wanted_ns : kMostPatience_ns;
}

void ring_if_awaited(TandemTeam* team) {
  if (__atomic_load_n(&team->sleepers, __ATOMIC_SEQ_CST)) tandem_team_ring(team);
}

void* serve(void* context) {
  TandemTeam* team = static_cast<TandemTeam*>(context);
  is_inside = true;
#if defined(__linux__)
  prctl(PR_SET_NAME, "tandem-team");
#endif
  for (uint64_t last = 0;;) {
    uint64_t gate = 0;
    const auto is_open = [&] {
      gate = __atomic_load_n(&team->gate, __ATOMIC_SEQ_CST);
      return (gate & kOpen) && gate >> kJobShift != last;
    };
    wait_until(team, is_open);
    if (!__atomic_compare_exchange_n(&team->gate, &gate, gate + 1, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) continue;
    last = gate >> kJobShift;
    if (team->job == nullptr) return nullptr;
    team->job(team->context, team);
    if ((__atomic_sub_fetch(&team->gate, 1, __ATOMIC_SEQ_CST) & (kOpen | kInside)) == 0) ring_if_awaited(team);
  }
}

// Opens the gate for the next job.
void begin_job(TandemTeam* team, void (*job)(void*, TandemTeam*), void* context) {
  team->job = job, team->context = context;
  team->first_phase = __atomic_load_n(&team->next, __ATOMIC_RELAXED) >> kUnitBits;
  const uint64_t number = (__atomic_load_n(&team->gate, __ATOMIC_RELAXED) >> kJobShift) + 1;
  __atomic_store_n(&team->gate, number << kJobShift | kOpen, __ATOMIC_SEQ_CST);
  ring_if_awaited(team);
}

// The calling thread's own team.
class Owner {
  TandemTeam* team_ = nullptr;
  pthread_t* threads_ = nullptr;
  int64_t wanted_ = 0, num_threads_ = 0;

 public:
  ~Owner() { close(); }

  // With `size` members, the caller included, or as many as the system allows.
  TandemTeam* of(int64_t size) {
    if (size == wanted_) return team_;
    close();
    void* memory = aligned_alloc(64, sizeof(TandemTeam));
    threads_ = static_cast<pthread_t*>(malloc(size_t(size) * sizeof(pthread_t)));
    if (memory == nullptr || threads_ == nullptr) abort();
    memset(memory, 0, sizeof(TandemTeam));
    team_ = static_cast<TandemTeam*>(memory);
    wanted_ = size;
    // Signals are for threads that run Python.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (num_threads_ < size - 1 && pthread_create(threads_ + num_threads_, nullptr, serve, team_) == 0) ++num_threads_;
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    team_->size = num_threads_ + 1;
    return team_;
  }

  // Joins the members.
  void close() {
    if (team_ == nullptr) return;
    begin_job(team_, nullptr, nullptr);
    for (int64_t i = 0; i < num_threads_; ++i) pthread_join(threads_[i], nullptr);
    forget();
  }

  // As a child of fork must: it has no such threads.
  void forget() {
    free(team_), free(threads_);
    team_ = nullptr, threads_ = nullptr;
    wanted_ = num_threads_ = 0;
  }
};

thread_local Owner owner;
pthread_once_t forks = PTHREAD_ONCE_INIT;

}  // namespace

int64_t tandem_threads() { return is_inside ? 1 : taken_threads ? taken_threads : omp_get_max_threads(); }

// From now on work called from here uses the threads that OpenMP would have used, and OpenMP none but this one: its
// threads spin when they have nothing to do, on processors that the team needs.
EXPORT void tandem_take_threads() {
  if (taken_threads) return;
  taken_threads = omp_get_max_threads();
  omp_set_num_threads(1);
}

void tandem_team_ring(TandemTeam* team) {
  __atomic_add_fetch(&team->bell, 1u, __ATOMIC_SEQ_CST);
#if defined(__linux__)
  syscall(SYS_futex, &team->bell, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
#endif
}

void tandem_team_wait(TandemTeam* team, uint64_t phase) {
  wait_until(team, [=] { return __atomic_load_n(&team->next, __ATOMIC_SEQ_CST) >> kUnitBits >= phase; });
}

void tandem_team_run(void (*job)(void*, TandemTeam*), void* context) {
  pthread_once(&forks, [] { pthread_atfork(nullptr, nullptr, [] { owner.forget(); }); });
  TandemTeam* team = owner.of(tandem_threads());
  begin_job(team, job, context);
  is_inside = true;
  job(context, team);
  is_inside = false;
  __atomic_and_fetch(&team->gate, ~kOpen, __ATOMIC_SEQ_CST);
  wait_until(team, [=] { return (__atomic_load_n(&team->gate, __ATOMIC_SEQ_CST) & kInside) == 0; });
}

EXPORT int tandem_max_threads() { return int(tandem_threads()); }
