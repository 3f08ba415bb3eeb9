#include "routing/rows_simd.h"

namespace mlx_moe {

namespace {

struct Simd {
  using V = float;
  static constexpr size_t width = 1, sums = 16;

  static V zero() { return 0.0f; }
  static V broadcast(float f) { return f; }
  static V add(V a, V b) { return a + b; }
  static V mul(V a, V b) { return a * b; }
  template <Scalar type>
  static V load(const void* p, size_t i) {
    return load_scalar(type, p, i);
  }
  template <Scalar type>
  static void store(void* p, size_t i, V v) {
    store_scalar(type, p, i, v);
  }
  static void stream_line(const char* from, char* to) { std::memcpy(to, from, 64); }
  static void fence() {}
};

}  // namespace

constinit const RowCode scalar_rows = SimdRows<Simd>::code("scalar");

}  // namespace mlx_moe
