// The experts of a layer, as those see them who only pass them on.

#pragma once

#include <stdint.h>

struct Product;

// Built by kernels/cpu/experts.py, field by field.
struct Experts {
  const Product* router;           // E -> X scores
  const Product* const* gate_up;   // [X] E -> I, gated; one more if every token has one more, with an I of its own
  const Product* const* down;      // [X] I -> E, and likewise
  const Product* shared_gate;      // E -> 1, whose sigmoid is that one's share; null if there is none
  int64_t experts, active;         // X, and K of each token
  int64_t adds_to_one;             // 1: the shares of those K do; else they are what softmax over all gave them
};

// Phases of a team's job that `tandem_experts_phases_<type>` takes.
constexpr int kExpertPhases = 6;
