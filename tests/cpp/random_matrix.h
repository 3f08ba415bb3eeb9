#pragma once

#include <cmath>
#include <random>
#include <vector>

#include "experts/matrix.h"

// A random stacked weight in one of MLX's formats together with its values in float64, decoded
// here from the definition of the format and not by the code under test.
struct Format {
  const char* name;
  mlx_moe::Mode mode;
  int bits = 0, group = 0;
  mlx_moe::Scalar type = mlx_moe::Scalar::f32;
};

inline const std::vector<Format> kFormats = {
    {"f32", mlx_moe::Mode::dense, 0, 0, mlx_moe::Scalar::f32},
    {"f16", mlx_moe::Mode::dense, 0, 0, mlx_moe::Scalar::f16},
    {"bf16", mlx_moe::Mode::dense, 0, 0, mlx_moe::Scalar::bf16},
    {"affine 2/32 f32", mlx_moe::Mode::affine, 2, 32, mlx_moe::Scalar::f32},
    {"affine 2/128 bf16", mlx_moe::Mode::affine, 2, 128, mlx_moe::Scalar::bf16},
    {"affine 3/64 bf16", mlx_moe::Mode::affine, 3, 64, mlx_moe::Scalar::bf16},
    {"affine 3/32 f16", mlx_moe::Mode::affine, 3, 32, mlx_moe::Scalar::f16},
    {"affine 4/32 f16", mlx_moe::Mode::affine, 4, 32, mlx_moe::Scalar::f16},
    {"affine 4/64 bf16", mlx_moe::Mode::affine, 4, 64, mlx_moe::Scalar::bf16},
    {"affine 4/128 f32", mlx_moe::Mode::affine, 4, 128, mlx_moe::Scalar::f32},
    {"affine 5/64 bf16", mlx_moe::Mode::affine, 5, 64, mlx_moe::Scalar::bf16},
    {"affine 5/32 f32", mlx_moe::Mode::affine, 5, 32, mlx_moe::Scalar::f32},
    {"affine 6/64 f16", mlx_moe::Mode::affine, 6, 64, mlx_moe::Scalar::f16},
    {"affine 6/32 bf16", mlx_moe::Mode::affine, 6, 32, mlx_moe::Scalar::bf16},
    {"affine 8/64 bf16", mlx_moe::Mode::affine, 8, 64, mlx_moe::Scalar::bf16},
    {"affine 8/128 f32", mlx_moe::Mode::affine, 8, 128, mlx_moe::Scalar::f32},
    {"mxfp4", mlx_moe::Mode::mxfp4, 4, 32},
    {"mxfp8", mlx_moe::Mode::mxfp8, 8, 32},
    {"nvfp4", mlx_moe::Mode::nvfp4, 4, 16},
};

class RandomMatrix {
 public:
  mlx_moe::Matrix m;
  std::vector<double> values;  // [experts, rows, cols]
  std::vector<double> added;   // [experts, rows], empty without an added bias

  RandomMatrix(const Format& f, size_t experts, size_t rows, size_t cols, std::mt19937& random)
      : random_(random) {
    m.mode = f.mode;
    m.type = f.type;
    m.bits = f.bits;
    m.group = f.group;
    m.experts = experts;
    m.rows = rows;
    m.cols = cols;
    values.resize(experts * rows * cols);
    weight_.resize(experts * rows * m.row_bytes());
    spread_ = 1 / std::sqrt(double(cols));
    f.mode == mlx_moe::Mode::dense ? fill_dense() : fill_quantised();
    m.weight = weight_.data();
  }
  RandomMatrix(const RandomMatrix&) = delete;

  void add_bias(mlx_moe::Scalar type) {
    added_.resize(m.experts * m.rows * size_of(type));
    for (size_t i = 0; i < m.experts * m.rows; ++i)
      added.push_back(store(type, added_, i, uniform(-1, 1)));
    m.added = added_.data();
    m.added_type = type;
  }

  double at(size_t expert, size_t row, size_t col) const {
    return values[(expert * m.rows + row) * m.cols + col];
  }

