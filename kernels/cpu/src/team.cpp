// Teams: one per thread that calls for one, opened at its first job, ended with that thread. Compiled once.
//
// The gate counts jobs and lets members in: job << kJobShift | kOpen | members inside. The owner opens it, works, closes
// it, and waits until nobody is inside. A member that wakes up too late finds it closed and has missed nothing.
//
// Guests are called to a job one by one, if their core is free when it begins; until then they sleep at a bell of their
// own, so that no job wakes them in vain. A core's owner that wants it back sleeps until the guest there has left. Else
// the guest, which has run on that core until now, waits for its processor behind the owner's whole job where the system
// thinks that fair, and its own team waits for the guest.

#include "team.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>
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

// Stretches of units get shorter towards the end of a phase: a member that still holds one when another has waited for
// half as long as it worked has lost its processor.
constexpr int64_t kLeastLate_ns = 20000;
constexpr int64_t kMostLate_ns = kMostPatience_ns;

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

thread_local bool is_inside = false;
thread_local int64_t taken_threads = 0;  // by tandem_take_threads
thread_local Loan loan;
thread_local const uint32_t* recall = nullptr;
thread_local int64_t member = 0;
thread_local int64_t most_called = 0;  // guests, since `tandem_take_most_guests` was called
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

// A core's owner, who may be of another process.
void wake_owner([[maybe_unused]] uint32_t* visit) {
#if defined(__linux__)
  syscall(SYS_futex, visit, FUTEX_WAKE, 1, nullptr, nullptr, 0);
#endif
}

