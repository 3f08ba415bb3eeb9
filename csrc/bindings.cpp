#include <array>
#include <map>
#include <mutex>

#include "bindings_common.h"
#include "experts/ffn.h"
#include "support/cpu.h"
#include "support/thread_pool.h"

using namespace nb::literals;

namespace mlx_moe {

namespace {

std::mutex calls_mutex;
std::map<std::string, size_t> calls;

// Writable arrays come as OutArray; the checks want the read-only type.
Array view(const OutArray& a) { return Array(a); }

Input input(const Array& a, const char* what) {
  require_contiguous(a, what);
  require(a.ndim() >= 2, std::string(what) + " needs at least two dimensions, has " + shape_of(a));
  size_t cols = a.shape(a.ndim() - 1);
  return {a.data(), scalar_type(a, what), cols ? a.size() / cols : 0, cols};
}

Output output(const OutArray& a) {
  Input in = input(view(a), "out");
  return {a.data(), in.type, in.rows, in.cols};
}

Routing routing(const Array& ids) {
  const uint32_t* data = id_data(ids, "ids");
  require(ids.ndim() >= 2, "ids need the shape [tokens, k], have " + shape_of(ids));
  size_t k = ids.shape(ids.ndim() - 1), tokens = k ? ids.size() / k : 0;
  require(ids.size() < (size_t(1) << 31), "more than 2^31 assignments in one call");
  return {data, tokens, k};
}

// Scores in any shape with a value an assignment, such as [.., k, 1].
Input score_rows(const Array& scores, const Routing& r) {
  require_contiguous(scores, "scores");
  require(scores.size() == r.tokens * r.k, "scores have shape " + shape_of(scores) + ", expected " +
                                               std::to_string(r.tokens) + " x " +
                                               std::to_string(r.k));
  return {scores.data(), scalar_type(scores, "scores"), r.tokens, r.k};
}

// A Matrix and the arrays that it reads.
struct HeldMatrix {
  Matrix m;
  std::vector<nb::object> arrays;
};

Array array_of(const nb::object& o, const char* what) {
  Array a;
  require(nb::try_cast(o, a), std::string(what) + " must be an array in main memory");
  return a;
}

// [experts, rows, n]; two dimensions are one expert.
std::array<size_t, 3> stack_shape(const Array& a, const char* what) {
  require_contiguous(a, what);
  require(a.ndim() == 2 || a.ndim() == 3,
          std::string(what) + " needs the shape [experts, rows, n], has " + shape_of(a));
  bool one = a.ndim() == 2;
  return {one ? 1 : a.shape(0), a.shape(one ? 0 : 1), a.shape(one ? 1 : 2)};
}

void set_dense(Matrix& m, const Array& weight) {
  m.mode = Mode::dense;
  m.type = scalar_type(weight, "weight");
  m.cols = stack_shape(weight, "weight")[2];
}

void set_quantised(Matrix& m, const Array& weight, const Array& scales, const std::string& mode,
                   int bits, int group) {
  require(weight.dtype() == nb::dtype<uint32_t>(), "a quantised weight must be uint32");
  m.mode = parse_mode(mode);
  require(m.mode != Mode::dense, "a dense weight has no scales");
  bool fp8 = m.mode == Mode::mxfp8, fp16_groups = m.mode == Mode::nvfp4;
  m.bits = bits ? bits : m.mode == Mode::affine ? 0 : fp8 ? 8 : 4;
  m.group = group ? group : m.mode == Mode::affine ? 0 : fp16_groups ? 16 : 32;
  require(m.bits > 0 && m.group > 0, "affine needs bits and group_size");
  m.cols = stack_shape(scales, "scales")[2] * size_t(m.group);
  size_t words = stack_shape(weight, "weight")[2];
  require(words * 32 == m.cols * size_t(m.bits),
          "weight has " + std::to_string(words) + " words a row and scales " +
              std::to_string(m.cols / size_t(m.group)) + " groups: not " + std::to_string(m.bits) +
              " bits in groups of " + std::to_string(m.group));
  if (m.mode == Mode::affine)
    m.type = scalar_type(scales, "scales");
  else
    require(scales.dtype() == nb::dtype<uint8_t>(), mode + " scales must be uint8");
  m.scales = static_cast<const uint8_t*>(scales.data());
}

void require_same_shape(const Array& a, const Array& b, const char* what) {
  bool same = a.ndim() == b.ndim();
  for (size_t i = 0; same && i < a.ndim(); ++i) same = a.shape(i) == b.shape(i);
  require(same, std::string(what) + " has shape " + shape_of(a) + ", expected " + shape_of(b));
}

void make_matrix(HeldMatrix* self, nb::object weight, nb::object scales, nb::object biases,
                 const std::string& mode, int bits, int group_size, nb::object global_scale,
                 nb::object bias) {
  Matrix m;
  auto w = array_of(weight, "weight");
  auto shape = stack_shape(w, "weight");
  m.experts = shape[0];
  m.rows = shape[1];
  m.weight = static_cast<const uint8_t*>(w.data());
  if (scales.is_none()) {
    set_dense(m, w);
  } else {
    auto s = array_of(scales, "scales");
    auto s_shape = stack_shape(s, "scales");
    require(s_shape[0] == m.experts && s_shape[1] == m.rows,
            "scales have shape " + shape_of(s) + ", the weight " + shape_of(w));
    set_quantised(m, w, s, mode, bits, group_size);
    require(biases.is_none() == (m.mode != Mode::affine),
            "biases go with mode affine, and only with it");
    if (!biases.is_none()) {
      auto b = array_of(biases, "biases");
      require_contiguous(b, "biases");
      require_same_shape(b, s, "biases");
      require(b.dtype() == s.dtype(), "biases and scales differ in dtype");
      m.biases = static_cast<const uint8_t*>(b.data());
    }
  }
  if (!global_scale.is_none()) {
    auto g = array_of(global_scale, "global_scale");
    require_contiguous(g, "global_scale");
    require(m.mode == Mode::nvfp4, "global_scale goes with mode nvfp4");
    require(g.dtype() == nb::dtype<float>() && g.size() == m.experts,
            "global_scale must be float32 [experts], has " + shape_of(g));
    m.global_scale = static_cast<const float*>(g.data());
  }
  if (!bias.is_none()) {
    auto b = array_of(bias, "bias");
    require_contiguous(b, "bias");
    require(b.size() == m.experts * m.rows && b.shape(b.ndim() - 1) == m.rows,
            "bias must be [experts, rows], has " + shape_of(b));
    m.added_type = scalar_type(b, "bias");
    m.added = static_cast<const uint8_t*>(b.data());
  }
  validate(m);
  new (self) HeldMatrix{m, {weight, scales, biases, global_scale, bias}};
}

size_t matrix_bytes(const HeldMatrix& h) {
  const Matrix& m = h.m;
  size_t rows = m.experts * m.rows, bytes = rows * m.row_bytes();
  if (m.mode != Mode::dense) bytes += rows * m.groups() * m.scale_size() * (m.biases ? 2 : 1);
  if (m.added) bytes += rows * size_of(m.added_type);
  return bytes;
}

void bind_matrix(nb::module_& m) {
  nb::class_<HeldMatrix>(
      m, "Matrix",
      "Stacked expert weights, read where they are (the arrays are kept alive).\n\n"
      "weight: [E, N, K] float32, float16 or bfloat16; or MLX-quantised uint32\n"
      "[E, N, K * bits / 32] with scales [E, N, K / group_size] (and biases of that\n"
      "shape for mode 'affine'; uint8 scales for 'mxfp4', 'mxfp8', 'nvfp4'; float32\n"
      "global_scale [E] for 'nvfp4'). Two dimensions are one expert. bias [E, N] is\n"
      "added to the output. Raises InvalidArgument where shapes, bits and group_size\n"
      "do not agree. Layout: mlx.core.quantize's documentation.")
      .def("__init__", &make_matrix, "weight"_a, "scales"_a = nb::none(), "biases"_a = nb::none(),
           nb::kw_only(), "mode"_a = "affine", "bits"_a = 0, "group_size"_a = 0,
           "global_scale"_a = nb::none(), "bias"_a = nb::none())
      .def_prop_ro("experts", [](const HeldMatrix& h) { return h.m.experts; })
      .def_prop_ro("rows", [](const HeldMatrix& h) { return h.m.rows; })
      .def_prop_ro("cols", [](const HeldMatrix& h) { return h.m.cols; })
      .def_prop_ro("mode", [](const HeldMatrix& h) { return name_of(h.m.mode); })
      .def_prop_ro("bits", [](const HeldMatrix& h) { return h.m.bits; })
      .def_prop_ro("group_size", [](const HeldMatrix& h) { return h.m.group; })
      .def_prop_ro("nbytes", &matrix_bytes);
}

nb::dlpack::dtype dtype_of(const std::string& name) {
  auto half = uint8_t(nb::dlpack::dtype_code::Float),
       brain = uint8_t(nb::dlpack::dtype_code::Bfloat);
  if (name == "float32") return nb::dtype<float>();
  if (name == "float16") return {half, 16, 1};
  if (name == "bfloat16") return {brain, 16, 1};
  throw Error("dtype " + name + " is none of float32, float16, bfloat16");
}

nb::ndarray<nb::array_api, nb::device::cpu> empty(const std::vector<size_t>& shape,
                                                  const std::string& dtype) {
  auto type = dtype_of(dtype);
  size_t bytes = type.bits / 8;
  for (size_t n : shape) bytes *= n;
  auto* data = new char[bytes ? bytes : 1];
  nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<char*>(p); });
  return {data, shape.size(), shape.data(), owner, nullptr, type};
}

