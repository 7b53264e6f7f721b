// Scratch memory of one thread, and arrays taken off it.

#pragma once

#include <stdint.h>
#include <stdlib.h>

#include "tier.h"

namespace {

TANDEM_INLINE int64_t round_up(int64_t x, int64_t step) { return (x + step - 1) / step * step; }
TANDEM_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
TANDEM_INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

// Grows only; lives as long as its thread. Contents are lost when it grows.
struct Arena {
  char* base = nullptr;
  int64_t size = 0;

  ~Arena() { free(base); }

  char* reserve(int64_t bytes) {
    if (bytes > size) {
      free(base);
      size = round_up(bytes, 1 << 16);
      base = static_cast<char*>(aligned_alloc(4096, size_t(size)));
      if (base == nullptr) abort();  // no exceptions here, and nothing sensible to return
    }
    return base;
  }
};

// Takes 64-byte aligned arrays off a buffer; from null on it measures how much they need.
struct Carver {
  char* at;

  template <typename T>
  T* take(int64_t count) {
    T* taken = reinterpret_cast<T*>(at);
    at = reinterpret_cast<char*>(intptr_t(at) + round_up(count * int64_t(sizeof(T)), 64));  // not at null + n
    return taken;
  }
};

}  // namespace
