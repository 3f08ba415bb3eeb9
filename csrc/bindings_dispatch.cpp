#include <nanobind/stl/array.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>

#include <map>
#include <memory>

#include "bindings_common.h"
#include "dispatch/coreml.h"
#include "dispatch/host.h"
#include "dispatch/queue.h"

using namespace nb::literals;

namespace mlx_moe {
namespace {

// (offset, scale offset or None); gate, up, down and their biases.
using Tensor = std::optional<std::pair<size_t, std::optional<size_t>>>;
using Tensors = std::array<Tensor, 6>;

std::optional<BlobTensor> blob_tensor(const Tensor& t) {
  if (!t) return std::nullopt;
  return BlobTensor{t->first, t->second};
}

BlobExpert blob_expert(const Tensors& t) {
  return {blob_tensor(t[0]), blob_tensor(t[1]), blob_tensor(t[2]),
          blob_tensor(t[3]), blob_tensor(t[4]), blob_tensor(t[5])};
}

// The submitted tiles, kept alive until they are done, and the queue that computes them.
class Submitted {
 public:
  Submitted(std::shared_ptr<Pending> pending, std::shared_ptr<Queue> queue,
            std::vector<OutArray> arrays)
      : pending_(std::move(pending)), queue_(std::move(queue)), arrays_(std::move(arrays)) {}
  ~Submitted() {
    nb::gil_scoped_release free;
    pending_->wait();
  }
  std::vector<std::string> wait() {
    nb::gil_scoped_release free;
    std::vector<std::string> texts;
    for (const Outcome& o : pending_->wait())
      texts.push_back(!o.status.ok() ? o.status.message
                      : !o.finite    ? "not finite"
                      : o.small      ? "too small"
                                     : "");
    return texts;
  }

 private:
  std::shared_ptr<Pending> pending_;
  std::shared_ptr<Queue> queue_;
  std::vector<OutArray> arrays_;
};

uint16_t* tile_data(const OutArray& a, const char* what) {
  require_shape(Array(a), 3, what);
  require(scalar_type(Array(a), what) == Scalar::f16, what, " must be float16");
  return static_cast<uint16_t*>(a.data());
}

// Any executor behind its queue: what a caller sees of it once programs are loaded.
class Dispatcher {
 public:
  Dispatcher(std::unique_ptr<StaticExecutor> executor, size_t in_flight)
      : queue_(std::make_shared<Queue>(std::move(executor), in_flight)) {}

  std::unique_ptr<Submitted> submit(
      const std::vector<std::tuple<size_t, OutArray, OutArray>>& tiles) {
    std::vector<Request> requests;
    std::vector<OutArray> arrays;
    for (const auto& [program, x, out] : tiles) {
      const uint16_t* from = tile_data(x, "a tile");
      uint16_t* to = tile_data(out, "out");
      require(
          x.shape(0) == out.shape(0) && x.shape(1) == out.shape(1) && x.shape(2) == out.shape(2),
          "a tile and its out differ in shape");
      requests.push_back({program, {x.shape(0), x.shape(1), x.shape(2), from, to}});
      arrays.insert(arrays.end(), {x, out});
    }
    count_call("submit");
    std::shared_ptr<Pending> pending;
    {
      nb::gil_scoped_release free;
      pending = queue_->submit(requests);
    }
    return std::make_unique<Submitted>(std::move(pending), queue_, std::move(arrays));
  }

  nb::dict counts() const {
    const Queue::Counts c = queue_->counts();
    nb::dict d;
    d["tiles"] = c.tiles;
    d["batches"] = c.batches;
    d["most_in_flight"] = c.most_in_flight;
    return d;
  }

 protected:
  std::shared_ptr<Queue> queue_;
};

class HostDispatcher : public Dispatcher {
 public:
  HostDispatcher(double dispatch_seconds, size_t in_flight)
      : Dispatcher(make(dispatch_seconds), in_flight) {}

  size_t load(const std::string& blob, size_t width, size_t inner, const std::string& activation,
              const std::vector<size_t>& capacities, const std::vector<Tensors>& experts,
              const std::map<std::string, float>& parameters) {
    HostProgram p{blob, width, inner, parse_activation(activation, parameters), capacities, {}};
    for (const Tensors& t : experts) p.experts.push_back(blob_expert(t));
    nb::gil_scoped_release free;
    return host().load(p);
  }

  size_t weight_bytes() const { return host().weight_bytes(); }

 private:
  static std::unique_ptr<HostExecutor> make(double dispatch_seconds) {
    require(dispatch_seconds >= 0 && dispatch_seconds < 60, "dispatch_seconds is ",
            dispatch_seconds, ", expected 0 to 60");
    return std::make_unique<HostExecutor>(std::chrono::duration<double>(dispatch_seconds));
  }
  HostExecutor& host() const { return static_cast<HostExecutor&>(queue_->executor()); }
};

void require_ok(const Status& status) {
  if (!status.ok()) throw Error(status.message);
}

class CoreMLDispatcher : public Dispatcher {
 public:
  CoreMLDispatcher(size_t in_flight, bool surfaces) : Dispatcher(make(surfaces), in_flight) {}

  size_t load(const std::map<size_t, std::pair<std::string, std::string>>& functions, size_t groups,
              size_t width, const std::string& input, const std::string& output) {
    CoreMLProgram p{groups, width, input, output, {}};
    for (const auto& [capacity, f] : functions) p.functions[capacity] = {f.first, f.second};
    size_t number = 0;
    nb::gil_scoped_release free;
    require_ok(coreml().load(p, number));
    return number;
  }

