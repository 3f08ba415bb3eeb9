#pragma once

// A few tokens against rows of 4-bit codes, both along the columns: what decoding is made of. Each
// row is read once, from its first byte to its last, which is what memory likes best. A token's
// results have the same bits whether it is alone or not; more tokens, by blocks of rows, sum in
// another order. Included by kernel_vnni.cpp only.

#include "experts/fixed_point.h"
#include "experts/vnni_codes.h"

namespace mlx_moe {

namespace {

constexpr size_t kVectorTokens = 3;                     // more are faster by blocks of rows
constexpr size_t kNearAhead = 1024, kFarAhead = 16384;  // bytes; measured
constexpr size_t kScaleRows = 16;                       // rows whose scales are unpacked at a time

inline size_t min(size_t a, size_t b) { return a < b ? a : b; }

inline bool takes_vectors(const Matrix& m, size_t tokens) {
  return m.bits == 4 && m.group >= 32 && tokens <= kVectorTokens;
}

// Lane i of a block of 128 columns multiplies columns 8i to 8i + 7: the scales of its lanes.
template <int unit>
inline __m512 lane_scales(const float* scale) {
  if constexpr (unit == 64) {
    __m512 first = _mm512_set1_ps(scale[0]);
    return _mm512_mask_broadcastss_ps(first, 0xff00, _mm_load_ss(scale + 1));
  }
  const __m512i lanes = _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0);
  return _mm512_permutevar_ps(_mm512_broadcast_f32x4(_mm_loadu_ps(scale)), lanes);
}

inline __m512i dot(__m512i sum, __m512i codes, const char* digits) {
  return _mm512_dpbusd_epi32(sum, codes, _mm512_loadu_si512(digits));
}

// Adds to `total` the products of a row with the tokens; `scale` [tokens][units] has the tokens'
// own in it.
template <int unit, bool floats, int tokens>
[[gnu::always_inline]] inline void dot_row(const uint8_t* src, size_t bytes, const float* scale,
                                           size_t units, const char* x, size_t stride,
                                           __m512 (&total)[tokens]) {
  for (size_t at = 0; at < bytes; at += 64, scale += 128 / unit, x += kBlockBytes) {
    // Memory answers into the second-level cache, which holds more questions than the first.
    _mm_prefetch(reinterpret_cast<const char*>(src) + at + kFarAhead, _MM_HINT_T1);
    _mm_prefetch(reinterpret_cast<const char*>(src) + at + kNearAhead, _MM_HINT_T0);
    __m512i words = bytes - at >= 64
                        ? _mm512_loadu_si512(src + at)
                        : _mm512_maskz_loadu_epi8((__mmask64(1) << (bytes - at)) - 1, src + at);
    __m512i even = four_columns<4>(words, 0), odd = four_columns<4>(words, 1);
    if constexpr (floats) even = float_codes(even), odd = float_codes(odd);
    for (int t = 0; t < tokens; ++t) {
      const char* digits = x + size_t(t) * stride;
      __m512i sum = dot(dot(__m512i{}, even, digits), odd, digits + kOdd);
      sum = _mm512_slli_epi32(sum, 8);
      sum = dot(dot(sum, even, digits + kLow), odd, digits + kLow + kOdd);
      __m512 scales = lane_scales<unit>(scale + size_t(t) * units);
      total[t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), scales, total[t]);
    }
  }
}

// The scales of some rows for each unit of 32 or 64 columns: [rows][units].
template <int unit>
void unit_scales(const Matrix& m, size_t expert, size_t row, size_t rows, float* scale,
                 float* bias) {
  unpack_scales<Simd>(m, expert, row, scale, bias, rows);
  if (m.group > unit)  // 128: two units each
    for (size_t g = rows * m.groups(); g-- > 0;) {
      scale[2 * g] = scale[2 * g + 1] = scale[g];
      bias[2 * g] = bias[2 * g + 1] = bias[g];
    }
}

