#pragma once

// Weight rows to float32 in scratch memory. Included by the one-ISA files only: everything is a
// template over that file's Simd, so that no two files share code at link time.

#include "experts/fp_tables.h"
#include "experts/matrix.h"
#include "support/scratch.h"

namespace mlx_moe {

// `scale` and `bias` of every group of some rows, in float32.
template <class Simd>
void unpack_scales(const Matrix& m, size_t expert, size_t row, float* scale, float* bias,
                   size_t rows = 1) {
  const uint8_t* s = m.row_scales(expert, row);
  size_t n = rows * m.groups();
  switch (m.mode) {
    case Mode::affine:
      Simd::to_f32(m.type, s, n, scale);
      Simd::to_f32(m.type, m.row_biases(expert, row), n, bias);
      return;
    case Mode::nvfp4: {
      // mx.quantize normalises by 448 * 6, the largest product of an e4m3 and an e2m1.
      float global = m.global_scale ? m.global(expert) / (448.f * 6.f) : 1.f;
      for (size_t g = 0; g < n; ++g) scale[g] = 0.5f * global * e4m3_to_f32(s[g]), bias[g] = 0.f;
      return;
    }
    default:
      float half = m.mode == Mode::mxfp4 ? 0.5f : 1.f;
      for (size_t g = 0; g < n; ++g) scale[g] = half * e8m0_to_f32(s[g]), bias[g] = 0.f;
  }
}

// Eight values of `bits` bits are `bits` bytes, low bits first.
template <class Simd, int bits>
void unpack_bits(const uint8_t* src, size_t n, uint8_t* codes) {
  for (size_t i = 0; i < n; i += 8, src += bits) {
    uint64_t word = 0;
    for (int b = 0; b < bits; ++b) word |= uint64_t(src[b]) << (8 * b);
    for (int j = 0; j < 8; ++j) codes[i + j] = uint8_t((word >> (bits * j)) & ((1 << bits) - 1));
  }
}

// Whole numbers (or doubled e2m1 values) of a row, one a byte.
template <class Simd>
const int8_t* unpack_codes(const Matrix& m, const uint8_t* src, int8_t* codes) {
  auto* out = reinterpret_cast<uint8_t*>(codes);
  switch (m.bits) {
    case 2:
      unpack_bits<Simd, 2>(src, m.cols, out);
      break;
    case 3:
      unpack_bits<Simd, 3>(src, m.cols, out);
      break;
    case 4:
      Simd::nibbles(src, m.cols, m.mode == Mode::affine ? kNibbles : kE2M1Doubled, codes);
      break;
    case 5:
      unpack_bits<Simd, 5>(src, m.cols, out);
      break;
    case 6:
      unpack_bits<Simd, 6>(src, m.cols, out);
      break;
    default:
      return reinterpret_cast<const int8_t*>(src);
  }
  return codes;
}

// Bytes from what is read to what is worth asking memory for, a little at a time.
constexpr size_t kReadAhead = 4096;

// Affine 4-bit groups of `bytes` bytes, which hold columns 2i and 2i + 1; the commonest format, so
// without a stop at whole numbers.
template <class Simd>
void unpack_nibbles(const uint8_t* src, size_t groups, size_t bytes, const float* scale,
                    const float* bias, float* out) {
  for (size_t g = 0, i = 0; g < groups; ++g) {
    auto s = Simd::broadcast(scale[g]), b = Simd::broadcast(bias[g]);
    __builtin_prefetch(src + i + kReadAhead);
    for (size_t end = i + bytes; i < end; i += Simd::width) {
      auto codes = Simd::nibble_pairs(src + i);
      Simd::store_pairs(out + 2 * i, Simd::fma(codes.low, s, b), Simd::fma(codes.high, s, b));
    }
  }
}

// One row as float32, zero up to `padded` columns. A float32 row is returned where it lies.
template <class Simd>
const float* unpack_row(const Matrix& m, size_t expert, size_t row, size_t padded, float* out) {
  const uint8_t* src = m.row(expert, row);
  for (size_t k = m.cols; k < padded; ++k) out[k] = 0.f;
  if (m.mode == Mode::dense) {
    if (m.type == Scalar::f32 && m.cols == padded) return reinterpret_cast<const float*>(src);
    Simd::to_f32(m.type, src, m.cols, out);
    return out;
  }
  auto* scale = static_cast<float*>(scratch(0, 2 * m.groups() * sizeof(float)));
  float* bias = scale + m.groups();
  unpack_scales<Simd>(m, expert, row, scale, bias);
  size_t group = size_t(m.group);
  if (m.mode == Mode::affine && m.bits == 4) {
    unpack_nibbles<Simd>(src, m.groups(), group / 2, scale, bias, out);
    return out;
  }
  if (m.mode == Mode::mxfp8) {
    for (size_t k = 0; k < m.cols; ++k) out[k] = scale[k / group] * e4m3_to_f32(src[k]);
    return out;
  }
  const int8_t* codes = unpack_codes<Simd>(m, src, static_cast<int8_t*>(scratch(1, m.cols)));
  // Only the doubled e2m1 values have a sign.
  bool is_signed = m.mode != Mode::affine;
  for (size_t g = 0, k = 0; k < m.cols; ++g, k += group)
    Simd::scale_codes(codes + k, group, is_signed, scale[g], bias[g], out + k);
  return out;
}

}  // namespace mlx_moe
