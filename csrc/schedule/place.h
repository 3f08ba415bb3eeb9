#pragma once

#include "schedule/problem.h"

namespace mlx_moe {

struct PlaceOptions {
  // Each expert that is split must shorten the makespan by this share of it.
  double split_gain = 0.001;
  // Standard deviations by which the next forward's units are expected apart, and the share by
  // which counting adds to the variance of a load (forward / counted). 0: the histogram is exact.
  double noise = 0;
  double counting = 1;
  // The units take turns, as forms of an expert on one processor do: their sum is made small.
  bool serial = false;
  // Where a placement is adjusted: forwards over which what moves is paid for; 0: it is free.
  double horizon = 0;
};

// A placement that takes little longer than the best: longest first, then moves and swaps that
// relieve the unit that takes longest, then splits where they pay. The same input gives the same
// placement. Throws Error on bad input, and if the units cannot hold all experts.
Placement place(const Experts& experts, std::span<const Unit> units,
                std::span<const double> histogram, const PlaceOptions& options);

// The same starting from a placement, of which as much is kept as helps.
Placement adjust(const Experts& experts, std::span<const Unit> units,
                 std::span<const double> histogram, const Placement& from,
                 const PlaceOptions& options);

// What place() makes small: the makespan, with the noise that is expected.
double expected_makespan(const Experts& experts, std::span<const Unit> units,
                         std::span<const double> histogram, const Placement& placement,
                         const PlaceOptions& options);

}  // namespace mlx_moe
