#include <nanobind/stl/tuple.h>

#include <tuple>

#include "bindings_common.h"
#include "schedule/scheduler.h"
#include "schedule/shift.h"

using namespace nb::literals;

namespace mlx_moe {
namespace {

// assignment, dispatch, bandwidth, memory, link, load, holds_all; count, bytes, row_bytes, shards,
// allowed.
using UnitNumbers = std::tuple<double, double, double, double, double, double, bool>;
using ExpertNumbers = std::tuple<size_t, double, double, uint32_t, std::vector<uint8_t>>;

std::vector<Unit> units_of(const std::vector<UnitNumbers>& numbers) {
  std::vector<Unit> units;
  for (const auto& [assignment, dispatch, bandwidth, memory, link, load, holds_all] : numbers)
    units.push_back({assignment, dispatch, bandwidth, memory, link, load, holds_all});
  return units;
}

Experts experts_of(const ExpertNumbers& numbers) {
  const auto& [count, bytes, row_bytes, shards, allowed] = numbers;
  return {count, bytes, row_bytes, shards, allowed};
}

std::span<const double> histogram_of(const Array& a, const char* what = "histogram") {
  require_shape(a, 1, what);
  require(a.dtype() == nb::dtype<double>(), what, " must be float64");
  return {static_cast<const double*>(a.data()), a.size()};
}

Placement placement_of(const Array& parts) {
  require_shape(parts, 2, "parts");
  require(parts.dtype() == nb::dtype<uint32_t>(), "parts must be uint32");
  const auto* data = static_cast<const uint32_t*>(parts.data());
  return {parts.shape(1), {data, data + parts.size()}};
}

nb::object array_of(const Placement& p) {
  const size_t experts = p.units ? p.parts.size() / p.units : 0;
  nb::object array =
      nb::module_::import_("numpy").attr("empty")(nb::make_tuple(experts, p.units), "uint32");
  std::copy(p.parts.begin(), p.parts.end(),
            static_cast<uint32_t*>(nb::cast<OutArray>(array).data()));
  return array;
}

nb::object py_place(const Array& histogram, const std::vector<UnitNumbers>& units,
                    const ExpertNumbers& experts, double split_gain, double noise, double counting,
                    bool serial) {
  require(split_gain >= 0 && noise >= 0 && counting >= 0,
          "split_gain, noise and counting are at least 0");
  return array_of(place(experts_of(experts), units_of(units), histogram_of(histogram),
                        {split_gain, noise, counting, serial, 0}));
}

std::vector<double> py_unit_seconds(const Array& histogram, const std::vector<UnitNumbers>& units,
                                    const ExpertNumbers& experts, const Array& parts) {
  const Experts e = experts_of(experts);
  const std::vector<Unit> u = units_of(units);
  const Placement p = placement_of(parts);
  const auto loads = histogram_of(histogram);
  check_problem(e, u);
  check_histogram(e, loads);
  check_placement(e, u, p);
  return unit_seconds(e, u, loads, p);
}

double variation(const Array& a, const Array& b, bool expected) {
  const auto x = histogram_of(a, "a"), y = histogram_of(b, "b");
  require(x.size() == y.size(), "histograms of ", x.size(), " and ", y.size(), " experts");
  return expected ? expected_variation(x, y) : total_variation(x, y);
}

nb::dict dict_of(const Replan& r) {
  nb::dict d;
  d["forward"] = r.forward;
  d["assignments"] = r.assignments;
  d["shift"] = r.shift;
  d["threshold"] = r.threshold;
  d["before"] = r.before;
  d["after"] = r.after;
  d["bytes_moved"] = r.bytes;
  d["moving_seconds"] = r.moving;
  return d;
}

class PyScheduler {
 public:
  PyScheduler(const ExpertNumbers& experts, const std::vector<UnitNumbers>& units, double shift,
              double noise, double hysteresis, double horizon, double minimum, double split_gain,
              double spread, bool serial)
      : scheduler_(
            experts_of(experts), units_of(units),
            {shift, noise, hysteresis, horizon, minimum, {split_gain, spread, 1, serial, 0}}) {}

  void plan(const Array& histogram, double counted) {
    scheduler_.plan(histogram_of(histogram), counted);
  }
  void adopt(const Array& parts, const Array& histogram, double counted) {
    scheduler_.adopt(placement_of(parts), histogram_of(histogram), counted);
  }
  nb::object observe(const Array& histogram) {
    const std::optional<Replan> replan = scheduler_.observe(histogram_of(histogram));
    return replan ? nb::object(dict_of(*replan)) : nb::none();
  }
  nb::object placement() const {
    return scheduler_.placement() ? array_of(*scheduler_.placement()) : nb::none();
  }
  nb::dict counts() const {
    const ScheduleCounts& c = scheduler_.counts();
    nb::dict d;
    d["forwards"] = c.forwards;
    d["decisions"] = c.decisions;
    d["shifts"] = c.shifts;
    d["replans"] = c.replans;
    d["declined"] = c.declined;
    d["bytes_moved"] = c.bytes;
    return d;
  }

 private:
  Scheduler scheduler_;
};

}  // namespace

void bind_schedule(nb::module_& m) {
  m.def("schedule_place", &py_place, "histogram"_a, "units"_a, "experts"_a, nb::kw_only(),
        "split_gain"_a = 0.001, "noise"_a = 0.0, "counting"_a = 1.0, "serial"_a = false,
        "uint32 [E, U]: shards of each expert on each unit (see mlx_moe.schedule.place).\n\n"
        "histogram float64 [E]; units (assignment, dispatch, bandwidth, memory, link, load, "
        "holds_all);\n"
        "experts (count, bytes, row_bytes, shards, allowed). Raises InvalidArgument.");
  m.def("schedule_seconds", &py_unit_seconds, "histogram"_a, "units"_a, "experts"_a, "parts"_a,
        "Seconds that each unit takes for a histogram. Raises InvalidArgument.");
  m.def("total_variation", &variation, "a"_a, "b"_a, "expected"_a = false,
        "Half the sum of differences of two histograms (float64 [E]) as shares; expected: what it\n"
        "would be on average if both were drawn from the same shares.");
  nb::class_<PyScheduler>(m, "LayerScheduler", "See mlx_moe.schedule.Scheduler.")
      .def(nb::init<const ExpertNumbers&, const std::vector<UnitNumbers>&, double, double, double,
                    double, double, double, double, bool>(),
           "experts"_a, "units"_a, nb::kw_only(), "shift"_a, "noise"_a, "hysteresis"_a, "horizon"_a,
           "minimum"_a, "split_gain"_a, "spread"_a, "serial"_a)
      .def("plan", &PyScheduler::plan, "histogram"_a, "counted"_a, "Place the experts anew.")
      .def("adopt", &PyScheduler::adopt, "parts"_a, "histogram"_a, "counted"_a,
           "Keep to a placement that was made for this histogram.")
      .def("observe", &PyScheduler::observe, "histogram"_a,
           "Count a forward; what was re-planned, or None.")
      .def_prop_ro("placement", &PyScheduler::placement, "uint32 [E, U], or None before any.")
      .def_prop_ro("counts", &PyScheduler::counts, "Counts since it was made.");
}

}  // namespace mlx_moe
