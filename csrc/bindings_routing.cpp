#include <climits>
#include <type_traits>

#include "bindings_common.h"
#include "routing/bucket.h"
#include "routing/capacity.h"
#include "routing/combine.h"
#include "routing/pack.h"

using namespace nb::literals;

namespace mlx_moe {
namespace {

PyObject* numpy_empty;  // set at import, kept for the life of the process

struct NewArray {
  nb::object object;
  void* data;

  template <class... Sizes>
  explicit NewArray(const char* dtype, Sizes... sizes)
      : object(nb::handle(numpy_empty)(nb::make_tuple(sizes...), dtype)),
        data(nb::cast<OutArray>(object).data()) {}
  int32_t* ints() const { return static_cast<int32_t*>(data); }
};

// The values of a contiguous array of T with this shape, -1 for any size.
template <class T>
const T* values_of(const Array& a, std::initializer_list<int64_t> shape, const char* what) {
  require_shape(a, shape.size(), what);
  require(a.dtype() == nb::dtype<T>(),
          std::string(what) + " must be " + (std::is_same_v<T, float> ? "float32" : "int32"));
  std::string expected;
  bool same = true;
  for (size_t i = 0; i < shape.size(); ++i) {
    const int64_t size = shape.begin()[i];
    same &= size < 0 || size_t(size) == a.shape(i);
    expected += (i ? ", " : "") + (size < 0 ? std::string("any") : std::to_string(size));
  }
  require(same, std::string(what) + " has shape " + shape_of(a) + ", expected [" + expected + "]");
  return static_cast<const T*>(a.data());
}

Rows rows_of(const Array& a, const char* what) {
  require_shape(a, 2, what);
  return {scalar_type(a, what), a.data(), a.shape(0), a.shape(1)};
}

Buckets buckets_of(const Array& order, const char* order_name, const Array& offsets,
                   const char* offsets_name) {
  Buckets b;
  b.order = values_of<int32_t>(order, {-1}, order_name);
  b.offsets = values_of<int32_t>(offsets, {-1}, offsets_name);
  b.n = order.shape(0);
  require(offsets.shape(0) > 0,
          std::string(offsets_name) + " is empty, expected a value more than experts");
  b.experts = offsets.shape(0) - 1;
  check_buckets(offsets_name, b);
  return b;
}

nb::tuple py_bucket(const Array& ids, int64_t num_experts) {
  const uint32_t* values = id_data(ids, "ids");
  const size_t n = ids.size();
  if (num_experts <= 0 || num_experts >= INT32_MAX || n > INT32_MAX)
    throw Error(std::to_string(n) + " ids for " + std::to_string(num_experts) +
                " experts, expected at most 2147483647 ids and 1 to 2147483646 experts");
  count_call("bucket");
  NewArray order("int32", n), offsets("int32", num_experts + 1);
  {
    nb::gil_scoped_release unlocked;
    bucket(values, n, size_t(num_experts), order.ints(), offsets.ints());
  }
  return nb::make_tuple(order.object, offsets.object);
}

nb::tuple py_capacity(const Array& order, const Array& offsets, const Array& capacities,
                      const std::optional<Array>& importance, const std::string& overflow) {
  const bool prune = overflow == "prune";
  require(prune || overflow == "spill",
          "overflow is '" + overflow + "', expected 'spill' or 'prune'");
  require(!prune || importance, "overflow 'prune' needs importance, float32 [n]");
  const Buckets b = buckets_of(order, "order", offsets, "offsets");
  const auto* limits = values_of<int32_t>(capacities, {int64_t(b.experts)}, "capacities");
  const float* weights =
      importance ? values_of<float>(*importance, {int64_t(b.n)}, "importance") : nullptr;
  count_call("capacity");
  NewArray kept_offsets("int32", b.experts + 1);
  const size_t m = count_kept(b, limits, kept_offsets.ints());
  NewArray kept("int32", m), overflowed("int32", b.n - m);
  {
    nb::gil_scoped_release unlocked;
    split(b, kept_offsets.ints(), prune ? weights : nullptr, kept.ints(), overflowed.ints());
  }
  return nb::make_tuple(kept.object, kept_offsets.object, overflowed.object);
}

nb::tuple py_pack(const Array& x, const Array& kept, const Array& kept_offsets,
                  const Array& experts, int64_t capacity, int64_t k, const std::string& dtype) {
  const Rows rows = rows_of(x, "x");
  const Buckets b = buckets_of(kept, "kept", kept_offsets, "kept_offsets");
  const Scalar type = parse_dtype(dtype);
  require(capacity >= 0 && capacity <= INT32_MAX && k >= 1 && k <= INT32_MAX,
          "capacity is " + std::to_string(capacity) + " and k " + std::to_string(k) +
              ", expected at least 0 and 1");
  const Tiling tiling{values_of<int32_t>(experts, {-1}, "experts"), experts.shape(0),
                      size_t(capacity), size_t(k)};
  check_pack(rows, b, tiling);
  count_call("pack");
  // numpy has no bfloat16: its bits travel as uint16
  NewArray tiles(type == Scalar::bf16 ? "uint16" : dtype.c_str(), tiling.groups, capacity,
                 rows.width);
  NewArray slots("int32", tiling.groups, capacity);
  {
    nb::gil_scoped_release unlocked;
    pack(rows, b, tiling, type, tiles.data, slots.ints());
  }
  return nb::make_tuple(tiles.object, slots.object);
}

void py_combine(const Array& rows, const Array& assignments, const Array& scores,
                const OutArray& out, bool accumulate) {
  const Rows r = rows_of(rows, "rows");
  const auto* which = values_of<int32_t>(assignments, {int64_t(r.count)}, "assignments");
  const auto* weights = values_of<float>(scores, {-1, -1}, "scores");
  const size_t tokens = scores.shape(0), top_k = scores.shape(1);
  values_of<float>(Array(out), {int64_t(tokens), int64_t(r.width)}, "out");
  count_call("combine");
  nb::gil_scoped_release unlocked;
  combine(r, which, weights, tokens, top_k, accumulate, static_cast<float*>(out.data()));
}

constexpr const char* kBucketDoc =
    "Sort assignments by expert; stable.\n\n"
    "ids: uint32 or int32, any shape, usually [T, k]; assignment t * k + j is ids[t, j].\n"
    "Returns (order int32 [n], offsets int32 [num_experts + 1]): the assignments of expert e are\n"
    "order[offsets[e]:offsets[e + 1]], in rising order; np.diff(offsets) are the loads.\n"
    "Raises InvalidArgument on an id outside 0..num_experts-1.";

constexpr const char* kCapacityDoc =
    "Split buckets at a capacity for each expert.\n\n"
    "order, offsets: what bucket returned, n assignments of E experts; capacities: int32 [E];\n"
    "importance: float32 [n] by assignment number. overflow 'spill' keeps the first of a bucket,\n"
    "'prune' the most important, ties to the earlier token (NPUMoE, arXiv 2604.18788).\n"
    "Returns (kept int32 [m], kept_offsets int32 [E + 1], overflowed int32 [n - m]), each in the\n"
    "order of the buckets. Raises InvalidArgument on a negative capacity, sizes that do not "
    "agree,\n"
    "and, when pruning, without importance or on a NaN in it.";

constexpr const char* kPackDoc =
    "Gather token rows into the static tiles of a group of experts.\n\n"
    "x: [T, d] float32, float16 or bfloat16; kept, kept_offsets: from capacity (or bucket);\n"
    "experts: int32 [G], distinct; capacity C: slots an expert; k: assignments a token.\n"
    "Returns (tiles [G, C, d], slots int32 [G, C]): slots holds the assignment of each slot, or "
    "-1\n"
    "for an empty one, whose row is zero. Values beyond the range of float16 become infinite.\n"
    "dtype 'bfloat16' gives the bits as uint16: mx.array(tiles).view(mx.bfloat16).\n"
    "Raises InvalidArgument on a load above C, an expert or assignment out of range.";

constexpr const char* kCombineDoc =
    "Write the weighted sum of expert outputs to out.\n\n"
    "rows: [n, d] float32, float16 or bfloat16; assignments: int32 [n], -1 for a row to leave out\n"
    "(an empty slot of a tile); scores: float32 [T, k]; out: writable float32 [T, d].\n"
    "out[t] = sum of scores[t, j] * the row of assignment t * k + j, in float32 and in the order\n"
    "of j; added to out if accumulate. Raises InvalidArgument, with out untouched, on an\n"
    "assignment given twice or out of range and on sizes that do not agree.";

}  // namespace

void bind_routing(nb::module_& m) {
  numpy_empty = nb::object(nb::module_::import_("numpy").attr("empty")).release().ptr();
  m.def("bucket", &py_bucket, "ids"_a, "num_experts"_a, kBucketDoc);
  m.def("capacity", &py_capacity, "order"_a, "offsets"_a, "capacities"_a,
        "importance"_a = nb::none(), "overflow"_a = "spill", kCapacityDoc);
  m.def("pack", &py_pack, "x"_a, "kept"_a, "kept_offsets"_a, "experts"_a, "capacity"_a, "k"_a,
        "dtype"_a = "float16", kPackDoc);
  m.def("combine", &py_combine, "rows"_a, "assignments"_a, "scores"_a, "out"_a,
        "accumulate"_a = false, kCombineDoc);
}

}  // namespace mlx_moe
