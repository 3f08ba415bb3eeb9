#pragma once

// A few tokens against weight rows with AVX512-BF16 dot products: what decoding is made of. Each
// row is read once, from its first byte to its last, which is what memory likes best.
// Included by kernel_amx.cpp only.

#include "experts/bf16_unpack.h"

namespace mlx_moe {

namespace {

constexpr size_t kAhead = 4096;  // bytes to prefetch before they are read

inline __m512 dot_bf16(__m512 sum, __m512i a, const uint16_t* b) {
  return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)_mm512_loadu_si512(b));
}

// Activations of a few tokens: rows of bfloat16, zero from `cols` to whole blocks of 32.
struct VectorPanel {
  const uint16_t* data;
  size_t cols, stride;
};

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

// What the rows of one matrix share while they are multiplied with a panel.
struct VectorWork {
  const Matrix& m;
  VectorPanel x;
  size_t groups;  // padded to 16
  float *scale, *bias, *sums;
  uint16_t* row;  // an unpacked row
  __m512i table;  // of 4-bit codes as whole numbers
};

// 4-bit codes in groups of 32 or more are multiplied as whole numbers, exact in bfloat16; the
// scale comes after each group, the bias once with the group's sum of x. out[t * ld].
template <size_t group, int tokens>
void dot_q4(const VectorWork& w, const uint8_t* src, float* out, size_t ld) {
  __m512 total[tokens];
  for (auto& t : total) t = _mm512_setzero_ps();
  const uint16_t* x = w.x.data;
  for (size_t g = 0, n = w.m.groups(); g < n; ++g, src += group / 2, x += group) {
    _mm_prefetch((const char*)src + kAhead, _MM_HINT_T0);
    __m512i codes[group / 32];
    for (size_t i = 0; i < group / 32; ++i)
      codes[i] = _mm512_permutexvar_epi16(spread_nibbles(src + 16 * i), w.table);
    __m512 scale = _mm512_set1_ps(w.scale[g]);
    for (int t = 0; t < tokens; ++t) {
      __m512 part = _mm512_setzero_ps();
      for (size_t i = 0; i < group / 32; ++i)
        part = dot_bf16(part, codes[i], x + size_t(t) * w.x.stride + 32 * i);
      total[t] = _mm512_fmadd_ps(part, scale, total[t]);
    }
  }
  for (int t = 0; t < tokens; ++t) {
    if (w.m.biases)
      for (size_t g = 0; g < w.groups; g += 16)
        total[t] = _mm512_fmadd_ps(_mm512_loadu_ps(w.bias + g),
                                   _mm512_loadu_ps(w.sums + size_t(t) * w.groups + g), total[t]);
    out[size_t(t) * ld] = _mm512_reduce_add_ps(total[t]);
  }
}

// Any other format: the row is unpacked, then multiplied.
template <int tokens>
void dot_unpacked(const VectorWork& w, const uint8_t* src, float* out, size_t ld) {
  unpack_rows({w.m, src, 1, w.scale, w.bias, 0, kAhead}, 0, w.m.cols, {w.row, 32});
  __m512 total[tokens];
  for (auto& t : total) t = _mm512_setzero_ps();
  for (size_t k = 0; k < w.m.cols; k += 32) {
    __m512i row = _mm512_load_si512(w.row + k);
    for (int t = 0; t < tokens; ++t)
      total[t] = dot_bf16(total[t], row, w.x.data + size_t(t) * w.x.stride + k);
  }
  for (int t = 0; t < tokens; ++t) out[size_t(t) * ld] = _mm512_reduce_add_ps(total[t]);
}

constexpr size_t kVectorTokens = 2;

using DotRow = void (*)(const VectorWork&, const uint8_t*, float*, size_t);

template <int tokens>
DotRow dot_row(const Matrix& m, size_t count) {
  if constexpr (tokens < int(kVectorTokens))
    if (count > tokens) return dot_row<tokens + 1>(m, count);
  if (m.mode == Mode::dense || m.bits != 4 || m.group < 32) return dot_unpacked<tokens>;
  return m.group == 32   ? dot_q4<32, tokens>
         : m.group == 64 ? dot_q4<64, tokens>
                         : dot_q4<128, tokens>;
}

// out[t * ld + r] = dot(row row0 + r, token t)
inline void vector_rows(const Matrix& m, size_t expert, size_t row0, size_t rows,
                        const VectorPanel& x, size_t tokens, float* out, size_t ld) {
  size_t padded = (m.cols + 31) / 32 * 32;
  size_t groups = m.mode == Mode::dense ? 0 : (m.groups() + 15) / 16 * 16;
  auto* scale = static_cast<float*>(scratch(2, (2 + tokens) * groups * sizeof(float) + padded * 2));
  float* sums = scale + 2 * groups;
  VectorWork w{m, x, groups, scale, scale + groups, sums, (uint16_t*)(sums + tokens * groups), {}};
  if (groups) {
    __m512 values = code_values(m);
    w.table = round_pair(values, values);
    for (size_t g = m.groups(); g < groups; ++g) w.bias[g] = 0.f;
  }
  for (size_t t = 0; m.biases && t < tokens; ++t)
    group_sums(x.data + t * x.stride, m.cols, size_t(m.group), sums + t * groups);
  DotRow dot = dot_row<1>(m, tokens);
  for (size_t r = 0; r < rows; ++r) {
    if (groups) unpack_scales<Isa>(m, expert, row0 + r, w.scale, w.bias);
    dot(w, m.row(expert, row0 + r), out + r, ld);
  }
}

}  // namespace

}  // namespace mlx_moe
