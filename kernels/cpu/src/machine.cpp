// What this machine can run. Compiled once, with no instruction set beyond the architecture's own.

#include <stdint.h>

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

#if defined(__x86_64__)

// Register states that the operating system must save, bits of XCR0.
constexpr uint64_t kAvxState = 0x6;      // SSE, AVX
constexpr uint64_t kAvx512State = 0xe6;  // and opmask, both upper halves
constexpr uint64_t kAmxState = 0x600e6;  // and tile configuration, tile data

struct Leaf {
  uint32_t eax, ebx, ecx, edx;
};

Leaf cpuid(uint32_t leaf, uint32_t subleaf) {
  Leaf r = {0, 0, 0, 0};
  __get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx);
  return r;
}

uint64_t saved_states() {
  if (!(cpuid(1, 0).ecx >> 27 & 1)) return 0;  // OSXSAVE: xgetbv may be used
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return uint64_t{high} << 32 | low;
}

bool all_bits(uint32_t word, uint32_t bits) { return (word & bits) == bits; }

bool has_avx2(uint64_t states) {
  const uint32_t fma_f16c_avx = 1u << 12 | 1u << 29 | 1u << 28;
  if ((states & kAvxState) != kAvxState) return false;
  return all_bits(cpuid(1, 0).ecx, fma_f16c_avx) && all_bits(cpuid(7, 0).ebx, 1u << 5);
}

bool has_avx512(uint64_t states) {
  const uint32_t f_dq_bw_vl = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;
  return (states & kAvx512State) == kAvx512State && all_bits(cpuid(7, 0).ebx, f_dq_bw_vl);
}

bool has_avx512_bf16() {
  const uint32_t vnni = 1u << 11;
  return cpuid(7, 0).eax >= 1 && all_bits(cpuid(7, 1).eax, 1u << 5) && all_bits(cpuid(7, 0).ecx, vnni);
}

// Linux gives tile data to a process that asks (arch_prctl 0x1023, feature 18); it holds for all its threads.
bool may_use_amx(uint64_t states) {
  const uint32_t bf16_tile = 1u << 22 | 1u << 24;
  if ((states & kAmxState) != kAmxState || !all_bits(cpuid(7, 0).edx, bf16_tile)) return false;
#if defined(__linux__)
  return syscall(SYS_arch_prctl, 0x1023, 18) == 0;
#else
  return false;
#endif
}

#endif  // __x86_64__

}  // namespace

// Names, separated by blanks, of the tiers that were compiled, lowest first.
EXPORT const char* tandem_built_tiers() { return TANDEM_BUILT_TIERS; }

// The hash of the sources that this library was built from.
EXPORT const char* tandem_sources() { return TANDEM_SOURCES; }

// The highest tier that processor and operating system allow, counted from 0: baseline, avx2, avx512, avx512_bf16, amx;
// on arm64 baseline, neon_bf16. Asks the kernel for AMX tiles on the way.
EXPORT int tandem_machine_tier() {
#if defined(__x86_64__)
  const uint64_t states = saved_states();
  if (!has_avx2(states)) return 0;
  if (!has_avx512(states)) return 1;
  if (!has_avx512_bf16()) return 2;
  return may_use_amx(states) ? 4 : 3;
#elif defined(__aarch64__) && defined(__linux__)
  constexpr unsigned long kBf16 = 1ul << 14;
  return getauxval(AT_HWCAP2) & kBf16 ? 1 : 0;
#else
  return 0;
#endif
}
