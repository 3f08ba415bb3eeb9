#pragma once

#include "schedule/packing.h"

namespace mlx_moe {

constexpr double kClose = 1e-4;  // share of the makespan that is not worth another step

// No placement of these loads is faster than this.
double lower_bound(const Packing& packing);

// Whole experts leave the unit that takes longest, or trade places with others, as long as that
// relieves it and it takes longer than the bound.
void improve(Packing& packing, double bound);

// The same; and where no single step helps, one that makes things worse and then what single
// steps find. Tried for every expert of the unit that takes longest, to every other unit and
// against every expert there, up to `trials` times.
void look_ahead(Packing& packing, double bound, size_t trials);

}  // namespace mlx_moe