// What the tokens bring to every row, zero behind the last unit.
template <int unit, bool floats>
struct TokenScales {
  size_t n, padded;             // units
  float *scales, *sums, *both;  // [tokens][padded]; `both` has those of the row at hand, too

  TokenScales(const FixedPanel& panel, size_t cols, const char* x, size_t tokens, float* room)
      : n(cols / unit), padded((n + 15) / 16 * 16), scales(room) {
    sums = scales + tokens * padded;
    both = sums + tokens * padded;
    for (size_t t = 0; t < tokens; ++t, x += panel.stride) {
      auto* scale = reinterpret_cast<const float*>(x + panel.scales());
      auto* sum = reinterpret_cast<const float*>(x + panel.sums(unit));
      for (size_t u = 0; u < padded; ++u) {
        scales[t * padded + u] = u < n ? scale[u * unit / kGroup] : 0.f;
        sums[t * padded + u] = u < n ? sum[u] * (floats ? -12.f : 1.f) : 0.f;
      }
    }
  }

  // Sets `both`, and `total` to the products with what the codes are offset by.
  template <int tokens>
  void start_row(const float* scale, const float* bias, __m512 (&total)[tokens]) const {
    for (auto& v : total) v = _mm512_setzero_ps();
    for (size_t u = 0; u < n; u += 16) {
      __mmask16 there = n - u < 16 ? __mmask16((1 << (n - u)) - 1) : __mmask16(0xffff);
      __m512 s = _mm512_maskz_loadu_ps(there, scale + u);
      __m512 offset = floats ? s : _mm512_maskz_loadu_ps(there, bias + u);
      for (size_t t = 0; t < tokens; ++t) {
        size_t at = t * padded + u;
        total[t] = _mm512_fmadd_ps(offset, _mm512_loadu_ps(sums + at), total[t]);
        _mm512_storeu_ps(both + at, _mm512_mul_ps(s, _mm512_loadu_ps(scales + at)));
      }
    }
  }
};

template <int unit, bool floats, int tokens>
void vector_rows(const Matrix& m, size_t expert, size_t row0, size_t rows, const FixedPanel& panel,
                 const char* x, float* out, size_t apart) {
  size_t n = m.cols / unit, padded = (n + 15) / 16 * 16;
  auto* scale =
      static_cast<float*>(scratch(4, (2 * kScaleRows * n + 3 * tokens * padded) * sizeof(float)));
  float* bias = scale + kScaleRows * n;
  TokenScales<unit, floats> own(panel, m.cols, x, tokens, bias + kScaleRows * n);
  for (size_t r = 0; r < rows; ++r) {
    size_t at = r % kScaleRows;
    if (!at) unit_scales<unit>(m, expert, row0 + r, min(kScaleRows, rows - r), scale, bias);
    __m512 total[tokens];
    own.start_row(scale + at * n, bias + at * n, total);
    dot_row<unit, floats>(m.row(expert, row0 + r), m.row_bytes(), own.both, padded, x, panel.stride,
                          total);
    for (size_t t = 0; t < tokens; ++t) out[t * apart + r] = _mm512_reduce_add_ps(total[t]);
  }
}

using VectorRows = void (*)(const Matrix&, size_t, size_t, size_t, const FixedPanel&, const char*,
                            float*, size_t);

template <int tokens>
VectorRows vector_rows_of(const Matrix& m) {
  if (m.mode != Mode::affine) return vector_rows<32, true, tokens>;
  return m.group == 32 ? vector_rows<32, false, tokens> : vector_rows<64, false, tokens>;
}

inline VectorRows vector_rows_for(const Matrix& m, size_t tokens) {
  return tokens == 1   ? vector_rows_of<1>(m)
         : tokens == 2 ? vector_rows_of<2>(m)
                       : vector_rows_of<3>(m);
}

}  // namespace

}  // namespace mlx_moe
