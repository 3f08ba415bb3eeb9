#include "routing/capacity.h"

#include <algorithm>
#include <bit>
#include <climits>
#include <string>
#include <vector>

#include "support/error.h"

namespace mlx_moe {
namespace {

// Smaller keys are kept first: falling importance, then rising position in the bucket.
uint64_t priority(float importance, size_t position) {
  uint32_t bits = std::bit_cast<uint32_t>(importance + 0.0f);  // -0 and 0 tie
  uint32_t rising = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return uint64_t(~rising) << 32 | position;
}

void check_importance(const Buckets& b, const float* importance) {
  for (size_t i = 0; i < b.n; ++i)
    if (uint32_t(b.order[i]) >= b.n)
      throw Error("order[" + std::to_string(i) + "] is " + std::to_string(b.order[i]) +
                  ", expected an assignment from 0 to " + std::to_string(b.n - 1));
  for (size_t i = 0; i < b.n; ++i)
    if (importance[i] != importance[i]) throw Error("importance[" + std::to_string(i) + "] is NaN");
}

}  // namespace

void check_buckets(const char* what, const Buckets& b) {
  require(b.n <= INT32_MAX, "more than 2147483647 assignments");
  bool ok = b.offsets[0] == 0 && size_t(b.offsets[b.experts]) == b.n;
  for (size_t e = 0; e < b.experts; ++e) ok &= b.offsets[e] <= b.offsets[e + 1];
  require(ok, std::string(what) + " must rise from 0 to the number of assignments, " +
                  std::to_string(b.n));
}

size_t count_kept(const Buckets& b, const int32_t* capacities, int32_t* kept_offsets) {
  kept_offsets[0] = 0;
  for (size_t e = 0; e < b.experts; ++e) {
    if (capacities[e] < 0)
      throw Error("capacities[" + std::to_string(e) + "] is " + std::to_string(capacities[e]) +
                  ", expected 0 or more");
    kept_offsets[e + 1] =
        kept_offsets[e] + std::min(capacities[e], b.offsets[e + 1] - b.offsets[e]);
  }
  return size_t(kept_offsets[b.experts]);
}

void split(const Buckets& b, const int32_t* kept_offsets, const float* importance, int32_t* kept,
           int32_t* overflowed) {
  if (importance) check_importance(b, importance);
  std::vector<uint64_t> keys, ranked;
  for (size_t e = 0; e < b.experts; ++e) {
    const int32_t* first = b.order + b.offsets[e];
    const size_t load = size_t(b.offsets[e + 1] - b.offsets[e]);
    const size_t fits = size_t(kept_offsets[e + 1] - kept_offsets[e]);
    if (!importance || fits == load || fits == 0) {
      kept = std::copy(first, first + fits, kept);
      overflowed = std::copy(first + fits, first + load, overflowed);
      continue;
    }
    keys.resize(load);
    for (size_t i = 0; i < load; ++i) keys[i] = priority(importance[first[i]], i);
    ranked = keys;
    std::nth_element(ranked.begin(), ranked.begin() + fits - 1, ranked.end());
    const uint64_t last = ranked[fits - 1];
    for (size_t i = 0; i < load; ++i) (keys[i] <= last ? *kept++ : *overflowed++) = first[i];
  }
}

}  // namespace mlx_moe
