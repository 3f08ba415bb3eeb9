#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "routing/bucket.h"
#include "routing/capacity.h"
#include "support/error.h"

using namespace mlx_moe;

namespace {

using Ints = std::vector<int32_t>;

struct Case {
  Ints order, offsets;
  Buckets view() const { return {order.data(), order.size(), offsets.data(), offsets.size() - 1}; }
};

struct Split {
  Ints kept, offsets, overflowed;
  bool operator==(const Split&) const = default;
};

Split run(const Case& c, const Ints& capacities, const float* importance) {
  check_buckets("test", c.view());
  Split s;
  s.offsets.resize(c.offsets.size());
  const size_t m = count_kept(c.view(), capacities.data(), s.offsets.data());
  s.kept.resize(m);
  s.overflowed.resize(c.order.size() - m);
  split(c.view(), s.offsets.data(), importance, s.kept.data(), s.overflowed.data());
  return s;
}

// Full sort by (importance falling, assignment rising), then back to token order.
Split reference(const Case& c, const Ints& capacities, const float* importance) {
  Split s{{}, {0}, {}};
  for (size_t e = 0; e + 1 < c.offsets.size(); ++e) {
    Ints bucket(c.order.begin() + c.offsets[e], c.order.begin() + c.offsets[e + 1]);
    Ints ranked = bucket;
    if (importance)
      std::stable_sort(ranked.begin(), ranked.end(),
                       [&](int32_t a, int32_t b) { return importance[a] > importance[b]; });
    ranked.resize(std::min<size_t>(ranked.size(), size_t(capacities[e])));
    for (int32_t a : bucket) {
      const bool fits = std::find(ranked.begin(), ranked.end(), a) != ranked.end();
      (fits ? s.kept : s.overflowed).push_back(a);
    }
    s.offsets.push_back(int32_t(s.kept.size()));
  }
  return s;
}

Case random_case(std::mt19937& random, size_t n, size_t experts) {
  std::vector<uint32_t> ids(n);
  for (auto& id : ids) id = uint32_t(random() % experts);
  Case c{Ints(n), Ints(experts + 1)};
  bucket(ids.data(), n, experts, c.order.data(), c.offsets.data());
  return c;
}

}  // namespace

TEST_CASE("capacity splits random buckets as a full sort does") {
  std::mt19937 random(2);
  for (int round = 0; round < 60; ++round) {
    CAPTURE(round);
    const size_t experts = 1 + random() % 9, n = random() % 400;
    const Case c = random_case(random, n, experts);
    Ints capacities(experts);
    for (auto& capacity : capacities) capacity = int32_t(random() % 90);
    const float values[] = {-INFINITY, -1.5f, -0.0f, 0.0f, 1e-40f, 0.25f, 0.5f, INFINITY};
    std::vector<float> importance(n);
    for (auto& i : importance) i = values[random() % 8];
    CHECK(run(c, capacities, nullptr) == reference(c, capacities, nullptr));
    CHECK(run(c, capacities, importance.data()) == reference(c, capacities, importance.data()));
  }
}

TEST_CASE("pruning keeps the most important, ties to the earlier token, in token order") {
  const Case c{{0, 2, 3, 5, 1, 4}, {0, 4, 6}};
  const float importance[] = {0.5f, 0.1f, 0.9f, 0.5f, 0.2f, 0.5f};
  CHECK(run(c, {2, 1}, importance) == Split{{0, 2, 4}, {0, 2, 3}, {3, 5, 1}});
  CHECK(run(c, {2, 1}, nullptr) == Split{{0, 2, 1}, {0, 2, 3}, {3, 5, 4}});
  CHECK(run(c, {0, 9}, importance) == Split{{1, 4}, {0, 0, 2}, {0, 2, 3, 5}});
}

TEST_CASE("capacity refuses what cannot be a bucket list") {
  const float importance[] = {1, NAN};
  const float finite[] = {1, 2};
  CHECK_THROWS_AS(run({{0, 1}, {0, 2}}, {1}, importance), Error);
  CHECK_THROWS_AS(run({{0, 2}, {0, 2}}, {1}, finite), Error);
  CHECK_THROWS_AS(run({{0, -1}, {0, 2}}, {1}, finite), Error);
  CHECK_THROWS_AS(run({{0, 1}, {0, 2}}, {-1}, nullptr), Error);
  CHECK_THROWS_AS(run({{0, 1}, {0, 1}}, {1}, nullptr), Error);
  CHECK_THROWS_AS(run({{0, 1}, {1, 2}}, {1}, nullptr), Error);
  CHECK_THROWS_AS(run({{0, 1}, {0, 3, 2}}, {1, 1}, nullptr), Error);
}
