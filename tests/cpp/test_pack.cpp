#include <doctest/doctest.h>

#include <random>
#include <vector>

#include "routing/bucket.h"
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
  const Tile tile{
      buckets, {experts.data(), experts.size(), capacity, top_k}, p.tiles.data(), p.slots.data()};
  check_buckets("offsets", buckets);
  check_pack(rows, {&tile, 1});
  pack(rows, {&tile, 1}, to);
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

TEST_CASE("all tiles of a layer in one call, small ones and more than the caches hold") {
  std::mt19937 random(5);
  for (size_t width : {5, 2049}) {  // 2049: rows that start nowhere near a cache line
    const size_t count = 600, top_k = 3, experts = 4, n = count * top_k;
    std::vector<uint16_t> x(count * width);
    for (auto& v : x) v = f32_to_bf16(float(int(random() % 256) - 128) / 16);
    std::vector<uint32_t> ids(n);
    for (auto& id : ids) id = uint32_t(random() % experts);
    Ints order(n), offsets(experts + 1);
    bucket(ids.data(), n, experts, order.data(), offsets.data());
    // Buckets in two halves: a tile of experts 2 and 0, one of 3, and one of what is left of 2.
    const int32_t half = (offsets[3] - offsets[2]) / 2;
    const Ints rest_offsets{0, 0, 0, half, half}, first{2, 0}, second{3}, third{2};
    Ints kept_offsets = offsets, kept(order.begin(), order.end());
    kept.erase(kept.begin() + offsets[2], kept.begin() + offsets[2] + half);
    for (size_t e : {3, 4}) kept_offsets[e] -= half;
    const Buckets all{kept.data(), kept.size(), kept_offsets.data(), experts};
    const Buckets rest{order.data() + offsets[2], size_t(half), rest_offsets.data(), experts};

    std::vector<uint16_t> rows[3];
    Ints slots[3];
    const Buckets from[] = {all, all, rest};
    const Ints* groups[] = {&first, &second, &third};
    const size_t capacities[] = {500, 601, size_t(half)};
    std::vector<Tile> tiles;
    for (size_t i = 0; i < 3; ++i) {
      rows[i].assign(groups[i]->size() * capacities[i] * width, 0x5555);
      slots[i].assign(groups[i]->size() * capacities[i], 77);
      tiles.push_back({from[i],
                       {groups[i]->data(), groups[i]->size(), capacities[i], top_k},
                       rows[i].data(),
                       slots[i].data()});
    }
    check_pack({Scalar::bf16, x.data(), count, width}, tiles);
    pack({Scalar::bf16, x.data(), count, width}, tiles, Scalar::f16);

    size_t wrong = 0;
    for (size_t i = 0; i < 3; ++i)
      for (size_t g = 0; g < groups[i]->size(); ++g) {
        const int32_t e = (*groups[i])[g], begin = from[i].offsets[e];
        const size_t load = size_t(from[i].offsets[e + 1] - begin);
        for (size_t s = 0; s < capacities[i]; ++s) {
          const size_t at = g * capacities[i] + s;
          const int32_t a = s < load ? from[i].order[begin + int32_t(s)] : -1;
          wrong += slots[i][at] != a;
          for (size_t c = 0; c < width; ++c) {
            const float want = a < 0 ? 0.0f : bf16_to_f32(x[size_t(a) / top_k * width + c]);
            wrong += f16_to_f32(rows[i][at * width + c]) != want;
          }
        }
      }
    CHECK(wrong == 0);
  }
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

TEST_CASE("pack refuses what is wrong in the last of several tiles") {
  const Ints kept{0, 1, 8}, good{0, 2, 2}, bad{0, 2, 3}, experts{0};
  const Rows x{Scalar::f32, nullptr, 4, 3};
  const Tiling tiling{experts.data(), 1, 2, 2}, small{experts.data(), 1, 1, 2};
  const Buckets some{kept.data(), 2, good.data(), 2}, all{kept.data(), 3, bad.data(), 2};
  const auto check = [&](const Tile& last) {
    const Tile tiles[] = {{some, tiling, nullptr, nullptr}, last};
    check_pack(x, tiles);
  };
  CHECK_NOTHROW(check({some, tiling, nullptr, nullptr}));
  CHECK_THROWS_AS(check({all, tiling, nullptr, nullptr}), Error);
  CHECK_THROWS_AS(check({some, small, nullptr, nullptr}), Error);
}
