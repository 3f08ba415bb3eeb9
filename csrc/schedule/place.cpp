#include "schedule/place.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "schedule/packing.h"
#include "support/error.h"

namespace mlx_moe {

namespace {

constexpr double kClose = 1e-4;  // of the bound: not worth another step
constexpr double kNear = 1e-3;   // not worth looking further
constexpr size_t kSteps = 64, kSplitSteps = 24, kTrials = 2048, kFew = 64;

// Experts by falling load, the first of equals first.
std::vector<uint32_t> by_load(std::span<const double> histogram) {
  std::vector<std::pair<double, uint32_t>> keys(histogram.size());
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = {-histogram[i], uint32_t(i)};
  std::sort(keys.begin(), keys.end());
  std::vector<uint32_t> order;
  order.reserve(keys.size());
  for (const auto& [load, expert] : keys) order.push_back(expert);
  return order;
}

// No placement of these loads is faster. Whatever the weights of the units, their weighted mean
// is no more than the slowest; the inverse of what an assignment takes makes the loads cost the
// same everywhere. And an expert that stays whole is somewhere.
double lower_bound(const Packing& p) {
  std::vector<double> weights;
  for (size_t u = 0; u < p.units(); ++u) weights.push_back(1 / std::max(p.slope(u), 1e-30));
  const double all = std::accumulate(weights.begin(), weights.end(), 0.0);
  double mean = 0, longest = 0;
  for (size_t e = 0; e < p.experts(); ++e) {
    double least = p.cost(e, 0, p.shards()), least_weighted = least * weights[0];
    for (size_t u = 1; u < p.units(); ++u) {
      const double cost = p.cost(e, u, p.shards());
      least = std::min(least, cost);
      least_weighted = std::min(least_weighted, cost * weights[u]);
    }
    mean += least_weighted / all;
    if (p.shards() == 1) longest = std::max(longest, least);
  }
  return std::max(mean, longest);
}

// Shares by speed, in whole shards and within the room; the rest where it takes least longer.
void spread_expert(Packing& p, size_t expert) {
  double speed = 0;
  for (size_t u = 0; u < p.units(); ++u) speed += 1 / std::max(p.unit(u).assignment, 1e-30);
  uint32_t left = p.shards();
  for (size_t u = 0; u < p.units(); ++u) {
    const double share = 1 / std::max(p.unit(u).assignment, 1e-30) / speed;
    const auto parts = uint32_t(std::min<double>(share * p.shards(), double(p.room(u))));
    p.set(expert, u, std::min(parts, left));
    left -= p.parts(expert, u);
  }
  for (; left > 0; --left) {
    size_t best = p.units();
    double least = 0;
    for (size_t u = 0; u < p.units(); ++u)
      if (p.room(u) > 0) {
        const double after = p.seconds_with(expert, u, p.parts(expert, u) + 1);
        if (best == p.units() || after < least) best = u, least = after;
      }
    p.set(expert, best, p.parts(expert, best) + 1);
  }
}

// Whole on the unit that is done first with it; in pieces where no unit has room for all of it.
void put(Packing& p, size_t expert) {
  size_t best = p.units();
  double least = 0;
  for (size_t u = 0; u < p.units(); ++u)
    if (p.room(u) >= p.shards()) {
      const double after = p.seconds(u) + p.cost(expert, u, p.shards());
      if (best == p.units() || after < least) best = u, least = after;
    }
  if (best < p.units())
    p.set(expert, best, p.shards());
  else
    spread_expert(p, expert);
}

// A change that relieves unit `a`: whole experts move to b, or trade places with one there.
struct Step {
  double seconds;  // of the slower of the two units, after it
  size_t expert, to;
  int64_t in_return;  // expert of b, or none
};

void look_at_moves(const Packing& p, size_t a, size_t b, Step& best) {
  if (p.room(b) < p.shards()) return;
  for (uint32_t e : p.whole(a)) {
    const double after =
        std::max(p.seconds(a) - p.cost(e, a, p.shards()), p.seconds(b) + p.cost(e, b, p.shards()));
    if (after < best.seconds) best = {after, e, b, -1};
  }
}

// Costs are linear in the load, so that for each expert of `a` the partner is known by its load:
// both lists fall, and the partner sought moves along with the expert.
void look_at_swaps(const Packing& p, size_t a, size_t b, Step& best) {
  const auto &ours = p.whole(a), &theirs = p.whole(b);
  if (theirs.empty()) return;
  const uint32_t all = p.shards();
  auto after = [&](uint32_t i, uint32_t j) {
    return std::max(p.seconds(a) - p.cost(i, a, all) + p.cost(j, a, all),
                    p.seconds(b) - p.cost(j, b, all) + p.cost(i, b, all));
  };
  const double slopes = p.slope(a) + p.slope(b);
  const double wanted = slopes > 0 ? (p.seconds(a) - p.seconds(b)) / slopes : 0;
  size_t at = 0;
  for (uint32_t i : ours) {
    while (at + 1 < theirs.size() && p.load(theirs[at]) > p.load(i) - wanted) ++at;
    for (size_t j : {at ? at - 1 : at, at}) {
      const double seconds = after(i, theirs[j]);
      if (seconds < best.seconds) best = {seconds, i, b, int64_t(theirs[j])};
    }
  }
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

// Where no single step helps: one that makes things worse, and then what single steps find. Tried
// for every expert of the unit that takes longest, to every other unit and against every expert
// there, until `trials` of them are used up. Few experts are the hard case, and the cheap one.
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
        if (p.room(b) >= p.shards()) attempt([&](Packing& t) { t.move(i, a, b, p.shards()); });
        for (uint32_t j : theirs) attempt([&](Packing& t) { t.swap(i, a, j, b); });
      }
    }
  }
}

