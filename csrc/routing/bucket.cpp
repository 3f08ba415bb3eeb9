#include "routing/bucket.h"

#include <algorithm>
#include <bit>
#include <climits>
#include <string>
#include <vector>

#include "support/error.h"

namespace mlx_moe {
namespace {

constexpr size_t kStackBins = 4 * 256;

[[noreturn]] void report_bad_id(const uint32_t* ids, size_t n, size_t experts) {
  size_t i = 0;
  while (i + 1 < n && ids[i] < experts) ++i;
  throw Error("ids[" + std::to_string(i) + "] is " + std::to_string(int32_t(ids[i])) +
              ", expected an expert from 0 to " + std::to_string(experts - 1));
}

// The input is cut into S contiguous streams, each with its own counters (bins[e * S + s]), that
// advance side by side: neighbouring increments never wait for each other's store.
template <size_t S>
void sort_streams(const uint32_t* ids, size_t n, size_t experts, uint32_t* bins, int32_t* order,
                  int32_t* offsets) {
  const uint32_t mask = uint32_t(std::bit_ceil(experts)) - 1;
  const size_t length = n / S, rest = length * S;

  uint32_t seen = 0;  // masking keeps the counters in bounds; `seen` tells whether it hid a bad id
  for (size_t i = 0; i < length; ++i)
    for (size_t s = 0; s < S; ++s) {
      uint32_t id = ids[s * length + i];
      seen |= id;
      ++bins[(id & mask) * S + s];
    }
  for (size_t i = rest; i < n; ++i) {
    seen |= ids[i];
    ++bins[(ids[i] & mask) * S + S - 1];
  }

  uint32_t total = 0;
  for (size_t e = 0; e < experts; ++e) {
    offsets[e] = int32_t(total);
    for (size_t s = 0; s < S; ++s) {
      uint32_t count = bins[e * S + s];
      bins[e * S + s] = total;
      total += count;
    }
  }
  offsets[experts] = int32_t(total);
  if (seen > mask || total != n) report_bad_id(ids, n, experts);

  for (size_t i = 0; i < length; ++i)
    for (size_t s = 0; s < S; ++s) {
      size_t at = s * length + i;
      order[bins[ids[at] * S + s]++] = int32_t(at);
    }
  for (size_t i = rest; i < n; ++i) order[bins[ids[i] * S + S - 1]++] = int32_t(i);
}

}  // namespace

void bucket(const uint32_t* ids, size_t n, size_t experts, int32_t* order, int32_t* offsets) {
  require(experts > 0 && experts <= INT32_MAX,
          "num_experts is " + std::to_string(experts) + ", expected 1 to 2147483647");
  require(n <= INT32_MAX, "" + std::to_string(n) + " ids, expected at most 2147483647");

  const size_t streams = n >= 4 * experts ? 4 : 1, bins = std::bit_ceil(experts) * streams;
  uint32_t on_stack[kStackBins];
  std::vector<uint32_t> on_heap(bins > kStackBins ? bins : 0);
  uint32_t* counters = on_heap.empty() ? on_stack : on_heap.data();
  if (on_heap.empty()) std::fill_n(on_stack, bins, 0u);

  if (streams == 4) sort_streams<4>(ids, n, experts, counters, order, offsets);
  else sort_streams<1>(ids, n, experts, counters, order, offsets);
}

}  // namespace mlx_moe
