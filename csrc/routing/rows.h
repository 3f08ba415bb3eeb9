#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "support/half.h"

// Row conversions for pack and combine, free of branches so that compilers vectorise them.
namespace mlx_moe {

inline float widen_f16(uint16_t h) {
  uint32_t u = uint32_t(h & 0x7fff) << 13;
  uint32_t normal = u + 0x38000000;
  uint32_t subnormal = std::bit_cast<uint32_t>(std::bit_cast<float>(u + 0x38800000) - 0x1p-14f);
  uint32_t f = u < 0x00800000 ? subnormal : normal;
  f = u >= 0x0f800000 ? u | 0x7f800000 : f;  // infinity and NaN
  return std::bit_cast<float>(f | uint32_t(h & 0x8000) << 16);
}

inline uint16_t narrow_f16(float f) {
  uint32_t u = std::bit_cast<uint32_t>(f), sign = u >> 16 & 0x8000;
  u &= 0x7fffffff;
  uint32_t normal = (u + 0xc8000fff + (u >> 13 & 1)) >> 13;
  uint32_t subnormal = std::bit_cast<uint32_t>(std::bit_cast<float>(u) + 0.5f) - 0x3f000000;
  uint32_t h = u < 0x38800000 ? subnormal : normal;
  h = u >= 0x477ff000 ? 0x7c00 : h;
  return uint16_t(sign | (u > 0x7f800000 ? 0x7e00 : h));
}

inline uint16_t narrow_bf16(float f) {
  uint32_t u = std::bit_cast<uint32_t>(f);
  uint32_t rounded = (u + 0x7fff + (u >> 16 & 1)) >> 16;
  return uint16_t((u & 0x7fffffff) > 0x7f800000 ? u >> 16 | 0x40 : rounded);
}

template <Scalar T>
float widen(const void* row, size_t i) {
  if constexpr (T == Scalar::f32)
    return static_cast<const float*>(row)[i];
  else if constexpr (T == Scalar::f16)
    return widen_f16(static_cast<const uint16_t*>(row)[i]);
  else
    return bf16_to_f32(static_cast<const uint16_t*>(row)[i]);
}

template <Scalar T>
void narrow(void* row, size_t i, float v) {
  if constexpr (T == Scalar::f32)
    static_cast<float*>(row)[i] = v;
  else if constexpr (T == Scalar::f16)
    static_cast<uint16_t*>(row)[i] = narrow_f16(v);
  else
    static_cast<uint16_t*>(row)[i] = narrow_bf16(v);
}

}  // namespace mlx_moe