void bind_experts(nb::module_& m) {
  m.def("empty", &empty, "shape"_a, "dtype"_a,
        "An uninitialised row-contiguous buffer of float32, float16 or bfloat16, to write into as\n"
        "`out`. mx.array copies it, which for a small result beats evaluating mx.zeros.");
  m.def(
      "swiglu",
      [](const Array& x, const Array& ids, const HeldMatrix& gate, const HeldMatrix& up,
         const HeldMatrix& down, const OutArray& out) {
        auto in = input(x, "x");
        auto r = routing(ids);
        auto y = output(out);
        count_call("swiglu");
        nb::gil_scoped_release free;
        swiglu(in, r, gate.m, up.m, down.m, y);
      },
      "x"_a, "ids"_a, "gate"_a, "up"_a, "down"_a, "out"_a,
      "out[T, k, D] = down . (silu(gate . x) * (up . x)) for every assignment.\n\n"
      "x [T, K] and out: float32, float16 or bfloat16; ids [T, k]: uint32 or int32, below E.\n"
      "Raises InvalidArgument on shapes that do not agree or an id out of range.");
  m.def(
      "swiglu_combine",
      [](const Array& x, const Array& ids, const Array& scores, const HeldMatrix& gate,
         const HeldMatrix& up, const HeldMatrix& down, const OutArray& out) {
        auto in = input(x, "x");
        auto r = routing(ids);
        auto s = score_rows(scores, r);
        auto y = output(out);
        count_call("swiglu_combine");
        nb::gil_scoped_release free;
        swiglu_combine(in, r, s, gate.m, up.m, down.m, y);
      },
      "x"_a, "ids"_a, "scores"_a, "gate"_a, "up"_a, "down"_a, "out"_a,
      "out[T, D] = the sum of swiglu's rows weighted by scores [T, k], in float32.\n\n"
      "Arguments and errors as for swiglu; scores: float32, float16 or bfloat16, also [T, k, 1].\n"
      "Leading dimensions of x, ids, scores and out may be several; they count as one, T.");
  m.def(
      "grouped",
      [](const Array& x, const Array& ids, const HeldMatrix& matrix, const OutArray& out) {
        auto in = input(x, "x");
        auto r = routing(ids);
        auto y = output(out);
        count_call("grouped");
        nb::gil_scoped_release free;
        grouped(in, r, matrix.m, y);
      },
      "x"_a, "ids"_a, "matrix"_a, "out"_a,
      "out[T, k, N] = the matrix of each assignment's expert times its row of x.\n\n"
      "x has a row a token, [T, K], or a row an assignment, [T, k, K]. Errors as for swiglu.");
  m.def(
      "linear",
      [](const Array& x, const HeldMatrix& matrix, const OutArray& out) {
        auto in = input(x, "x");
        auto y = output(out);
        count_call("linear");
        nb::gil_scoped_release free;
        linear(in, matrix.m, y);
      },
      "x"_a, "matrix"_a, "out"_a,
      "out[M, N] = x[M, K] times a single matrix. Errors as for swiglu.");
  m.def(
      "softmax",
      [](const OutArray& scores, float scale, size_t period, const OutArray& out) {
        auto in = output(scores);
        auto y = output(out);
        count_call("softmax");
        nb::gil_scoped_release free;
        softmax(in, scale, period, y);
      },
      "scores"_a, "scale"_a, "period"_a, "out"_a,
      "out[R, n] = softmax(scale * scores) by rows; float32 scores, which are overwritten.\n\n"
      "period 0: no mask. Else rows are runs of `period` causal queries, of which the last sees\n"
      "all n values, the one before it n - 1, and so on; what a row does not see is zero.");
}

}  // namespace

