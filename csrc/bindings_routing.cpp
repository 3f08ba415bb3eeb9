#include <nanobind/stl/variant.h>

#include <climits>
#include <type_traits>
#include <variant>

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

// An Error unless the array has these sizes, -1 for any.
void require_sizes(const Array& a, std::initializer_list<int64_t> shape, const char* what) {
  std::string expected;
  bool same = true;
  for (size_t i = 0; i < shape.size(); ++i) {
    const int64_t size = shape.begin()[i];
    same &= size < 0 || size_t(size) == a.shape(i);
    expected += (i ? ", " : "") + (size < 0 ? std::string("any") : std::to_string(size));
  }
  require(same, std::string(what) + " has shape " + shape_of(a) + ", expected [" + expected + "]");
}

// The values of a contiguous array of T with these sizes.
template <class T>
const T* values_of(const Array& a, std::initializer_list<int64_t> shape, const char* what) {
  require_shape(a, shape.size(), what);
  require(a.dtype() == nb::dtype<T>(),
          std::string(what) + " must be " + (std::is_same_v<T, float> ? "float32" : "int32"));
  require_sizes(a, shape, what);
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
  Tile tile{b, tiling, nullptr, nullptr};
  check_pack(rows, {&tile, 1});
  count_call("pack");
  // numpy has no bfloat16: its bits travel as uint16
  NewArray tiles(type == Scalar::bf16 ? "uint16" : dtype.c_str(), tiling.groups, capacity,
                 rows.width);
  NewArray slots("int32", tiling.groups, capacity);
  tile.rows = tiles.data;
  tile.slots = slots.ints();
  {
    nb::gil_scoped_release unlocked;
    pack(rows, {&tile, 1}, type);
  }
  return nb::make_tuple(tiles.object, slots.object);
}

// One array, or several.
using Arrays = std::variant<Array, std::vector<Array>>;

std::vector<Array> listed(const Arrays& arrays) {
  if (auto* one = std::get_if<Array>(&arrays)) return {*one};
  return std::get<std::vector<Array>>(arrays);
}

// A tile and its slots, to be written.
Tile tile_of(const Buckets& kept, const Array& experts, const OutArray& rows, const OutArray& slots,
             size_t width, size_t k, const std::string& at) {
  const auto* which = values_of<int32_t>(experts, {-1}, ("experts" + at).c_str());
  const int64_t groups = int64_t(experts.shape(0));
  require_shape(Array(rows), 3, ("tiles" + at).c_str());
  require_sizes(Array(rows), {groups, -1, int64_t(width)}, ("tiles" + at).c_str());
  const int64_t capacity = int64_t(rows.shape(1));
  values_of<int32_t>(Array(slots), {groups, capacity}, ("slots" + at).c_str());
  return {kept,
          {which, size_t(groups), size_t(capacity), k},
          rows.data(),
          static_cast<int32_t*>(slots.data())};
}

// The buckets of every group: its own, or the same for all.
std::vector<Buckets> buckets_of_groups(const std::vector<Array>& kept,
                                       const std::vector<Array>& offsets, size_t groups) {
  require(kept.size() == offsets.size() && (kept.size() == 1 || kept.size() == groups),
          "there are ", kept.size(), " kept and ", offsets.size(), " kept_offsets for ", groups,
          " groups");
  std::vector<Buckets> buckets;
  for (size_t i = 0; i < kept.size(); ++i)
    buckets.push_back(buckets_of(kept[i], "kept", offsets[i], "kept_offsets"));
  if (kept.size() == 1) buckets.resize(groups, buckets[0]);
  return buckets;
}

void py_pack_groups(const Array& x, const Arrays& kept, const Arrays& kept_offsets,
                    const std::vector<Array>& experts, int64_t k,
                    const std::vector<OutArray>& tiles, const std::vector<OutArray>& slots) {
  const Rows rows = rows_of(x, "x");
  const size_t groups = experts.size();
  const std::vector<Array> held = listed(kept), offsets = listed(kept_offsets);
  const std::vector<Buckets> buckets = buckets_of_groups(held, offsets, groups);
  require(k >= 1 && k <= INT32_MAX, "k is ", k, ", expected at least 1");
  require(tiles.size() == groups && slots.size() == groups, "there are ", tiles.size(),
          " tiles and ", slots.size(), " slots for ", groups, " groups");
  std::vector<Tile> each;
  Scalar type = Scalar::f16;
  for (size_t g = 0; g < groups; ++g) {
    const std::string at = "[" + std::to_string(g) + "]", name = "tiles" + at;
    each.push_back(tile_of(buckets[g], experts[g], tiles[g], slots[g], rows.width, size_t(k), at));
    const Scalar found = scalar_type(Array(tiles[g]), name.c_str());
    if (g == 0) type = found;
    require(found == type, name, " differs from tiles[0] in dtype");
  }
  check_pack(rows, each);
  count_call("pack_groups");
  nb::gil_scoped_release unlocked;
  pack(rows, each, type);
}

