#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "support/half.h"

namespace mlx_moe {

// How the values of a weight are stored. The quantised modes are MLX's own
// (https://ml-explore.github.io/mlx/build/html/python/_autosummary/mlx.core.quantize.html).
enum class Mode : uint8_t { dense, affine, mxfp4, mxfp8, nvfp4 };

// Where the arrays of one expert begin, each as in a Matrix; weight is null where it is absent.
struct ExpertArrays {
  const uint8_t *weight = nullptr, *scales = nullptr, *biases = nullptr, *added = nullptr;
  const float* global_scale = nullptr;
};

// A stack of expert weights [experts, rows, cols] where the caller keeps it; nothing is copied.
// Quantised rows are bit streams, low bits first; a group of `group` values shares one scale
// (affine: w = scale * q + bias; the others: w = scale * value(q)).
struct Matrix {
  Mode mode = Mode::dense;
  Scalar type = Scalar::f32;  // of dense values, or of affine scales and biases
  int bits = 0, group = 0;    // quantised modes only
  size_t experts = 0, rows = 0, cols = 0;
  const uint8_t* weight = nullptr;
  const uint8_t* scales = nullptr;
  const uint8_t* biases = nullptr;      // affine
  const float* global_scale = nullptr;  // nvfp4, one an expert, optional
  // Copies of some experts in a kernel's own layout (see PackedExperts), optional.
  const void* const* packed = nullptr;
  const uint8_t* added = nullptr;  // added to the output, [experts, rows], optional
  Scalar added_type = Scalar::f32;
  // For experts that do not follow each other in memory: one an expert, read in place of the arrays
  // above, of which those that exist are only told by not being null.
  const ExpertArrays* table = nullptr;

  // Always inlined: of a shared copy the linker might keep the one that was compiled for a newer
  // instruction set.
  [[gnu::always_inline]] size_t groups() const { return cols / size_t(group); }
  [[gnu::always_inline]] size_t row_bytes() const {
    return mode == Mode::dense ? cols * size_of(type) : cols * bits / 8;
  }
  [[gnu::always_inline]] size_t scale_size() const {
    return mode == Mode::affine ? size_of(type) : 1;
  }
  [[gnu::always_inline]] const uint8_t* row(size_t expert, size_t r) const {
    if (table) return table[expert].weight + r * row_bytes();
    return weight + (expert * rows + r) * row_bytes();
  }
  [[gnu::always_inline]] const uint8_t* row_scales(size_t expert, size_t r) const {
    if (table) return table[expert].scales + r * groups() * scale_size();
    return scales + (expert * rows + r) * groups() * scale_size();
  }
  [[gnu::always_inline]] const uint8_t* row_biases(size_t expert, size_t r) const {
    if (table) return table[expert].biases + r * groups() * scale_size();
    return biases + (expert * rows + r) * groups() * scale_size();
  }
  [[gnu::always_inline]] float added_to(size_t expert, size_t r) const {
    if (!added) return 0.f;
    if (table) return load_scalar(added_type, table[expert].added, r);
    return load_scalar(added_type, added, expert * rows + r);
  }
  [[gnu::always_inline]] float global(size_t expert) const {
    return table ? *table[expert].global_scale : global_scale[expert];
  }
  bool holds(size_t expert) const { return !table || table[expert].weight; }
};

Mode parse_mode(const std::string& name);
const char* name_of(Mode mode);

// Checks that bits and group are ones that MLX writes and fit the row; an Error says which do not.
void validate(const Matrix& m);

}  // namespace mlx_moe