std::string shape_of(const Array& a) {
  std::string s = "[";
  for (size_t i = 0; i < a.ndim(); ++i) s += (i ? ", " : "") + std::to_string(a.shape(i));
  return s + "]";
}

Scalar scalar_type(const Array& a, const char* what) {
  auto d = a.dtype();
  if (d == nb::dtype<float>()) return Scalar::f32;
  if (d.lanes == 1 && d.bits == 16) {
    if (d.code == uint8_t(nb::dlpack::dtype_code::Float)) return Scalar::f16;
    if (d.code == uint8_t(nb::dlpack::dtype_code::Bfloat)) return Scalar::bf16;
  }
  throw Error(std::string(what) + " must be float32, float16 or bfloat16");
}

void require_contiguous(const Array& a, const char* what) {
  int64_t expected = 1;
  bool ok = true;
  for (size_t i = a.ndim(); i-- > 0;) {
    ok = ok && (a.shape(i) == 1 || a.stride(i) == expected);
    expected *= int64_t(a.shape(i));
  }
  if (!ok && expected != 0) throw NotContiguous(std::string(what) + " must be row-contiguous");
}

void require_shape(const Array& a, size_t ndim, const char* what) {
  require_contiguous(a, what);
  require(a.ndim() == ndim,
          std::string(what) + " needs " + std::to_string(ndim) + " dimensions, has " + shape_of(a));
}