 private:
  double uniform(double low, double high) {
    return std::uniform_real_distribution<double>(low, high)(random_);
  }

  static double store(mlx_moe::Scalar type, std::vector<uint8_t>& to, size_t i, double v) {
    mlx_moe::store_scalar(type, to.data(), i, float(v));
    return mlx_moe::load_scalar(type, to.data(), i);
  }

  void fill_dense() {
    for (size_t i = 0; i < values.size(); ++i)
      values[i] = store(m.type, weight_, i, uniform(-spread_, spread_));
  }

  void fill_quantised() {
    for (auto& byte : weight_) byte = uint8_t(random_());
    if (m.mode == mlx_moe::Mode::mxfp8)
      for (auto& byte : weight_)
        if ((byte & 0x7f) == 0x7f) byte = 0;  // NaN
    const size_t groups = values.size() / size_t(m.group);
    scales_.resize(groups * m.scale_size());
    if (m.mode == mlx_moe::Mode::affine) biases_.resize(scales_.size());
    if (m.mode == mlx_moe::Mode::nvfp4)
      for (size_t e = 0; e < m.experts; ++e)
        global_.push_back(float(uniform(1, 2) * spread_ * 448 * 6));
    for (size_t g = 0; g < groups; ++g) fill_group(g);
    m.scales = scales_.data();
    m.biases = biases_.empty() ? nullptr : biases_.data();
    m.global_scale = global_.empty() ? nullptr : global_.data();
  }

  void fill_group(size_t g) {
    double scale = 0, bias = 0;
    switch (m.mode) {
      case mlx_moe::Mode::affine: {
        const double largest = (1 << m.bits) - 1;
        scale = store(m.type, scales_, g, uniform(0.5, 2) * spread_ / largest);
        bias = store(m.type, biases_, g, -scale * largest * uniform(0.4, 0.6));
        break;
      }
      case mlx_moe::Mode::nvfp4:
        scales_[g] = uint8_t(random_() % 8 ? 0x20 + random_() % 32 : random_() % 8);  // 1/8..2, ~0
        scale = e4m3(scales_[g]) * double(global_[g / (values.size() / m.group / m.experts)]) /
                (448 * 6);
        break;
      default:
        scales_[g] = uint8_t(124 + std::ilogb(spread_) + int(random_() % 4) -
                             (m.mode == mlx_moe::Mode::mxfp8 ? 7 : 0));
        scale = std::ldexp(1.0, scales_[g] - 127);
    }
    for (size_t i = g * size_t(m.group); i < (g + 1) * size_t(m.group); ++i)
      values[i] = scale * code_value(i) + bias;
  }

  // Value i of the whole bit stream; rows are whole bytes, so the stream has no gaps.
  double code_value(size_t i) const {
    uint32_t code = 0;
    for (size_t bit = 0; bit < size_t(m.bits); ++bit) {
      const size_t at = i * size_t(m.bits) + bit;
      code |= uint32_t(weight_[at / 8] >> (at % 8) & 1) << bit;
    }
    if (m.mode == mlx_moe::Mode::affine) return code;
    return m.mode == mlx_moe::Mode::mxfp8 ? e4m3(uint8_t(code)) : e2m1(uint8_t(code));
  }

  static double small_float(int sign, int exponent, int mantissa, int bits, int bias) {
    const double fraction = std::ldexp(mantissa, -bits);
    const double value =
        exponent ? std::ldexp(1 + fraction, exponent - bias) : std::ldexp(fraction, 1 - bias);
    return sign ? -value : value;
  }
  static double e2m1(uint8_t v) { return small_float(v >> 3, v >> 1 & 3, v & 1, 1, 1); }
  static double e4m3(uint8_t v) { return small_float(v >> 7, v >> 3 & 15, v & 7, 3, 7); }

  std::mt19937& random_;
  double spread_;
  std::vector<uint8_t> weight_, scales_, biases_, added_;
  std::vector<float> global_;
};
