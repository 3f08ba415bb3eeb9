#include <doctest/doctest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "routing/bucket.h"
#include "support/error.h"

using namespace mlx_moe;

namespace {

struct Sorted {
  std::vector<int32_t> order, offsets;
};

Sorted run(const std::vector<uint32_t>& ids, size_t experts) {
  Sorted s{std::vector<int32_t>(ids.size()), std::vector<int32_t>(experts + 1)};
  bucket(ids.data(), ids.size(), experts, s.order.data(), s.offsets.data());
  return s;
}

Sorted reference(const std::vector<uint32_t>& ids, size_t experts) {
  Sorted s{std::vector<int32_t>(ids.size()), std::vector<int32_t>(experts + 1)};
  std::iota(s.order.begin(), s.order.end(), 0);
  std::stable_sort(s.order.begin(), s.order.end(),
                   [&](int32_t a, int32_t b) { return ids[a] < ids[b]; });
  for (size_t e = 0; e <= experts; ++e)
    s.offsets[e] =
        int32_t(std::count_if(ids.begin(), ids.end(), [&](uint32_t i) { return i < e; }));
  return s;
}

}  // namespace

TEST_CASE("bucket sorts assignments stably by expert") {
  std::mt19937 random(1);
  for (size_t experts : {1, 2, 3, 60, 64, 128, 257, 1000})
    for (size_t n : {0, 1, 2, 3, 5, 8, 63, 511, 512, 515, 4099}) {
      CAPTURE(experts);
      CAPTURE(n);
      std::vector<uint32_t> ids(n);
      for (auto& id : ids) id = uint32_t(random() % experts);
      const Sorted got = run(ids, experts), want = reference(ids, experts);
      CHECK(got.order == want.order);
      CHECK(got.offsets == want.offsets);
    }
}

TEST_CASE("bucket finds an id out of range wherever it stands") {
  for (size_t experts : {1, 60, 64, 128})
    for (size_t n : {1, 7, 8, 700})
      for (size_t at : {size_t(0), n / 2, n - 1})
        for (uint32_t bad :
             {uint32_t(experts), 127u + uint32_t(experts), 0x80000000u, 0xffffffffu}) {
          CAPTURE(experts);
          CAPTURE(n);
          std::vector<uint32_t> ids(n, uint32_t(experts - 1));
          ids[at] = bad;
          const std::string message =
              "ids[" + std::to_string(at) + "] is " + std::to_string(int32_t(bad)) +
              ", expected an expert from 0 to " + std::to_string(experts - 1);
          CHECK_THROWS_WITH_AS(run(ids, experts), message.c_str(), Error);
        }
}

TEST_CASE("bucket refuses zero experts and too many ids") {
  int32_t offsets[2];
  CHECK_THROWS_AS(bucket(nullptr, 0, 0, nullptr, offsets), Error);
  CHECK_THROWS_AS(bucket(nullptr, size_t(1) << 31, 1, nullptr, offsets), Error);
}
