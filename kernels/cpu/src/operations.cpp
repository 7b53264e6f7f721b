// Norms, rotation with KV store, gated activation, sums: each one pass over the tokens, in float32 inside.
//
// T tokens, E hidden, I intermediate, H query heads, Hkv KV heads, D head_dim, S block_size. Strides are in
// elements. Element type: float, bfloat16 or float16, the same for all of a call's tensors except cos and sin, and norm
// weights W, which may be float.

#include "gates.h"
#include "kv_elements.h"
#include "parallel.h"
#include "rotate_shape.h"
#include "simd.h"

namespace {

// Sum of squares of x[0 … n).
template <typename T>
TANDEM_INLINE float sum_of_squares(const T* x, int64_t n) {
  F32 sums[4] = {};
  int64_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes)
    for (int j = 0; j < 4; ++j) {
      const F32 v = load(x + i + j * kLanes);
      sums[j] = fma(v, v, sums[j]);
    }
  for (; i + kLanes <= n; i += kLanes) {
    const F32 v = load(x + i);
    sums[0] = fma(v, v, sums[0]);
  }
  const F32 v = load_n(x + i, int(n - i));
  sums[1] = fma(v, v, sums[1]);
  return sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// As sum_of_squares of residual += x; the residual is rounded to T before it is squared.
template <typename T>
TANDEM_INLINE float add_and_sum_squares(const T* x, T* residual, int64_t n) {
  F32 sums[2] = {};
  int64_t i = 0;
  for (; i + 2 * kLanes <= n; i += 2 * kLanes)
    for (int j = 0; j < 2; ++j) {
      const int64_t at = i + j * kLanes;
      const F32 v = rounded_to<T>(load(residual + at) + load(x + at));
      store(residual + at, v);
      sums[j] = fma(v, v, sums[j]);
    }
  for (int64_t left = n - i; left > 0; left = n - i) {
    const int count = left < kLanes ? int(left) : kLanes;
    const F32 v = rounded_to<T>(load_n(residual + i, count) + load_n(x + i, count));
    store_n(residual + i, v, count);
    sums[0] = fma(v, v, sums[0]);
    i += count;
  }
  return sum(sums[0] + sums[1]);
}

// out[0 … n) = x * scale * weight.
template <typename T, typename W>
TANDEM_INLINE void scale_by_weight(const T* x, const W* weight, float scale, T* out, int64_t n) {
  const F32 factor = splat(scale);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(out + i, load(x + i) * factor * load(weight + i));
  const int left = int(n - i);
  store_n(out + i, load_n(x + i, left) * factor * load_n(weight + i, left), left);
}

TANDEM_INLINE float inverse_rms(float squares, int64_t n, float eps) {
  return 1.0f / __builtin_sqrtf(squares / float(n) + eps);
}

template <typename T, typename W>
void rms_norm(const T* x, int64_t x_stride, const W* weight, T* out, int64_t tokens, int64_t width, float eps) {
  over_tokens(tokens, tokens * width * 2 * int64_t(sizeof(T)), [=](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) {
      const T* row = x + t * x_stride;
      scale_by_weight(row, weight, inverse_rms(sum_of_squares(row, width), width, eps), out + t * width, width);
    }
  });
}

template <typename T, typename W>
void add_rms_norm(const T* x, int64_t x_stride, T* residual, int64_t residual_stride, const W* weight, T* out,
                  int64_t tokens, int64_t width, float eps) {
  over_tokens(tokens, tokens * width * 4 * int64_t(sizeof(T)), [=](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) {
      T* sums = residual + t * residual_stride;
      const float squares = add_and_sum_squares(x + t * x_stride, sums, width);
      scale_by_weight(sums, weight, inverse_rms(squares, width, eps), out + t * width, width);
    }
  });
}

// x[0 … n) = x * factor.
template <typename T>
void scale(T* x, int64_t n, float factor) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(x + i, load(x + i) * factor);
  store_n(x + i, load_n(x + i, int(n - i)) * factor, int(n - i));
}