// Shards of one expert go from `from` to `to`.
struct Transfer {
  double seconds, both;  // of the slower unit after it, and of the two
  size_t expert, from, to;
  uint32_t parts;
};

void look_at_transfers(const Packing& p, size_t e, size_t a, size_t b, Transfer& best) {
  const uint32_t has = p.parts(e, a), there = p.parts(e, b);
  const auto most = uint32_t(std::min<uint64_t>(has, p.room(b)));
  if (most == 0) return;
  // Times of both units are linear in the shards between the first and the last one to go.
  auto at = [&](uint32_t q) {
    const double ours = p.seconds_with(e, a, has - q), theirs = p.seconds_with(e, b, there + q);
    const double slower = std::max(ours, theirs);
    if (slower < best.seconds || (slower == best.seconds && ours + theirs < best.both))
      best = {slower, ours + theirs, e, a, b, q};
  };
  at(most);
  if (most < 2) return;
  const double gap = p.seconds_with(e, a, has - 1) - p.seconds_with(e, b, there + 1);
  const double a_shard = p.seconds_with(e, a, has) - p.seconds_with(e, a, has - 1);
  const double b_shard = p.seconds_with(e, b, there + 2) - p.seconds_with(e, b, there + 1);
  if (gap <= 0) return at(1);
  const double q = a_shard + b_shard > 0 ? 1 + gap / (a_shard + b_shard) : most;
  const auto low = uint32_t(std::clamp(q, 1.0, double(most)));
  at(low);
  if (low < most) at(low + 1);
}

double score(const Packing& p, const PlaceOptions& o) {
  const double noise = o.noise > 0 ? o.noise * std::sqrt(1 + o.counting) * p.spread() : 0;
  return p.makespan() + noise;
}

// Splitting is weighed against what it has to gain at least.
double weighed(const Packing& p, const PlaceOptions& o) {
  return score(p, o) * (1 + o.split_gain * double(p.splits()));
}

// The unit that takes longest hands on shards, as long as that pays.
void split(Packing& p, double bound, const PlaceOptions& o) {
  Packing trial = p;
  double least = weighed(p, o);
  for (size_t step = 0; step < kSplitSteps; ++step) {
    const size_t a = trial.critical();
    const double now = trial.seconds(a);
    if (now <= bound * (1 + kClose)) break;
    Transfer best{now * (1 - kClose), 0, 0, a, a, 0};
    for (size_t e = 0; e < trial.experts(); ++e)
      if (trial.parts(e, a) > 0 && trial.load(e) > 0)
        for (size_t b = 0; b < trial.units(); ++b)
          if (b != a) look_at_transfers(trial, e, a, b, best);
    if (best.to == a) break;
    trial.move(best.expert, a, best.to, best.parts);
    improve(trial, bound);
    if (const double weight = weighed(trial, o); weight < least) {
      least = weight;
      p = trial;
    }
  }
}