// INVARIANT: whoever makes a condition true stores it first and looks at `sleepers` then; a sleeper counts itself
// first and looks at the condition then. So one of the two sees the other.
template <typename Condition>
void wait_until(TandemBell* bell, const Condition& holds) {
  const int64_t began_ns = now_ns();
  if (spin_until(holds, began_ns + patience_ns)) return;
  __atomic_add_fetch(&bell->sleepers, 1u, __ATOMIC_SEQ_CST);
  for (;;) {
    const uint32_t rung = __atomic_load_n(&bell->rung, __ATOMIC_SEQ_CST);
    if (holds()) break;
    sleep_on(&bell->rung, rung);
  }
  __atomic_sub_fetch(&bell->sleepers, 1u, __ATOMIC_SEQ_CST);
  const int64_t wanted_ns = now_ns() - began_ns < kShort_ns ? 2 * patience_ns : patience_ns / 2;
  patience_ns = wanted_ns < kLeastPatience_ns ? kLeastPatience_ns : wanted_ns < kMostPatience_ns ? wanted_ns : kMostPatience_ns;
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

void set_name(const char* name) {
#if defined(__linux__)
  prctl(PR_SET_NAME, name);
#endif
}

// Works for the team from job to job, until the one that is none. Waits at the gate until may_enter(job), at `bell`;
// leave() follows.
template <typename MayEnter, typename Leave>
void work_for(TandemTeam* team, TandemBell* bell, const MayEnter& may_enter, const Leave& leave) {
  is_inside = true;
  member = int64_t(__atomic_add_fetch(&team->num_joined, 1, __ATOMIC_RELAXED));
  for (uint64_t last = 0;;) {
    uint64_t gate = 0;
    wait_until(bell, [&] {
      gate = __atomic_load_n(&team->gate, __ATOMIC_SEQ_CST);
      return (gate & kOpen) && gate >> kJobShift != last && may_enter(gate >> kJobShift);
    });
    if (!__atomic_compare_exchange_n(&team->gate, &gate, gate + 1, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
      leave();
      continue;
    }
    last = gate >> kJobShift;
    if (team->job == nullptr) return leave();
    team->job(team->context, team);
    if ((__atomic_sub_fetch(&team->gate, 1, __ATOMIC_SEQ_CST) & (kOpen | kInside)) == 0) ring_if_awaited(&team->bell);
    leave();
  }
}

void* serve(void* context) {
  TandemTeam* team = static_cast<TandemTeam*>(context);
  set_name("tandem-team");
  work_for(
      team, &team->bell, [](uint64_t) { return true; }, [] {});
  return nullptr;
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

void* visit(void* context) {
  Guest* guest = static_cast<Guest*>(context);
  set_name("tandem-guest");
  recall = &guest->core->is_busy;
  work_for(
      guest->team, &guest->bell, [=](uint64_t job) { return guest->enter(job); }, [=] { guest->leave(); });
  return nullptr;
}

// Opens the gate for the next job, whose number is returned.
uint64_t begin_job(TandemTeam* team, void (*job)(void*, TandemTeam*), void* context) {
  team->job = job, team->context = context;
  team->first_phase = __atomic_load_n(&team->phase, __ATOMIC_RELAXED);
  const uint64_t number = (__atomic_load_n(&team->gate, __ATOMIC_RELAXED) >> kJobShift) + 1;
  __atomic_store_n(&team->gate, number << kJobShift | kOpen, __ATOMIC_SEQ_CST);
  ring_if_awaited(&team->bell);
  return number;
}

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

template <typename T>
T* allocate(int64_t count) {
  const size_t bytes = (size_t(count) * sizeof(T) + 63) / 64 * 64;
  void* memory = aligned_alloc(64, bytes ? bytes : 64);
  if (memory == nullptr) abort();
  memset(memory, 0, bytes);
  return static_cast<T*>(memory);
}

int32_t* copied(const int32_t* values, int64_t count) {
  return static_cast<int32_t*>(memcpy(allocate<int32_t>(count), values, size_t(count) * sizeof *values));
}

// The calling thread's own team.
class Owner {
  TandemTeam* team_ = nullptr;
  pthread_t* threads_ = nullptr;
  Guest* guests_ = nullptr;
  int64_t wanted_ = 0, num_threads_ = 0, num_guests_ = 0;

 public:
  ~Owner() { close(); }

  // With `size` members, the caller and guests included, or as many as the system allows.
  TandemTeam* of(int64_t size) {
    if (size == wanted_) return team_;
    close();
    const int64_t own = size - loan.num_others;
    team_ = allocate<TandemTeam>(1);
    team_->shares = allocate<TandemShare>(size);
    team_->held = allocate<TandemHeld>(size);
    threads_ = allocate<pthread_t>(own);
    guests_ = allocate<Guest>(loan.num_others);
    wanted_ = size;
    // Signals are for threads that run Python.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (num_threads_ < own - 1 && pthread_create(threads_ + num_threads_, nullptr, serve, team_) == 0) ++num_threads_;
    for (int64_t i = 0; i < loan.num_others; ++i) invite(loan.others[i]);
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    team_->size = num_threads_ + num_guests_ + 1;
    return team_;
  }

  // Calls those guests to the job whose cores are free.
  void call_guests(uint64_t job) {
    if (num_guests_ == 0) return;
    const int64_t at_ns = now_ns();
    int64_t called = 0;
    for (int64_t i = 0; i < num_guests_; ++i) {
      if (!guests_[i].is_core_free(at_ns)) continue;
      guests_[i].call(job);
      ++called;
    }
    if (called > most_called) most_called = called;
  }

  // Joins the members.
  void close() {
    if (team_ == nullptr) return;
    const uint64_t job = begin_job(team_, nullptr, nullptr);
    for (int64_t i = 0; i < num_guests_; ++i) guests_[i].is_dismissed = true, guests_[i].call(job);
    for (int64_t i = 0; i < num_threads_; ++i) pthread_join(threads_[i], nullptr);
    for (int64_t i = 0; i < num_guests_; ++i) pthread_join(guests_[i].thread, nullptr);
    forget();
  }

  // As a child of fork must: it has no such threads.
  void forget() {
    if (team_ != nullptr) free(team_->shares), free(team_->held);
    free(team_), free(threads_), free(guests_);
    team_ = nullptr, threads_ = nullptr, guests_ = nullptr;
    wanted_ = num_threads_ = num_guests_ = 0;
  }

 private:
  // A guest on `core`; none where the system does not let this process run there.
  void invite([[maybe_unused]] int32_t core) {
#if defined(__linux__)
    Guest* guest = guests_ + num_guests_;
    guest->team = team_, guest->core = loan.uses + core;
    cpu_set_t cores;
    CPU_ZERO(&cores);
    CPU_SET(size_t(core), &cores);
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    if (pthread_attr_setaffinity_np(&attributes, sizeof cores, &cores) == 0 &&
        pthread_create(&guest->thread, &attributes, visit, guest) == 0)
      ++num_guests_;
    pthread_attr_destroy(&attributes);
#endif
  }
};

thread_local Owner owner;
pthread_once_t forks = PTHREAD_ONCE_INIT;

}  // namespace

int64_t tandem_threads() {
  return is_inside ? 1 : (taken_threads ? taken_threads : omp_get_max_threads()) + loan.num_others;
}

const uint32_t* tandem_recall() { return recall; }

int64_t tandem_member() { return member; }

int64_t tandem_now_ns() { return now_ns(); }

// From now on work called from here uses the threads that OpenMP would have used, and OpenMP none but this one: its
// threads spin when they have nothing to do, on processors that the team needs.
EXPORT void tandem_take_threads() {
  if (taken_threads) return;
  taken_threads = omp_get_max_threads();
  omp_set_num_threads(1);
}

// From now on jobs of the calling thread say in the shared file, of `num_cores` TandemCoreUse, that its cores `own`
// compute, and guests on the cores `others` help them while nobody computes there. To be called once. *error is 0, or
// why the file cannot be mapped; then nothing has changed.
EXPORT void tandem_share_cores(int file, int64_t num_cores, const int32_t* own, int64_t num_own, const int32_t* others,
                               int64_t num_others, int* error) {
#if defined(__linux__)
  void* memory = mmap(nullptr, size_t(num_cores) * sizeof(TandemCoreUse), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  *error = memory == MAP_FAILED ? errno : 0;
  if (*error) return;
  loan.uses = static_cast<TandemCoreUse*>(memory), loan.num_uses = num_cores;
#else
  *error = ENOSYS;
  return;
#endif
  loan.own = copied(own, num_own), loan.others = copied(others, num_others);
  loan.num_own = num_own, loan.num_others = num_others;
  set_busy(false);  // who had these cores before may have died within a job
}

// The most guests that any one job of the calling thread had since the last call.
EXPORT int64_t tandem_take_most_guests() {
  const int64_t most = most_called;
  most_called = 0;
  return most;
}

void tandem_team_ring(TandemTeam* team) { ring(&team->bell); }

void tandem_team_wait(TandemTeam* team, uint64_t phase) {
  wait_until(&team->bell, [=] { return __atomic_load_n(&team->phase, __ATOMIC_SEQ_CST) >= phase; });
}

bool tandem_team_is_past(const TandemTeam* team, uint64_t phase, int64_t worked_ns) {
  const auto is_past = [=] { return __atomic_load_n(&team->phase, __ATOMIC_ACQUIRE) > phase; };
  if (is_past()) return true;
  const int64_t late_ns = worked_ns / 2 < kLeastLate_ns ? kLeastLate_ns : worked_ns / 2;
  return spin_until(is_past, now_ns() + (late_ns < kMostLate_ns ? late_ns : kMostLate_ns));
}

void tandem_team_run(void (*job)(void*, TandemTeam*), void* context) {
  pthread_once(&forks, [] { pthread_atfork(nullptr, nullptr, [] { owner.forget(); }); });
  TandemTeam* team = owner.of(tandem_threads());
  set_busy(true);
  owner.call_guests(begin_job(team, job, context));
  is_inside = true;
  job(context, team);
  is_inside = false;
  __atomic_and_fetch(&team->gate, ~kOpen, __ATOMIC_SEQ_CST);
  wait_until(&team->bell, [=] { return (__atomic_load_n(&team->gate, __ATOMIC_SEQ_CST) & kInside) == 0; });
  set_busy(false);
}

EXPORT int tandem_max_threads() { return int(tandem_threads()); }
