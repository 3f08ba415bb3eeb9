#include <immintrin.h>

#include "routing/rows_simd.h"

namespace mlx_moe {

namespace {

struct Simd {
  using V = __m512;
  static constexpr size_t width = 16, sums = 8;

  static V zero() { return _mm512_setzero_ps(); }
  static V broadcast(float f) { return _mm512_set1_ps(f); }
  static V add(V a, V b) { return _mm512_add_ps(a, b); }
  static V mul(V a, V b) { return _mm512_mul_ps(a, b); }

  template <Scalar type>
  static V load(const void* p, size_t i) {
    if constexpr (type == Scalar::f32) return _mm512_loadu_ps(static_cast<const float*>(p) + i);
    const auto* at = reinterpret_cast<const __m256i*>(static_cast<const uint16_t*>(p) + i);
    const __m256i h = _mm256_loadu_si256(at);
    if constexpr (type == Scalar::f16) return _mm512_cvtph_ps(h);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
  }

  // f32_to_bf16 of half.h.
  static __m256i to_bf16(V v) {
    const __m512i u = _mm512_castps_si512(v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    const __m512i chosen = _mm512_mask_or_epi32(rounded, nan, u, _mm512_set1_epi32(0x400000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(chosen, 16));
  }

  template <Scalar type>
  static void store(void* p, size_t i, V v) {
    if constexpr (type == Scalar::f32) return _mm512_storeu_ps(static_cast<float*>(p) + i, v);
    auto* at = reinterpret_cast<__m256i*>(static_cast<uint16_t*>(p) + i);
    if constexpr (type == Scalar::f16)
      _mm256_storeu_si256(at, _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
    else
      _mm256_storeu_si256(at, to_bf16(v));
  }

  static void stream_line(const char* from, char* to) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to), _mm512_loadu_si512(from));
  }
  static void fence() { _mm_sfence(); }
};

}  // namespace

constinit const RowCode avx512_rows = SimdRows<Simd>::code("avx512");

}  // namespace mlx_moe
