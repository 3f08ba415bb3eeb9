#pragma once

#include <span>

#include "store/residency.h"

namespace mlx_moe {

// Forwards in order: forward i is of layers[i] and asks for experts[offsets[i] .. offsets[i + 1]).
struct Forwards {
  std::span<const int32_t> layers;
  std::span<const int64_t> offsets;
  std::span<const int32_t> experts;  // of the layer
};

// What a store would count for these forwards, without reading: `experts` and `slot_bytes` of each
// layer. Throws Error on numbers out of range, and where a forward's experts exceed the budget.
StoreCounts replay(std::span<const int32_t> experts, std::span<const int64_t> slot_bytes,
                   const Forwards& forwards, size_t budget, const PolicyOptions& policy);

}  // namespace mlx_moe
