#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "schedule/scheduler.h"
#include "schedule/shift.h"
#include "support/error.h"

using namespace mlx_moe;

namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

Unit unit(double assignment, double dispatch = 0, double memory = kInf, double link = kInf) {
  return {assignment, dispatch, kInf, memory, link, kInf};
}

double makespan(const Experts& e, const std::vector<Unit>& units, const std::vector<double>& loads,
                const Placement& p) {
  const auto seconds = unit_seconds(e, units, loads, p);
  return *std::max_element(seconds.begin(), seconds.end());
}

// Of all ways to put whole experts on units within their memory.
double optimum(const Experts& e, const std::vector<Unit>& units, const std::vector<double>& loads) {
  double best = kInf;
  size_t ways = 1;
  for (size_t i = 0; i < e.count; ++i) ways *= units.size();
  for (size_t way = 0; way < ways; ++way) {
    std::vector<double> seconds(units.size()), bytes(units.size());
    size_t rest = way;
    for (size_t i = 0; i < e.count; ++i, rest /= units.size()) {
      const size_t u = rest % units.size();
      seconds[u] += piece_seconds(e, units[u], loads[i], e.shards);
      bytes[u] += e.bytes;
    }
    bool fits = true;
    for (size_t u = 0; u < units.size(); ++u) fits &= bytes[u] <= units[u].memory;
    if (fits) best = std::min(best, *std::max_element(seconds.begin(), seconds.end()));
  }
  return best;
}

std::vector<double> draw(std::mt19937& random, size_t experts, size_t assignments, double skew) {
  std::vector<double> weights(experts), loads(experts);
  std::exponential_distribution<double> exponential(1);
  for (double& w : weights) w = std::pow(exponential(random), skew);
  std::discrete_distribution<size_t> choose(weights.begin(), weights.end());
  for (size_t i = 0; i < assignments; ++i) ++loads[choose(random)];
  return loads;
}

}  // namespace

TEST_CASE("placements of whole experts are near the best of all") {
  std::mt19937 random(1);
  double sum = 0;
  for (int i = 0; i < 100; ++i) {
    CAPTURE(i);
    const Experts e{2 + random() % 6, 1, 1, 1};
    std::vector<Unit> units;
    for (size_t u = 0; u < 1 + random() % 3; ++u)
      units.push_back(unit(1e-6 * double(1 + random() % 4), random() % 2 ? 1e-4 : 0,
                           random() % 2 ? kInf : double(e.count / 2 + 1),
                           random() % 2 ? kInf : 1e6));
    units.push_back(unit(2e-6));
    const auto loads = draw(random, e.count, random() % 1000, double(random() % 3));
    const double found = makespan(e, units, loads, place(e, units, loads, {}));
    const double best = optimum(e, units, loads);
    CHECK(found >= best * (1 - 1e-12));
    CHECK(found <= best * 1.15);
    sum += best > 0 ? found / best : 1;
  }
  CHECK(sum / 100 <= 1.02);
}

TEST_CASE("every placement is whole, fits and is the same again") {
  std::mt19937 random(2);
  for (size_t experts : {1, 2, 33, 257})
    for (uint32_t shards : {1u, 3u, 16u})
      for (size_t units : {1, 2, 5})
        for (double noise : {0.0, 2.0}) {
          CAPTURE(experts);
          CAPTURE(shards);
          CAPTURE(units);
          const Experts e{experts, 10, 1, shards};
          std::vector<Unit> all;
          for (size_t u = 0; u < units; ++u)
            all.push_back(unit(1e-6 * double(1 + u), 1e-6,
                               10 * double((experts + units - 1) / units), u ? 1e6 : kInf));
          const auto loads = draw(random, experts, 1000, 2);
          const Placement p = place(e, all, loads, {0.001, noise, 1});
          CHECK_NOTHROW(check_placement(e, all, p));
          CHECK(p.parts == place(e, all, loads, {0.001, noise, 1}).parts);
          const Placement q = adjust(e, all, draw(random, experts, 1000, 2), p, {});
          CHECK_NOTHROW(check_placement(e, all, q));
        }
}

TEST_CASE("an expert is split where a unit would wait for it, unless that costs more") {
  const Experts e{5, 0, 100, 8};
  const std::vector<double> loads{800, 10, 10, 10, 10};
  const Placement cheap = place(e, std::vector<Unit>(4, unit(1e-6, 1e-6)), loads, {});
  CHECK(std::count(cheap.parts.begin(), cheap.parts.begin() + 4, 2u) == 4);
  const Placement dear = place(e, std::vector<Unit>(4, unit(1e-6, 1e-3)), loads, {});
  CHECK(std::count(dear.parts.begin(), dear.parts.begin() + 4, 8u) == 1);
}

TEST_CASE("variation of histograms") {
  const std::vector<double> a{10, 0, 30}, b{0, 20, 20}, none{0, 0, 0};
  CHECK(total_variation(a, b) == doctest::Approx(0.5));
  CHECK(total_variation(a, none) == 0);
  CHECK(expected_variation(a, none) == 0);
}

TEST_CASE("the scheduler re-plans once for a shift, and not for noise") {
  std::mt19937 random(3);
  Scheduler s({16, 1, 0, 4}, std::vector<Unit>(4, unit(1e-6)), {});
  std::vector<double> weights[2] = {std::vector<double>(16, 1.0), std::vector<double>(16, 1.0)};
  for (size_t i = 0; i < 4; ++i) weights[0][i] = 10, weights[1][4 * i] = 10;
  size_t replans = 0;
  for (int forward = 0; forward < 60; ++forward) {
    const auto& w = weights[forward / 30];
    std::discrete_distribution<size_t> choose(w.begin(), w.end());
    std::vector<double> loads(16);
    for (int i = 0; i < 2000; ++i) ++loads[choose(random)];
    if (const auto replan = s.observe(loads)) {
      ++replans;
      CHECK(forward == 30);
      CHECK(replan->shift > replan->threshold);
      CHECK(replan->after < replan->before);
    }
  }
  CHECK(replans == 1);
  CHECK(s.counts().replans == 1);
  CHECK(s.counts().shifts == 1);
}

TEST_CASE("bad problems are refused") {
  const Experts e{2, 1, 0, 1};
  const std::vector<Unit> one{unit(1)}, small{unit(1, 0, 1)}, wrong{unit(-1)};
  const std::vector<double> loads{1, 2}, few{1}, negative{1, -1};
  CHECK_THROWS_AS(place(e, one, few, {}), Error);
  CHECK_THROWS_AS(place(e, one, negative, {}), Error);
  CHECK_THROWS_AS(place(e, small, loads, {}), Error);
  CHECK_THROWS_AS(place(e, wrong, loads, {}), Error);
  CHECK_THROWS_AS(place(e, {}, loads, {}), Error);
  CHECK_THROWS_AS(adjust(e, one, loads, Placement{1, {1, 0}}, {}), Error);
  CHECK_THROWS_AS(adjust(e, small, loads, Placement{1, {1, 1}}, {}), Error);
  CHECK_THROWS_AS(Scheduler(e, small, {}), Error);
}
