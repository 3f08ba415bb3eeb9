#pragma once

// One token against rows of 4-bit codes, both along the columns: read about as they lie, which
// memory likes best: a twelfth faster than a row a lane. The sums run in an order of their own.
// Included by kernel_vnni.cpp only.

#include "experts/fixed_point.h"
#include "experts/vnni_codes.h"

namespace mlx_moe {

namespace {

constexpr size_t kScaleRows = 16;  // rows whose scales are unpacked at a time
constexpr int kAlongRows = 4;      // and that share a load of the token's digits
constexpr size_t kAlongFar = 12288, kAlongNear = 4096;  // bytes; measured

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

// Adds the products of some rows with the token; `scale` [rows][units] has the token's own in it.
template <int unit, bool floats, int rows>
[[gnu::always_inline]] inline void dot_along(const uint8_t* src, size_t bytes, const float* scale,
                                             size_t units, const char* x, __m512 (&total)[rows]) {
  for (size_t at = 0; at < bytes; at += 64, scale += 128 / unit, x += kBlockBytes) {
    size_t n = bytes - at;
    __m512i digits[4];
    for (int i = 0; i < 4; ++i) digits[i] = _mm512_load_si512(x + 64 * i);
    for (int r = 0; r < rows; ++r) {
      const uint8_t* p = src + size_t(r) * bytes + at;
      // Memory answers into the second-level cache, which holds more questions than the first.
      _mm_prefetch(reinterpret_cast<const char*>(p + kAlongFar), _MM_HINT_T1);
      _mm_prefetch(reinterpret_cast<const char*>(p + kAlongNear), _MM_HINT_T0);
      __m512i words =
          n >= 64 ? _mm512_loadu_si512(p) : _mm512_maskz_loadu_epi8((__mmask64(1) << n) - 1, p);
      __m512i even = four_columns<4>(words, 0), odd = four_columns<4>(words, 1);
      if constexpr (floats) even = float_codes(even), odd = float_codes(odd);
      __m512i sum = _mm512_dpbusd_epi32(_mm512_setzero_si512(), even, digits[0]);
      sum = _mm512_slli_epi32(_mm512_dpbusd_epi32(sum, odd, digits[1]), 8);
      sum = _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(sum, even, digits[2]), odd, digits[3]);
      __m512 scales = lane_scales<unit>(scale + size_t(r) * units);
      total[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), scales, total[r]);
    }
  }
}

// The sums of four vectors.
inline __m128 sum_each(const __m512 (&v)[kAlongRows]) {
  auto pairs = [](__m512 a, __m512 b) {
    return _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)));
  };
  __m512d a = pairs(v[0], v[1]), b = pairs(v[2], v[3]);
  __m512 all = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)),
                             _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
  __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
  return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

// Where the scales and biases of a row's units of 32 or 64 columns are, and those of the next row.
struct UnitScales {
  Scalar type;
  const uint8_t *scale, *bias;
  size_t stride;

  UnitScales row(size_t r) const { return {type, scale + r * stride, bias + r * stride, stride}; }
};

// Those of some rows: where they lie, or unpacked into `room`, [2][rows][units].
template <int unit>
UnitScales unit_scales(const Matrix& m, size_t expert, size_t row, size_t rows, float* room) {
  if (m.mode == Mode::affine && m.group == unit)
    return {m.type, m.row_scales(expert, row), m.row_biases(expert, row),
            m.groups() * m.scale_size()};
  size_t units = m.cols / unit;
  float *scale = room, *bias = scale + rows * units;
  unpack_scales<Simd>(m, expert, row, scale, bias, rows);
  if (m.group > unit)  // 128: two units each
    for (size_t g = rows * m.groups(); g-- > 0;) {
      scale[2 * g] = scale[2 * g + 1] = scale[g];
      bias[2 * g] = bias[2 * g + 1] = bias[g];
    }
  auto bytes = [](float* p) { return reinterpret_cast<const uint8_t*>(p); };
  return {Scalar::f32, bytes(scale), bytes(bias), units * sizeof(float)};
}

