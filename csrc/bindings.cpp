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
  if (a.ndim() < 2)
    throw Error(std::string(what) + " needs at least two dimensions, has " + shape_of(a));
  size_t cols = a.shape(a.ndim() - 1);
  return {a.data(), scalar_type(a, what), cols ? a.size() / cols : 0, cols};
}

Output output(const OutArray& a) {
  Input in = input(view(a), "out");
  return {a.data(), in.type, in.rows, in.cols};
}

Routing routing(const Array& ids) {
  const uint32_t* data = id_data(ids, "ids");
  if (ids.ndim() < 2) throw Error("ids need the shape [tokens, k], have " + shape_of(ids));
  size_t k = ids.shape(ids.ndim() - 1), tokens = k ? ids.size() / k : 0;
  require(ids.size() < (size_t(1) << 31), "more than 2^31 assignments in one call");
  return {data, tokens, k};
}

// Scores in any shape with a value an assignment, such as [.., k, 1].
Input score_rows(const Array& scores, const Routing& r) {
  require_contiguous(scores, "scores");
  if (scores.size() != r.tokens * r.k)
    throw Error("scores have shape " + shape_of(scores) + ", expected " + std::to_string(r.tokens) +
                " x " + std::to_string(r.k));
  return {scores.data(), scalar_type(scores, "scores"), r.tokens, r.k};
}

nb::dlpack::dtype dtype_of(const std::string& name) {
  switch (parse_dtype(name)) {
    case Scalar::f32:
      return nb::dtype<float>();
    case Scalar::f16:
      return {uint8_t(nb::dlpack::dtype_code::Float), 16, 1};
    default:
      return {uint8_t(nb::dlpack::dtype_code::Bfloat), 16, 1};
  }
}

nb::ndarray<nb::array_api, nb::device::cpu> empty(const std::vector<size_t>& shape,
                                                  const std::string& dtype) {
  auto type = dtype_of(dtype);
  size_t bytes = type.bits / 8;
  for (size_t n : shape)
    require(!__builtin_mul_overflow(bytes, n, &bytes), "a shape of more than 2^64 bytes");
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
      "weighted_sum",
      [](const Array& rows, const Array& scores, const HeldMatrix& gate, const HeldMatrix& up,
         const HeldMatrix& down, const OutArray& out) {
        auto y = input(rows, "y");
        auto to = output(out);
        auto s = score_rows(scores, Routing{nullptr, to.rows, to.rows ? y.rows / to.rows : 0});
        count_call("weighted_sum");
        nb::gil_scoped_release free;
        weighted_sum(y, s, gate.m, up.m, down.m, to);
      },
      "y"_a, "scores"_a, "gate"_a, "up"_a, "down"_a, "out"_a,
      "out[T, D] = the weighted sum of y [T, k, D] that swiglu_combine would write: the same bits\n"
      "for rows that swiglu wrote with these matrices' formats. Errors as for swiglu_combine.");
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

Scalar parse_dtype(const std::string& name) {
  if (name == "float32") return Scalar::f32;
  if (name == "float16") return Scalar::f16;
  if (name == "bfloat16") return Scalar::bf16;
  throw Error("dtype is '" + name + "', expected 'float32', 'float16' or 'bfloat16'");
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
  if (uintptr_t(a.data()) % a.itemsize() != 0)
    throw Error(std::string(what) + " must be aligned to its values");
}

void require_shape(const Array& a, size_t ndim, const char* what) {
  require_contiguous(a, what);
  require(a.ndim() == ndim,
          std::string(what) + " needs " + std::to_string(ndim) + " dimensions, has " + shape_of(a));
}

const uint32_t* id_data(const Array& ids, const char* what) {
  require_contiguous(ids, what);
  require(ids.dtype() == nb::dtype<uint32_t>() || ids.dtype() == nb::dtype<int32_t>(), what,
          " must be uint32 or int32");
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
  bind_dispatch(m);
  bind_store(m);
  bind_schedule(m);
}
