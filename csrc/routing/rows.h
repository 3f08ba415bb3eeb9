#pragma once

#include <cstddef>
#include <cstdint>

#include "support/half.h"

namespace mlx_moe {

// A row to add to a sum, times its score.
struct Term {
  const void* row;
  float score;
  Scalar type;
};

struct Terms {
  const Term* data;
  size_t count;
};

// What one instruction set offers for rows of n values. Rounds to nearest even; what float16 cannot
// hold becomes infinite, a NaN stays one. Rows are aligned to their values, no more.
struct RowCode {
  const char* name;
  // to = from, in another type
  void (*convert)(Scalar from_type, const void* from, Scalar to_type, void* to, size_t n);
  void (*copy)(const void* from, void* to, size_t bytes);
  // A copy past the caches, where the processor can; other threads see it after `fence`.
  void (*stream)(const void* from, void* to, size_t bytes);
  void (*fence)();
  // out = (add ? out : 0) + the sum of score * row, in order. Products and sums are rounded to
  // float32 one by one: the same bits from every instruction set. Asks memory for `next` meanwhile.
  void (*sum)(const Terms& terms, const Terms& next, size_t n, bool add, Scalar out_type,
              void* out);
};

// The code for the instruction set in use (chosen_isa).
const RowCode& row_code();

extern const RowCode scalar_rows, avx2_rows, avx512_rows, neon_rows;

}  // namespace mlx_moe