// residual[0 … n) += x.
template <typename T>
void add(const T* x, T* residual, int64_t n) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(residual + i, load(residual + i) + load(x + i));
  const int left = int(n - i);
  store_n(residual + i, load_n(residual + i, left) + load_n(x + i, left), left);
}

template <typename T>
void silu_mul(const T* gate_up, int64_t stride, T* out, int64_t tokens, int64_t width) {
  // The exponential costs about as much as four times the bytes.
  over_tokens(tokens, tokens * width * 12 * int64_t(sizeof(T)), [=](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) {
      const T* gate = gate_up + t * stride;
      const T* up = gate + width;
      T* to = out + t * width;
      int64_t i = 0;
      for (; i + kLanes <= width; i += kLanes) store(to + i, silu<T>(load(gate + i)) * load(up + i));
      const int left = int(width - i);
      store_n(to + i, silu<T>(load_n(gate + i, left)) * load_n(up + i, left), left);
    }
  });
}

// One head, in place: (a, b) -> (a cos - b sin, b cos + a sin), a and b its two halves; `scaled` brings the
// norm's factor and weight. Rounded once.
template <typename T, typename W, bool Normed>
TANDEM_INLINE void rotate_head(T* head, const float* cos, const float* sin, const W* weight, float scale,
                               int64_t half) {
  for (int64_t i = 0; i < half; i += kLanes) {
    const int n = half - i < kLanes ? int(half - i) : kLanes;
    const bool whole = n == kLanes;
    T* low = head + i;
    T* high = low + half;
    F32 a = whole ? load(low) : load_n(low, n);
    F32 b = whole ? load(high) : load_n(high, n);
    const F32 c = whole ? load(cos + i) : load_n(cos + i, n);
    const F32 s = whole ? load(sin + i) : load_n(sin + i, n);
    if (Normed) {
      const W* w = weight + i;
      a = a * scale * (whole ? load(w) : load_n(w, n));
      b = b * scale * (whole ? load(w + half) : load_n(w + half, n));
    }
    const F32 turned_a = fma(a, c, -(b * s));  // which product is rounded is not left to the compiler
    const F32 turned_b = fma(b, c, a * s);
    if (whole) {
      store(low, turned_a);
      store(high, turned_b);
    } else {
      store_n(low, turned_a, n);
      store_n(high, turned_b, n);
    }
  }
}

// Heads first … last of a token, normed one by one, or as one row by a weight of as many.
template <typename T, typename W, bool Normed>
TANDEM_INLINE void rotate_heads(T* token, const RotateShape& shape, int64_t t, int64_t first, int64_t last,
                                const W* weight, const HeadNorm& norm) {
  const int64_t dim = shape.head_dim;
  const float* cos = shape.cos + t * shape.cos_token;
  const float* sin = shape.sin + t * shape.sin_token;
  float scale = 1.0f;
  if (Normed && norm.is_whole) {
    float squares = 0.0f;
    for (int64_t h = first; h < last; ++h) squares += sum_of_squares(token + h * shape.qkv_head, dim);
    scale = inverse_rms(squares, (last - first) * dim, norm.eps);
  }
  for (int64_t h = first; h < last; ++h) {
    T* head = token + h * shape.qkv_head;
    if (Normed && !norm.is_whole) scale = inverse_rms(sum_of_squares(head, dim), dim, norm.eps);
    rotate_head<T, W, Normed>(head, cos, sin, weight, scale, dim / 2);
    if (Normed && norm.is_whole) weight += dim;
  }
}

template <typename T, typename W, bool Normed>
void rotate_token(T* token, const RotateShape& shape, int64_t t, const HeadNorm& norm) {
  const int64_t heads = shape.heads;
  rotate_heads<T, W, Normed>(token, shape, t, 0, heads, static_cast<const W*>(norm.q_weight), norm);
  rotate_heads<T, W, Normed>(token, shape, t, heads, heads + shape.kv_heads, static_cast<const W*>(norm.k_weight),
                             norm);
}

