#pragma once

// Weight rows to bfloat16 (AVX-512 with VBMI and BF16). Included by kernel_amx.cpp only.

#include <immintrin.h>

#include "experts/fp_tables.h"
#include "experts/matrix.h"

namespace mlx_moe {

namespace {

// Where a row goes: 32 columns at a time, `stride` values from one such block to the next.
struct RowBlocks {
  uint16_t* data;
  size_t stride;
};

inline __mmask32 tail_mask(size_t n) { return n >= 32 ? 0xffffffff : (1u << n) - 1; }

inline __m512i round_pair(__m512 low, __m512 high) {
  return (__m512i)_mm512_cvtne2ps_pbh(high, low);
}

// Up to 32 values of any float type as bfloat16, zero beyond n.
inline __m512i load_bf16(Scalar type, const void* src, size_t i, size_t n) {
  __mmask32 m = tail_mask(n);
  if (type == Scalar::bf16)
    return _mm512_maskz_loadu_epi16(m, static_cast<const uint16_t*>(src) + i);
  if (type == Scalar::f16) {
    __m512i h = _mm512_maskz_loadu_epi16(m, static_cast<const uint16_t*>(src) + i);
    return round_pair(_mm512_cvtph_ps(_mm512_castsi512_si256(h)),
                      _mm512_cvtph_ps(_mm512_extracti64x4_epi64(h, 1)));
  }
  auto* f = static_cast<const float*>(src) + i;
  return round_pair(_mm512_maskz_loadu_ps(__mmask16(m), f),
                    _mm512_maskz_loadu_ps(__mmask16(m >> 16), f + 16));
}

inline __m512 load_f32(Scalar type, const void* src, size_t i, size_t n) {
  __mmask16 m = __mmask16(tail_mask(n));
  if (type == Scalar::f32) return _mm512_maskz_loadu_ps(m, static_cast<const float*>(src) + i);
  __m256i h = _mm256_maskz_loadu_epi16(m, static_cast<const uint16_t*>(src) + i);
  if (type == Scalar::f16) return _mm512_cvtph_ps(h);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
}

// Scale and bias of each group in float32; the arrays are padded to 16 groups.
inline void unpack_scales(const Matrix& m, size_t expert, size_t row, float* scale, float* bias) {
  const uint8_t* s = m.row_scales(expert, row);
  const uint8_t* b = m.biases ? m.row_biases(expert, row) : nullptr;
  size_t n = m.groups();
  float factor = m.mode == Mode::mxfp4 ? 0.5f : 1.f;  // e2m1 values are kept doubled
  if (m.mode == Mode::nvfp4)  // mx.quantize normalises by 448 * 6
    factor = m.global_scale ? 0.5f * m.global_scale[expert] / (448.f * 6.f) : 0.5f;
  for (size_t g = 0; g < n; g += 16) {
    if (m.mode == Mode::affine) {
      _mm512_storeu_ps(scale + g, load_f32(m.type, s, g, n - g));
      _mm512_storeu_ps(bias + g, load_f32(m.type, b, g, n - g));
      continue;
    }
    for (size_t i = g; i < n && i < g + 16; ++i)
      scale[i] = factor * (m.mode == Mode::nvfp4 ? e4m3_to_f32(s[i]) : e8m0_to_f32(s[i]));
    _mm512_storeu_ps(bias + g, _mm512_setzero_ps());
  }
}

// The 16 values of a 4-bit code, before the scale.
inline __m512 code_values(const Matrix& m) {
  auto* table = m.mode == Mode::affine ? kNibbles : kE2M1Doubled;
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_load_si128((const __m128i*)table)));
}

// 32 codes of 4 bits as indices in the low bits of words; bit 4 of every other word is dirty.
inline __m512i spread_nibbles(__m128i bytes) {
  __m512i wide = _mm512_cvtepu8_epi32(bytes);
  return _mm512_or_si512(wide, _mm512_slli_epi32(wide, 12));
}

inline __m128i load_nibbles(const uint8_t* src) { return _mm_loadu_si128((const __m128i*)src); }

// Groups of 32 or more: the 16 possible values of a group are looked up, both halves of the table
// alike so that a dirty bit 4 does no harm.
inline void unpack_q4(const uint8_t* src, __m512 values, const float* scale, const float* bias,
                      size_t group, size_t k0, size_t k1, RowBlocks to) {
  uint16_t* dst = to.data;
  for (size_t k = k0; k < k1; k += group) {
    size_t g = k / group;
    __m512 t = _mm512_fmadd_ps(values, _mm512_set1_ps(scale[g]), _mm512_set1_ps(bias[g]));
    __m512i table = round_pair(t, t);
    for (size_t i = k; i < k + group && i < k1; i += 32, dst += to.stride)
      _mm512_store_si512(
          dst, _mm512_permutexvar_epi16(spread_nibbles(load_nibbles(src + i / 2)), table));
  }
}

