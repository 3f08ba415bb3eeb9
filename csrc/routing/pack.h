#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

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

// A tile to fill from these buckets.
struct Tile {
  Buckets kept;
  Tiling tiling;
  void* rows;      // [groups, capacity, width]
  int32_t* slots;  // [groups, capacity]
};

// Throws Error on a load above the capacity, an expert out of range or given twice, and an
// assignment outside 0 .. x.count * top_k - 1.
void check_pack(const Rows& x, std::span<const Tile> tiles);

// Gathers the token rows x[assignment / top_k] into tiles of `type`; slots names the assignment in
// each slot, -1 for an empty one, whose row is zero. One call for all the tiles of a layer reads
// and converts a token once. The arguments have passed check_pack.
void pack(const Rows& x, std::span<const Tile> tiles, Scalar type);

}  // namespace mlx_moe
