#pragma once

#include <string>

#include "experts/matrix.h"

namespace mlx_moe {

// Rows of activations to read: token i of a bucket is row rows[i] (or i) of base.
struct Gather {
  const void* base;
  Scalar type;
  const int32_t* rows;
  size_t stride;   // elements from row to row
  int32_t divide;  // rows[i] / divide is the row: assignment numbers address tokens
};

// Rows of results to write: token i of a bucket goes to row rows[i] (or i) of base.
struct Scatter {
  void* base;
  Scalar type;
  const int32_t* rows;
  size_t stride;
};

// The micro-kernel interface: what one instruction set offers. A panel is a bucket's activations
// in the kernel's own layout. A block is up to block_rows weight rows of one expert, against every
// token of the panel; blocks start at multiples of block_rows.
struct Kernel {
  const char* name;
  size_t block_rows;
  size_t panel_tokens;  // most tokens in a panel, so that it stays in the second-level cache
  size_t (*panel_bytes)(size_t tokens, size_t cols);
  // panel = the gathered rows, [tokens, cols]
  void (*pack)(const Gather& x, size_t tokens, size_t cols, void* panel);
  // h = silu(gate . x) * (up . x), columns [row0, row0 + rows) of the panel h
  void (*gate_up)(const Matrix& gate, const Matrix& up, size_t expert, size_t row0, size_t rows,
                  const void* x, size_t tokens, void* h);
  // out[:, row0 : row0 + rows] = w . x + added
  void (*project)(const Matrix& w, size_t expert, size_t row0, size_t rows, const void* x,
                  size_t tokens, const Scatter& out);
  // out [cols] = the sum of k rows [k, cols] of y weighted by scores [k], in float32
  void (*combine)(const void* y, Scalar y_type, const float* scores, size_t k, size_t cols,
                  void* out, Scalar out_type);
  // out [n] = softmax(scale * scores[0 : seen]), zero beyond; scores is overwritten
  void (*softmax)(float* scores, size_t n, size_t seen, float scale, void* out, Scalar out_type);
  // Weight rows in the kernel's own layout, which gate_up and project read where m.packed has
  // them; null where a kernel would gain nothing.
  size_t (*packed_bytes)(const Matrix& m) = nullptr;  // of one expert
  void (*pack_rows)(const Matrix& m, size_t expert, size_t row0, size_t rows,
                    void* expert_copy) = nullptr;
};

constexpr size_t kFewTokens = 4;

// The kernel that multiplies w with so many tokens' activations of this type; `isa` as in
// usable_isas(). Up to kFewTokens, and beyond, it is the same for any number.
const Kernel& kernel_for(const std::string& isa, Scalar activations, const Matrix& w,
                         size_t tokens = kFewTokens + 1);

extern const Kernel scalar_kernel, avx2_kernel, avx512_kernel, vnni_kernel, amx_kernel, neon_kernel;

}  // namespace mlx_moe
