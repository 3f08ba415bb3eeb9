#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "routing/pack.h"

namespace mlx_moe {

// Rows to sum: a tile of results, or rows computed elsewhere. Row i is that of assignments[i], or
// of none where that is -1 (an empty slot of a tile).
struct Part {
  Rows rows;
  const int32_t* assignments;  // [rows.count]
};

struct Scores {
  const float* data;  // [tokens, top_k]
  size_t tokens, top_k;
};

struct Sums {
  Scalar type;
  void* data;  // [tokens, width]
  size_t width;
};

// out[t] = sum of scores[a] * the row of assignment a, over t's assignments a in their order
// wherever their rows are, in float32, rounded to out's type at the end. Tokens without rows get
// zeros. `accumulate` adds to what out holds.
// Throws Error before it writes on an assignment out of range or given twice, and on rows of
// another width than out's.
void combine(std::span<const Part> parts, const Scores& scores, bool accumulate, const Sums& out);

}  // namespace mlx_moe
