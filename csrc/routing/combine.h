#pragma once

#include <cstddef>
#include <cstdint>

#include "routing/pack.h"

namespace mlx_moe {

// out[t] = sum over rows i with assignments[i] / top_k == t of scores[assignments[i]] * rows[i],
// summed in the order of the assignments whatever the order of the rows; out is [tokens, width],
// scores [tokens, top_k]. A row whose assignment is -1 (an empty slot of a tile) is left out;
// tokens without rows get zeros. `accumulate` adds to what out holds.
// Throws Error before it writes on an assignment out of range or given twice.
void combine(const Rows& rows, const int32_t* assignments, const float* scores, size_t tokens,
             size_t top_k, bool accumulate, float* out);

}  // namespace mlx_moe
