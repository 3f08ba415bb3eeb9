#include "routing/bucket.h"

#include <algorithm>
#include <bit>
#include <climits>
#include <string>
#include <utility>
#include <vector>

#include "support/error.h"

namespace mlx_moe {
namespace {

constexpr size_t kStackBins = 512;

[[noreturn]] void report_bad_id(const uint32_t* ids, size_t n, size_t experts) {
  size_t i = 0;
  while (i + 1 < n && ids[i] < experts) ++i;
  throw Error("ids[" + std::to_string(i) + "] is " + std::to_string(int32_t(ids[i])) +
              ", expected an expert from 0 to " + std::to_string(experts - 1));
}

// A counting sort bound by its three stores an assignment: more counters side by side gain
// nothing, since the experts of one token differ. `bins` holds mask + 1 zeros, a power of two.
void sort(const uint32_t* __restrict ids, size_t n, size_t experts, uint32_t mask,
          uint32_t* __restrict bins, int32_t* __restrict order, int32_t* __restrict offsets) {
  uint32_t seen = 0;  // masking keeps the counters in bounds; `seen` tells whether it hid a bad id
  for (size_t i = 0; i < n; ++i) {
    seen |= ids[i];
    ++bins[ids[i] & mask];
  }
  uint32_t total = 0;
  for (size_t e = 0; e < experts; ++e) {
    offsets[e] = int32_t(total);
    total += std::exchange(bins[e], total);
  }
  offsets[experts] = int32_t(total);
  if (seen > mask || total != n) report_bad_id(ids, n, experts);
  for (size_t i = 0; i < n; ++i) order[bins[ids[i]]++] = int32_t(i);
}

}  // namespace

void bucket(const uint32_t* ids, size_t n, size_t experts, int32_t* order, int32_t* offsets) {
  require(experts > 0 && experts < INT32_MAX && n <= INT32_MAX,
          "more than 2147483647 ids, or experts not from 1 to 2147483646");
  const size_t bins = std::bit_ceil(experts);
  uint32_t on_stack[kStackBins];
  std::vector<uint32_t> on_heap(bins > kStackBins ? bins : 0);
  if (on_heap.empty()) std::fill_n(on_stack, bins, 0u);
  sort(ids, n, experts, uint32_t(bins - 1), on_heap.empty() ? on_stack : on_heap.data(), order,
       offsets);
}

}  // namespace mlx_moe
