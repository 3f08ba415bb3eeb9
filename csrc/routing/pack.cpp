#include "routing/pack.h"

#include <algorithm>
#include <climits>
#include <string>
#include <vector>

#include "routing/rows.h"
#include "support/error.h"

namespace mlx_moe {
namespace {

using ConvertRow = void (*)(const void* from, void* to, size_t width);

template <Scalar From, Scalar To>
void convert_row(const void* from, void* to, size_t width) {
  if constexpr (From == To) std::copy_n(static_cast<const char*>(from), width * size_of(To), static_cast<char*>(to));
  else
    for (size_t i = 0; i < width; ++i) narrow<To>(to, i, widen<From>(from, i));
}

template <Scalar From>
ConvertRow converter_to(Scalar to) {
  switch (to) {
    case Scalar::f16: return convert_row<From, Scalar::f16>;
    case Scalar::bf16: return convert_row<From, Scalar::bf16>;
    default: return convert_row<From, Scalar::f32>;
  }
}

ConvertRow converter(Scalar from, Scalar to) {
  switch (from) {
    case Scalar::f16: return converter_to<Scalar::f16>(to);
    case Scalar::bf16: return converter_to<Scalar::bf16>(to);
    default: return converter_to<Scalar::f32>(to);
  }
}

void check(const Rows& x, size_t top_k, const Buckets& kept, const int32_t* experts, size_t groups,
           size_t capacity) {
  require(top_k > 0, "pack: k is 0, expected at least 1");
  require(x.count <= INT32_MAX / top_k, "pack: more than 2147483647 assignments");
  check_buckets("pack", kept);
  std::vector<bool> packed(kept.experts);
  for (size_t g = 0; g < groups; ++g) {
    const std::string where = "pack: experts[" + std::to_string(g) + "] is " +
                              std::to_string(experts[g]);
    require(uint32_t(experts[g]) < kept.experts,
            where + ", expected 0 to " + std::to_string(int64_t(kept.experts) - 1));
    const int32_t* bounds = kept.offsets + experts[g];
    const size_t load = size_t(bounds[1] - bounds[0]);
    require(load <= capacity, where + " with " + std::to_string(load) +
                                  " assignments, expected at most the capacity " +
                                  std::to_string(capacity));
    require(!packed[experts[g]], where + " for the second time, expected distinct experts");
    packed[experts[g]] = true;
  }
  for (size_t i = 0; i < kept.n; ++i)
    if (size_t(uint32_t(kept.order[i])) >= x.count * top_k)
      throw Error("pack: kept[" + std::to_string(i) + "] is " + std::to_string(kept.order[i]) +
                  ", expected an assignment below " + std::to_string(x.count * top_k) + " (" +
                  std::to_string(x.count) + " tokens, k " + std::to_string(top_k) + ")");
}

}  // namespace

void pack(const Rows& x, size_t top_k, const Buckets& kept, const int32_t* experts, size_t groups,
          size_t capacity, Scalar type, void* tiles, int32_t* slots) {
  check(x, top_k, kept, experts, groups, capacity);
  const ConvertRow convert = converter(x.type, type);
  const size_t from_bytes = x.width * size_of(x.type), to_bytes = x.width * size_of(type);
  const char* from = static_cast<const char*>(x.data);
  char* to = static_cast<char*>(tiles);
  for (size_t g = 0; g < groups; ++g) {
    const int32_t* bucket = kept.order + kept.offsets[experts[g]];
    const size_t load = size_t(kept.offsets[experts[g] + 1] - kept.offsets[experts[g]]);
    for (size_t i = 0; i < load; ++i, to += to_bytes) {
      convert(from + size_t(bucket[i]) / top_k * from_bytes, to, x.width);
      *slots++ = bucket[i];
    }
    to = std::fill_n(to, (capacity - load) * to_bytes, 0);
    slots = std::fill_n(slots, capacity - load, -1);
  }
}

}  // namespace mlx_moe
