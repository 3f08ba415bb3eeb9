#pragma once

#include "experts/matrix.h"

namespace mlx_moe {

// Row-contiguous rows [rows, cols] of the caller's.
struct Input {
  const void* data;
  Scalar type;
  size_t rows, cols;
};
struct Output {
  void* data;
  Scalar type;
  size_t rows, cols;
};

// The experts that each token is routed to: ids [tokens, k].
struct Routing {
  const uint32_t* ids;
  size_t tokens, k;
};

// y [tokens * k, D] = down . (silu(gate . x) * (up . x)) of every assignment.
void swiglu(const Input& x, const Routing& routing, const Matrix& gate, const Matrix& up,
            const Matrix& down, const Output& y);

// out [tokens, D] = the same, summed over each token's assignments with weights scores [tokens, k].
void swiglu_combine(const Input& x, const Routing& routing, const Input& scores, const Matrix& gate,
                    const Matrix& up, const Matrix& down, const Output& out);

// out [tokens, D] = the weighted sum that swiglu_combine would write for swiglu's rows y
// [tokens * k, D]: the same bits.
void weighted_sum(const Input& y, const Input& scores, const Matrix& gate, const Matrix& up,
                  const Matrix& down, const Output& out);

// y [tokens * k, N] = w . x of every assignment; x has a row a token or a row an assignment.
void grouped(const Input& x, const Routing& routing, const Matrix& w, const Output& y);

// y [rows, N] = w . x for a single matrix.
void linear(const Input& x, const Matrix& w, const Output& y);

// out [rows, n] = softmax(scale * scores) by rows; scores is overwritten. With a period, rows are
// runs of that many causal queries of which the last sees all n values, the one before n - 1; what
// a row does not see is zero.
void softmax(const Output& scores, float scale, size_t period, const Output& out);

}  // namespace mlx_moe