// The first `shared` experts over all units, the others longest first.
Packing pack(const Experts& experts, std::span<const Unit> units, std::span<const double> loads,
             size_t shared) {
  Packing p(experts, units, loads);
  for (size_t e = 0; e < shared; ++e) spread_expert(p, e);
  for (size_t e = shared; e < loads.size(); ++e) put(p, e);
  return p;
}

void check_room(const Experts& experts, std::span<const Unit> units) {
  const Packing empty(experts, units, {});
  uint64_t room = 0;
  for (size_t u = 0; u < units.size(); ++u) room += empty.room(u);
  require(room >= uint64_t(experts.count) * experts.shards, experts.count, " experts of ",
          experts.bytes, " bytes do not fit: the units hold ", double(room) / experts.shards);
}

struct Sorted {
  std::vector<uint32_t> order;
  std::vector<double> loads;

  explicit Sorted(std::span<const double> histogram)
      : order(by_load(histogram)), loads(histogram.size()) {
    for (size_t i = 0; i < order.size(); ++i) loads[i] = histogram[order[i]];
  }
  Placement placement(const Packing& p) const {
    Placement found{p.units(), std::vector<uint32_t>(order.size() * p.units())};
    for (size_t i = 0; i < order.size(); ++i)
      for (size_t u = 0; u < p.units(); ++u) found.parts[order[i] * p.units() + u] = p.parts(i, u);
    return found;
  }
  Packing packing(const Experts& e, std::span<const Unit> units, const Placement& from) const {
    Packing p(e, units, loads);
    for (size_t i = 0; i < order.size(); ++i)
      for (size_t u = 0; u < units.size(); ++u)
        p.set(i, u, from.parts[order[i] * units.size() + u]);
    return p;
  }
};

}  // namespace

Placement place(const Experts& experts, std::span<const Unit> units,
                std::span<const double> histogram, const PlaceOptions& options) {
  check_problem(experts, units);
  check_histogram(experts, histogram);
  check_room(experts, units);
  const Sorted sorted(histogram);
  Packing best = pack(experts, units, sorted.loads, 0);
  const double bound = lower_bound(best);
  look_ahead(best, bound, experts.count <= kFew ? kTrials / experts.count : 0);
  if (experts.shards == 1 || units.size() == 1) return sorted.placement(best);
  double least = weighed(best, options);
  // The busiest experts over all units: one, two, ... in steps that grow, while it helps.
  size_t worse = 0;
  for (size_t shared = 1; shared <= experts.count && worse < 2; shared += 1 + shared / 3) {
    if (bound * (1 + options.split_gain * double(shared)) >= least) break;
    Packing p = pack(experts, units, sorted.loads, shared);
    improve(p, bound);
    const double weight = weighed(p, options);
    worse = weight < least ? 0 : worse + 1;
    if (weight < least) {
      least = weight;
      best = std::move(p);
    }
  }
  split(best, bound, options);
  return sorted.placement(best);
}

Placement adjust(const Experts& experts, std::span<const Unit> units,
                 std::span<const double> histogram, const Placement& from,
                 const PlaceOptions& options) {
  check_problem(experts, units);
  check_histogram(experts, histogram);
  check_placement(experts, units, from);
  const Sorted sorted(histogram);
  Packing p = sorted.packing(experts, units, from);
  const double bound = lower_bound(p);
  improve(p, bound);
  if (experts.shards > 1 && units.size() > 1) split(p, bound, options);
  return sorted.placement(p);
}

double expected_makespan(const Experts& experts, std::span<const Unit> units,
                         std::span<const double> histogram, const Placement& placement,
                         const PlaceOptions& options) {
  const Sorted sorted(histogram);
  return score(sorted.packing(experts, units, placement), options);
}

}  // namespace mlx_moe
