#pragma once

// One token against weight rows with AVX512-BF16 dot products: what a decode step is made of.
// Included by kernel_amx.cpp only.

#include "experts/bf16_unpack.h"
#include "support/scratch.h"

namespace mlx_moe {

namespace {

constexpr size_t kAhead = 4096;  // bytes to prefetch before they are read

inline __m512 dot_bf16(__m512 sum, __m512i a, const uint16_t* b) {
  return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)_mm512_loadu_si512(b));
}

// Sum over each group of x, for the biases of affine weights; padded to 16 groups with zeros.
inline void group_sums(const uint16_t* x, size_t cols, size_t group, float* sums) {
  size_t n = cols / group;
  const __m512i ones = _mm512_set1_epi16(0x3f80);
  for (size_t g = 0; g < n; ++g) {
    __m512 s = _mm512_setzero_ps();
    for (size_t k = 0; k < group; k += 32) s = dot_bf16(s, ones, x + g * group + k);
    sums[g] = _mm512_reduce_add_ps(s);
  }
  for (size_t g = n; g % 16; ++g) sums[g] = 0.f;
}

inline __m512 dot_group(const uint8_t* src, __m512i table, const uint16_t* x, size_t group) {
  __m512 sum = _mm512_setzero_ps();
  for (size_t k = 0; k < group; k += 32)
    sum = dot_bf16(sum, _mm512_permutexvar_epi16(spread_nibbles(src + k / 2), table), x + k);
  return sum;
}

// 4-bit codes in groups of 32 or more are multiplied as whole numbers, exact in bfloat16; the
// scale comes after each group, the bias once with the group's sum of x.
template <size_t group>
inline float dot_q4(size_t groups, const uint8_t* src, __m512i table, const float* scale,
                    const float* bias, const uint16_t* x, const float* sums) {
  __m512 even = _mm512_setzero_ps(), odd = even;
  size_t g = 0;
  for (; g + 2 <= groups; g += 2, src += group, x += 2 * group) {
    _mm_prefetch((const char*)src + kAhead, _MM_HINT_T0);
    __m512 first = dot_group(src, table, x, group);
    __m512 second = dot_group(src + group / 2, table, x + group, group);
    even = _mm512_fmadd_ps(first, _mm512_set1_ps(scale[g]), even);
    odd = _mm512_fmadd_ps(second, _mm512_set1_ps(scale[g + 1]), odd);
  }
  if (g < groups)
    even = _mm512_fmadd_ps(dot_group(src, table, x, group), _mm512_set1_ps(scale[g]), even);
  if (sums)
    for (g = 0; g < groups; g += 16)
      odd = _mm512_fmadd_ps(_mm512_loadu_ps(bias + g), _mm512_loadu_ps(sums + g), odd);
  return _mm512_reduce_add_ps(_mm512_add_ps(even, odd));
}

// out[r] = dot(row row0 + r, x); x is padded to whole blocks of 32 with zeros.
inline void vector_rows(const Matrix& m, size_t expert, size_t row0, size_t rows,
                        const uint16_t* x, float* out) {
  size_t padded = (m.cols + 31) / 32 * 32;
  size_t groups = m.mode == Mode::dense ? 0 : (m.groups() + 15) / 16 * 16;
  auto* scale = static_cast<float*>(scratch(2, 3 * groups * sizeof(float) + padded * 2));
  float *bias = scale + groups, *sums = bias + groups;
  auto* row = reinterpret_cast<uint16_t*>(sums + groups);
  bool q4 = m.mode != Mode::dense && m.bits == 4 && m.group >= 32;
  __m512i table{};
  if (q4) {
    __m512 values = code_values(m);
    table = round_pair(values, values);
    if (m.biases) group_sums(x, m.cols, size_t(m.group), sums);
  }
  for (size_t r = 0; r < rows; ++r) {
    const uint8_t* src = m.row(expert, row0 + r);
    if (groups) unpack_scales(m, expert, row0 + r, scale, bias);
    if (q4) {
      auto* dot = m.group == 32 ? dot_q4<32> : m.group == 64 ? dot_q4<64> : dot_q4<128>;
      out[r] = dot(m.groups(), src, table, scale, bias, x, m.biases ? sums : nullptr);
      continue;
    }
    unpack_rows({m, src, 1, scale, bias, 0}, 0, m.cols, {row, 32});
    __m512 sum[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    for (size_t k = 0; k < padded; k += 32)
      sum[k / 32 & 1] = dot_bf16(sum[k / 32 & 1], _mm512_load_si512(row + k), x + k);
    out[r] = _mm512_reduce_add_ps(_mm512_add_ps(sum[0], sum[1]));
  }
}

}  // namespace

}  // namespace mlx_moe
