// Shapes and strides, in elements, of one step's rotate_and_store; the same for every layer that turns by the same
// angles, and for any part of the tokens. And a layer's norm of q and k. The same structs stand in
// kernels/cpu/operations.py.

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

struct HeadNorm {
  const void *q_weight, *k_weight;  // [D] of the heads' type; if wide, of float; if whole, [H * D] and [Hkv * D]
  int64_t is_wide, is_whole;        // 1 if so; whole: all heads of q as one row, and those of k
  float eps;
};

}  // namespace
