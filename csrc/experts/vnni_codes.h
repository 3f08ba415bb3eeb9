#pragma once

// Codes of quantised weight rows, as AVX512-VNNI multiplies them. Included by kernel_vnni.cpp only.

#include "experts/avx512_simd.h"
#include "experts/transpose.h"
#include "experts/unpack.h"

namespace mlx_moe {

namespace {

// Codes of four columns a lane from words of 4 or of 2 bits each: for every eight columns the even
// ones, then the odd ones, as the digits of a FixedPanel lie.
template <int bits>
inline __m512i four_columns(__m512i words, int q) {
  if constexpr (bits == 8) return words;  // q is 0
  const __m512i mask = _mm512_set1_epi8((1 << bits) - 1);
  if constexpr (bits == 4) return _mm512_and_si512(q ? _mm512_srli_epi32(words, 4) : words, mask);
  const __m512i even = _mm512_set1_epi64(0x2c2824200c080400);  // bits where columns 0, 2, 4, 6 lie
  __m512i from = _mm512_add_epi8(even, _mm512_set1_epi8(char(q / 2 * 16 + q % 2 * 2)));
  return _mm512_and_si512(_mm512_multishift_epi64_epi8(from, words), mask);
}

// Doubled e2m1 values + 12
inline __m512i float_codes(__m512i codes) {
  const __m512i table = _mm512_broadcast_i32x4(
      _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
  return _mm512_shuffle_epi8(table, codes);
}

struct CodeRows {
  const uint8_t* src;  // the first row's first byte of the stretch
  size_t rows, row_bytes, bytes;
};

// The next 64 bytes of sixteen rows, or what there is of them; the rest is zero.
template <bool whole>
inline void load_rows(const CodeRows& from, size_t at, __m512i (&r)[16]) {
  size_t n = from.bytes - at;
  __mmask64 mask = n < 64 ? (__mmask64(1) << n) - 1 : ~__mmask64(0);
  for (size_t i = 0; i < 16; ++i)
    if constexpr (whole)
      r[i] = _mm512_loadu_si512(from.src + i * from.row_bytes + at);
    else
      r[i] = i < from.rows ? _mm512_maskz_loadu_epi8(mask, from.src + i * from.row_bytes + at)
                           : _mm512_setzero_si512();
}

// Sixteen rows to [step of 4 columns][2 * 16 rows][4].
template <int bits, bool floats>
inline void store_codes(const CodeRows& from, uint8_t* to) {
  constexpr int quarters = 8 / bits;  // of a 32-bit word
  for (size_t at = 0; at < from.bytes; at += 64) {
    __m512i r[16];
    from.rows >= 16 && from.bytes - at >= 64 ? load_rows<true>(from, at, r)
                                             : load_rows<false>(from, at, r);
    if constexpr (bits == 8) {
      const __m512i order = _mm512_broadcast_i32x4(
          _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15));
      for (auto& v : r) v = _mm512_shuffle_epi8(v, order);
    }
    transpose(r);
    for (int w = 0; w < 16; ++w)
      for (int q = 0; q < quarters; ++q, to += 128) {
        __m512i codes = four_columns<bits>(r[w], q);
        _mm512_store_si512(to, floats ? float_codes(codes) : codes);
      }
  }
}

// The sums of codes are due for a scale after so many columns.
inline size_t unit_columns(const Matrix& m) { return m.group > 64 ? 64 : size_t(m.group); }

// 16-bit scales of up to sixteen rows from group g on, two groups a word: to [group][32 rows].
inline void store_half_scales(Scalar type, const uint8_t* src, size_t stride, size_t rows,
                              size_t groups, float* to) {
  for (size_t g = 0; g < groups; g += 32) {
    size_t n = groups - g < 32 ? groups - g : 32;
    __mmask32 mask = n < 32 ? (__mmask32(1) << n) - 1 : ~__mmask32(0);
    __m512i r[16];
    for (size_t i = 0; i < 16; ++i)
      r[i] = i < rows ? _mm512_maskz_loadu_epi16(mask, src + i * stride + 2 * g)
                      : _mm512_setzero_si512();
    transpose(r);
    for (size_t i = 0; i < n; ++i) {
      __m512i half = i % 2 ? _mm512_srli_epi32(r[i / 2], 16) : r[i / 2];
      __m512 v = type == Scalar::bf16 ? _mm512_castsi512_ps(_mm512_slli_epi32(half, 16))
                                      : _mm512_cvtph_ps(_mm512_cvtepi32_epi16(half));
      _mm512_storeu_ps(to + (g + i) * 32, v);
    }
  }
}

// [groups][32 rows] of scales and biases; codes of e2m1 values are stored with 12 added.
inline void unpack_scale_columns(const Matrix& m, size_t expert, size_t row0, size_t rows,
                                 float* scale, float* bias) {
  size_t groups = m.groups(), stride = (groups + 15) / 16 * 16;
  auto* lines = static_cast<float*>(scratch(5, 2 * 16 * stride * sizeof(float)));
  float* biases = lines + 16 * stride;
  for (size_t r0 = 0; r0 < 32; r0 += 16, scale += 16, bias += 16) {
    size_t n = rows - (r0 < rows ? r0 : rows), row = row0 + (n ? r0 : 0);
    if (n > 16) n = 16;
    if (m.mode == Mode::affine && m.type != Scalar::f32) {
      store_half_scales(m.type, m.row_scales(expert, row), 2 * groups, n, groups, scale);
      store_half_scales(m.type, m.row_biases(expert, row), 2 * groups, n, groups, bias);
      continue;
    }
    for (size_t r = 0; r < n; ++r) {
      float *s = lines + r * stride, *b = biases + r * stride;
      unpack_scales<Simd>(m, expert, row + r, s, b);
      for (size_t g = 0; m.mode != Mode::affine && g < groups; ++g) b[g] = -12.f * s[g];
    }
    for (size_t g = 0; g < groups; g += 16)
      for (float* from : {lines, biases}) {
        __m512i v[16];
        for (size_t r = 0; r < 16; ++r) v[r] = _mm512_loadu_si512(from + r * stride + g);
        transpose(v);
        for (size_t i = 0; i < 16 && g + i < groups; ++i)
          _mm512_storeu_si512((from == lines ? scale : bias) + (g + i) * 32, v[i]);
      }
  }
}

}  // namespace

}  // namespace mlx_moe
