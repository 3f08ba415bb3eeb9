#pragma once

// A few tokens against dense and 8-bit floating-point rows with AVX512-BF16 dot products (codes of
// whole numbers go to kernel_vnni.cpp). Each row is read once, from its first byte to its last,
// which is what memory likes best. Included by kernel_amx.cpp only.

#include "experts/bf16_unpack.h"

namespace mlx_moe {

namespace {

constexpr size_t kAhead = 4096;  // bytes to prefetch before they are read
constexpr size_t kVectorTokens = 2;

// Activations of a few tokens: rows of bfloat16, zero from `cols` to whole blocks of 32.
struct VectorPanel {
  const uint16_t* data;
  size_t cols, stride;
};

// A row is unpacked, then multiplied: out[t * ld].
template <int tokens>
void dot_unpacked(const SourceRows& source, const VectorPanel& x, uint16_t* row, float* out,
                  size_t ld) {
  unpack_rows(source, 0, x.cols, {row, 32});
  __m512 total[tokens];
  for (auto& t : total) t = _mm512_setzero_ps();
  for (size_t k = 0; k < x.cols; k += 32) {
    __m512bh w = (__m512bh)_mm512_load_si512(row + k);
    for (int t = 0; t < tokens; ++t) {
      const uint16_t* xs = x.data + size_t(t) * x.stride + k;
      total[t] = _mm512_dpbf16_ps(total[t], w, (__m512bh)_mm512_loadu_si512(xs));
    }
  }
  for (int t = 0; t < tokens; ++t) out[size_t(t) * ld] = _mm512_reduce_add_ps(total[t]);
}

// out[t * ld + r] = dot(row row0 + r, token t)
inline void vector_rows(const Matrix& m, size_t expert, size_t row0, size_t rows,
                        const VectorPanel& x, size_t tokens, float* out, size_t ld) {
  size_t padded = (m.cols + 31) / 32 * 32;
  size_t groups = m.mode == Mode::dense ? 0 : (m.groups() + 15) / 16 * 16;
  auto* scale = static_cast<float*>(scratch(2, 2 * groups * sizeof(float) + padded * 2));
  float* bias = scale + groups;
  auto* row = reinterpret_cast<uint16_t*>(bias + groups);
  for (size_t r = 0; r < rows; ++r) {
    if (groups) unpack_scales<Isa>(m, expert, row0 + r, scale, bias);
    SourceRows source{m, m.row(expert, row0 + r), 1, scale, bias, 0, kAhead};
    tokens == 1 ? dot_unpacked<1>(source, x, row, out + r, ld)
                : dot_unpacked<2>(source, x, row, out + r, ld);
  }
}

}  // namespace

}  // namespace mlx_moe
