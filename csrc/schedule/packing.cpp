#include "schedule/packing.h"

#include <cmath>

namespace mlx_moe {

Packing::Packing(const Experts& experts, std::span<const Unit> units, std::span<const double> loads,
                 std::span<const uint8_t> allowed)
    : shards_(experts.shards),
      shard_(1.0 / experts.shards),
      loads_(loads),
      allowed_(allowed),
      parts_(loads.size() * units.size()),
      seconds_(units.size()),
      room_(units.size()),
      whole_(units.size()),
      holders_(loads.size()) {
  for (size_t u = 0; u < units.size(); ++u) {
    const Unit& unit = units[u];
    rates_.push_back({unit.dispatch, experts.bytes / unit.bandwidth, experts.row_bytes / unit.link,
                      unit.assignment});
    room_[u] = room_of(experts, units[u]);
    whole_[u].reserve(loads.size());
  }
}

void Packing::set(size_t expert, size_t unit, uint32_t parts) {
  uint32_t& has = parts_[expert * units() + unit];
  if (has == parts) return;
  seconds_[unit] += cost(expert, unit, parts) - cost(expert, unit, has);
  room_[unit] += has;
  room_[unit] -= parts;
  auto& list = whole_[unit];
  if (has == shards()) list.erase(std::lower_bound(list.begin(), list.end(), uint32_t(expert)));
  if (parts == shards())
    list.insert(list.empty() || list.back() < expert
                    ? list.end()
                    : std::lower_bound(list.begin(), list.end(), uint32_t(expert)),
                uint32_t(expert));
  const uint16_t before = holders_[expert];
  holders_[expert] = uint16_t(before + (has == 0) - (parts == 0));
  splits_ += size_t(holders_[expert] > 1) - size_t(before > 1);
  has = parts;
}

size_t Packing::critical() const {
  return size_t(std::max_element(seconds_.begin(), seconds_.end()) - seconds_.begin());
}

double Packing::spread() const {
  const double n = double(units());
  double variance = 0;
  for (size_t e = 0; e < experts(); ++e) {
    double sum = 0, squares = 0;
    for (size_t u = 0; u < units(); ++u)
      if (const uint32_t p = parts(e, u)) {
        const double slope = rates_[u].row + rates_[u].work * p * shard_;
        sum += slope;
        squares += slope * slope;
      }
    variance += loads_[e] * (squares / n - (sum / n) * (sum / n));
  }
  return std::sqrt(std::max(variance, 0.0));
}

}  // namespace mlx_moe
