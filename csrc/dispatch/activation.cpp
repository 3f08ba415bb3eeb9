#include "dispatch/activation.h"

#include <cmath>
#include <initializer_list>

#include "support/error.h"
#include "support/half.h"

namespace mlx_moe {

namespace {

using Shape = Activation::Shape;

struct Known {
  const char* name;
  Shape shape;
  bool gated;
  std::initializer_list<const char*> parameters;  // "?" before what may be left out
};

const Known kKnown[] = {
    {"swiglu", Shape::sigmoid, true, {}},
    {"swiglu_oai", Shape::sigmoid, true, {"alpha", "limit"}},
    {"swiglu_clamped_inputs", Shape::sigmoid, true, {"limit"}},
    {"swiglu_clamped", Shape::sigmoid, true, {"limit"}},
    {"situ", Shape::situ, true, {"beta", "?linear_beta"}},
    {"geglu_tanh", Shape::gelu_tanh, true, {}},
    {"geglu_erf", Shape::gelu_erf, true, {}},
    {"reglu", Shape::relu, true, {}},
    {"silu", Shape::sigmoid, false, {}},
    {"gelu_tanh", Shape::gelu_tanh, false, {}},
    {"gelu_erf", Shape::gelu_erf, false, {}},
    {"gelu_sigmoid", Shape::sigmoid, false, {}},
    {"relu", Shape::relu, false, {}},
    {"relu2", Shape::relu2, false, {}},
};

const Known& find(const std::string& name) {
  std::string names;
  for (const Known& k : kKnown) {
    if (name == k.name) return k;
    names += std::string(names.empty() ? "" : ", ") + k.name;
  }
  throw Error("unknown activation '" + name + "'; known: " + names);
}

float sigmoid(float x) { return 1.f / (1.f + std::exp(-x)); }

float at_most(float v, float limit) { return v > limit ? limit : v; }

float shaped(const Activation& a, float g) {
  switch (a.shape) {
    case Shape::sigmoid:
      return g * sigmoid(a.alpha * g);
    case Shape::gelu_tanh:
      return 0.5f * g * (1.f + std::tanh(0.7978845608f * (g + 0.044715f * g * g * g)));
    case Shape::gelu_erf:
      return 0.5f * g * (1.f + std::erf(g * 0.7071067812f));
    case Shape::situ:
      return a.beta * std::tanh(g / a.beta) * sigmoid(g);
    default: {
      float r = g < 0.f ? 0.f : g;  // NaN stays NaN
      return a.shape == Shape::relu ? r : r * r;
    }
  }
}

float raised(const Activation& a, float u) {
  if (a.linear_beta > 0) return a.linear_beta * std::tanh(u / a.linear_beta);
  return (u < -a.up_limit ? -a.up_limit : at_most(u, a.up_limit)) + a.shift;
}

}  // namespace

Activation parse_activation(const std::string& name, std::map<std::string, float> parameters) {
  const Known& known = find(name);
  Activation a;
  a.shape = known.shape;
  a.gated = known.gated;
  const auto take = [&](const char* key, bool optional, float otherwise) {
    auto found = parameters.extract(key);
    if (!found && optional) return otherwise;
    require(bool(found), "activation ", name, " needs the parameter ", key);
    require(found.mapped() > 0, "activation ", name, " with ", key, " ", found.mapped(),
            ", expected more than 0");
    return found.mapped();
  };
  for (const char* given : known.parameters) {
    const bool optional = *given == '?';
    const std::string key = given + optional;
    if (key == "alpha") a.alpha = take("alpha", optional, 1);
    if (key == "beta") a.beta = take("beta", optional, 1);
    if (key == "linear_beta") a.linear_beta = take("linear_beta", optional, 0);
    if (key == "limit") {
      a.up_limit = take("limit", optional, 0);
      (name == "swiglu_clamped" ? a.limit : a.gate_limit) = a.up_limit;
    }
  }
  if (name == "swiglu_oai") a.shift = 1;
  if (name == "gelu_sigmoid") a.alpha = 1.702f;
  require(parameters.empty(), "activation ", name, " has no parameter ",
          parameters.empty() ? "" : parameters.begin()->first);
  return a;
}

void apply(const Activation& a, const float* g, const float* u, size_t n, uint16_t* h) {
  for (size_t i = 0; i < n; ++i) {
    float f = at_most(shaped(a, at_most(g[i], a.gate_limit)), a.limit);
    h[i] = f32_to_f16(a.gated ? f * raised(a, u[i]) : f);
  }
}

}  // namespace mlx_moe