// What the token brings to every row, zero behind the last unit.
template <int unit, bool floats>
struct TokenScales {
  size_t units, padded, whole;  // `whole` of them fill vectors, `last` are in one more
  __mmask16 last;
  float *scales, *sums;

  TokenScales(size_t units, const FixedPanel& panel, const char* x, float* room)
      : units(units),
        padded((units + 15) / 16 * 16),
        whole(units / 16 * 16),
        last(__mmask16((1 << units % 16) - 1)),
        scales(room),
        sums(room + padded) {
    for (size_t u = 0; u < padded; ++u) {
      size_t group = u * unit / kGroup;
      auto* own = reinterpret_cast<const float*>(x + panel.at(group * kGroup, 0) + kValues);
      scales[u] = u < units ? own[0] : 0.f;
      sums[u] = u < units ? own[sum_at(unit, u * unit)] * (floats ? -12.f : 1.f) : 0.f;
    }
  }

  // Sets `both` to the row's and the token's scales; the products with what codes are offset by.
  __m512 start_row(const UnitScales& row, float* both) const {
    __m512 total = _mm512_setzero_ps();
    auto add = [&](size_t u, __mmask16 there) {
      __m512 scale = Simd::load_f32(row.type, row.scale, u, there);
      __m512 offset = floats ? scale : Simd::load_f32(row.type, row.bias, u, there);
      total = _mm512_fmadd_ps(offset, _mm512_loadu_ps(sums + u), total);
      _mm512_storeu_ps(both + u, _mm512_mul_ps(scale, _mm512_loadu_ps(scales + u)));
    };
    for (size_t u = 0; u < whole; u += 16) add(u, 0xffff);
    if (last) add(whole, last);
    return total;
  }
};

// out[r] = dot(row r, the token), for up to kScaleRows rows
template <int unit, bool floats>
void along_rows(const Matrix& m, size_t expert, size_t row0, size_t rows,
                const TokenScales<unit, floats>& own, const char* x, float* room, float* out) {
  ask_scales(m, expert, row0 + kScaleRows, kScaleRows);
  float* both = room + 2 * kScaleRows * own.units;
  UnitScales scales = unit_scales<unit>(m, expert, row0, rows, room);
  auto dots = [&]<int some>(size_t r, __m512(&total)[some]) {
    for (size_t i = 0; i < some; ++i)
      total[i] = own.start_row(scales.row(r + i), both + i * own.padded);
    dot_along<unit, floats>(m.row(expert, row0 + r), m.row_bytes(), both, own.padded, x, total);
  };
  size_t r = 0;
  for (; r + kAlongRows <= rows; r += kAlongRows) {
    __m512 total[kAlongRows];
    dots(r, total);
    _mm_storeu_ps(out + r, sum_each(total));
  }
  for (; r < rows; ++r) {
    __m512 total[1];
    dots(r, total);
    out[r] = _mm512_reduce_add_ps(total[0]);
  }
}

template <int unit, bool floats>
void vector_rows_of(const Matrix& m, size_t expert, size_t row0, size_t rows,
                    const FixedPanel& panel, const char* x, float* out) {
  size_t n = m.cols / unit, padded = (n + 15) / 16 * 16;
  size_t floats_needed = 2 * kScaleRows * n + (kAlongRows + 2) * padded;
  auto* room = static_cast<float*>(scratch(4, floats_needed * sizeof(float)));
  TokenScales<unit, floats> own(n, panel, x, room);
  for (size_t r = 0; r < rows; r += kScaleRows)
    along_rows(m, expert, row0 + r, min(kScaleRows, rows - r), own, x, room + 2 * padded, out + r);
}

// out[r] = dot(row r, the token)
inline void vector_rows(const Matrix& m, size_t expert, size_t row0, size_t rows,
                        const FixedPanel& panel, const char* x, float* out) {
  auto run = m.mode != Mode::affine ? vector_rows_of<32, true>
             : m.group == 32        ? vector_rows_of<32, false>
                                    : vector_rows_of<64, false>;
  run(m, expert, row0, rows, panel, x, out);
}

}  // namespace

}  // namespace mlx_moe
