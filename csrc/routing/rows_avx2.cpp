#include <immintrin.h>

#include "routing/rows_simd.h"

namespace mlx_moe {

namespace {

struct Simd {
  using V = __m256;
  static constexpr size_t width = 8, sums = 8;

  static V zero() { return _mm256_setzero_ps(); }
  static V broadcast(float f) { return _mm256_set1_ps(f); }
  static V add(V a, V b) { return _mm256_add_ps(a, b); }
  static V mul(V a, V b) { return _mm256_mul_ps(a, b); }

  template <Scalar type>
  static V load(const void* p, size_t i) {
    if constexpr (type == Scalar::f32) return _mm256_loadu_ps(static_cast<const float*>(p) + i);
    const auto* at = reinterpret_cast<const __m128i*>(static_cast<const uint16_t*>(p) + i);
    const __m128i h = _mm_loadu_si128(at);
    if constexpr (type == Scalar::f16) return _mm256_cvtph_ps(h);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
  }

  // f32_to_bf16 of half.h.
  static __m128i to_bf16(V v) {
    const __m256i u = _mm256_castps_si256(v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i quiet = _mm256_or_si256(u, _mm256_set1_epi32(0x400000));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    const __m256i high = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
  }

  template <Scalar type>
  static void store(void* p, size_t i, V v) {
    if constexpr (type == Scalar::f32) return _mm256_storeu_ps(static_cast<float*>(p) + i, v);
    auto* at = reinterpret_cast<__m128i*>(static_cast<uint16_t*>(p) + i);
    if constexpr (type == Scalar::f16)
      _mm_storeu_si128(at, _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
    else
      _mm_storeu_si128(at, to_bf16(v));
  }

  static void stream_line(const char* from, char* to) {
    for (int i = 0; i < 64; i += 32)
      _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i),
                          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i)));
  }
  static void fence() { _mm_sfence(); }
};

}  // namespace

constinit const RowCode avx2_rows = SimdRows<Simd>::code("avx2");

}  // namespace mlx_moe
