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

// The experts of a group and the shape of their tile: `capacity` slots each.
struct Tiling {
  const int32_t* experts;
  size_t groups, capacity, top_k;
};

// Throws Error on a load above the capacity, an expert out of range or given twice, and an
// assignment outside 0 .. x.count * top_k - 1.
void check_pack(const Rows& x, const Buckets& kept, const Tiling& tiling);

// Gathers the token rows x[assignment / top_k] into tiles [groups, capacity, width] of `type`;
// slots [groups, capacity] names the assignment in each slot, -1 for an empty one, whose row is
// zero. The arguments have passed check_pack.
void pack(const Rows& x, const Buckets& kept, const Tiling& tiling, Scalar type, void* tiles,
          int32_t* slots);

}  // namespace mlx_moe
