#include <array>
#include <utility>

#include "bindings_common.h"

using namespace nb::literals;

namespace mlx_moe {
namespace {

Array array_of(const nb::object& o, const char* what) {
  Array a;
  require(nb::try_cast(o, a), what, " must be an array in main memory");
  return a;
}

// [experts, rows, n]; two dimensions are one expert.
std::array<size_t, 3> stack_shape(const Array& a, const char* what) {
  require_contiguous(a, what);
  if (a.ndim() != 2 && a.ndim() != 3)
    throw Error(std::string(what) + " needs the shape [experts, rows, n], has " + shape_of(a));
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
  require(words * 32 == m.cols * size_t(m.bits), "weight has ", words, " words a row and scales ",
          m.cols / size_t(m.group), " groups: not ", m.bits, " bits in groups of ", m.group);
  if (m.mode == Mode::affine)
    m.type = scalar_type(scales, "scales");
  else
    require(scales.dtype() == nb::dtype<uint8_t>(), mode, " scales must be uint8");
  m.scales = static_cast<const uint8_t*>(scales.data());
}

void require_same_shape(const Array& a, const Array& b, const char* what) {
  bool same = a.ndim() == b.ndim();
  for (size_t i = 0; same && i < a.ndim(); ++i) same = a.shape(i) == b.shape(i);
  if (!same)
    throw Error(std::string(what) + " has shape " + shape_of(a) + ", expected " + shape_of(b));
}

void make_matrix(HeldMatrix* self, nb::object weight, nb::object scales, nb::object biases,
                 const std::string& mode, int bits, int group_size, nb::object global_scale,
                 nb::object bias, std::shared_ptr<HeldPacked> packed) {
  Matrix m;
  std::vector<Array> arrays;
  auto held = [&](const nb::object& o, const char* what) {
    return arrays.emplace_back(array_of(o, what));
  };
  auto w = held(weight, "weight");
  auto shape = stack_shape(w, "weight");
  m.experts = shape[0];
  m.rows = shape[1];
  m.weight = static_cast<const uint8_t*>(w.data());
  if (scales.is_none()) {
    set_dense(m, w);
  } else {
    auto s = held(scales, "scales");
    auto s_shape = stack_shape(s, "scales");
    if (s_shape[0] != m.experts || s_shape[1] != m.rows)
      throw Error("scales have shape " + shape_of(s) + ", the weight " + shape_of(w));
    set_quantised(m, w, s, mode, bits, group_size);
    require(biases.is_none() == (m.mode != Mode::affine),
            "biases go with mode affine, and only with it");
    if (!biases.is_none()) {
      auto b = held(biases, "biases");
      require_contiguous(b, "biases");
      require_same_shape(b, s, "biases");
      require(b.dtype() == s.dtype(), "biases and scales differ in dtype");
      m.biases = static_cast<const uint8_t*>(b.data());
    }
  }
  if (!global_scale.is_none()) {
    auto g = held(global_scale, "global_scale");
    require_contiguous(g, "global_scale");
    require(m.mode == Mode::nvfp4, "global_scale goes with mode nvfp4");
    require(g.dtype() == nb::dtype<float>() && g.size() == m.experts,
            "global_scale must be float32 [experts], has " + shape_of(g));
    m.global_scale = static_cast<const float*>(g.data());
  }
  if (!bias.is_none()) {
    auto b = held(bias, "bias");
    require_contiguous(b, "bias");
    require(b.ndim() > 0 && b.shape(b.ndim() - 1) == m.rows && b.size() == m.experts * m.rows,
            "bias must be [experts, rows], has " + shape_of(b));
    m.added_type = scalar_type(b, "bias");
    m.added = static_cast<const uint8_t*>(b.data());
  }
  validate(m);
  if (packed) m.packed = packed->experts.table(m);
  new (self) HeldMatrix{m, std::move(arrays), std::move(packed), {}};
}

std::shared_ptr<HeldPacked> make_packed(const HeldMatrix& h, const std::vector<size_t>& experts,
                                        std::shared_ptr<HeldPacked> previous) {
  require(!h.m.table, "experts of a store are not packed: their slots change");
  nb::gil_scoped_release release;
  return std::make_shared<HeldPacked>(
      HeldPacked{PackedExperts(h.m, experts, previous ? &previous->experts : nullptr), h.arrays});
}

size_t matrix_bytes(const HeldMatrix& h) {
  const Matrix& m = h.m;
  size_t rows = m.experts * m.rows, bytes = rows * m.row_bytes();
  if (m.mode != Mode::dense) bytes += rows * m.groups() * m.scale_size() * (m.biases ? 2 : 1);
  if (m.added) bytes += rows * size_of(m.added_type);
  return bytes;
}

}  // namespace

void bind_matrix(nb::module_& m) {
  nb::class_<HeldPacked>(
      m, "Packed",
      "Copies of some experts of a Matrix in the kernels' own layout, for its `packed`.\n\n"
      "With tiles (isa 'amx'), many bfloat16 or float16 tokens are multiplied with such\n"
      "experts without unpacking them; the copies are bfloat16. Empty (nbytes 0) where the\n"
      "kernel in use has no such layout. Copies that previous has of the same arrays are shared\n"
      "with it, not made anew. Raises InvalidArgument on an expert out of range.")
      .def(nb::new_(&make_packed), "matrix"_a, "experts"_a, "previous"_a = nb::none())
      .def_prop_ro("nbytes", [](const HeldPacked& h) { return h.experts.bytes(); });
  nb::class_<HeldMatrix>(
      m, "Matrix",
      "Stacked expert weights, read where they are (the arrays are kept alive).\n\n"
      "weight: [E, N, K] float32, float16 or bfloat16; or MLX-quantised uint32\n"
      "[E, N, K * bits / 32] with scales [E, N, K / group_size] (and biases of that\n"
      "shape for mode 'affine'; uint8 scales for 'mxfp4', 'mxfp8', 'nvfp4'; float32\n"
      "global_scale [E] for 'nvfp4'). Two dimensions are one expert. bias [E, N] is\n"
      "added to the output. packed is used if it was made from the same arrays. Raises\n"
      "InvalidArgument where shapes, bits and group_size do not agree. Layout:\n"
      "mlx.core.quantize's documentation.")
      .def("__init__", &make_matrix, "weight"_a, "scales"_a = nb::none(), "biases"_a = nb::none(),
           nb::kw_only(), "mode"_a = "affine", "bits"_a = 0, "group_size"_a = 0,
           "global_scale"_a = nb::none(), "bias"_a = nb::none(), "packed"_a = nb::none())
      .def_prop_ro("experts", [](const HeldMatrix& h) { return h.m.experts; })
      .def_prop_ro("rows", [](const HeldMatrix& h) { return h.m.rows; })
      .def_prop_ro("cols", [](const HeldMatrix& h) { return h.m.cols; })
      .def_prop_ro("mode", [](const HeldMatrix& h) { return name_of(h.m.mode); })
      .def_prop_ro("bits", [](const HeldMatrix& h) { return h.m.bits; })
      .def_prop_ro("group_size", [](const HeldMatrix& h) { return h.m.group; })
      .def_prop_ro("nbytes", &matrix_bytes);
}

}  // namespace mlx_moe
