#include "schedule/place.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "schedule/improve.h"
#include "schedule/packing.h"
#include "schedule/split.h"
#include "support/error.h"

namespace mlx_moe {

namespace {

constexpr size_t kTrials = 2048, kFew = 64;
constexpr double kFar = 0.01;  // of the bound: worth another start
constexpr double kInfinity = std::numeric_limits<double>::infinity();

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

// Whole on a full unit that it may be on, from which another expert goes on to where that one may
// be, and so on up to a unit with room: the shortest such chain, false if there is none.
bool displace(Packing& p, size_t expert) {
  const size_t n = p.units();
  std::vector<size_t> mover(n), from(n, n), queue;
  std::vector<bool> seen(n);
  auto reach = [&](size_t u, size_t e, size_t source) {
    if (seen[u] || !p.may(e, u)) return;
    seen[u] = true, mover[u] = e, from[u] = source;
    queue.push_back(u);
  };
  for (size_t u = 0; u < n; ++u) reach(u, expert, n);
  for (size_t i = 0; i < queue.size(); ++i) {
    size_t u = queue[i];
    if (p.room(u) >= p.shards()) {
      for (; from[u] < n; u = from[u]) p.move(mover[u], from[u], u, p.shards());
      p.set(expert, u, p.shards());
      return true;
    }
    for (uint32_t e : p.whole(u))
      for (size_t v = 0; v < n; ++v) reach(v, e, u);
  }
  return false;
}

// Whole on the unit that is done first with it; in pieces where no unit has room for all of it.
void put(Packing& p, size_t expert) {
  size_t best = p.units();
  double least = 0;
  for (size_t u = 0; u < p.units(); ++u)
    if (p.room(u) >= p.shards() && p.may(expert, u)) {
      const double after = p.seconds(u) + p.cost(expert, u, p.shards());
      if (best == p.units() || after < least) best = u, least = after;
    }
  if (best < p.units())
    p.set(expert, best, p.shards());
  else if (p.shards() > 1 || !displace(p, expert))
    spread_expert(p, expert);
}

// A problem with its experts by falling load.
struct Sorted {
  const Experts& experts;
  std::span<const Unit> units;
  std::vector<uint32_t> order;
  std::vector<double> loads;
  std::vector<uint8_t> allowed;

