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

// Rows of a panel: digits [blocks of 128 columns][high, low][even columns, odd columns][64], as
// 4-bit codes lie in their bytes, then for each group its scale and the sums of its values by 16,
// 32 and 64 columns.
struct FixedPanel {
  size_t blocks, groups, stride;
  explicit FixedPanel(size_t cols) : blocks((cols + 127) / 128), groups(2 * blocks) {
    stride = groups * (2 * kGroup + 8 * sizeof(float));
  }
  size_t scales() const { return groups * 2 * kGroup; }
  // Sums of `columns` values each.
  size_t sums(size_t columns) const {
    size_t before = columns == 16 ? 1 : columns == 32 ? 5 : 7;
    return scales() + before * groups * sizeof(float);
  }
};

// Bytes from a block's high digits of even columns to ...
constexpr size_t kOdd = 64, kLow = 128, kBlockBytes = 256;

// Where the digits of the even columns from `column`, a multiple of 8, lie in a row.
inline size_t digits_at(size_t column) { return column / 128 * kBlockBytes + column % 128 / 2; }

// Group g of a row from 64 float32 values.
inline void store_group(const float* x, size_t g, const FixedPanel& panel, char* row) {
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
  char* to = row + digits_at(g * kGroup);
  for (const char* from : {high, low}) {
    __m512i sorted = _mm512_permutexvar_epi8(order, _mm512_load_si512(from));
    _mm256_storeu_si256((__m256i*)to, _mm512_castsi512_si256(sorted));
    _mm256_storeu_si256((__m256i*)(to + kOdd), _mm512_extracti64x4_epi64(sorted, 1));
    to += kLow;
  }
  auto at = [&](size_t bytes, size_t i) { return reinterpret_cast<float*>(row + bytes) + i; };
  *at(panel.scales(), g) = scale;
  for (size_t i = 0; i < 4; ++i) *at(panel.sums(16), 4 * g + i) = sums[i];
  for (size_t i = 0; i < 2; ++i) *at(panel.sums(32), 2 * g + i) = sums[2 * i] + sums[2 * i + 1];
  *at(panel.sums(64), g) = (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// The half of the last block that a row of an odd number of groups leaves empty.
inline void zero_group(size_t g, const FixedPanel& panel, char* row) {
  alignas(64) float zeros[kGroup] = {};
  store_group(zeros, g, panel, row);
}

}  // namespace

}  // namespace mlx_moe
