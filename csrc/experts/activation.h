#pragma once

// Included by the one-ISA files only (see unpack.h).

#include <cstddef>
#include <cstdint>

namespace mlx_moe {

// e^x within 2 ulp: x = n ln 2 + r, a polynomial for e^r, times 2^n. Zero below -87.6, infinity
// above 88.3, NaN of NaN. Written so that compilers turn a loop of it into vector code.
template <class Simd>
static inline float fast_exp(float x) {
  x = x > 89.f ? 89.f : x;
  x = x < -88.f ? -88.f : x;
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
  uint32_t power = (__builtin_bit_cast(uint32_t, shifted) + 127) << 23;
  return p * __builtin_bit_cast(float, power);
}

// h = silu(gate) * up
template <class Simd>
static inline void swiglu(const float* gate, const float* up, size_t n, float* h) {
  for (size_t i = 0; i < n; ++i) {
    float g = gate[i];
    h[i] = g / (1.f + fast_exp<Simd>(-g)) * up[i];
  }
}

// p [n] = softmax(scale * p[0 : seen]), zero beyond
template <class Simd>
static inline void softmax(float* p, size_t n, size_t seen, float scale) {
  constexpr size_t lanes = 16;  // partial results, so that compilers may use vectors
  float top[lanes], sum[lanes];
  for (size_t j = 0; j < lanes; ++j) top[j] = -__builtin_inff(), sum[j] = 0.f;
  size_t whole = seen / lanes * lanes;
  for (size_t i = 0; i < whole; i += lanes)
    for (size_t j = 0; j < lanes; ++j) top[j] = p[i + j] > top[j] ? p[i + j] : top[j];
  for (size_t i = whole; i < seen; ++i) top[0] = p[i] > top[0] ? p[i] : top[0];
  float highest = top[0];
  for (size_t j = 1; j < lanes; ++j) highest = top[j] > highest ? top[j] : highest;
  for (size_t i = 0; i < seen; ++i) p[i] = fast_exp<Simd>(scale * (p[i] - highest));
  for (size_t i = 0; i < whole; i += lanes)
    for (size_t j = 0; j < lanes; ++j) sum[j] += p[i + j];
  for (size_t i = whole; i < seen; ++i) sum[0] += p[i];
  float total = 0.f;
  for (size_t j = 0; j < lanes; ++j) total += sum[j];
  float inverse = 1.f / total;
  for (size_t i = 0; i < seen; ++i) p[i] *= inverse;
  for (size_t i = seen; i < n; ++i) p[i] = 0.f;
}

}  // namespace mlx_moe
