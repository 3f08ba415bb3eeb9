#include "dispatch/transpose.h"

#include <algorithm>
#include <cstring>
#include <tuple>
#include <utility>

#include "support/thread_pool.h"

namespace mlx_moe {

namespace {

constexpr size_t kLanes = 8;
constexpr size_t kRows = 64;  // of `from` at a time: whole cache lines of `to` are written
constexpr size_t kBand = 64;  // columns that one thread takes at a time

void plain(const uint16_t* from, size_t from_stride, size_t rows, size_t cols, uint16_t* to,
           size_t to_stride) {
  for (size_t c = 0; c < cols; ++c)
    for (size_t r = 0; r < rows; ++r) to[c * to_stride + r] = from[r * from_stride + c];
}

#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define MLX_MOE_SHUFFLES
#endif
#endif

#ifdef MLX_MOE_SHUFFLES
typedef uint16_t Lanes __attribute__((vector_size(16)));
typedef uint32_t Pairs __attribute__((vector_size(16)));
typedef uint64_t Quads __attribute__((vector_size(16)));

template <class V>
std::pair<Lanes, Lanes> interleave(Lanes a, Lanes b) {
  const V x = (V)a, y = (V)b;
  if constexpr (sizeof(x[0]) == 2)
    return {(Lanes)__builtin_shufflevector(x, y, 0, 8, 1, 9, 2, 10, 3, 11),
            (Lanes)__builtin_shufflevector(x, y, 4, 12, 5, 13, 6, 14, 7, 15)};
  else if constexpr (sizeof(x[0]) == 4)
    return {(Lanes)__builtin_shufflevector(x, y, 0, 4, 1, 5),
            (Lanes)__builtin_shufflevector(x, y, 2, 6, 3, 7)};
  else
    return {(Lanes)__builtin_shufflevector(x, y, 0, 2), (Lanes)__builtin_shufflevector(x, y, 1, 3)};
}

void square(const uint16_t* from, size_t from_stride, uint16_t* to, size_t to_stride) {
  Lanes v[kLanes], w[kLanes];
  for (size_t i = 0; i < kLanes; ++i) std::memcpy(&v[i], from + i * from_stride, sizeof v[i]);
  for (size_t i = 0; i < 4; ++i)
    std::tie(w[2 * i], w[2 * i + 1]) = interleave<Lanes>(v[2 * i], v[2 * i + 1]);
  for (size_t i = 0; i < 2; ++i)
    for (size_t j = 0; j < 2; ++j)
      std::tie(v[4 * i + 2 * j], v[4 * i + 2 * j + 1]) =
          interleave<Pairs>(w[4 * i + j], w[4 * i + 2 + j]);
  for (size_t i = 0; i < 4; ++i)
    std::tie(w[2 * i], w[2 * i + 1]) = interleave<Quads>(v[i], v[4 + i]);
  for (size_t i = 0; i < kLanes; ++i) std::memcpy(to + i * to_stride, &w[i], sizeof w[i]);
}
#else
void square(const uint16_t* from, size_t from_stride, uint16_t* to, size_t to_stride) {
  plain(from, from_stride, kLanes, kLanes, to, to_stride);
}
#endif

void band(const uint16_t* from, size_t from_stride, size_t rows, size_t cols, uint16_t* to,
          size_t to_stride) {
  for (size_t top = 0; top < rows; top += kRows) {
    const size_t n = std::min(kRows, rows - top), whole = n - n % kLanes;
    size_t c = 0;
    for (; c + kLanes <= cols; c += kLanes) {
      for (size_t r = top; r < top + whole; r += kLanes)
        square(from + r * from_stride + c, from_stride, to + c * to_stride + r, to_stride);
      plain(from + (top + whole) * from_stride + c, from_stride, n - whole, kLanes,
            to + c * to_stride + top + whole, to_stride);
    }
    plain(from + top * from_stride + c, from_stride, n, cols - c, to + c * to_stride + top,
          to_stride);
  }
}

}  // namespace

void transpose(const uint16_t* from, size_t from_stride, size_t rows, size_t cols, uint16_t* to,
               size_t to_stride) {
  ThreadPool::shared().run((cols + kBand - 1) / kBand, [&](size_t i) {
    const size_t c = i * kBand;
    band(from + c, from_stride, rows, std::min(kBand, cols - c), to + c * to_stride, to_stride);
  });
}

}  // namespace mlx_moe
