#pragma once

// Weight rows to bfloat16 (AVX-512 with VBMI and BF16). Included by kernel_amx.cpp only.

#include <immintrin.h>

#include "experts/unpack.h"

namespace mlx_moe {

namespace {

// Rows of one matrix to unpack: the first one's bytes and, one `stride` apart, scales and biases.
struct SourceRows {
  const Matrix& m;
  const uint8_t* data;
  size_t rows;
  const float *scale, *bias;
  size_t stride;
  size_t ahead;  // bytes from what is read to what is worth asking memory for
};

// Where they go: 32 columns of a row, the next row right behind, `stride` values to the next 32
// columns.
struct RowBlocks {
  uint16_t* data;
  size_t stride;
};

// One request for each few values read: many at once would fill the core's line buffers and stall.
inline void prefetch(const SourceRows& from, const uint8_t* src) {
  _mm_prefetch((const char*)src + from.ahead, _MM_HINT_T1);
}

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

// What unpack.h and activation.h ask of an instruction set.
struct Isa {
  static void to_f32(Scalar type, const void* src, size_t n, float* dst) {
    for (size_t i = 0; i < n; i += 16)
      _mm512_mask_storeu_ps(dst + i, __mmask16(tail_mask(n - i)), load_f32(type, src, i, n - i));
  }
};

// The 16 values of a 4-bit code, before the scale.
inline __m512 code_values(const Matrix& m) {
  auto* table = m.mode == Mode::affine ? kNibbles : kE2M1Doubled;
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_load_si128((const __m128i*)table)));
}

// 32 codes of 4 bits as 32 words
inline __m512i spread_nibbles(const uint8_t* src) {
  __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)src));
  constexpr int or_and = 0xa8;  // (a | b) & c
  return _mm512_ternarylogic_epi32(wide, _mm512_slli_epi32(wide, 12), _mm512_set1_epi16(15),
                                   or_and);
}

// The 16 values that a group's codes stand for, as bfloat16.
inline __m512i group_table(__m512 values, float scale, float bias) {
  __m512 t = _mm512_fmadd_ps(values, _mm512_set1_ps(scale), _mm512_set1_ps(bias));
  return _mm512_castsi256_si512((__m256i)_mm512_cvtneps_pbh(t));
}

// Groups of 32 or more: the values of a group are looked up.
inline void unpack_q4(const SourceRows& from, size_t k0, size_t k1, RowBlocks to) {
  const __m512 values = code_values(from.m);
  const size_t row_bytes = from.m.row_bytes();
  const int shift = __builtin_ctz(unsigned(from.m.group));
  for (size_t r = 0; r < from.rows; ++r) {
    const float *scale = from.scale + r * from.stride, *bias = from.bias + r * from.stride;
    const uint8_t* src = from.data + r * row_bytes;
    uint16_t* dst = to.data + r * 32;
    for (size_t k = k0; k < k1; k += 64, dst += 2 * to.stride) {
      prefetch(from, src + k / 2);
      size_t g = k >> shift;
      __m512i table = group_table(values, scale[g], bias[g]);
      _mm512_store_si512(dst, _mm512_permutexvar_epi16(spread_nibbles(src + k / 2), table));
      if (k + 32 == k1) break;
      if (shift == 5) table = group_table(values, scale[g + 1], bias[g + 1]);
      _mm512_store_si512(dst + to.stride,
                         _mm512_permutexvar_epi16(spread_nibbles(src + k / 2 + 16), table));
    }
  }
}

