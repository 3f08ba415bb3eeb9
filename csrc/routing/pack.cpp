#include "routing/pack.h"

#include <algorithm>
#include <climits>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "routing/rows.h"
#include "support/error.h"
#include "support/scratch.h"
#include "support/thread_pool.h"

namespace mlx_moe {
namespace {

constexpr size_t kChunk = 8;           // tokens a task
constexpr size_t kAlone = 64 << 10;    // tile bytes not worth waking a thread for
constexpr size_t kStreamed = 4 << 20;  // tile bytes that the caches would not keep

// Where each token goes: to the tile rows rows[first[t] .. first[t + 1]).
struct Destinations {
  uint32_t* first;
  char** rows;
};

// Rows of empty slots.
struct Gap {
  char* rows;
  size_t bytes;
};

// Calls fn(tile, the expert's first slot, the assignments of its bucket, their number).
template <class Fn>
void for_buckets(std::span<const Tile> tiles, Fn&& fn) {
  for (const Tile& tile : tiles)
    for (size_t g = 0; g < tile.tiling.groups; ++g) {
      const int32_t* offset = tile.kept.offsets + tile.tiling.experts[g];
      fn(tile, g * tile.tiling.capacity, tile.kept.order + offset[0],
         size_t(offset[1] - offset[0]));
    }
}

// A counting sort of the tiles' rows by token, in scratch.
Destinations by_token(std::span<const Tile> tiles, size_t tokens, size_t row_bytes) {
  size_t n = 0;
  for_buckets(tiles, [&](auto&, auto, auto, size_t load) { n += load; });
  auto** rows = static_cast<char**>(scratch(1, n * sizeof(char*) + (n + tokens + 1) * 4));
  auto* first = reinterpret_cast<uint32_t*>(rows + n);
  uint32_t *next = first + 1, *token = next + tokens;
  std::fill_n(first, tokens + 1, 0u);

  uint32_t* to = token;
  for_buckets(tiles, [&](const Tile& tile, auto, const int32_t* bucket, size_t load) {
    for (size_t i = 0; i < load; ++i)
      ++next[*to++ = uint32_t(bucket[i]) / uint32_t(tile.tiling.top_k)];
  });
  uint32_t total = 0;
  for (size_t t = 0; t < tokens; ++t) total += std::exchange(next[t], total);
  for_buckets(tiles, [&](const Tile& tile, size_t slot, auto, size_t load) {
    char* row = static_cast<char*>(tile.rows) + slot * row_bytes;
    for (size_t i = 0; i < load; ++i, row += row_bytes) rows[next[*token++]++] = row;
  });
  return {first, rows};
}

// Writes the slots; gives the gaps that they leave.
std::vector<Gap> fill_slots(std::span<const Tile> tiles, size_t row_bytes) {
  std::vector<Gap> gaps;
  for_buckets(tiles, [&](const Tile& tile, size_t slot, const int32_t* bucket, size_t load) {
    const size_t empty = tile.tiling.capacity - load, gap = slot + load;
    std::copy_n(bucket, load, tile.slots + slot);
    std::fill_n(tile.slots + gap, empty, -1);
    if (empty > 0 && row_bytes > 0)
      gaps.push_back({static_cast<char*>(tile.rows) + gap * row_bytes, empty * row_bytes});
  });
  return gaps;
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

void check_kept(size_t tokens, size_t top_k, const Buckets& kept) {
  const size_t total = tokens * top_k;
  for (size_t i = 0; i < kept.n; ++i)
    if (uint32_t(kept.order[i]) >= total)
      throw Error("kept[" + std::to_string(i) + "] is " + std::to_string(kept.order[i]) +
                  ", expected an assignment below " + std::to_string(total) + " (" +
                  std::to_string(tokens) + " tokens, k " + std::to_string(top_k) + ")");
}

}  // namespace

void check_pack(const Rows& x, std::span<const Tile> tiles) {
  const Tile* before = nullptr;
  for (const Tile& tile : tiles) {
    const size_t top_k = tile.tiling.top_k;
    require(top_k > 0, "k is 0, expected at least 1");
    require(x.count <= INT32_MAX / top_k, "more than 2147483647 assignments");
    check_loads(tile.kept, tile.tiling);
    const bool checked = before && before->kept.order == tile.kept.order &&
                         before->kept.n == tile.kept.n && before->tiling.top_k == top_k;
    if (!checked) check_kept(x.count, top_k, tile.kept);
    before = &tile;
  }
}

void pack(const Rows& x, std::span<const Tile> tiles, Scalar type) {
  const size_t row_bytes = x.width * size_of(type), from_bytes = x.width * size_of(x.type);
  const Destinations to = by_token(tiles, x.count, row_bytes);
  const std::vector<Gap> gaps = fill_slots(tiles, row_bytes);
  size_t bytes = 0;
  for (const Tile& tile : tiles) bytes += tile.tiling.groups * tile.tiling.capacity * row_bytes;

  const RowCode& code = row_code();
  const auto copy = bytes < kStreamed ? code.copy : code.stream;
  const auto spread = [&](size_t t) {
    const void* row = static_cast<const char*>(x.data) + t * from_bytes;
    char **first = to.rows + to.first[t], **last = to.rows + to.first[t + 1];
    if (x.type != type && first < last) {
      code.convert(x.type, row, type, scratch(0, row_bytes), x.width);
      row = scratch(0, row_bytes);
    }
    for (; first < last; ++first) copy(row, *first, row_bytes);
  };

  const size_t chunks = (x.count + kChunk - 1) / kChunk;
  auto task = [&](size_t i) {
    if (i < chunks)
      for (size_t t = i * kChunk; t < std::min(x.count, (i + 1) * kChunk); ++t) spread(t);
    else
      std::memset(gaps[i - chunks].rows, 0, gaps[i - chunks].bytes);
    code.fence();
  };
  if (bytes < kAlone)
    for (size_t i = 0; i < chunks + gaps.size(); ++i) task(i);
  else
    ThreadPool::shared().run(chunks + gaps.size(), task);
}

}  // namespace mlx_moe
