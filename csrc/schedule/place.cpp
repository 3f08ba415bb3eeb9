#include "schedule/place.h"

#include <algorithm>

#include "schedule/improve.h"
#include "schedule/packing.h"
#include "schedule/split.h"
#include "support/error.h"

namespace mlx_moe {

namespace {

constexpr size_t kTrials = 2048, kFew = 64;
constexpr double kFar = 0.01;  // of the bound: worth another start

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

// The first `shared` experts over all units, the others longest first.
Packing pack(const Experts& experts, std::span<const Unit> units, std::span<const double> loads,
             size_t shared) {
  Packing p(experts, units, loads);
  for (size_t e = 0; e < shared; ++e) spread_expert(p, e);
  for (size_t e = shared; e < loads.size(); ++e) put(p, e);
  return p;
}

// Few experts are the hard case, and cheap enough to look further, and from elsewhere too.
void improve_whole(Packing& p, double bound, const Experts& experts, std::span<const Unit> units,
                   std::span<const double> loads) {
  if (experts.count > kFew) return improve(p, bound);
  look_ahead(p, bound, kTrials / experts.count);
  if (p.makespan() <= bound * (1 + kFar)) return;
  Packing other(experts, units, loads);
  for (size_t e = experts.count; e-- > 0;) put(other, e);  // shortest first
  look_ahead(other, bound, kTrials / experts.count);
  if (other.makespan() < p.makespan()) p = std::move(other);
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
  improve_whole(best, bound, experts, units, sorted.loads);
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
