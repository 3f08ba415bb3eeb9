#pragma once

#include <cstddef>
#include <cstdint>

namespace mlx_moe {

// to[c * to_stride + r] = from[r * from_stride + c] for r < rows and c < cols. Strides count
// values. The values between the rows of `to` are not touched.
void transpose(const uint16_t* from, size_t from_stride, size_t rows, size_t cols, uint16_t* to,
               size_t to_stride);

}  // namespace mlx_moe
