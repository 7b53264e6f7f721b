// Where the maximum of each row first stands; -1 if it is not finite or the row holds NaN.

#include "parallel.h"
#include "simd.h"

namespace {

constexpr int64_t kChunk = 1024;  // looked at again, element by element, once it is known to hold the maximum

struct Found {
  float value;
  bool nan;
};

// Maximum of row[0 … n), or whether there is NaN.
template <typename T>
TANDEM_INLINE Found highest_of(const T* row, int64_t n) {
  F32 tops[4];
  I32 nans = {};
  for (int j = 0; j < 4; ++j) tops[j] = splat(-__builtin_inff());
  int64_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes)
    for (int j = 0; j < 4; ++j) {
      const F32 v = load(row + i + j * kLanes);
      tops[j] = max(v, tops[j]);
      nans |= v != v;
    }
  float top = highest(max(max(tops[0], tops[1]), max(tops[2], tops[3])));
  bool nan = false;
  for (int lane = 0; lane < kLanes; ++lane) nan |= nans[lane] != 0;
  for (; i < n; ++i) {
    const float v = widen(row[i]);
    top = v > top ? v : top;
    nan |= v != v;
  }
  return {top, nan};
}

template <typename T>
int64_t first_max_of(const T* row, int64_t width) {
  Found best = {-__builtin_inff(), false};
  int64_t chunk = 0;
  for (int64_t c = 0; c < width; c += kChunk) {
    const Found found = highest_of(row + c, width - c < kChunk ? width - c : kChunk);
    if (found.nan) return -1;
    if (found.value > best.value) {
      best = found;
      chunk = c;
    }
  }
  if (!(__builtin_fabsf(best.value) < __builtin_inff())) return -1;
  int64_t i = chunk;
  while (widen(row[i]) != best.value) ++i;
  return i;
}

template <typename T>
void first_max(const T* rows, int64_t stride, int64_t count, int64_t width, int64_t* indices) {
  over_tokens(count, count * width * int64_t(sizeof(T)), [=](int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r) indices[r] = first_max_of(rows + r * stride, width);
  });
}

}  // namespace

// rows [count, width], `stride` apart -> indices [count].
TANDEM_EXPORT(void, tandem_first_max_f32)
(const float* rows, int64_t stride, int64_t count, int64_t width, int64_t* indices) {
  first_max(rows, stride, count, width, indices);
}

TANDEM_EXPORT(void, tandem_first_max_bf16)
(const Bf16* rows, int64_t stride, int64_t count, int64_t width, int64_t* indices) {
  first_max(rows, stride, count, width, indices);
}

TANDEM_EXPORT(void, tandem_first_max_f16)
(const Half* rows, int64_t stride, int64_t count, int64_t width, int64_t* indices) {
  first_max(rows, stride, count, width, indices);
}
