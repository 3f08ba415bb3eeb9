#include "schedule/scheduler.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "schedule/shift.h"
#include "support/error.h"

namespace mlx_moe {

namespace {

constexpr double kMemory = 64;  // decisions' worth of assignments that are remembered

double sum(std::span<const double> x) { return std::accumulate(x.begin(), x.end(), 0.0); }

void scale(std::vector<double>& x, double factor) {
  for (double& value : x) value *= factor;
}

void add(std::vector<double>& to, std::span<const double> x) {
  for (size_t i = 0; i < x.size(); ++i) to[i] += x[i];
}

bool same(const Unit& a, const Unit& b) {
  return a.assignment == b.assignment && a.dispatch == b.dispatch && a.bandwidth == b.bandwidth &&
         a.memory == b.memory && a.link == b.link && a.load == b.load && a.holds_all == b.holds_all;
}

}  // namespace

Scheduler::Scheduler(const Experts& experts, std::vector<Unit> units, const ScheduleOptions& o)
    : experts_(experts), units_(std::move(units)), options_(o) {
  require(o.shift >= 0 && o.shift <= 1, "shift is ", o.shift, ", expected 0 to 1");
  for (double x : {o.noise, o.hysteresis, o.horizon, o.minimum, o.place.split_gain, o.place.noise})
    require(std::isfinite(x) && x >= 0, "noise, hysteresis, horizon, minimum and split_gain are ",
            "finite numbers of at least 0, found ", x);
  check_problem(experts_, units_);  // before anything is as large as it says
  for (auto* counts : {&planned_, &pending_, &gathered_}) counts->resize(experts_.count);
  place(experts_, units_, planned_, options_.place);  // says now what could not be placed later
}

PlaceOptions Scheduler::place_options(double forward, double counted) const {
  PlaceOptions options = options_.place;
  options.counting = counted > 0 ? forward / counted : 0;
  options.horizon = options_.horizon;
  return options;
}

void Scheduler::plan(std::span<const double> histogram, double counted) {
  adopt(place(experts_, units_, histogram, place_options(sum(histogram), counted)), histogram,
        counted);
}

void Scheduler::adopt(const Placement& placement, std::span<const double> histogram,
                      double counted) {
  check_histogram(experts_, histogram);
  check_placement(experts_, units_, placement);
  const double all = sum(histogram);
  require(counted >= 0, "counted is ", counted, ", expected at least 0");
  placement_ = placement;
  planned_.assign(histogram.begin(), histogram.end());
  if (all > 0 && std::isfinite(counted)) scale(planned_, counted / all);
  if (std::isinf(counted) && all > 0) scale(planned_, 1e15 / all);  // as good as exact
}

std::optional<Replan> Scheduler::observe(std::span<const double> histogram) {
  check_histogram(experts_, histogram);
  ++counts_.forwards;
  add(pending_, histogram);
  ++pending_forwards_;
  const double enough = std::max(1.0, options_.minimum * double(experts_.count));
  if (sum(pending_) < enough) return std::nullopt;
  gather();
  return decide();
}

// What is pending joins what was gathered, or takes its place if routing has changed since.
void Scheduler::gather() {
  ++counts_.decisions;
  const double limit = options_.shift + options_.noise * expected_variation(pending_, gathered_);
  if (total_variation(pending_, gathered_) > limit) {
    ++counts_.shifts;
    std::fill(gathered_.begin(), gathered_.end(), 0.0);
    gathered_forwards_ = 0;
  }
  // Old counts fade, so that a slow drift is seen as well.
  const double most = kMemory * sum(pending_), all = sum(gathered_);
  if (all > most) {
    scale(gathered_, most / all);
    gathered_forwards_ *= most / all;
  }
  add(gathered_, pending_);
  gathered_forwards_ += pending_forwards_;
  std::fill(pending_.begin(), pending_.end(), 0.0);
  pending_forwards_ = 0;
}

std::vector<double> Scheduler::mean_forward() const {
  std::vector<double> mean = gathered_;
  scale(mean, 1 / gathered_forwards_);
  return mean;
}

std::optional<Replan> Scheduler::decide() {
  const std::vector<double> forward = mean_forward();
  const double counted = sum(gathered_);
  if (!placement_) {
    plan(forward, counted);
    return std::nullopt;
  }
  const bool blind = sum(planned_) <= 0;  // placed for nothing that was counted: any load differs
  const double shift = blind ? 1 : total_variation(gathered_, planned_);
  const double threshold =
      options_.shift + options_.noise * expected_variation(gathered_, planned_);
  if (!blind && shift <= threshold) return std::nullopt;

  const PlaceOptions options = place_options(sum(forward), counted);
  const double before = expected_makespan(experts_, units_, forward, *placement_, options);
  std::optional<Placement> best;
  Replan found{counts_.forwards, counted, shift, threshold, before, before, 0, 0};
  double least = before * options_.horizon;
  std::vector<Placement> candidates{adjust(experts_, units_, forward, *placement_, options)};
  try {
    candidates.push_back(relabelled(place(experts_, units_, forward, options)));
  } catch (const Error&) {
    // Experts in pieces, placed one by one, can fill units that others must be on.
  }
  for (const Placement& candidate : candidates) {
    const std::vector<double> arriving = arriving_bytes(experts_, units_, *placement_, candidate);
    double moving = 0;
    for (size_t u = 0; u < units_.size(); ++u)
      moving = std::max(moving, arriving[u] / units_[u].load);
    const double after = expected_makespan(experts_, units_, forward, candidate, options);
    const double total = after * options_.horizon + moving;
    if (after > before * (1 - options_.hysteresis) || total >= least) continue;
    least = total;
    best = candidate;
    found.after = after;
    found.bytes = sum(arriving);
    found.moving = moving;
  }
  if (!best) {
    ++counts_.declined;
    return std::nullopt;
  }
  placement_ = *best;
  planned_ = gathered_;
  ++counts_.replans;
  counts_.bytes += found.bytes;
  return found;
}

// Equal units are told apart by what they hold: each of the found ones becomes the unit that has
// most of its experts, so that few weights move.
Placement Scheduler::relabelled(const Placement& found) const {
  if (!experts_.allowed.empty()) return found;
  const size_t n = units_.size();
  std::vector<double> common(n * n);
  for (size_t e = 0; e < experts_.count; ++e)
    for (size_t f = 0; f < n; ++f)
      if (const uint32_t parts = found.parts[e * n + f])
        for (size_t u = 0; u < n; ++u)
          common[f * n + u] += std::min(parts, placement_->parts[e * n + u]);
  std::vector<size_t> name(n, n);
  std::vector<bool> taken(n);
  for (size_t round = 0; round < n; ++round) {
    size_t from = n, to = n;
    double most = -1;
    for (size_t f = 0; f < n; ++f)
      for (size_t u = 0; name[f] == n && u < n; ++u)
        if (!taken[u] && same(units_[f], units_[u]) && common[f * n + u] > most)
          most = common[f * n + u], from = f, to = u;
    name[from] = to;
    taken[to] = true;
  }
  Placement renamed = found;
  for (size_t e = 0; e < experts_.count; ++e)
    for (size_t f = 0; f < n; ++f) renamed.parts[e * n + name[f]] = found.parts[e * n + f];
  return renamed;
}

}  // namespace mlx_moe