// Groups of 16: two tables side by side, bit 4 of an index says which.
inline void unpack_q4_by_16(const SourceRows& from, size_t k0, size_t k1, RowBlocks to) {
  const __m512i second = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(16), 1);
  const __m512 values = code_values(from.m);
  for (size_t r = 0; r < from.rows; ++r) {
    const uint8_t* src = from.data + r * from.m.row_bytes();
    const float* scale = from.scale + r * from.stride;
    uint16_t* dst = to.data + r * 32;
    for (size_t k = k0; k < k1; k += 32, dst += to.stride) {
      prefetch(from, src + k / 2);
      bool half = k1 - k < 32;
      __m512 low = _mm512_mul_ps(values, _mm512_set1_ps(scale[k / 16]));
      __m512 high = _mm512_mul_ps(values, _mm512_set1_ps(half ? 0.f : scale[k / 16 + 1]));
      alignas(16) uint8_t bytes[16];
      _mm_store_si128((__m128i*)bytes, _mm_maskz_loadu_epi8(half ? 0xff : 0xffff, src + k / 2));
      __m512i index = spread_nibbles(bytes);
      _mm512_store_si512(
          dst, _mm512_permutexvar_epi16(_mm512_or_si512(index, second), round_pair(low, high)));
    }
  }
}

// 64 codes of `bits` bits, one a byte: each qword takes the `bits` bytes that hold eight codes.
inline __m512i spread_codes(const uint8_t* src, int bits, size_t n) {
  alignas(64) uint8_t bytes[64];
  for (int i = 0; i < 64; ++i) bytes[i] = uint8_t(i / 8 * bits + i % 8);
  __mmask64 m = n >= 64 ? (bits == 8 ? ~0ull : (1ull << (8 * bits)) - 1)
                        : (1ull << (n / 8 * size_t(bits))) - 1;
  __m512i raw = _mm512_maskz_loadu_epi8(m, src);
  __m512i words = _mm512_permutexvar_epi8(_mm512_load_si512(bytes), raw);
  __m512i control = _mm512_set1_epi64(bits * 0x0706050403020100);  // byte i: i * bits
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
inline void unpack_codes(const SourceRows& from, size_t k0, size_t k1, RowBlocks to) {
  alignas(64) uint8_t codes[64];
  const size_t group = size_t(from.m.group), bits = size_t(from.m.bits);
  const bool fp8 = from.m.mode == Mode::mxfp8;
  for (size_t r = 0; r < from.rows; ++r) {
    const float *scale = from.scale + r * from.stride, *bias = from.bias + r * from.stride;
    const uint8_t* src = from.data + r * from.m.row_bytes();
    uint16_t* dst = to.data + r * 32;
    for (size_t k = k0; k < k1; k += 64) {
      prefetch(from, src + k * bits / 8);
      _mm512_store_si512(codes, spread_codes(src + k * bits / 8, int(bits), k1 - k));
      for (size_t i = 0; i < 64 && k + i < k1; i += 32, dst += to.stride) {
        size_t g = (k + i) / group;
        __m512 s = _mm512_set1_ps(scale[g]), b = _mm512_set1_ps(bias[g]), half[2];
        for (int j = 0; j < 2; ++j) {
          __m512i c = _mm512_cvtepu8_epi32(_mm_load_si128((const __m128i*)(codes + i) + j));
          half[j] = _mm512_fmadd_ps(fp8 ? e4m3_values(c) : _mm512_cvtepi32_ps(c), s, b);
        }
        _mm512_store_si512(dst, round_pair(half[0], half[1]));
      }
    }
  }
}

inline void unpack_dense(const SourceRows& from, size_t k0, size_t k1, RowBlocks to) {
  for (size_t r = 0; r < from.rows; ++r) {
    const uint8_t* src = from.data + r * from.m.row_bytes();
    uint16_t* dst = to.data + r * 32;
    for (size_t k = k0; k < k1; k += 32, dst += to.stride) {
      prefetch(from, src + k * size_of(from.m.type));
      _mm512_store_si512(dst, load_bf16(from.m.type, src, k, k1 - k));
    }
  }
}

// Columns [k0, k1) of some rows; k0 is a multiple of 64.
inline void unpack_rows(const SourceRows& from, size_t k0, size_t k1, RowBlocks to) {
  if (from.m.mode == Mode::dense)
    unpack_dense(from, k0, k1, to);
  else if (from.m.group == 16)
    unpack_q4_by_16(from, k0, k1, to);
  else if (from.m.bits == 4)
    unpack_q4(from, k0, k1, to);
  else
    unpack_codes(from, k0, k1, to);
}

}  // namespace

}  // namespace mlx_moe
