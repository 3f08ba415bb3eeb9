#include "experts/dot_kernel.h"

namespace mlx_moe {

namespace {

struct Simd {
  using V = float;
  static constexpr size_t width = 1;
  static constexpr size_t rows = 4;
  static constexpr int tokens = 2;

  static V zero() { return 0.f; }
  static V load(const float* p) { return *p; }
  static V fma(V a, V b, V c) { return a * b + c; }
  static V add(V a, V b) { return a + b; }
  static V broadcast(float f) { return f; }
  struct Pair {
    V low, high;
  };
  static void store_pairs(float* p, V even, V odd) { p[0] = even, p[1] = odd; }
  static Pair nibble_pairs(const uint8_t* src) { return {float(*src & 15), float(*src >> 4)}; }
  static float sum(V v) { return v; }

  static void to_f32(Scalar type, const void* src, size_t n, float* dst) {
    for (size_t i = 0; i < n; ++i) dst[i] = load_scalar(type, src, i);
  }
  static void from_f32(Scalar type, const float* src, size_t n, void* dst) {
    for (size_t i = 0; i < n; ++i) store_scalar(type, dst, i, src[i]);
  }
  static void nibbles(const uint8_t* src, size_t n, const int8_t* table, int8_t* dst) {
    for (size_t i = 0; i < n; i += 2) {
      dst[i] = table[src[i / 2] & 15];
      dst[i + 1] = table[src[i / 2] >> 4];
    }
  }
  static void scale_codes(const int8_t* codes, size_t n, bool is_signed, float scale, float bias,
                          float* dst) {
    for (size_t i = 0; i < n; ++i)
      dst[i] = scale * (is_signed ? float(codes[i]) : float(uint8_t(codes[i]))) + bias;
  }
};

}  // namespace

constinit const Kernel scalar_kernel = DotKernel<Simd>::kernel("scalar");

}  // namespace mlx_moe
