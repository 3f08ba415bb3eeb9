#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace mlx_moe {

// What computes: times in seconds, rates in bytes a second, of which infinity costs nothing.
struct Unit {
  double assignment;       // seconds that a whole expert takes for an assignment
  double dispatch;         // seconds for each expert, or shard of one, that has work
  double bandwidth;        // at which the weights of an expert with work are read
  double memory;           // bytes of expert weights that it can hold
  double link;             // at which an assignment's row goes there and its result comes back
  double load;             // at which weights that it did not hold arrive
  bool holds_all = false;  // has every expert's weights anyway: nothing moves to it
};

// The experts of a layer, all of one size.
struct Experts {
  size_t count;
  double bytes;      // of the weights of one
  double row_bytes;  // that an assignment moves over a link, there and back
  uint32_t shards;   // equal parts along ff that one can be cut into; 1: it stays whole
  std::vector<uint8_t> allowed = {};  // [count * units], 0 where an expert cannot be; or empty
};

// How many of its shards each unit has of each expert: parts[expert * units + unit]. Shards of one
// expert on two units each take all of its assignments; their results are added.
struct Placement {
  size_t units = 0;
  std::vector<uint32_t> parts;
};

// Throws Error unless the sizes and rates are such as a unit can have and the histogram
// (assignments of each expert, may be means) has a finite value of at least 0 for each.
void check_problem(const Experts& experts, std::span<const Unit> units);
void check_histogram(const Experts& experts, std::span<const double> histogram);

// Throws Error unless every expert has all its shards somewhere, and they fit there.
void check_placement(const Experts& experts, std::span<const Unit> units,
                     const Placement& placement);

// Seconds of `parts` shards of one expert on a unit. An expert that is expected less than once
// is dispatched, and its weights are read, as often as that.
inline double piece_seconds(const Experts& experts, const Unit& unit, double assignments,
                            uint32_t parts) {
  if (parts == 0 || assignments <= 0) return 0;
  const double share = double(parts) / experts.shards, times = assignments < 1 ? assignments : 1;
  return times * (unit.dispatch + share * experts.bytes / unit.bandwidth) +
         assignments * (experts.row_bytes / unit.link + share * unit.assignment);
}

// Shards that fit a unit, of all that there are. A limit that was computed as so many experts'
// bytes holds them.
uint64_t room_of(const Experts& experts, const Unit& unit);

// Seconds that each unit takes for the histogram.
std::vector<double> unit_seconds(const Experts& experts, std::span<const Unit> units,
                                 std::span<const double> histogram, const Placement& placement);

// Bytes of weights that each unit has in `to` and had not in `from`.
std::vector<double> arriving_bytes(const Experts& experts, std::span<const Unit> units,
                                   const Placement& from, const Placement& to);

}  // namespace mlx_moe
