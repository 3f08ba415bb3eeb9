#include "routing/pack.h"

#include <algorithm>
#include <climits>
#include <string>
#include <vector>

#include "support/error.h"
#include "support/thread_pool.h"

namespace mlx_moe {
namespace {

using ConvertRow = void (*)(const void* from, void* to, size_t width);

template <Scalar From, Scalar To>
void convert_row(const void* from, void* to, size_t width) {
  if constexpr (From == To)
    std::copy_n(static_cast<const char*>(from), width * size_of(To), static_cast<char*>(to));
  else
    for (size_t i = 0; i < width; ++i) store_scalar(To, to, i, load_scalar(From, from, i));
}

template <Scalar From>
ConvertRow converter_to(Scalar to) {
  switch (to) {
    case Scalar::f16:
      return convert_row<From, Scalar::f16>;
    case Scalar::bf16:
      return convert_row<From, Scalar::bf16>;
    default:
      return convert_row<From, Scalar::f32>;
  }
}

ConvertRow converter(Scalar from, Scalar to) {
  switch (from) {
    case Scalar::f16:
      return converter_to<Scalar::f16>(to);
    case Scalar::bf16:
      return converter_to<Scalar::bf16>(to);
    default:
      return converter_to<Scalar::f32>(to);
  }
}

void check_loads(const Buckets& kept, const Tiling& tiling) {
  std::vector<bool> packed(kept.experts);
  for (size_t g = 0; g < tiling.groups; ++g) {
    const int32_t expert = tiling.experts[g];
    const auto fail = [&](const std::string& what) {
      throw Error("experts[" + std::to_string(g) + "] is " + std::to_string(expert) + what);
    };
    if (expert < 0 || size_t(expert) >= kept.experts)
      fail(", expected an expert below " + std::to_string(kept.experts));
    const int32_t load = kept.offsets[expert + 1] - kept.offsets[expert];
    if (size_t(load) > tiling.capacity)
      fail(" with " + std::to_string(load) + " assignments, expected at most the capacity " +
           std::to_string(tiling.capacity));
    if (packed[size_t(expert)]) fail(" for the second time, expected distinct experts");
    packed[size_t(expert)] = true;
  }
}

}  // namespace

void check_pack(const Rows& x, const Buckets& kept, const Tiling& tiling) {
  require(tiling.top_k > 0, "k is 0, expected at least 1");
  require(x.count <= INT32_MAX / tiling.top_k, "more than 2147483647 assignments");
  check_loads(kept, tiling);
  const size_t total = x.count * tiling.top_k;
  for (size_t i = 0; i < kept.n; ++i)
    if (uint32_t(kept.order[i]) >= total)
      throw Error("kept[" + std::to_string(i) + "] is " + std::to_string(kept.order[i]) +
                  ", expected an assignment below " + std::to_string(total) + " (" +
                  std::to_string(x.count) + " tokens, k " + std::to_string(tiling.top_k) + ")");
}

void pack(const Rows& x, const Buckets& kept, const Tiling& tiling, Scalar type, void* tiles,
          int32_t* slots) {
  const ConvertRow convert = converter(x.type, type);
  const size_t from_bytes = x.width * size_of(x.type), to_bytes = x.width * size_of(type);
  const char* from = static_cast<const char*>(x.data);
  char* to = static_cast<char*>(tiles);
  ThreadPool::shared().run(tiling.groups, [&](size_t g) {
    char* row = to + g * tiling.capacity * to_bytes;
    int32_t* slot = slots + g * tiling.capacity;
    const int32_t* offset = kept.offsets + tiling.experts[g];
    for (int32_t i = offset[0]; i < offset[1]; ++i, row += to_bytes) {
      const int32_t assignment = kept.order[i];
      convert(from + size_t(assignment) / tiling.top_k * from_bytes, row, x.width);
      *slot++ = assignment;
    }
    const size_t empty = tiling.capacity - size_t(offset[1] - offset[0]);
    std::fill_n(row, empty * to_bytes, 0);
    std::fill_n(slot, empty, -1);
  });
}

}  // namespace mlx_moe
