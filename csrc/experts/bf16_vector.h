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

// 4-bit codes in groups of 32 or more are multiplied as whole numbers, exact in bfloat16; the
// scale comes after each group, the bias once with the group's sum of x.
inline float dot_q4(const Matrix& m, const uint8_t* src, __m512i table, const float* scale,
                    const float* bias, const uint16_t* x, const float* sums) {
  __m512 total[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
  size_t group = size_t(m.group), n = m.groups();
  for (size_t g = 0; g < n; ++g) {
    __m512 part = _mm512_setzero_ps();
    for (size_t k = 0; k < group; k += 32, src += 16, x += 32)
      part = dot_bf16(part, _mm512_permutexvar_epi16(spread_nibbles(load_nibbles(src)), table), x);
    _mm_prefetch((const char*)src + kAhead, _MM_HINT_T0);
    total[g & 1] = _mm512_fmadd_ps(part, _mm512_set1_ps(scale[g]), total[g & 1]);
  }
  if (sums)
    for (size_t g = 0; g < n; g += 16)
      total[0] = _mm512_fmadd_ps(_mm512_loadu_ps(bias + g), _mm512_loadu_ps(sums + g), total[0]);
  return _mm512_reduce_add_ps(_mm512_add_ps(total[0], total[1]));
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
      out[r] = dot_q4(m, src, table, scale, bias, x, m.biases ? sums : nullptr);
      continue;
    }
    unpack_row(m, src, scale, bias, 0, m.cols, {row, 32});
    __m512 sum[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    for (size_t k = 0; k < padded; k += 32)
      sum[k / 32 & 1] = dot_bf16(sum[k / 32 & 1], _mm512_load_si512(row + k), x + k);
    out[r] = _mm512_reduce_add_ps(_mm512_add_ps(sum[0], sum[1]));
  }
}

}  // namespace

}  // namespace mlx_moe
