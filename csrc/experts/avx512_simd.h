#pragma once

// Sixteen floats at a time. Included by files compiled for AVX-512 only, each with a copy of its
// own.

#include <immintrin.h>

#include "experts/transpose.h"
#include "support/half.h"

namespace mlx_moe {

namespace {

struct Simd {
  using V = __m512;
  static constexpr size_t width = 16;
  static constexpr size_t rows = 4;
  static constexpr int tokens = 6;        // 4 rows x 6 tokens + 6 + 1 of 32 registers
  static constexpr size_t lane_rows = 8;  // 8 rows x 2 vectors of tokens + 2 + 1

  static V zero() { return _mm512_setzero_ps(); }
  static V load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, V v) { _mm512_storeu_ps(p, v); }
  static V fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
  static V add(V a, V b) { return _mm512_add_ps(a, b); }
  static V broadcast(float f) { return _mm512_set1_ps(f); }
  struct Pair {
    V low, high;
  };
  static void store_pairs(float* p, V even, V odd) {
    const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    _mm512_storeu_ps(p, _mm512_permutex2var_ps(even, low, odd));
    _mm512_storeu_ps(p + 16, _mm512_permutex2var_ps(even, high, odd));
  }
  static Pair nibble_pairs(const uint8_t* src) {
    __m512i b = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(src)));
    return {_mm512_cvtepi32_ps(_mm512_and_si512(b, _mm512_set1_epi32(15))),
            _mm512_cvtepi32_ps(_mm512_srli_epi32(b, 4))};
  }
  static float sum(V v) { return _mm512_reduce_add_ps(v); }

  // dst [n, width] from src [width, n], n a multiple of 16
  static void transpose(const float* src, size_t n, float* dst) {
    for (size_t k = 0; k < n; k += 16) {
      __m512i r[16];
      for (size_t i = 0; i < 16; ++i) r[i] = _mm512_loadu_si512(src + i * n + k);
      mlx_moe::transpose(r);
      for (size_t i = 0; i < 16; ++i) _mm512_storeu_si512(dst + (k + i) * 16, r[i]);
    }
  }

  // Values i to i + 15 of src, those in the mask.
  static V load_f32(Scalar type, const void* src, size_t i, __mmask16 m) {
    if (type == Scalar::f32) return _mm512_maskz_loadu_ps(m, static_cast<const float*>(src) + i);
    __m256i h = _mm256_maskz_loadu_epi16(m, static_cast<const uint16_t*>(src) + i);
    return type == Scalar::f16
               ? _mm512_cvtph_ps(h)
               : _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
  }

  static void to_f32(Scalar type, const void* src, size_t n, float* dst) {
    for (size_t i = 0; i < n; i += 16) {
      __mmask16 m = n - i >= 16 ? 0xffff : __mmask16((1u << (n - i)) - 1);
      _mm512_mask_storeu_ps(dst + i, m, load_f32(type, src, i, m));
    }
  }

  static void from_f32(Scalar type, const float* src, size_t n, void* dst) {
    if (type == Scalar::f32) {
      for (size_t i = 0; i < n; ++i) static_cast<float*>(dst)[i] = src[i];
      return;
    }
    if (type == Scalar::bf16) {
      for (size_t i = 0; i < n; ++i) static_cast<uint16_t*>(dst)[i] = f32_to_bf16(src[i]);
      return;
    }
    for (size_t i = 0; i < n; i += 16) {
      __mmask16 m = n - i >= 16 ? 0xffff : __mmask16((1u << (n - i)) - 1);
      __m256i h = _mm512_cvtps_ph(_mm512_maskz_loadu_ps(m, src + i), _MM_FROUND_TO_NEAREST_INT);
      _mm256_mask_storeu_epi16(static_cast<uint16_t*>(dst) + i, m, h);
    }
  }

  static void nibbles(const uint8_t* src, size_t n, const int8_t* table, int8_t* dst) {
    __m256i lut =
        _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(table)));
    // Groups are at least 16 values, so n is a multiple of 16.
    for (size_t i = 0; i < n; i += 32) {
      __mmask16 m = n - i >= 32 ? 0xffff : 0xff;
      __m256i bytes = _mm256_cvtepu8_epi16(_mm_maskz_loadu_epi8(m, src + i / 2));
      __m256i pairs = _mm256_or_si256(bytes, _mm256_slli_epi16(bytes, 4));
      __m256i codes = _mm256_shuffle_epi8(lut, _mm256_and_si256(pairs, _mm256_set1_epi8(15)));
      _mm256_mask_storeu_epi8(dst + i, n - i >= 32 ? 0xffffffff : 0xffff, codes);
    }
  }

  static void scale_codes(const int8_t* codes, size_t n, bool is_signed, float scale, float bias,
                          float* dst) {
    __m512 s = _mm512_set1_ps(scale), b = _mm512_set1_ps(bias);
    for (size_t i = 0; i < n; i += 16) {
      __m128i c = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + i));
      __m512i wide = is_signed ? _mm512_cvtepi8_epi32(c) : _mm512_cvtepu8_epi32(c);
      _mm512_storeu_ps(dst + i, _mm512_fmadd_ps(_mm512_cvtepi32_ps(wide), s, b));
    }
  }
};

}  // namespace

}  // namespace mlx_moe
