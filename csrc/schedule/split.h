#pragma once

#include "schedule/packing.h"
#include "schedule/place.h"

namespace mlx_moe {

// An expert that is nowhere yet over all units: shares by speed, in whole shards and within the
// room; what is left where it takes least longer.
void spread_expert(Packing& packing, size_t expert);

// The makespan, with the noise that is expected.
double score(const Packing& packing, const PlaceOptions& options);

// The same, raised by what each split has to save at least.
double weighed(const Packing& packing, const PlaceOptions& options);

// The unit that takes longest hands on shards, as long as that pays.
void split(Packing& packing, double bound, const PlaceOptions& options);

}  // namespace mlx_moe
