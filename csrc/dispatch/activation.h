#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>

namespace mlx_moe {

// What stands between an expert's matrices. With the gate g and, where there are three matrices,
// the other projection u:
//   h = min(f(min(g, gate_limit)), limit) * (up(u) + shift)
// where up is the identity, a clip to up_limit or, for situ, linear_beta * tanh(u / linear_beta).
struct Activation {
  enum class Shape : uint8_t { sigmoid, gelu_tanh, gelu_erf, relu, relu2, situ };
  static constexpr float kNone = __builtin_inff();

  Shape shape = Shape::sigmoid;
  bool gated = true;  // three matrices
  float alpha = 1, gate_limit = kNone, limit = kNone, up_limit = kNone, shift = 0;
  float beta = 1, linear_beta = 0;  // situ

  // silu(gate) * up, for which there is a fused kernel.
  bool is_swiglu() const {
    return gated && shape == Shape::sigmoid && alpha == 1 && gate_limit == kNone &&
           limit == kNone && up_limit == kNone && shift == 0;
  }
};

// The activation that a manifest names, with its parameters by name. Throws Error on a name that is
// not known here, and on a parameter that is missing, unknown or not above 0.
Activation parse_activation(const std::string& name, std::map<std::string, float> parameters);

// h [n] in half precision from g [n] and, if gated, u [n].
void apply(const Activation& activation, const float* g, const float* u, size_t n, uint16_t* h);

}  // namespace mlx_moe
