#pragma once

#include <cstddef>
#include <cstdint>

namespace mlx_moe {

// Stable counting sort of assignments by expert: bucket e is
// order[offsets[e] .. offsets[e+1]), flat assignment numbers in ascending order.
// order holds n values, offsets experts + 1. Throws Error on an id >= experts.
void bucket(const uint32_t* ids, size_t n, size_t experts, int32_t* order, int32_t* offsets);

}  // namespace mlx_moe
