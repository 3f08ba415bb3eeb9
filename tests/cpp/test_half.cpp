#include <doctest/doctest.h>

#include <bit>
#include <cmath>
#include <initializer_list>

#include "support/half.h"

using namespace mlx_moe;

namespace {

// The value of a half from its definition.
double half_value(uint16_t h, int exponent_bits) {
  const int mantissa_bits = 15 - exponent_bits, bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = h >> mantissa_bits & ((1 << exponent_bits) - 1);
  const int mantissa = h & ((1 << mantissa_bits) - 1);
  const double sign = h & 0x8000 ? -1 : 1;
  if (exponent == (1 << exponent_bits) - 1) return mantissa ? NAN : sign * INFINITY;
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - mantissa_bits);
  return sign * std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
}

bool same(double a, double b) {
  return std::isnan(a) ? std::isnan(b) : a == b && std::signbit(a) == std::signbit(b);
}

}  // namespace

TEST_CASE("every half widens to its value and narrows back") {
  size_t wrong = 0;
  for (uint32_t h = 0; h < 65536; ++h) {
    const double f16 = half_value(uint16_t(h), 5), bf16 = half_value(uint16_t(h), 8);
    wrong += !same(f16_to_f32(uint16_t(h)), f16);
    wrong += !same(bf16_to_f32(uint16_t(h)), bf16);
    if (!std::isnan(f16)) wrong += f32_to_f16(float(f16)) != h;
    if (!std::isnan(bf16)) wrong += f32_to_bf16(float(bf16)) != h;
  }
  CHECK(wrong == 0);
}

TEST_CASE("narrowing rounds to the nearest, ties to even") {
  size_t wrong = 0;
  for (uint32_t h = 0; h < 0x7bff; ++h) {
    const double low = half_value(uint16_t(h), 5), high = half_value(uint16_t(h + 1), 5);
    const float tie = float((low + high) / 2);
    const uint16_t even = uint16_t(h & 1 ? h + 1 : h);
    wrong += f32_to_f16(tie) != even;
    wrong += f32_to_f16(std::nextafter(tie, 0.0f)) != h;
    wrong += f32_to_f16(-std::nextafter(tie, 1e9f)) != (0x8000 | (h + 1));
  }
  for (uint32_t h = 0; h < 0x7f7f; ++h) {
    const uint32_t tie = h << 16 | 0x8000;
    wrong += f32_to_bf16(std::bit_cast<float>(tie)) != (h & 1 ? h + 1 : h);
    wrong += f32_to_bf16(std::bit_cast<float>(tie - 1)) != h;
    wrong += f32_to_bf16(std::bit_cast<float>(tie + 1)) != h + 1;
  }
  CHECK(wrong == 0);
}

TEST_CASE("what does not fit becomes infinity and NaN stays NaN") {
  CHECK(f32_to_f16(65519.0f) == 0x7bff);
  CHECK(f32_to_f16(65520.0f) == 0x7c00);
  CHECK(f32_to_f16(-3e38f) == 0xfc00);
  CHECK(f32_to_bf16(3.4e38f) == 0x7f80);
  for (uint32_t nan : {0x7f800001u, 0xff800001u, 0x7fffffffu}) {
    CHECK(std::isnan(f16_to_f32(f32_to_f16(std::bit_cast<float>(nan)))));
    CHECK(std::isnan(bf16_to_f32(f32_to_bf16(std::bit_cast<float>(nan)))));
  }
}
