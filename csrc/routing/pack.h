#pragma once

#include <cstddef>
#include <cstdint>

#include "routing/capacity.h"
#include "support/half.h"

namespace mlx_moe {

struct Rows {
  Scalar type;
  const void* data;  // [count, width]
  size_t count, width;
};

// Gathers the token rows x[assignment / top_k] of `groups` experts into tiles
// [groups, capacity, width] of `type`; slots [groups, capacity] names the assignment in each
// slot, -1 for an empty one, whose row is zero.
// Throws Error on a load above the capacity, an expert out of range or given twice, and an
// assignment outside 0 .. x.count * top_k - 1.
void pack(const Rows& x, size_t top_k, const Buckets& kept, const int32_t* experts, size_t groups,
          size_t capacity, Scalar type, void* tiles, int32_t* slots);

}  // namespace mlx_moe