std::vector<Part> parts_of(const std::vector<Array>& rows, const std::vector<Array>& assignments) {
  require(rows.size() == assignments.size(), "there are ", rows.size(), " rows and ",
          assignments.size(), " assignments");
  std::vector<Part> parts;
  for (size_t i = 0; i < rows.size(); ++i) {
    const std::string at = rows.size() > 1 ? "[" + std::to_string(i) + "]" : "";
    const Rows r = rows_of(rows[i], ("rows" + at).c_str());
    parts.push_back(
        {r, values_of<int32_t>(assignments[i], {int64_t(r.count)}, ("assignments" + at).c_str())});
  }
  return parts;
}

void py_combine(const Arrays& rows, const Arrays& assignments, const Array& scores,
                const OutArray& out, bool accumulate) {
  const std::vector<Array> held = listed(rows), which = listed(assignments);
  const std::vector<Part> parts = parts_of(held, which);
  const auto* weights = values_of<float>(scores, {-1, -1}, "scores");
  const Scores s{weights, scores.shape(0), scores.shape(1)};
  const Rows to = rows_of(Array(out), "out");
  const int64_t width = int64_t(parts.empty() ? to.width : parts[0].rows.width);
  require_sizes(Array(out), {int64_t(s.tokens), width}, "out");
  count_call("combine");
  nb::gil_scoped_release unlocked;
  combine(parts, s, accumulate, {to.type, out.data(), to.width});
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

constexpr const char* kPackGroupsDoc =
    "Fill the tiles of several groups at once, in memory that the caller keeps.\n\n"
    "x, kept, kept_offsets, k: as for pack; kept and kept_offsets may be lists, one a group. For\n"
    "group g experts[g]: int32 [G]; tiles[g]: writable [G, C, d], all of one float dtype; "
    "slots[g]:\n"
    "writable int32 [G, C]; each group has a G and a C of its own. A token is read and converted\n"
    "once, however many tiles it goes to. Errors as for pack, before anything is written.";

constexpr const char* kCombineDoc =
    "Write the weighted sum of expert outputs to out.\n\n"
    "rows: [n, d] float32, float16 or bfloat16; assignments: int32 [n], -1 for a row to leave out\n"
    "(an empty slot of a tile). Both may be lists, such as the result tiles of all groups, each\n"
    "with its slots, and the rows of what spilled; dtypes may differ. scores: float32 [T, k];\n"
    "out: writable [T, d], float32, float16 or bfloat16.\n"
    "out[t] = sum of scores[t, j] * the row of assignment t * k + j, in float32 and in the order\n"
    "of j, rounded to out's dtype once; added to out if accumulate. Raises InvalidArgument, with\n"
    "out untouched, on an assignment given twice or out of range and on sizes that do not agree.";

}  // namespace

void bind_routing(nb::module_& m) {
  numpy_empty = nb::object(nb::module_::import_("numpy").attr("empty")).release().ptr();
  m.def("bucket", &py_bucket, "ids"_a, "num_experts"_a, kBucketDoc);
  m.def("capacity", &py_capacity, "order"_a, "offsets"_a, "capacities"_a,
        "importance"_a = nb::none(), "overflow"_a = "spill", kCapacityDoc);
  m.def("pack", &py_pack, "x"_a, "kept"_a, "kept_offsets"_a, "experts"_a, "capacity"_a, "k"_a,
        "dtype"_a = "float16", kPackDoc);
  m.def("pack_groups", &py_pack_groups, "x"_a, "kept"_a, "kept_offsets"_a, "experts"_a, "k"_a,
        "tiles"_a, "slots"_a, kPackGroupsDoc);
  m.def("combine", &py_combine, "rows"_a, "assignments"_a, "scores"_a, "out"_a,
        "accumulate"_a = false, kCombineDoc);
}

}  // namespace mlx_moe
