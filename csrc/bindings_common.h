#pragma once

// How arrays come in: any buffer through DLPack, checked here, never copied.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "experts/matrix.h"
#include "experts/packed.h"
#include "support/error.h"
#include "support/half.h"

namespace nb = nanobind;

namespace mlx_moe {

using Array = nb::ndarray<nb::ro, nb::device::cpu>;
using OutArray = nb::ndarray<nb::device::cpu>;

std::string shape_of(const Array& a);

// Float type of an array; an Error that names `what` for any other dtype.
Scalar scalar_type(const Array& a, const char* what);

// float32, float16 or bfloat16 by name; an Error for any other.
Scalar parse_dtype(const std::string& name);

// An Error unless the array is row-contiguous and its values are aligned.
void require_contiguous(const Array& a, const char* what);

// The same and that it has `ndim` dimensions.
void require_shape(const Array& a, size_t ndim, const char* what);

// Contiguous [.., k] expert ids, uint32 or int32 (a negative one reads as out of range).
const uint32_t* id_data(const Array& ids, const char* what);

// Counts a call, for tests that assert what ran.
void count_call(const char* function);

// Copies of experts, and the buffers that they were made from: kept, so that no other array can
// come to lie at the same address.
struct HeldPacked {
  PackedExperts experts;
  std::vector<Array> arrays;
};

// A Matrix and the buffers that it reads.
struct HeldMatrix {
  Matrix m;
  std::vector<Array> arrays;
  std::shared_ptr<HeldPacked> packed;
  std::shared_ptr<const void> slots;  // of an expert store
};

void bind_matrix(nb::module_& m);
void bind_routing(nb::module_& m);
void bind_dispatch(nb::module_& m);
void bind_store(nb::module_& m);
void bind_schedule(nb::module_& m);

}  // namespace mlx_moe