// Stores a row of one KV head as slot `slot` of the block whose elements of this side and head begin at `to`.
template <typename T, typename K>
TANDEM_INLINE void store_row(const T* row, K* to, int64_t slot, const RotateShape& shape) {
  if constexpr (kHasScales<K>) {
    const float scale = quantize_row(row, to + slot * shape.kv_slot, shape.head_dim);
    memcpy(to + shape.block_size * shape.head_dim + slot * int64_t(sizeof scale), &scale, sizeof scale);
  } else {
    memcpy(to + slot * shape.kv_slot, row, size_t(shape.head_dim) * sizeof(T));
  }
}

template <typename T, typename K>
void rotate_and_store(T* qkv, K* kv, const RotateShape* shape_at, const HeadNorm* norm) {
  const RotateShape shape = *shape_at;
  const int64_t row_bytes = (shape.heads + 2 * shape.kv_heads) * shape.head_dim * int64_t(sizeof(T));
  over_tokens(shape.tokens, shape.tokens * row_bytes * 3, [=](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) {
      T* token = qkv + t * shape.qkv_token;
      if (norm == nullptr)
        rotate_token<T, T, false>(token, shape, t, HeadNorm{});
      else if (norm->is_wide)
        rotate_token<T, float, true>(token, shape, t, *norm);
      else
        rotate_token<T, T, true>(token, shape, t, *norm);
      const int64_t slot = shape.slots[t];
      if (slot < 0) continue;
      K* to = kv + slot / shape.block_size * shape.kv_block;
      const T* keys = token + shape.heads * shape.qkv_head;
      const T* values = keys + shape.kv_heads * shape.qkv_head;
      for (int64_t h = 0; h < shape.kv_heads; ++h) {
        store_row(keys + h * shape.qkv_head, to + h * shape.kv_head, slot % shape.block_size, shape);
        store_row(values + h * shape.qkv_head, to + h * shape.kv_head + shape.kv_side, slot % shape.block_size, shape);
      }
    }
  });
}

}  // namespace

#define TANDEM_ROTATE(suffix, T, K)                                                                               \
  TANDEM_EXPORT(void, tandem_rotate_and_store_##suffix)                                                           \
  (T * qkv, K * kv, const RotateShape* shape, const HeadNorm* norm) {                                             \
    rotate_and_store(qkv, kv, shape, norm);                                                                       \
  }

#define TANDEM_NORMS(suffix, T, W)                                                                                \
  TANDEM_EXPORT(void, tandem_rms_norm_##suffix)                                                                   \
  (const T* x, int64_t x_stride, const W* weight, T* out, int64_t tokens, int64_t width, float eps) {             \
    rms_norm(x, x_stride, weight, out, tokens, width, eps);                                                       \
  }                                                                                                               \
  TANDEM_EXPORT(void, tandem_add_rms_norm_##suffix)                                                               \
  (const T* x, int64_t x_stride, T* residual, int64_t residual_stride, const W* weight, T* out, int64_t tokens,   \
   int64_t width, float eps) {                                                                                    \
    add_rms_norm(x, x_stride, residual, residual_stride, weight, out, tokens, width, eps);                        \
  }

#define TANDEM_OPERATIONS(suffix, T)                                                                              \
  TANDEM_NORMS(suffix, T, T)                                                                                      \
  TANDEM_EXPORT(void, tandem_scale_##suffix)(T* x, int64_t n, float factor) { scale(x, n, factor); }              \
  TANDEM_EXPORT(void, tandem_add_##suffix)(const T* x, T* residual, int64_t n) { add(x, residual, n); }           \
  TANDEM_EXPORT(void, tandem_silu_mul_##suffix)                                                                   \
  (const T* gate_up, int64_t stride, T* out, int64_t tokens, int64_t width) {                                     \
    silu_mul(gate_up, stride, out, tokens, width);                                                                \
  }                                                                                                               \
  TANDEM_ROTATE(suffix, T, T)                                                                                     \
  TANDEM_ROTATE(suffix##_int8, T, Int8)                                                                           \
  TANDEM_ROTATE(suffix##_fp8, T, Fp8)

TANDEM_OPERATIONS(f32, float)
TANDEM_OPERATIONS(bf16, Bf16)
TANDEM_OPERATIONS(f16, Half)
TANDEM_NORMS(bf16_wide, Bf16, float)
TANDEM_NORMS(f16_wide, Half, float)
