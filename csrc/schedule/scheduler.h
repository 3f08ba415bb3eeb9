#pragma once

#include <optional>

#include "schedule/place.h"

namespace mlx_moe {

struct ScheduleOptions {
  double shift = 0.02;       // total variation that is no reason to re-plan
  double noise = 1.5;        // times the variation to expect of samples of these sizes, likewise
  double hysteresis = 0.02;  // share of the makespan that a re-plan must save
  double horizon = 16;       // forwards over which it must earn what moving weights takes
  double minimum = 4;        // assignments for each expert, before anything is decided
  PlaceOptions place{0.001, 1.0, 1.0, false, 0};
};

// A change of the placement, as it was decided.
struct Replan {
  uint64_t forward;    // how many were observed before it
  double assignments;  // counted since routing last shifted
  // Total variation from what was planned for, 1 if that was nothing, and what it passed.
  double shift, threshold;
  double before, after;  // predicted seconds of a forward, by the old and the new placement
  double bytes;          // of weights that change places
  double moving;         // seconds that takes
};

struct ScheduleCounts {
  uint64_t forwards = 0, decisions = 0;  // observed; times that the histograms were compared
  uint64_t shifts = 0;                   // times that routing was found to have changed
  uint64_t replans = 0;
  uint64_t declined = 0;  // past the threshold, but with too little to gain
  double bytes = 0;       // of weights that changed places
};

// Follows one layer: told what each forward routed, it keeps a placement of its experts and
// changes it when routing has shifted and the change pays. Not for several threads at once.
class Scheduler {
 public:
  // Throws Error on options out of range, or units that cannot hold the experts.
  Scheduler(const Experts& experts, std::vector<Unit> units, const ScheduleOptions& options);

  // Place the experts anew for a histogram of one forward (means are fine), of which `counted`
  // assignments were seen. Not counted as a re-plan.
  void plan(std::span<const double> histogram, double counted);
  // Keep to a placement that was made elsewhere, for this histogram.
  void adopt(const Placement& placement, std::span<const double> histogram, double counted);

  // Count a forward. The re-plan, if there is reason for one; the first enough assignments place
  // the experts where nothing was planned, which is no re-plan.
  std::optional<Replan> observe(std::span<const double> histogram);

  const std::optional<Placement>& placement() const { return placement_; }
  const ScheduleCounts& counts() const { return counts_; }
  const Experts& experts() const { return experts_; }
  const std::vector<Unit>& units() const { return units_; }
  PlaceOptions place_options(double forward, double counted) const;

 private:
  std::optional<Replan> decide();
  void gather();
  std::vector<double> mean_forward() const;
  Placement relabelled(const Placement& found) const;

  Experts experts_;
  std::vector<Unit> units_;
  ScheduleOptions options_;
  ScheduleCounts counts_;
  std::optional<Placement> placement_;
  std::vector<double> planned_;   // assignments that the placement was made from
  std::vector<double> pending_;   // since the last decision
  std::vector<double> gathered_;  // since routing last shifted
  double pending_forwards_ = 0, gathered_forwards_ = 0;
};

}  // namespace mlx_moe
