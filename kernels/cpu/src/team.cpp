// Teams: one per thread that calls for one, opened at its first job, ended with that thread. Compiled once.
//
// The gate counts jobs and lets members in: job << kJobShift | kOpen | members inside. The owner opens it, works, closes
// it, and waits until nobody is inside. A member that wakes up too late finds it closed and has missed nothing.

#include "team.h"

#include "guests.h"
#include "waiting.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#if defined(__linux__)
#include <sys/mman.h>
#include <sys/prctl.h>
#endif

#define EXPORT extern "C" __attribute__((visibility("default")))

extern "C" int omp_get_max_threads(void);
extern "C" void omp_set_num_threads(int);

namespace {

constexpr int kJobShift = 16;
constexpr uint64_t kOpen = uint64_t{1} << 15;
constexpr uint64_t kInside = kOpen - 1;

// Stretches of units get shorter towards the end of a phase: a member that still holds one when another has waited for
// half as long as it worked has lost its processor.
constexpr int64_t kLeastLate_ns = 20000;
constexpr int64_t kMostLate_ns = kMostSpin_ns;

thread_local bool is_inside = false;
thread_local int64_t taken_threads = 0;  // by tandem_take_threads
thread_local int64_t member = 0;

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
    for (int64_t i = 0; i < num_guests_; ++i)
      if (guests_[i].is_core_free(at_ns)) guests_[i].call(job);
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
