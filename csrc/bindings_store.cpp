#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>

#include <tuple>

#include "bindings_common.h"
#include "store/failure.h"
#include "store/replay.h"
#include "store/store.h"

using namespace nb::literals;

namespace mlx_moe {
namespace {

// (mode, bits, group_size, names of weight, scales, biases, bias, global_scale).
using Source = std::tuple<std::string, int, int, std::vector<std::vector<std::string>>>;
using Layers = std::vector<std::pair<std::string, std::vector<Source>>>;

LayerSource layer_source(const std::string& name, const std::vector<Source>& matrices) {
  LayerSource layer{name, {}};
  for (const auto& [mode, bits, group, names] : matrices) {
    require(names.size() == kParts, name, ": a projection has ", names.size(),
            " lists of names, expected ", size_t(kParts));
    MatrixSource m{parse_mode(mode), bits, group, {}};
    std::copy(names.begin(), names.end(), m.names.begin());
    layer.matrices.push_back(std::move(m));
  }
  return layer;
}

nb::dict dict_of(const StoreCounts& c) {
  nb::dict d;
  d["hits"] = c.hits;
  d["misses"] = c.misses;
  d["prefetch_useful"] = c.prefetch_useful;
  d["prefetch_issued"] = c.prefetch_issued;
  d["prefetch_wasted"] = c.prefetch_wasted;
  d["prefetch_dropped"] = c.prefetch_dropped;
  d["evictions"] = c.evictions;
  d["bytes_read"] = c.bytes_read;
  d["stall_seconds"] = c.stall_seconds;
  d["resident_bytes"] = c.resident_bytes;
  d["resident_experts"] = c.resident_experts;
  return d;
}

// What was acquired: gone once it is released and none of its matrices is in use.
class Acquired {
 public:
  explicit Acquired(std::shared_ptr<HeldExperts> held) : held_(std::move(held)) {}

  nb::tuple matrices() const {
    require(held_ != nullptr, "these experts were released");
    nb::list all;
    for (const Matrix& m : held_->matrices()) all.append(nb::cast(HeldMatrix{m, {}, {}, held_}));
    return nb::tuple(all);
  }
  void release() { held_.reset(); }

 private:
  std::shared_ptr<HeldExperts> held_;
};

class Store {
 public:
  Store(const std::vector<std::string>& paths, const Layers& layers, size_t budget,
        const std::string& policy, uint64_t period, const std::vector<uint64_t>& counts,
        const std::vector<uint32_t>& pinned, size_t readers, bool direct, double timeout) {
    std::vector<LayerSource> sources;
    for (const auto& [name, matrices] : layers) sources.push_back(layer_source(name, matrices));
    nb::gil_scoped_release free;
    store_ = std::make_shared<ExpertStore>(
        paths, sources,
        StoreOptions{budget, {policy, period, counts, pinned}, readers, direct, timeout});
  }
  ~Store() {
    nb::gil_scoped_release free;
    store_->close();
    store_.reset();
  }

  Acquired acquire(size_t layer, const Array& experts) const {
    const auto ids = values(experts);
    nb::gil_scoped_release free;
    return Acquired(store_->acquire(layer, ids, [] {
      nb::gil_scoped_acquire held;
      if (PyErr_CheckSignals() != 0) throw nb::python_error();
    }));
  }

  void prefetch(size_t layer, const Array& experts, bool warm) const {
    const auto ids = values(experts);
    nb::gil_scoped_release free;
    store_->prefetch(layer, ids, warm);
  }

  std::vector<uint32_t> resident(size_t layer) const {
    nb::gil_scoped_release free;
    return store_->resident(layer);
  }

  nb::dict stats() const {
    StoreCounts c;
    {
      nb::gil_scoped_release free;
      c = store_->counts();
    }
    return dict_of(c);
  }
  void check_files() const {
    nb::gil_scoped_release free;
    store_->check_files();
  }

  void close() const {
    nb::gil_scoped_release free;
    store_->close();
  }

  bool idle() const { return store_->idle(); }
  bool direct() const { return store_->direct(); }
  std::vector<size_t> slot_bytes() const {
    std::vector<size_t> bytes;
    for (const LayerLayout& l : store_->layers()) bytes.push_back(l.slot_bytes);
    return bytes;
  }
  std::vector<size_t> experts() const {
    std::vector<size_t> counts;
    for (const LayerLayout& l : store_->layers()) counts.push_back(l.experts);
    return counts;
  }

 private:
  static std::span<const uint32_t> values(const Array& experts) {
    return {id_data(experts, "experts"), experts.size()};
  }