const uint32_t* id_data(const Array& ids, const char* what) {
  require_contiguous(ids, what);
  require(ids.dtype() == nb::dtype<uint32_t>() || ids.dtype() == nb::dtype<int32_t>(),
          std::string(what) + " must be uint32 or int32");
  return static_cast<const uint32_t*>(ids.data());
}

void count_call(const char* function) {
  std::lock_guard lock(calls_mutex);
  ++calls[function];
}

}  // namespace mlx_moe

NB_MODULE(_core, m) {
  using namespace mlx_moe;
  static auto raise = [](const char* name, const Error& e) {
    PyErr_SetString(nb::module_::import_("mlx_moe.errors").attr(name).ptr(), e.what());
  };
  nb::register_exception_translator([](const std::exception_ptr& p, void*) {
    try {
      std::rethrow_exception(p);
    } catch (const NotContiguous& e) {
      raise("NotContiguous", e);
    } catch (const Error& e) {
      raise("InvalidArgument", e);
    }
  });
  m.def("isa", &chosen_isa, "The instruction set in use: amx, avx512, avx2, neon or scalar.");
  m.def("isas", &usable_isas, "The instruction sets usable on this machine, best first.");
  m.def("num_threads", [] { return ThreadPool::shared().size(); }, "Threads that compute.");
  m.def(
      "calls",
      [] {
        std::lock_guard lock(calls_mutex);
        nb::dict d;
        for (auto& [name, n] : calls) d[name.c_str()] = n;
        return d;
      },
      "Number of calls of each expert function since import.");
  bind_matrix(m);
  bind_experts(m);
  bind_routing(m);
}
