// Shapes and strides, in elements, of one step's rotate_and_store; the same for every layer, and for any part of the
// tokens. The same struct stands in kernels/cpu/operations.py.

#pragma once

#include <stdint.h>

namespace {

struct RotateShape {
  int64_t tokens, heads, kv_heads, head_dim, block_size;
  int64_t qkv_token, qkv_head;
  int64_t cos_token, sin_token;
  int64_t kv_block, kv_side, kv_head, kv_slot;
  const float* cos;
  const float* sin;
  const int64_t* slots;
};

}  // namespace
