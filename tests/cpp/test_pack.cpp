#include <doctest/doctest.h>

#include <vector>

#include "routing/pack.h"
#include "support/error.h"

using namespace mlx_moe;

namespace {

using Ints = std::vector<int32_t>;

// Four tokens of three values, token t holds t + 0.25 * column.
std::vector<char> tokens(Scalar type) {
  std::vector<char> x(12 * size_of(type));
  for (size_t i = 0; i < 12; ++i)
    store_scalar(type, x.data(), i, float(i / 3) + 0.25f * float(i % 3));
  return x;
}

struct Packed {
  std::vector<char> tiles;
  Ints slots;
};

Packed run(Scalar from, Scalar to, const Ints& kept, const Ints& offsets, const Ints& experts,
           size_t capacity, size_t top_k = 2) {
  const auto x = tokens(from);
  const size_t slots = experts.size() * capacity;
  Packed p{std::vector<char>(slots * 3 * size_of(to), 0x55), Ints(slots, 77)};
  const Rows rows{from, x.data(), 4, 3};
  const Buckets buckets{kept.data(), kept.size(), offsets.data(), offsets.size() - 1};
  const Tiling tiling{experts.data(), experts.size(), capacity, top_k};
  check_buckets("offsets", buckets);
  check_pack(rows, buckets, tiling);
  pack(rows, buckets, tiling, to, p.tiles.data(), p.slots.data());
  return p;
}

}  // namespace

TEST_CASE("pack gathers rows in every pair of types and zeroes empty slots") {
  const Ints kept{0, 3, 7, 1, 6}, offsets{0, 3, 3, 5};
  for (Scalar from : {Scalar::f32, Scalar::f16, Scalar::bf16})
    for (Scalar to : {Scalar::f32, Scalar::f16, Scalar::bf16}) {
      CAPTURE(int(from));
      CAPTURE(int(to));
      const Packed p = run(from, to, kept, offsets, {2, 0, 1}, 3);
      CHECK(p.slots == Ints{1, 6, -1, 0, 3, 7, -1, -1, -1});
      for (size_t slot = 0; slot < 9; ++slot)
        for (size_t c = 0; c < 3; ++c) {
          const int32_t a = p.slots[slot];
          const float want = a < 0 ? 0.0f : float(a / 2) + 0.25f * float(c);
          CHECK(load_scalar(to, p.tiles.data(), slot * 3 + c) == want);
        }
    }
}

TEST_CASE("pack of nothing is padding") {
  CHECK(run(Scalar::f32, Scalar::f16, {}, {0, 0}, {0}, 2).slots == Ints{-1, -1});
  CHECK(run(Scalar::f32, Scalar::f16, {}, {0}, {}, 2).slots.empty());
  CHECK(run(Scalar::f32, Scalar::f16, {}, {0, 0}, {0}, 0).slots.empty());
}

TEST_CASE("pack refuses what does not fit") {
  const auto refuses = [](const Ints& kept, const Ints& offsets, const Ints& experts,
                          size_t capacity, size_t top_k = 2) {
    CHECK_THROWS_AS(run(Scalar::f32, Scalar::f32, kept, offsets, experts, capacity, top_k), Error);
  };
  refuses({0, 1}, {0, 2}, {0}, 1);
  refuses({0, 1}, {0, 2}, {1}, 2);
  refuses({0, 1}, {0, 2}, {-1}, 2);
  refuses({0, 1}, {0, 2}, {0, 0}, 2);
  refuses({0, 8}, {0, 2}, {0}, 2);
  refuses({0, -1}, {0, 2}, {0}, 2);
  refuses({0, 1}, {0, 1}, {0}, 2);
  refuses({0, 1}, {0, 2}, {0}, 2, 0);
}
