#pragma once

// Activations as 16-bit whole numbers in two signed digits, with one scale a group of 64 columns:
// what AVX512-VNNI multiplies with a weight's codes, exactly. The error, 2^-16 of the group's
// largest value, is below bfloat16's own. Included by kernel_vnni.cpp only.

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

namespace mlx_moe {

namespace {

constexpr size_t kGroup = 64;       // columns that share a scale
constexpr float kLargest = 32639;   // 127 * 256 + 127
constexpr float kSmallest = 1e-34;  // below, a group counts as zero: its scale would overflow

// Bytes from a group's high digits of even columns to ...
constexpr size_t kOdd = 64, kLow = 128, kValues = 256;
constexpr size_t kBlockBytes = 320;

// [blocks of 128 columns][tokens][high, low][even columns, odd columns][64], digits as 4-bit codes
// lie in their bytes; behind each token's digits, for both groups: the scale, then the sums of 16
// columns each, of 32 and of 64.
struct FixedPanel {
  size_t tokens, groups;
  FixedPanel(size_t cols, size_t tokens) : tokens(tokens), groups((cols + 127) / 128 * 2) {}

  size_t bytes() const { return groups / 2 * tokens * kBlockBytes; }
  // Where token t's digits of the even columns from `column`, a multiple of 8, lie.
  size_t at(size_t column, size_t t) const {
    return (column / 128 * tokens + t) * kBlockBytes + column % 128 / 2;
  }
};

// Where the sum of `columns` values from `column` is among the values of its group.
inline size_t sum_at(size_t columns, size_t column) {
  return (columns == 16 ? 1 : columns == 32 ? 5 : 7) + column % kGroup / columns;
}

// Group g of token t from 64 float32 values.
inline void store_group(const float* x, size_t g, size_t t, const FixedPanel& panel, char* to) {
  __m512 v[4], top = _mm512_setzero_ps();
  __mmask16 broken = 0;
  for (int i = 0; i < 4; ++i) {
    v[i] = _mm512_loadu_ps(x + 16 * i);
    top = _mm512_max_ps(top, _mm512_abs_ps(v[i]));
    broken |= _mm512_fpclass_ps_mask(v[i], 0x99);  // NaN or infinite
  }
  float largest = _mm512_reduce_max_ps(top);
  bool zero = broken || largest < kSmallest;
  float scale = broken ? __builtin_nanf("") : zero ? 0.f : largest / kLargest;
  __m512 inverse = _mm512_set1_ps(zero ? 0.f : kLargest / largest);
  alignas(64) char high[kGroup], low[kGroup];
  float sums[4];
  for (int i = 0; i < 4; ++i) {
    __m512i whole = zero ? __m512i{} : _mm512_cvtps_epi32(_mm512_mul_ps(v[i], inverse));
    __m512i up = _mm512_srai_epi32(_mm512_add_epi32(whole, _mm512_set1_epi32(128)), 8);
    __m512i down = _mm512_sub_epi32(whole, _mm512_slli_epi32(up, 8));
    _mm_store_si128((__m128i*)(high + 16 * i), _mm512_cvtepi32_epi8(up));
    _mm_store_si128((__m128i*)(low + 16 * i), _mm512_cvtepi32_epi8(down));
    sums[i] = scale * float(_mm512_reduce_add_epi32(whole));
  }
  const __m512i even = _mm512_set_epi16(
      0x3e3c, 0x3a38, 0x3634, 0x3230, 0x2e2c, 0x2a28, 0x2624, 0x2220, 0x1e1c, 0x1a18, 0x1614,
      0x1210, 0x0e0c, 0x0a08, 0x0604, 0x0200, 0x3e3c, 0x3a38, 0x3634, 0x3230, 0x2e2c, 0x2a28,
      0x2624, 0x2220, 0x1e1c, 0x1a18, 0x1614, 0x1210, 0x0e0c, 0x0a08, 0x0604, 0x0200);
  const __m512i order = _mm512_mask_add_epi8(even, ~__mmask64(0) << 32, even, _mm512_set1_epi8(1));
  to += panel.at(g * kGroup, t);
  auto* values = reinterpret_cast<float*>(to + kValues);
  for (const char* from : {high, low}) {
    __m512i sorted = _mm512_permutexvar_epi8(order, _mm512_load_si512(from));
    _mm256_storeu_si256((__m256i*)to, _mm512_castsi512_si256(sorted));
    _mm256_storeu_si256((__m256i*)(to + kOdd), _mm512_extracti64x4_epi64(sorted, 1));
    to += kLow;
  }
  float pairs[] = {sums[0] + sums[1], sums[2] + sums[3]};
  _mm256_store_ps(values, _mm256_setr_ps(scale, sums[0], sums[1], sums[2], sums[3], pairs[0],
                                         pairs[1], pairs[0] + pairs[1]));
}

// The half of the last block that a row of an odd number of groups leaves empty.
inline void zero_group(size_t g, size_t t, const FixedPanel& panel, char* to) {
  alignas(64) float zeros[kGroup] = {};
  store_group(zeros, g, t, panel, to);
}

}  // namespace

}  // namespace mlx_moe
