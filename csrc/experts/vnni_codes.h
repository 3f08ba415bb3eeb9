#pragma once

// Codes of quantised weight rows, as AVX512-VNNI multiplies them. Included by kernel_vnni.cpp only.

#include "experts/avx512_simd.h"
#include "experts/transpose.h"
#include "experts/unpack.h"

namespace mlx_moe {

namespace {

constexpr size_t kBlockRows = 64;  // weight rows of a block

inline size_t min(size_t a, size_t b) { return a < b ? a : b; }

// Codes of four columns a lane from words of 4 or of 2 bits each: for every eight columns the even
// ones, then the odd ones, as the digits of a FixedPanel lie.
template <int bits>
inline __m512i four_columns(__m512i words, int q) {
  if constexpr (bits == 8) return words;  // q is 0
  const __m512i mask = _mm512_set1_epi8((1 << bits) - 1);
  if constexpr (bits == 4) {
    // A bit matrix that moves the upper half of a byte down: a shift and a mask in one.
    const __m512i down = _mm512_set1_epi64(0x1020408000000000);
    return q ? _mm512_gf2p8affine_epi64_epi8(words, down, 0) : _mm512_and_si512(words, mask);
  }
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

// Sums of codes times the four digits at `digits`. Compilers read the digits in an instruction of
// its own (GCC 12, clang 16), which takes a tenth more time.
[[gnu::always_inline]] inline void dot_four(__m512i& sum, __m512i codes, const char* digits) {
  asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(codes), "m"(*(const char (*)[4])digits));
}

// Up to sixteen rows of bytes.
struct ByteRows {
  const uint8_t* src;
  size_t rows, row_bytes, bytes;  // `bytes` of each are read

  bool whole() const { return rows >= 16 && bytes % 32 == 0; }
};

inline __m512i halves(__m256i low, __m256i high) {
  return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}

// The next eight words of sixteen rows as transpose_halves takes them, zero where there are none.
template <bool whole>
inline void load_words(const ByteRows& from, size_t at, __m512i (&r)[8]) {
  size_t n = from.bytes - at, stride = from.row_bytes;
  __mmask32 mask = n < 32 ? (__mmask32(1) << n) - 1 : ~__mmask32(0);
  // Four pointers, and a row's bytes once, twice and three times: what addresses can be made of.
  const uint8_t* quads[4] = {from.src + at};
  for (int q = 1; q < 4; ++q) quads[q] = quads[q - 1] + 4 * stride;
  auto row = [&](size_t i) {
    const uint8_t* p = quads[i / 4] + i % 4 * stride;
    if (whole) return _mm256_loadu_si256((const __m256i*)p);
    return i < from.rows ? _mm256_maskz_loadu_epi8(mask, p) : __m256i{};
  };
  for (size_t i = 0; i < 4; ++i) {
    r[i] = halves(row(i), row(i + 4));
    r[i + 4] = halves(row(i + 8), row(i + 12));
  }
}

// Sixteen rows to [step of 4 columns][2 * 16 rows][4].
template <int bits, bool floats, bool whole>
inline void store_rows(const ByteRows& from, uint8_t* to) {
  constexpr int quarters = 8 / bits;  // of a 32-bit word
  for (size_t at = 0; at < from.bytes; at += 32) {
    __m512i r[8];
    load_words<whole>(from, at, r);
    if constexpr (bits == 8) {
      const __m512i order = _mm512_broadcast_i32x4(
          _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15));
      for (auto& v : r) v = _mm512_shuffle_epi8(v, order);
    }
    transpose_halves(r);
    for (auto& word : r)
      for (int q = 0; q < quarters; ++q, to += 128) {
        __m512i codes = four_columns<bits>(word, q);
        _mm512_store_si512(to, floats ? float_codes(codes) : codes);
      }
  }
}

template <int bits, bool floats>
inline void store_codes(const ByteRows& from, uint8_t* to) {
  from.whole() ? store_rows<bits, floats, true>(from, to)
               : store_rows<bits, floats, false>(from, to);
}

// The sums of codes are due for a scale after so many columns.
inline size_t unit_columns(const Matrix& m) { return m.group > 64 ? 64 : size_t(m.group); }

// Of 32 rows: the scales of a group, then its biases.
constexpr size_t kScaleStride = 64, kBias = 32;

inline __m512 half_to_f32(Scalar type, __m512i word, bool high) {
  if (type == Scalar::bf16)
    return _mm512_castsi512_ps(high ? _mm512_and_si512(word, _mm512_set1_epi32(int(0xffff0000)))
                                    : _mm512_slli_epi32(word, 16));
  return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(high ? _mm512_srli_epi32(word, 16) : word));
}

// 16-bit scales of up to sixteen rows, two groups a word: to [group] kScaleStride apart.
template <bool whole>
inline void store_half_scales(Scalar type, const ByteRows& from, float* to) {
  for (size_t at = 0; at < from.bytes; at += 32) {
    __m512i r[8];
    load_words<whole>(from, at, r);
    transpose_halves(r);
    for (size_t i = 0; i < 16 && at + 2 * i < from.bytes; ++i, to += kScaleStride)
      _mm512_storeu_ps(to, half_to_f32(type, r[i / 2], i % 2));
  }
}

// Asks memory for the scales of some rows.
inline void ask_scales(const Matrix& m, size_t expert, size_t row, size_t rows) {
  bool affine = m.mode == Mode::affine;
  const uint8_t* scales = m.row_scales(expert, row);
  const uint8_t* biases = affine ? m.row_biases(expert, row) : nullptr;
  for (size_t i = 0; i < rows * m.groups() * m.scale_size(); i += 64) {
    _mm_prefetch(reinterpret_cast<const char*>(scales + i), _MM_HINT_T1);
    if (affine) _mm_prefetch(reinterpret_cast<const char*>(biases + i), _MM_HINT_T1);
  }
}

// [groups][scales, biases][32 rows]; codes of e2m1 values are stored with 12 added.
inline void unpack_scale_columns(const Matrix& m, size_t expert, size_t row0, size_t rows,
                                 float* scale) {
  size_t groups = m.groups(), stride = (groups + 15) / 16 * 16;
  auto* lines = static_cast<float*>(scratch(5, 2 * 16 * stride * sizeof(float)));
  float* biases = lines + 16 * stride;
  for (size_t r0 = 0; r0 < 32; r0 += 16, scale += 16) {
    size_t n = min(rows - min(r0, rows), 16), row = row0 + (n ? r0 : 0);
    if (m.mode == Mode::affine && m.type != Scalar::f32) {
      ByteRows from{m.row_scales(expert, row), n, 2 * groups, 2 * groups};
      auto store = from.whole() ? store_half_scales<true> : store_half_scales<false>;
      store(m.type, from, scale);
      from.src = m.row_biases(expert, row);
      store(m.type, from, scale + kBias);
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
        float* to = scale + g * kScaleStride + (from == lines ? 0 : kBias);
        for (size_t i = 0; i < 16 && g + i < groups; ++i)
          _mm512_storeu_si512(to + i * kScaleStride, v[i]);
      }
  }
}

}  // namespace

}  // namespace mlx_moe
