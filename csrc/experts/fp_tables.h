#pragma once

#include <cstdint>

#include "support/half.h"

namespace mlx_moe {

// e2m1 values of mxfp4 and nvfp4 (OCP Microscaling v1.0, 5.3.3), doubled so that they are whole.
alignas(16) static constexpr int8_t kE2M1Doubled[16] = {0, 1,  2,  3,  4,  6,  8,  12,
                                                        0, -1, -2, -3, -4, -6, -8, -12};
alignas(16) static constexpr int8_t kNibbles[16] = {0, 1, 2,  3,  4,  5,  6,  7,
                                                    8, 9, 10, 11, 12, 13, 14, 15};

// e4m3 (OCP 8-bit floating point, 3.1): bias 7, no infinities, 0x7f is NaN.
static inline float e4m3_to_f32(uint8_t v) {
  uint32_t sign = uint32_t(v & 0x80) << 24, exp = (v >> 3) & 15, man = v & 7;
  if ((v & 0x7f) == 0x7f) return __builtin_bit_cast(float, sign | 0x7fc00000);
  if (exp) return __builtin_bit_cast(float, sign | ((exp + 120) << 23) | (man << 20));
  float sub = float(man) * 0x1p-9f;
  return sign ? -sub : sub;
}

// e8m0: a power of two; 255 is NaN, 0 is 2^-127 (a float32 subnormal).
static inline float e8m0_to_f32(uint8_t v) {
  if (v == 255) return __builtin_bit_cast(float, uint32_t(0x7fc00000));
  return v ? __builtin_bit_cast(float, uint32_t(v) << 23) : 0x1p-127f;
}

}  // namespace mlx_moe
