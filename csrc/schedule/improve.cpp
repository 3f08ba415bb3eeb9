#include "schedule/improve.h"

#include <algorithm>
#include <limits>
#include <numeric>

namespace mlx_moe {

namespace {

constexpr double kNear = 1e-3;  // of the bound: not worth looking further
constexpr size_t kSteps = 64;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

// A change that relieves unit `a`: whole experts move to b, or trade places with one there.
struct Step {
  double seconds;  // of the slower of the two units, after it
  size_t expert, to;
  int64_t in_return;  // expert of b, or none
};

// The busier the expert, the sooner `a` is done without it and the later b with it: the best one
// is where the two meet, or the one before.
void look_at_moves(const Packing& p, size_t a, size_t b, Step& best) {
  const auto& ours = p.whole(a);
  if (p.room(b) < p.shards()) return;
  auto relieved = [&](uint32_t e) { return p.seconds(a) - p.cost(e, a, p.shards()); };
  auto burdened = [&](uint32_t e) { return p.seconds(b) + p.cost(e, b, p.shards()); };
  auto look = [&](uint32_t e) {
    const double after = std::max(relieved(e), burdened(e));
    if (after < best.seconds) best = {after, e, b, -1};
  };
  if (p.restricted()) {
    for (uint32_t e : ours)
      if (p.may(e, b)) look(e);
    return;
  }
  const auto meet = std::partition_point(ours.begin(), ours.end(),
                                         [&](uint32_t e) { return burdened(e) > relieved(e); });
  for (auto it : {meet, meet == ours.begin() ? meet : meet - 1})
    if (it != ours.end()) look(*it);
}

// Costs are linear in the load, so that for each expert of `a` the partner is known by its load:
// both lists fall, and the partner sought moves along with the expert.
void look_at_swaps(const Packing& p, size_t a, size_t b, Step& best) {
  const auto &ours = p.whole(a), &theirs = p.whole(b);
  const double slopes = p.slope(a) + p.slope(b);
  if (theirs.empty() || slopes <= 0) return;
  const uint32_t all = p.shards();
  const double wanted = (p.seconds(a) - p.seconds(b)) / slopes;
  const double even = p.seconds(a) - wanted * p.slope(a);  // no swap can do better
  size_t at = 0;
  for (uint32_t i : ours) {
    while (at + 1 < theirs.size() && p.load(theirs[at]) > p.load(i) - wanted) ++at;
    for (size_t k : {at ? at - 1 : at, at}) {
      const uint32_t j = theirs[k];
      if (!p.may(i, b) || !p.may(j, a)) continue;
      const double less = p.load(i) - p.load(j);
      const bool linear = p.load(j) >= 1;  // below, there is less to dispatch as well
      if (linear && p.seconds(a) - less * p.slope(a) >= best.seconds) continue;
      const double after = std::max(p.seconds(a) - p.cost(i, a, all) + p.cost(j, a, all),
                                    p.seconds(b) - p.cost(j, b, all) + p.cost(i, b, all));
      if (after < best.seconds) best = {after, i, b, int64_t(j)};
    }
    if (best.seconds <= even * (1 + kClose / 10)) return;
  }
}

}  // namespace

// Whatever the weights of the units, their weighted mean
// is no more than the slowest; the inverse of what an assignment takes makes the loads cost the
// same everywhere. And an expert that stays whole is somewhere.
double lower_bound(const Packing& p) {
  std::vector<double> weights;
  for (size_t u = 0; u < p.units(); ++u) weights.push_back(1 / std::max(p.slope(u), 1e-30));
  const double all = std::accumulate(weights.begin(), weights.end(), 0.0);
  double mean = 0, longest = 0;
  for (size_t e = 0; e < p.experts(); ++e) {
    double least = kInfinity, least_weighted = kInfinity;
    for (size_t u = 0; u < p.units(); ++u) {
      if (!p.may(e, u)) continue;
      const double cost = p.cost(e, u, p.shards());
      least = std::min(least, cost);
      least_weighted = std::min(least_weighted, cost * weights[u]);
    }
    mean += least_weighted / all;
    if (p.shards() == 1) longest = std::max(longest, least);
  }
  return std::max(mean, longest);
}

void improve(Packing& p, double bound) {
  for (size_t step = 0; step < kSteps; ++step) {
    const size_t a = p.critical();
    if (p.seconds(a) <= bound * (1 + kClose) || p.whole(a).empty()) return;
    Step best{p.seconds(a) * (1 - kClose), 0, a, -1};
    for (size_t b = 0; b < p.units(); ++b)
      if (b != a) {
        look_at_moves(p, a, b, best);
        look_at_swaps(p, a, b, best);
      }
    if (best.to == a) return;
    if (best.in_return < 0)
      p.move(best.expert, a, best.to, p.shards());
    else
      p.swap(best.expert, a, size_t(best.in_return), best.to);
  }
}

void look_ahead(Packing& p, double bound, size_t trials) {
  improve(p, bound);
  for (bool better = true; better;) {
    better = false;
    const size_t a = p.critical();
    if (p.seconds(a) <= bound * (1 + kNear)) return;
    const std::vector<uint32_t> ours = p.whole(a);
    auto attempt = [&](auto change) {
      if (better || trials == 0) return;
      --trials;
      Packing trial = p;
      change(trial);
      improve(trial, bound);
      if (trial.makespan() < p.makespan() * (1 - kClose / 10)) {
        p = std::move(trial);
        better = true;
      }
    };
    for (size_t b = 0; b < p.units() && !better; ++b) {
      if (b == a) continue;
      const std::vector<uint32_t> theirs = p.whole(b);
      for (uint32_t i : ours) {
        if (!p.may(i, b)) continue;
        if (p.room(b) >= p.shards()) attempt([&](Packing& t) { t.move(i, a, b, p.shards()); });
        for (uint32_t j : theirs)
          if (p.may(j, a)) attempt([&](Packing& t) { t.swap(i, a, j, b); });
      }
    }
  }
}

}  // namespace mlx_moe