  Sorted(const Experts& e, std::span<const Unit> u, std::span<const double> histogram)
      : experts(e), units(u), order(by_load(histogram)), allowed(e.allowed.size()) {
    for (uint32_t expert : order) loads.push_back(histogram[expert]);
    for (size_t i = 0; i < allowed.size(); ++i)
      allowed[i] = e.allowed[order[i / u.size()] * u.size() + i % u.size()];
  }
  Packing empty() const { return Packing(experts, units, loads, allowed); }
  Placement placement(const Packing& p) const {
    Placement found{p.units(), std::vector<uint32_t>(order.size() * p.units())};
    for (size_t i = 0; i < order.size(); ++i)
      for (size_t u = 0; u < p.units(); ++u) found.parts[order[i] * p.units() + u] = p.parts(i, u);
    return found;
  }
  Packing packing(const Placement& from) const {
    Packing p = empty();
    for (size_t i = 0; i < order.size(); ++i)
      for (size_t u = 0; u < units.size(); ++u)
        p.set(i, u, from.parts[order[i] * units.size() + u]);
    return p;
  }
};

// Those that cannot be everywhere take their place first.
bool is_bound(const Packing& p, size_t expert) {
  for (size_t u = 0; u < p.units(); ++u)
    if (!p.may(expert, u)) return true;
  return false;
}

void put_bound(Packing& p) {
  for (size_t e = 0; p.restricted() && e < p.experts(); ++e)
    if (is_bound(p, e)) put(p, e);
}

// The first `shared` experts over all units, the others longest first.
Packing pack(const Sorted& problem, size_t shared) {
  Packing p = problem.empty();
  put_bound(p);
  for (size_t e = 0; e < p.experts(); ++e)
    if (!p.restricted() || !is_bound(p, e)) e < shared ? spread_expert(p, e) : put(p, e);
  return p;
}

// Few experts are the hard case, and cheap enough to look further, and from elsewhere too.
void improve_whole(Packing& p, double bound, const Sorted& problem) {
  const size_t count = p.experts();
  if (count > kFew) return improve(p, bound);
  look_ahead(p, bound, kTrials / count);
  if (p.makespan() <= bound * (1 + kFar)) return;
  Packing other = problem.empty();
  put_bound(other);
  for (size_t e = count; e-- > 0;)  // shortest first
    if (!other.restricted() || !is_bound(other, e)) put(other, e);
  look_ahead(other, bound, kTrials / count);
  if (other.makespan() < p.makespan()) p = std::move(other);
}

// Where units take turns, each expert is best off on the unit that is fastest with it; those with
// most to lose choose first where room is short.
Packing pack_serial(const Sorted& problem, const Placement* from, double horizon) {
  Packing p = problem.empty();
  const size_t n = p.units();
  auto cost = [&](size_t e, size_t u) {
    const bool there = !from || from->parts[problem.order[e] * n + u] == p.shards();
    const Unit& unit = problem.units[u];
    const double moving =
        there || unit.holds_all || horizon <= 0 ? 0 : problem.experts.bytes / unit.load / horizon;
    return p.cost(e, u, p.shards()) + moving;
  };
  std::vector<std::pair<double, size_t>> losses;
  for (size_t e = 0; e < p.experts(); ++e) {
    double first = kInfinity, second = kInfinity;
    for (size_t u = 0; u < n; ++u)
      if (p.may(e, u)) {
        const double c = cost(e, u);
        second = std::min(second, std::max(c, first));
        first = std::min(c, first);
      }
    losses.emplace_back(std::isinf(second) ? -kInfinity : first - second, e);
  }
  std::sort(losses.begin(), losses.end());
  for (const auto& [loss, e] : losses) {
    size_t best = n;
    for (size_t u = 0; u < n; ++u)
      if (p.may(e, u) && p.room(u) >= p.shards() && (best == n || cost(e, u) < cost(e, best)))
        best = u;
    if (best < n)
      p.set(e, best, p.shards());
    else
      require(displace(p, e), "no unit that expert ", problem.order[e], " may be on has room");
  }
  return p;
}

void check_room(const Experts& experts, std::span<const Unit> units) {
  uint64_t room = 0;
  for (const Unit& unit : units) room += room_of(experts, unit);
  require(room >= uint64_t(experts.count) * experts.shards, experts.count, " experts of ",
          experts.bytes, " bytes do not fit: the units hold ", double(room) / experts.shards);
}

}  // namespace

Placement place(const Experts& experts, std::span<const Unit> units,
                std::span<const double> histogram, const PlaceOptions& options) {
  check_problem(experts, units);
  check_histogram(experts, histogram);
  check_room(experts, units);
  const Sorted problem(experts, units, histogram);
  if (options.serial) return problem.placement(pack_serial(problem, nullptr, 0));
  Packing best = pack(problem, 0);
  const double bound = lower_bound(best);
  improve_whole(best, bound, problem);
  if (experts.shards == 1 || units.size() == 1) return problem.placement(best);
  double least = weighed(best, options);
  // The busiest experts over all units: one, two, ... in steps that grow, while it helps.
  size_t worse = 0;
  for (size_t shared = 1; shared <= experts.count && worse < 2; shared += 1 + shared / 3) {
    if (bound * (1 + options.split_gain * double(shared)) >= least) break;
    Packing p = pack(problem, shared);
    improve(p, bound);
    const double weight = weighed(p, options);
    worse = weight < least ? 0 : worse + 1;
    if (weight < least) {
      least = weight;
      best = std::move(p);
    }
  }
  split(best, bound, options);
  return problem.placement(best);
}

Placement adjust(const Experts& experts, std::span<const Unit> units,
                 std::span<const double> histogram, const Placement& from,
                 const PlaceOptions& options) {
  check_problem(experts, units);
  check_histogram(experts, histogram);
  check_placement(experts, units, from);
  const Sorted problem(experts, units, histogram);
  if (options.serial) return problem.placement(pack_serial(problem, &from, options.horizon));
  Packing p = problem.packing(from);
  const double bound = lower_bound(p);
  improve(p, bound);
  if (experts.shards > 1 && units.size() > 1) split(p, bound, options);
  return problem.placement(p);
}

double expected_makespan(const Experts& experts, std::span<const Unit> units,
                         std::span<const double> histogram, const Placement& placement,
                         const PlaceOptions& options) {
  const Sorted problem(experts, units, histogram);
  return score(problem.packing(placement), options);
}

}  // namespace mlx_moe
