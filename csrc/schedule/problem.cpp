#include "schedule/problem.h"

#include <cmath>

#include "support/error.h"

namespace mlx_moe {

namespace {

constexpr size_t kMostExperts = size_t(1) << 16, kMostUnits = 256;
constexpr uint32_t kMostShards = 1 << 12;

bool is_time(double x) { return std::isfinite(x) && x >= 0; }
bool is_rate(double x) { return x > 0; }  // infinity is one, NaN is not

}  // namespace

void check_problem(const Experts& e, std::span<const Unit> units) {
  require(e.count >= 1 && e.count <= kMostExperts, e.count, " experts, expected 1 to ",
          kMostExperts);
  require(e.shards >= 1 && e.shards <= kMostShards, "an expert in ", e.shards,
          " shards, expected 1 to ", kMostShards);
  require(is_time(e.bytes) && is_time(e.row_bytes), "bytes of an expert are ", e.bytes,
          " and of a row ", e.row_bytes, ", expected finite numbers of at least 0");
  require(!units.empty() && units.size() <= kMostUnits, units.size(), " units, expected 1 to ",
          kMostUnits);
  require(e.allowed.empty() || e.allowed.size() == e.count * units.size(), "allowed has ",
          e.allowed.size(), " values, expected ", e.count, " experts x ", units.size(), " units");
  for (size_t u = 0; u < units.size(); ++u) {
    const Unit& unit = units[u];
    require(is_time(unit.assignment) && is_time(unit.dispatch), "unit ", u, ": seconds are ",
            unit.assignment, " an assignment and ", unit.dispatch,
            " a dispatch, expected finite numbers of at least 0");
    require(is_rate(unit.bandwidth) && is_rate(unit.link) && is_rate(unit.load), "unit ", u,
            ": bandwidth, link and load are ", unit.bandwidth, ", ", unit.link, " and ", unit.load,
            " bytes a second, expected numbers above 0");
    require(unit.memory >= 0, "unit ", u, ": memory is ", unit.memory, " bytes");
  }
}

void check_histogram(const Experts& e, std::span<const double> histogram) {
  require(histogram.size() == e.count, "the histogram has ", histogram.size(),
          " values, expected one for each of ", e.count, " experts");
  for (size_t i = 0; i < e.count; ++i)
    require(is_time(histogram[i]), "the histogram has ", histogram[i], " assignments of expert ", i,
            ", expected a finite number of at least 0");
}

void check_placement(const Experts& e, std::span<const Unit> units, const Placement& p) {
  require(p.units == units.size() && p.parts.size() == e.count * units.size(),
          "the placement is of ", p.parts.size(), " values for ", p.units, " units, expected ",
          e.count, " experts x ", units.size(), " units");
  for (size_t i = 0; i < e.count; ++i) {
    uint64_t sum = 0;
    for (size_t u = 0; u < p.units; ++u) {
      const uint32_t parts = p.parts[i * p.units + u];
      sum += parts;
      require(parts == 0 || e.allowed.empty() || e.allowed[i * p.units + u], "the placement has ",
              "expert ", i, " on unit ", u, ", where it is not allowed");
    }
    require(sum == e.shards, "the placement has ", sum, " shards of expert ", i, ", expected ",
            e.shards);
  }
  for (size_t u = 0; u < p.units; ++u) {
    uint64_t parts = 0;
    for (size_t i = 0; i < e.count; ++i) parts += p.parts[i * p.units + u];
    require(parts <= room_of(e, units[u]), "the placement has ", parts, " shards on unit ", u,
            ", which holds ", room_of(e, units[u]));
  }
}

uint64_t room_of(const Experts& e, const Unit& unit) {
  const double all = double(e.count) * e.shards;
  const double fits = e.bytes > 0 ? unit.memory / e.bytes * e.shards : all;
  return fits >= all ? uint64_t(all) : uint64_t(fits + 1e-9);
}

std::vector<double> unit_seconds(const Experts& e, std::span<const Unit> units,
                                 std::span<const double> histogram, const Placement& p) {
  std::vector<double> seconds(units.size());
  for (size_t i = 0; i < e.count; ++i)
    for (size_t u = 0; u < units.size(); ++u)
      seconds[u] += piece_seconds(e, units[u], histogram[i], p.parts[i * units.size() + u]);
  return seconds;
}

std::vector<double> arriving_bytes(const Experts& e, std::span<const Unit> units,
                                   const Placement& from, const Placement& to) {
  std::vector<double> bytes(to.units);
  for (size_t i = 0; i < to.parts.size(); ++i)
    if (to.parts[i] > from.parts[i] && !units[i % to.units].holds_all)
      bytes[i % to.units] += e.bytes * (to.parts[i] - from.parts[i]) / e.shards;
  return bytes;
}

}  // namespace mlx_moe
