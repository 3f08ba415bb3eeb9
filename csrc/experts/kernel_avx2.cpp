#include <immintrin.h>

#include "experts/dot_kernel.h"

namespace mlx_moe {

namespace {

struct Simd {
  using V = __m256;
  static constexpr size_t width = 8;
  static constexpr size_t rows = 4;
  static constexpr int tokens = 3;  // 4 rows x 3 tokens + 3 + 1 of 16 registers

  static V zero() { return _mm256_setzero_ps(); }
  static V load(const float* p) { return _mm256_loadu_ps(p); }
  static V fma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
  static V add(V a, V b) { return _mm256_add_ps(a, b); }
  static V broadcast(float f) { return _mm256_set1_ps(f); }
  struct Pair {
    V low, high;
  };
  static void store_pairs(float* p, V even, V odd) {
    __m256 low = _mm256_unpacklo_ps(even, odd), high = _mm256_unpackhi_ps(even, odd);
    _mm256_storeu_ps(p, _mm256_permute2f128_ps(low, high, 0x20));
    _mm256_storeu_ps(p + 8, _mm256_permute2f128_ps(low, high, 0x31));
  }
  static Pair nibble_pairs(const uint8_t* src) {
    __m256i b = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(src)));
    return {_mm256_cvtepi32_ps(_mm256_and_si256(b, _mm256_set1_epi32(15))),
            _mm256_cvtepi32_ps(_mm256_srli_epi32(b, 4))};
  }
  static float sum(V v) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
  }

  static void to_f32(Scalar type, const void* src, size_t n, float* dst) {
    size_t i = 0;
    auto* half = static_cast<const uint16_t*>(src);
    for (; i + 8 <= n; i += 8) {
      if (type == Scalar::f32) {
        _mm256_storeu_ps(dst + i, load(static_cast<const float*>(src) + i));
        continue;
      }
      __m128i h = _mm_loadu_si128(reinterpret_cast<const __m128i*>(half + i));
      _mm256_storeu_ps(dst + i, type == Scalar::f16 ? _mm256_cvtph_ps(h)
                                                    : _mm256_castsi256_ps(_mm256_slli_epi32(
                                                          _mm256_cvtepu16_epi32(h), 16)));
    }
    for (; i < n; ++i) dst[i] = load_scalar(type, src, i);
  }

  static void from_f32(Scalar type, const float* src, size_t n, void* dst) {
    if (type == Scalar::f16) {
      size_t i = 0;
      auto* half = static_cast<uint16_t*>(dst);
      for (; i + 8 <= n; i += 8)
        _mm_storeu_si128(reinterpret_cast<__m128i*>(half + i),
                         _mm256_cvtps_ph(load(src + i), _MM_FROUND_TO_NEAREST_INT));
      for (; i < n; ++i) half[i] = f32_to_f16(src[i]);
      return;
    }
    for (size_t i = 0; i < n; ++i) store_scalar(type, dst, i, src[i]);
  }

  static void nibbles(const uint8_t* src, size_t n, const int8_t* table, int8_t* dst) {
    __m128i lut = _mm_load_si128(reinterpret_cast<const __m128i*>(table));
    __m128i mask = _mm_set1_epi8(15);
    size_t i = 0;
    for (; i + 32 <= n; i += 32) {
      __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(src + i / 2));
      __m128i low = _mm_shuffle_epi8(lut, _mm_and_si128(bytes, mask));
      __m128i high = _mm_shuffle_epi8(lut, _mm_and_si128(_mm_srli_epi16(bytes, 4), mask));
      auto* to = reinterpret_cast<__m128i*>(dst + i);
      _mm_storeu_si128(to, _mm_unpacklo_epi8(low, high));
      _mm_storeu_si128(to + 1, _mm_unpackhi_epi8(low, high));
    }
    for (; i < n; i += 2) {
      dst[i] = table[src[i / 2] & 15];
      dst[i + 1] = table[src[i / 2] >> 4];
    }
  }

  static void scale_codes(const int8_t* codes, size_t n, bool is_signed, float scale, float bias,
                          float* dst) {
    __m256 s = _mm256_set1_ps(scale), b = _mm256_set1_ps(bias);
    for (size_t i = 0; i < n; i += 8) {
      __m128i c = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + i));
      __m256i wide = is_signed ? _mm256_cvtepi8_epi32(c) : _mm256_cvtepu8_epi32(c);
      _mm256_storeu_ps(dst + i, _mm256_fmadd_ps(_mm256_cvtepi32_ps(wide), s, b));
    }
  }
};

}  // namespace

constinit const Kernel avx2_kernel = DotKernel<Simd>::kernel("avx2");

}  // namespace mlx_moe
