#pragma once

#include <memory>
#include <vector>

#include "experts/matrix.h"

namespace mlx_moe {

// Copies of some of a matrix's experts in the layout of the kernel that multiplies many half
// precision tokens: no row is unpacked again. They cost memory (bfloat16 tiles: four times 4-bit
// weights) and belong to the very arrays that they were made from.
class PackedExperts {
 public:
  // Copies that `previous` has of the same arrays are shared with it instead of made anew.
  // Throws Error on an expert out of range; holds nothing where the kernel has no such layout.
  PackedExperts(const Matrix& m, const std::vector<size_t>& experts,
                const PackedExperts* previous = nullptr);
  PackedExperts(PackedExperts&&) = default;

  // The table for a Matrix, null unless m reads the arrays that were packed.
  const void* const* table(const Matrix& m) const;
  size_t bytes() const { return bytes_; }

 private:
  const uint8_t *weight_, *scales_, *biases_;
  const void* kernel_ = nullptr;                 // whose layout it is
  std::vector<std::shared_ptr<char[]>> copies_;  // by expert, as `table_`
  std::vector<const void*> table_;
  size_t bytes_ = 0;
};

}  // namespace mlx_moe
