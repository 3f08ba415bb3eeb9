#pragma once

// Included by the one-ISA files only (see unpack.h).

#include <cstddef>
#include <cstdint>

namespace mlx_moe {

// e^x within 2 ulp: x = n ln 2 + r, a polynomial for e^r, 2^n put into the exponent. Written so
// that compilers turn a loop of it into vector code.
template <class Simd>
static inline float fast_exp(float x) {
  x = x > 88.f ? 88.f : x;
  x = x < -87.f ? -87.f : x;
  float shifted = x * 1.44269504f + 12582912.f;  // the low bits are n
  float n = shifted - 12582912.f;
  float r = x - n * 0.693359375f + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.f;
  int32_t bits = __builtin_bit_cast(int32_t, shifted) << 23;
  return __builtin_bit_cast(float, __builtin_bit_cast(int32_t, p) + bits);
}

// h = silu(gate) * up
template <class Simd>
static inline void swiglu(const float* gate, const float* up, size_t n, float* h) {
  for (size_t i = 0; i < n; ++i) {
    float g = gate[i];
    h[i] = g / (1.f + fast_exp<Simd>(-g)) * up[i];
  }
}

}  // namespace mlx_moe
