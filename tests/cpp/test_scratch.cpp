#include <doctest/doctest.h>

#include <cstdint>
#include <cstring>
#include <initializer_list>

#include "support/scratch.h"

using namespace mlx_moe;

TEST_CASE("scratch memory is aligned, as long as asked for, and stays until asked for again") {
  for (size_t bytes : {1, 4096, 5000, 64 << 20, 100}) {
    void* p = scratch(0, bytes);
    CHECK(uintptr_t(p) % 64 == 0);
    std::memset(p, 1, bytes);
    scratch(1, 1 << 20);
    CHECK(static_cast<char*>(p)[bytes - 1] == 1);
  }
}

TEST_CASE("a large buffer goes after many small requests") {
  void* large = scratch(2, 64 << 20);
  CHECK(scratch(2, 100) == large);
  size_t same = 0;
  for (int i = 0; i < 3000; ++i) {
    void* p = scratch(2, 100);
    std::memset(p, i, 100);
    same += p == large;
  }
  CHECK(same > 500);
  CHECK(same < 3000);
}
