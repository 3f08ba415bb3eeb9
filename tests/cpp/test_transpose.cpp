#include <doctest/doctest.h>

#include <vector>

#include "dispatch/transpose.h"

using namespace mlx_moe;

TEST_CASE("every value is moved to its place, and nothing else is written") {
  const struct {
    size_t rows, cols, from_stride, to_stride;
  } cases[] = {{1, 1, 1, 1},       {8, 8, 8, 8},         {7, 9, 11, 13},       {64, 64, 64, 64},
               {65, 130, 130, 72}, {512, 200, 200, 512}, {33, 2048, 2050, 64}, {0, 5, 5, 5}};
  for (const auto& [rows, cols, from_stride, to_stride] : cases) {
    CAPTURE(rows);
    CAPTURE(cols);
    std::vector<uint16_t> from(rows * from_stride + 1), to(cols * to_stride + 1, 0xffff);
    for (size_t i = 0; i < from.size(); ++i) from[i] = uint16_t(i * 40503u % 65521);
    transpose(from.data(), from_stride, rows, cols, to.data(), to_stride);
    size_t wrong = 0;
    for (size_t i = 0; i < to.size(); ++i) {
      const size_t c = i / to_stride, r = i % to_stride;
      wrong += to[i] != (c < cols && r < rows ? from[r * from_stride + c] : 0xffff);
    }
    CHECK(wrong == 0);
  }
}