// Groups of 16: two tables side by side, bit 4 of an index says which.
inline void unpack_q4_by_16(const uint8_t* src, __m512 values, const float* scale, size_t k0,
                            size_t k1, RowBlocks to) {
  const __m512i second = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(16), 1);
  uint16_t* dst = to.data;
  for (size_t k = k0; k < k1; k += 32, dst += to.stride) {
    bool half = k1 - k < 32;
    __m512 low = _mm512_mul_ps(values, _mm512_set1_ps(scale[k / 16]));
    __m512 high = _mm512_mul_ps(values, _mm512_set1_ps(half ? 0.f : scale[k / 16 + 1]));
    __m128i bytes = _mm_maskz_loadu_epi8(half ? 0xff : 0xffff, src + k / 2);
    __m512i index = _mm512_and_si512(spread_nibbles(bytes), _mm512_set1_epi16(15));
    _mm512_store_si512(dst, _mm512_permutexvar_epi16(_mm512_or_si512(index, second),
                                                     round_pair(low, high)));
  }
}

// 64 codes of `bits` bits, one a byte: each qword takes the `bits` bytes that hold eight codes.
inline __m512i spread_codes(const uint8_t* src, int bits, size_t n) {
  alignas(64) uint8_t bytes[64];
  alignas(8) uint8_t shifts[8];
  for (int i = 0; i < 64; ++i) bytes[i] = uint8_t(i / 8 * bits + i % 8);
  for (int i = 0; i < 8; ++i) shifts[i] = uint8_t(i * bits);
  __mmask64 m = n >= 64 ? (bits == 8 ? ~0ull : (1ull << (8 * bits)) - 1)
                        : (1ull << (n / 8 * size_t(bits))) - 1;
  __m512i raw = _mm512_maskz_loadu_epi8(m, src);
  __m512i words = _mm512_permutexvar_epi8(_mm512_load_si512(bytes), raw);
  __m512i control = _mm512_set1_epi64(*(const int64_t*)shifts);
  return _mm512_and_si512(_mm512_multishift_epi64_epi8(control, words),
                          _mm512_set1_epi8(char((1 << bits) - 1)));
}

inline __m512 e4m3_values(__m512i v) {
  __m512i sign = _mm512_slli_epi32(_mm512_and_si512(v, _mm512_set1_epi32(0x80)), 24);
  __m512i rest = _mm512_and_si512(v, _mm512_set1_epi32(0x7f));
  __m512 f = _mm512_castsi512_ps(_mm512_or_si512(sign, _mm512_slli_epi32(rest, 20)));
  f = _mm512_mul_ps(f, _mm512_set1_ps(0x1p120f));  // the exponents' biases differ by 120
  __mmask16 nan = _mm512_cmpeq_epi32_mask(rest, _mm512_set1_epi32(0x7f));
  return _mm512_mask_mov_ps(f, nan, _mm512_set1_ps(__builtin_nanf("")));
}

// Any other width: codes to float32, scaled, rounded. Groups are 32 or more.
inline void unpack_codes(const Matrix& m, const uint8_t* src, const float* scale,
                         const float* bias, size_t k0, size_t k1, RowBlocks to) {
  uint16_t* dst = to.data;
  alignas(64) uint8_t codes[64];
  size_t group = size_t(m.group);
  for (size_t k = k0; k < k1; k += 64) {
    _mm512_store_si512(codes, spread_codes(src + k * size_t(m.bits) / 8, m.bits, k1 - k));
    for (size_t i = 0; i < 64 && k + i < k1; i += 32, dst += to.stride) {
      __m512 s = _mm512_set1_ps(scale[(k + i) / group]), b = _mm512_set1_ps(bias[(k + i) / group]);
      __m512 half[2];
      for (int j = 0; j < 2; ++j) {
        __m512i c = _mm512_cvtepu8_epi32(_mm_load_si128((const __m128i*)(codes + i) + j));
        __m512 v = m.mode == Mode::mxfp8 ? e4m3_values(c) : _mm512_cvtepi32_ps(c);
        half[j] = _mm512_fmadd_ps(v, s, b);
      }
      _mm512_store_si512(dst, round_pair(half[0], half[1]));
    }
  }
}

// Columns [k0, k1) of one row; k0 is a multiple of every group. `scale` and `bias` are the row's.
inline void unpack_row(const Matrix& m, const uint8_t* src, const float* scale, const float* bias,
                       size_t k0, size_t k1, RowBlocks to) {
  if (m.mode == Mode::dense) {
    uint16_t* dst = to.data;
    for (size_t k = k0; k < k1; k += 32, dst += to.stride)
      _mm512_store_si512(dst, load_bf16(m.type, src, k, k1 - k));
  } else if (m.group == 16) {
    unpack_q4_by_16(src, code_values(m), scale, k0, k1, to);
  } else if (m.bits == 4) {
    unpack_q4(src, code_values(m), scale, bias, size_t(m.group), k0, k1, to);
  } else {
    unpack_codes(m, src, scale, bias, k0, k1, to);
  }
}

}  // namespace

}  // namespace mlx_moe
