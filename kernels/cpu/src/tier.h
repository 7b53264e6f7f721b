// Names of one instruction tier. Each kernel file is compiled once per tier, into that tier's library.
//
// TANDEM_TIER is the tier's name (baseline, avx2, avx512, avx512_bf16, amx, neon_bf16) and becomes the suffix of
// every exported function. All else in a kernel file and in its headers stands in an anonymous namespace.

#pragma once

#ifndef TANDEM_TIER
#error "compile through kernels/cpu/build.py, which names the tier"
#endif

#define TANDEM_JOIN_EXPANDED(name, tier) name##_##tier
#define TANDEM_JOIN(name, tier) TANDEM_JOIN_EXPANDED(name, tier)

// TANDEM_EXPORT(void, tandem_silu_mul_f32)(const float* x, ...) { ... }
#define TANDEM_EXPORT(result, name) \
  extern "C" __attribute__((visibility("default"))) result TANDEM_JOIN(name, TANDEM_TIER)

#define TANDEM_INLINE inline __attribute__((always_inline))