  std::map<std::string, size_t> buffers() const {
    const CoreMLExecutor::Counts c = coreml().counts();
    return {{"surfaces", c.surfaces}, {"pages", c.pages}, {"copied", c.copied}};
  }

 private:
  static std::unique_ptr<CoreMLExecutor> make(bool surfaces) {
    require_ok(coreml_available());
    return std::make_unique<CoreMLExecutor>(surfaces);
  }
  CoreMLExecutor& coreml() const { return static_cast<CoreMLExecutor&>(queue_->executor()); }
};

using UnitCounts = std::map<std::string, std::pair<size_t, size_t>>;

UnitCounts placement_of(const std::string& compiled, const std::string& function) {
  Placement p;
  nb::gil_scoped_release free;
  require_ok(coreml_placement({compiled, function}, p));
  return {{"ane", {p.ane.operations, p.ane.products}},
          {"gpu", {p.gpu.operations, p.gpu.products}},
          {"cpu", {p.cpu.operations, p.cpu.products}},
          {"other", {p.other.operations, p.other.products}}};
}

void bind_coreml(nb::module_& m) {
  nb::class_<CoreMLDispatcher, Dispatcher>(
      m, "CoreMLExecutor",
      "Runs compiled groups through Core ML (macOS 14 or newer), asked for the Neural Engine and\n"
      "the CPU. surfaces: keep tiles on IOSurfaces, which the Neural Engine reads in place.\n"
      "Raises InvalidArgument where there is no Core ML.")
      .def(nb::init<size_t, bool>(), nb::kw_only(), "in_flight"_a = 4, "surfaces"_a = true)
      .def("load", &CoreMLDispatcher::load, "functions"_a, "groups"_a, "width"_a, "input"_a,
           "output"_a,
           "Load a program and return its number.\n\n"
           "functions: by capacity, the compiled model and the name of its function, '' for the\n"
           "only one. Raises InvalidArgument, which names the file, if one does not load or has\n"
           "other shapes than [1, width, 1, groups * capacity] of float16.")
      .def_prop_ro("buffers", &CoreMLDispatcher::buffers,
                   "surfaces and pages (buffers made) and copied (results elsewhere than there).");
  m.def(
      "coreml_missing", [] { return coreml_available().message; },
      "Why there is no Core ML here, or ''.");
  m.def(
      "coreml_compile",
      [](const std::string& package) {
        std::string compiled;
        nb::gil_scoped_release free;
        require_ok(coreml_compile(package, compiled));
        return compiled;
      },
      "package"_a, "Compile an .mlpackage; returns a temporary directory that is the caller's.");
  m.def("coreml_placement", &placement_of, "compiled"_a, "function"_a,
        "Operations, and convolutions among them, by the unit that Core ML prefers for them:\n"
        "ane, gpu, cpu and other. Raises InvalidArgument if it does not say.");
}

}  // namespace

void bind_dispatch(nb::module_& m) {
  m.def(
      "addresses",
      [](const std::vector<Array>& arrays) {
        std::vector<uintptr_t> found;
        for (const Array& a : arrays) found.push_back(reinterpret_cast<uintptr_t>(a.data()));
        return found;
      },
      "arrays"_a, "Where the values of each array are in memory.");
  nb::class_<Submitted>(m, "Submitted", "Tiles that an executor was handed; keeps them alive.")
      .def("wait", &Submitted::wait,
           "Wait for all of them. A text for each: '' if its out is written and within float16's\n"
           "range, 'not finite' if it or x holds an infinity or a NaN, 'too small' if all of it\n"
           "is below the normal numbers, else what went wrong.");
  nb::class_<Dispatcher>(m, "StaticExecutor", "What runs programs of fixed shapes.")
      .def("submit", &Dispatcher::submit, "tiles"_a,
           "Begin (program, x, out) for each: x and out float16 [G, C, d], out is written.\n\n"
           "Raises InvalidArgument, with nothing begun, on a shape that the program was not\n"
           "compiled for.")
      .def_prop_ro("counts", &Dispatcher::counts,
                   "tiles, batches and most_in_flight (tiles at a time) since it was made.");
  nb::class_<HostDispatcher, Dispatcher>(
      m, "HostExecutor",
      "Runs compiled groups on the CPU kernels: float16 in and out, static shapes only.\n\n"
      "dispatch_seconds: what each tile waits before it is computed, one after the other, as for\n"
      "a device (for tests and benchmarks). in_flight: tiles in work at a time. The work is done\n"
      "on a thread of its own.")
      .def(nb::init<double, size_t>(), nb::kw_only(), "dispatch_seconds"_a = 0.0, "in_flight"_a = 4)
      .def("load", &HostDispatcher::load, "blob"_a, "width"_a, "inner"_a, "activation"_a,
           "capacities"_a, "experts"_a, "parameters"_a = std::map<std::string, float>{},
           "Make a program of a weight file and return its number.\n\n"
           "experts: for each (gate, up, down, gate_bias, up_bias, down_bias), each None or\n"
           "(byte offset, None for float16, or for int8 the offset of float16 scales, one a row).\n"
           "gate and up are [inner, width], down [width, inner]. parameters: the activation's.\n"
           "Raises InvalidArgument on an unknown activation or parameter, a file that cannot be\n"
           "read, a tensor outside of it.")
      .def_prop_ro("weight_bytes", &HostDispatcher::weight_bytes,
                   "Memory that the programs' weights take, all in float16.");
  bind_coreml(m);
}

}  // namespace mlx_moe