  std::shared_ptr<ExpertStore> store_;
};

nb::list tensors(const std::string& path) {
  std::vector<Tensor> found;
  {
    nb::gil_scoped_release free;
    found = read_tensors(File(path, false));
  }
  nb::list all;
  for (const Tensor& t : found)
    all.append(nb::make_tuple(t.name, t.dtype, nb::tuple(nb::cast(t.shape)), t.offset, t.size));
  return all;
}

template <class T>
std::span<const T> values_of(const Array& a, const char* what) {
  require_shape(a, 1, what);
  require(a.dtype() == nb::dtype<T>(), what, " must be int", 8 * sizeof(T));
  return {static_cast<const T*>(a.data()), a.size()};
}

nb::dict py_replay(const Array& experts, const Array& slot_bytes, const Array& layers,
                   const Array& offsets, const Array& ids, size_t budget, const std::string& policy,
                   uint64_t period, const std::vector<uint64_t>& initial,
                   const std::vector<uint32_t>& pinned) {
  const auto counts = values_of<int32_t>(experts, "experts");
  const auto sizes = values_of<int64_t>(slot_bytes, "slot_bytes");
  const Forwards forwards{values_of<int32_t>(layers, "layers"),
                          values_of<int64_t>(offsets, "offsets"), values_of<int32_t>(ids, "ids")};
  StoreCounts found;
  {
    nb::gil_scoped_release free;
    found = replay(counts, sizes, forwards, budget, {policy, period, initial, pinned});
  }
  return dict_of(found);
}

constexpr const char* kStoreDoc =
    "Experts of safetensors files, read into slots under a limit of bytes as they are asked "
    "for.\n\n"
    "paths: the files. layers: for each (name, projections), a projection being (mode, bits,\n"
    "group_size, names) with mode 'dense' for one that is not quantised and names five lists of\n"
    "tensor names: weight, scales, biases, bias, global_scale. A list has one name of a stacked\n"
    "tensor [E, ...], a name an expert, or none. budget: bytes of all slots. policy: 'lru', 'lfu'\n"
    "(counts, halved every `period` uses; they begin with `counts`, in 256ths of a use) or\n"
    "'pinned' (`pinned` go last); both count experts over all layers. readers: threads. direct: "
    "read past the page cache where that is possible.\n"
    "timeout: seconds to wait for slots that others hold. Any number of threads may call.\n"
    "Raises CorruptFile, ReadFailed or InvalidArgument; see acquire.";

constexpr const char* kAcquireDoc =
    "Experts of a layer (number), in memory: reads those that are not, without the GIL.\n\n"
    "experts: uint32 or int32, any shape, repetitions allowed. Their slots stay until the result\n"
    "is released and none of its matrices is in use. Raises MemoryLimit if the budget cannot hold\n"
    "so many at once, StoreBusy after `timeout` seconds of waiting for others, ReadFailed,\n"
    "FileChanged, StoreClosed, InvalidArgument on a number out of range.";

}  // namespace

void bind_store(nb::module_& m) {
  nb::register_exception_translator([](const std::exception_ptr& p, void*) {
    try {
      std::rethrow_exception(p);
    } catch (const StoreFailure& e) {
      PyErr_SetString(nb::module_::import_("mlx_moe.errors").attr(name_of(e.failure)).ptr(),
                      e.what());
    }
  });
  m.def("safetensors", &tensors, "path"_a,
        "(name, dtype, shape, offset, nbytes) of each tensor of a safetensors file, checked, in\n"
        "the order of its bytes. Raises CorruptFile or ReadFailed.");
  m.def("replay", &py_replay, "experts"_a, "slot_bytes"_a, "layers"_a, "offsets"_a, "ids"_a,
        "budget"_a, nb::kw_only(), "policy"_a = "lru", "period"_a = 0,
        "counts"_a = std::vector<uint64_t>{}, "pinned"_a = std::vector<uint32_t>{},
        "What a Store's stats would be after these forwards, without reading anything.\n\n"
        "experts int32 [L] and slot_bytes int64 [L] of each layer; forward i is of layers[i]\n"
        "(int32 [n]) and asks for ids[offsets[i]:offsets[i + 1]] (int64 [n + 1], int32 [m]).\n"
        "Raises InvalidArgument on numbers out of range, and where the budget cannot hold what\n"
        "a forward asks for.");
  nb::class_<Acquired>(m, "Acquired", "Experts that stay in memory; a context manager.")
      .def_prop_ro("matrices", &Acquired::matrices,
                   "A Matrix for each projection; only the acquired experts can be routed to.")
      .def("release", &Acquired::release, "Let the slots go once no matrix is in use.")
      .def("__enter__", [](nb::object self) { return self; })
      .def("__exit__", [](Acquired& self, nb::args) { self.release(); });
  nb::class_<Store>(m, "Store", kStoreDoc)
      .def(nb::init<const std::vector<std::string>&, const Layers&, size_t, const std::string&,
                    uint64_t, const std::vector<uint64_t>&, const std::vector<uint32_t>&, size_t,
                    bool, double>(),
           "paths"_a, "layers"_a, "budget"_a, nb::kw_only(), "policy"_a = "lru", "period"_a = 0,
           "counts"_a = std::vector<uint64_t>{}, "pinned"_a = std::vector<uint32_t>{},
           "readers"_a = 4, "direct"_a = false, "timeout"_a = 60.0)
      .def("acquire", &Store::acquire, "layer"_a, "experts"_a, kAcquireDoc)
      .def("prefetch", &Store::prefetch, "layer"_a, "experts"_a, nb::kw_only(), "warm"_a = false,
           "Read experts when nobody waits for others, the first ones first.\n\n"
           "warm: into free room only, at last; else also in place of experts\n"
           "neither held nor just read, and only until their layer is acquired.")
      .def("resident", &Store::resident, "layer"_a, "The layer's experts that are in memory.")
      .def("stats", &Store::stats, "Counts since it was opened; bytes and seconds.")
      .def("check_files", &Store::check_files,
           "Raise FileChanged unless the paths lead to the files that were opened, unchanged.")
      .def("close", &Store::close, "End all reading. What was acquired stays until released.")
      .def_prop_ro("idle", &Store::idle, "Whether no prefetch is waiting or being read.")
      .def_prop_ro("direct", &Store::direct, "Whether reads go past the page cache.")
      .def_prop_ro("experts", &Store::experts, "Experts of each layer.")
      .def_prop_ro("slot_bytes", &Store::slot_bytes, "Bytes of a slot of each layer.");
}

}  // namespace mlx_moe
