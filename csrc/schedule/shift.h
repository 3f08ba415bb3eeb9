#pragma once

#include <span>

namespace mlx_moe {

// Total-variation distance of two histograms as shares, 0 to 1; 0 if one of them is empty.
double total_variation(std::span<const double> a, std::span<const double> b);

// The total-variation distance to expect of histograms of `a` and `b` assignments that are drawn
// from the same shares, estimated from both: sum sqrt(2 p (1 - p) (1/a + 1/b) / pi) / 2.
double expected_variation(std::span<const double> a, std::span<const double> b);

}  // namespace mlx_moe
