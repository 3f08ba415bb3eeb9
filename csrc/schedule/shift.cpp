#include "schedule/shift.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <numeric>

namespace mlx_moe {

namespace {

double sum(std::span<const double> x) { return std::accumulate(x.begin(), x.end(), 0.0); }

}  // namespace

double total_variation(std::span<const double> a, std::span<const double> b) {
  const double all_a = sum(a), all_b = sum(b);
  if (all_a <= 0 || all_b <= 0) return 0;
  double apart = 0;
  for (size_t i = 0; i < a.size(); ++i) apart += std::abs(a[i] / all_a - b[i] / all_b);
  return apart / 2;
}

double expected_variation(std::span<const double> a, std::span<const double> b) {
  const double all_a = sum(a), all_b = sum(b);
  if (all_a <= 0 || all_b <= 0) return 0;
  const double scale = 2 / std::numbers::pi * (1 / all_a + 1 / all_b);
  double expected = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const double p = (a[i] + b[i]) / (all_a + all_b);
    expected += std::sqrt(std::max(p * (1 - p), 0.0) * scale);
  }
  return expected / 2;
}

}  // namespace mlx_moe
