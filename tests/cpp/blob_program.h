#pragma once

#include <unistd.h>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "dispatch/host.h"
#include "support/half.h"

// A weight file with random experts, and their outputs in float64.
class BlobProgram {
 public:
  using Function = std::function<double(double gate, double up)>;  // one input: up alone

  mlx_moe::HostProgram program;

  BlobProgram(size_t experts, size_t width, size_t inner, const std::string& activation,
              std::map<std::string, float> parameters, bool int8, bool biases, Function function)
      : function_(std::move(function)), int8_(int8) {
    program.width = width;
    program.inner = inner;
    program.capacities = {4, 8};
    program.activation = mlx_moe::parse_activation(activation, std::move(parameters));
    for (size_t e = 0; e < experts; ++e) {
      mlx_moe::BlobExpert at;
      Values v;
      if (program.activation.gated) at.gate = matrix(v.gate, inner, width);
      at.up = matrix(v.up, inner, width);
      at.down = matrix(v.down, width, inner);
      v.gate_bias.resize(inner), v.up_bias.resize(inner), v.down_bias.resize(width);
      if (biases) {
        if (program.activation.gated) at.gate_bias = half(v.gate_bias);
        at.up_bias = half(v.up_bias);
        at.down_bias = half(v.down_bias);
      }
      program.experts.push_back(at);
      values_.push_back(std::move(v));
    }
    static int made = 0;
    auto name = "mlx_moe_blob_" + std::to_string(getpid()) + "_" + std::to_string(made++);
    program.blob = (std::filesystem::temp_directory_path() / name).string();
    std::ofstream(program.blob, std::ios::binary)
        .write(reinterpret_cast<const char*>(bytes_.data()), std::streamsize(bytes_.size()));
  }
  ~BlobProgram() { std::remove(program.blob.c_str()); }
  BlobProgram(const BlobProgram&) = delete;

  // Relative Frobenius error of y [groups, capacity, width] for x.
  double error(const std::vector<uint16_t>& x, const std::vector<uint16_t>& y,
               size_t capacity) const {
    double wrong = 0, size = 0;
    for (size_t g = 0; g < values_.size(); ++g)
      for (size_t t = 0; t < capacity; ++t) {
        const size_t at = (g * capacity + t) * program.width;
        const std::vector<double> expected = output(values_[g], x.data() + at);
        for (size_t i = 0; i < program.width; ++i) {
          const double found = mlx_moe::f16_to_f32(y[at + i]);
          wrong += (found - expected[i]) * (found - expected[i]);
          size += expected[i] * expected[i];
        }
      }
    return std::sqrt(wrong / size);
  }

  std::vector<uint16_t> input(size_t capacity, float scale = 1) {
    std::vector<uint16_t> x(values_.size() * capacity * program.width);
    for (auto& h : x) h = mlx_moe::f32_to_f16(scale * uniform(-2, 2));
    return x;
  }

 private:
  struct Values {
    std::vector<double> gate, up, down, gate_bias, up_bias, down_bias;
  };

  float uniform(float low, float high) {
    return std::uniform_real_distribution<float>(low, high)(random_);
  }

  size_t append(const void* data, size_t size) {
    while (bytes_.size() % 64) bytes_.push_back(0);
    const size_t at = bytes_.size();
    auto* p = static_cast<const uint8_t*>(data);
    bytes_.insert(bytes_.end(), p, p + size);
    return at;
  }

  mlx_moe::BlobTensor half(std::vector<double>& values, float spread = 0.5f) {
    std::vector<uint16_t> stored;
    for (double& v : values) {
      stored.push_back(mlx_moe::f32_to_f16(uniform(-spread, spread)));
      v = mlx_moe::f16_to_f32(stored.back());
    }
    return {append(stored.data(), stored.size() * 2), std::nullopt};
  }

  mlx_moe::BlobTensor matrix(std::vector<double>& values, size_t rows, size_t cols) {
    values.resize(rows * cols);
    const float spread = 1 / std::sqrt(float(cols));
    if (!int8_) return half(values, spread);
    std::vector<int8_t> codes;
    std::vector<uint16_t> scales;
    for (size_t r = 0; r < rows; ++r) {
      scales.push_back(mlx_moe::f32_to_f16(spread / 127 * uniform(0.5, 1)));
      for (size_t c = 0; c < cols; ++c) {
        codes.push_back(int8_t(int(random_() % 255) - 127));
        const float w = mlx_moe::f16_to_f32(scales.back()) * float(codes.back());
        values[r * cols + c] = mlx_moe::f16_to_f32(mlx_moe::f32_to_f16(w));
      }
    }
    const size_t at = append(codes.data(), codes.size());
    return {at, append(scales.data(), scales.size() * 2)};
  }

  std::vector<double> output(const Values& v, const uint16_t* x) const {
    const size_t width = program.width, inner = program.inner;
    const auto product = [](const std::vector<double>& w, size_t row, const auto& in, size_t n) {
      double sum = 0;
      for (size_t i = 0; i < n; ++i) sum += w[row * n + i] * in(i);
      return sum;
    };
    const auto at = [&](size_t i) { return double(mlx_moe::f16_to_f32(x[i])); };
    std::vector<double> h(inner), y(width);
    for (size_t i = 0; i < inner; ++i) {
      const double up = product(v.up, i, at, width) + v.up_bias[i];
      const double gate = v.gate.empty() ? 0 : product(v.gate, i, at, width) + v.gate_bias[i];
      h[i] = function_(gate, up);
    }
    for (size_t i = 0; i < width; ++i)
      y[i] = product(v.down, i, [&](size_t j) { return h[j]; }, inner) + v.down_bias[i];
    return y;
  }

  Function function_;
  bool int8_;
  std::mt19937 random_{7};
  std::vector<uint8_t> bytes_;
  std::vector<Values> values_;
};
