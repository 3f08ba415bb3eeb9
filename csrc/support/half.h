#pragma once

#include <cstddef>
#include <cstdint>

namespace mlx_moe {

// static: files compiled for different instruction sets must not share these at link time.

static inline float bf16_to_f32(uint16_t h) { return __builtin_bit_cast(float, uint32_t(h) << 16); }

// Round to nearest even; a NaN stays a quiet NaN.
static inline uint16_t f32_to_bf16(float f) {
  uint32_t u = __builtin_bit_cast(uint32_t, f), rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  return uint16_t((u & 0x7fffffff) > 0x7f800000 ? (u >> 16) | 0x40 : rounded);
}

static inline float f16_to_f32(uint16_t h) {
  uint32_t sign = uint32_t(h & 0x8000) << 16, exp = (h >> 10) & 31, man = h & 0x3ff;
  if (exp == 31) return __builtin_bit_cast(float, sign | 0x7f800000 | (man << 13));
  if (exp) return __builtin_bit_cast(float, sign | ((exp + 112) << 23) | (man << 13));
  float sub = float(man) * 0x1p-24f;
  return sign ? -sub : sub;
}

static inline uint16_t f32_to_f16(float f) {
  uint32_t u = __builtin_bit_cast(uint32_t, f), sign = (u >> 16) & 0x8000;
  u &= 0x7fffffff;
  if (u > 0x7f800000) return uint16_t(sign | 0x7e00);
  if (u >= 0x477ff000) return uint16_t(sign | 0x7c00);  // rounds to 65536 or more
  if (u < 0x38800000) {  // subnormal half: add 0.5 to align the mantissa
    float shifted = __builtin_bit_cast(float, u) + 0.5f;
    return uint16_t(sign | (__builtin_bit_cast(uint32_t, shifted) - 0x3f000000));
  }
  u += 0xc8000fff + ((u >> 13) & 1);
  return uint16_t(sign | (u >> 13));
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
