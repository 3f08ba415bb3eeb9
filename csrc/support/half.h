#pragma once

#include <cstddef>
#include <cstdint>

namespace mlx_moe {

// static: files compiled for different instruction sets must not share these at link time.
// Conversions have no branches, so that compilers turn a loop of them into vector code.

static inline float bf16_to_f32(uint16_t h) { return __builtin_bit_cast(float, uint32_t(h) << 16); }

// Round to nearest even; a NaN stays a quiet NaN.
static inline uint16_t f32_to_bf16(float f) {
  uint32_t u = __builtin_bit_cast(uint32_t, f), rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  return uint16_t((u & 0x7fffffff) > 0x7f800000 ? (u >> 16) | 0x40 : rounded);
}

static inline float f16_to_f32(uint16_t h) {
  uint32_t u = uint32_t(h & 0x7fff) << 13, normal = u + 0x38000000;
  float subnormal = __builtin_bit_cast(float, u + 0x38800000) - 0x1p-14f;
  uint32_t f = u < 0x00800000 ? __builtin_bit_cast(uint32_t, subnormal) : normal;
  f = u >= 0x0f800000 ? u | 0x7f800000 : f;  // infinity and NaN
  return __builtin_bit_cast(float, f | uint32_t(h & 0x8000) << 16);
}

static inline uint16_t f32_to_f16(float f) {
  uint32_t u = __builtin_bit_cast(uint32_t, f), sign = u >> 16 & 0x8000;
  u &= 0x7fffffff;
  uint32_t normal = (u + 0xc8000fff + (u >> 13 & 1)) >> 13;
  float aligned = __builtin_bit_cast(float, u) + 0.5f;  // the mantissa of a subnormal half
  uint32_t subnormal = __builtin_bit_cast(uint32_t, aligned) - 0x3f000000;
  uint32_t h = u < 0x38800000 ? subnormal : normal;
  h = u >= 0x477ff000 ? 0x7c00 : h;  // rounds to 65536 or more
  return uint16_t(sign | (u > 0x7f800000 ? 0x7e00 : h));
}

enum class Scalar : uint8_t { f32, f16, bf16 };

static inline size_t size_of(Scalar t) { return t == Scalar::f32 ? 4 : 2; }

static inline float load_scalar(Scalar t, const void* p, size_t i) {
  if (t == Scalar::f32) return static_cast<const float*>(p)[i];
  uint16_t h = static_cast<const uint16_t*>(p)[i];
  return t == Scalar::bf16 ? bf16_to_f32(h) : f16_to_f32(h);
}

static inline void store_scalar(Scalar t, void* p, size_t i, float v) {
  if (t == Scalar::f32)
    static_cast<float*>(p)[i] = v;
  else
    static_cast<uint16_t*>(p)[i] = t == Scalar::bf16 ? f32_to_bf16(v) : f32_to_f16(v);
}

}  // namespace mlx_moe
