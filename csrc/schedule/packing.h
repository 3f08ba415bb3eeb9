#pragma once

#include <algorithm>
#include <span>
#include <vector>

#include "schedule/problem.h"

namespace mlx_moe {

// Experts on units while a placement is sought. Experts are numbered by rank: loads never rise.
class Packing {
 public:
  // allowed: [experts * units] by rank, or empty.
  Packing(const Experts& experts, std::span<const Unit> units, std::span<const double> loads,
          std::span<const uint8_t> allowed);

  size_t units() const { return rates_.size(); }
  size_t experts() const { return loads_.size(); }
  uint32_t shards() const { return shards_; }
  double load(size_t expert) const { return loads_[expert]; }
  double seconds(size_t unit) const { return seconds_[unit]; }
  uint32_t parts(size_t expert, size_t unit) const { return parts_[expert * units() + unit]; }
  bool restricted() const { return !allowed_.empty(); }
  bool may(size_t expert, size_t unit) const {
    return allowed_.empty() || allowed_[expert * units() + unit];
  }
  uint64_t room(size_t unit) const { return room_[unit]; }  // in shards
  // The experts that a unit has whole, by rank.
  const std::vector<uint32_t>& whole(size_t unit) const { return whole_[unit]; }
  size_t splits() const { return splits_; }  // experts on more than one unit

  // piece_seconds, with what does not change divided out before.
  double cost(size_t expert, size_t unit, uint32_t parts) const {
    const Rates& r = rates_[unit];
    const double n = loads_[expert], share = parts * shard_;
    return parts
               ? std::min(n, 1.0) * (r.dispatch + share * r.weights) + n * (r.row + share * r.work)
               : 0;
  }
  // Seconds that a whole expert takes for one more assignment.
  double slope(size_t unit) const { return rates_[unit].row + rates_[unit].work; }
  // Seconds of a unit once it has `parts` of the expert instead of what it has.
  double seconds_with(size_t expert, size_t unit, uint32_t parts) const {
    return seconds_[unit] - cost(expert, unit, this->parts(expert, unit)) +
           cost(expert, unit, parts);
  }
  void set(size_t expert, size_t unit, uint32_t parts);
  void move(size_t expert, size_t from, size_t to, uint32_t parts) {
    set(expert, from, this->parts(expert, from) - parts);
    set(expert, to, this->parts(expert, to) + parts);
  }
  void swap(size_t on_a, size_t a, size_t on_b, size_t b) {
    set(on_a, a, 0);
    set(on_b, b, 0);
    set(on_a, b, shards());
    set(on_b, a, shards());
  }

  size_t critical() const;  // the unit that takes longest, the first of equals
  double makespan() const { return seconds_[critical()]; }
  // Standard deviation of a unit's seconds from their mean over units when each expert's load is
  // drawn anew (Poisson): what splitting an expert evenly takes away.
  double spread() const;

 private:
  struct Rates {
    double dispatch, weights, row, work;  // seconds: of a piece, times its share, of a row, ditto
  };

  uint32_t shards_;
  std::vector<Rates> rates_;
  double shard_;  // share of an expert
  std::span<const double> loads_;
  std::span<const uint8_t> allowed_;
  std::vector<uint32_t> parts_;
  std::vector<double> seconds_;
  std::vector<uint64_t> room_;
  std::vector<std::vector<uint32_t>> whole_;
  std::vector<uint16_t> holders_;  // units that have some of the expert
  size_t splits_ = 0;
};

}  // namespace mlx_moe
