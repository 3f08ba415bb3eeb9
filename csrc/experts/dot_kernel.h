#pragma once

// The kernel that multiplies by dot products: weight rows are unpacked to float32 and multiplied
// with float32 activations, both along the columns. Included by the one-ISA files only.

#if defined(MLX_MOE_ACCELERATE)
#include <Accelerate/Accelerate.h>
#elif defined(MLX_MOE_CBLAS)  // the same calls from any BLAS, to test them off Apple
#include <cblas.h>
#endif

#include "experts/activation.h"
#include "experts/kernel.h"
#include "experts/unpack.h"

namespace mlx_moe {

template <class Simd>
struct DotKernel {
  static constexpr size_t kBlock = 32, kRows = Simd::rows, kPad = 16, kTokens = 128,
                          kStretch = 1024;

  static size_t padded(size_t cols) { return (cols + kPad - 1) / kPad * kPad; }

  // Rows of a panel are a cache line longer, so that no power of two separates them.
  static size_t row_stride(size_t cols) { return padded(cols) + kPad; }

  static size_t panel_bytes(size_t tokens, size_t cols) {
    return tokens * row_stride(cols) * sizeof(float);
  }

  static void pack(const Gather& x, size_t tokens, size_t cols, void* panel) {
    size_t stride = row_stride(cols);
    for (size_t t = 0; t < tokens; ++t) {
      size_t row = x.rows ? size_t(x.rows[t] / x.divide) : t;
      auto* src = static_cast<const uint8_t*>(x.base) + row * x.stride * size_of(x.type);
      float* dst = static_cast<float*>(panel) + t * stride;
      Simd::to_f32(x.type, src, cols, dst);
      for (size_t k = cols; k < padded(cols); ++k) dst[k] = 0.f;
    }
  }

  // out[r * ld + t] += dot(w[r], x[t]) over k columns, the sums in registers.
  template <int tokens>
  static void dots(const float* const* w, const float* x, size_t k, size_t stride, float* out,
                   size_t ld) {
    typename Simd::V acc[kRows][tokens];
    for (auto& row : acc)
      for (auto& a : row) a = Simd::zero();
    for (size_t i = 0; i < k; i += Simd::width) {
      typename Simd::V xs[tokens];
      for (int t = 0; t < tokens; ++t) xs[t] = Simd::load(x + t * stride + i);
      for (size_t r = 0; r < kRows; ++r) {
        auto wr = Simd::load(w[r] + i);
        for (int t = 0; t < tokens; ++t) acc[r][t] = Simd::fma(wr, xs[t], acc[r][t]);
      }
    }
    for (size_t r = 0; r < kRows; ++r)
      for (int t = 0; t < tokens; ++t) out[r * ld + t] += Simd::sum(acc[r][t]);
  }

  template <int tokens>
  static void rest(size_t n, const float* const* w, const float* x, size_t k, size_t stride,
                   float* out, size_t ld) {
    if (n == tokens) return dots<tokens>(w, x, k, stride, out, ld);
    if constexpr (tokens > 1) rest<tokens - 1>(n, w, x, k, stride, out, ld);
  }

  static bool affine_q4(const Matrix& m) { return m.mode == Mode::affine && m.bits == 4; }

  // One token against affine 4-bit rows, without unpacking them: codes times x, the scale after
  // each group, the bias once with the group's sum of x. Bytes hold columns 2i and 2i + 1.
  static void vector_q4(const Matrix& m, size_t expert, size_t row0, size_t rows, const float* x,
                        float* out) {
    size_t half = m.cols / 2, groups = m.groups(), bytes = size_t(m.group) / 2;
    size_t pad = padded(groups);
    auto* even = static_cast<float*>(scratch(4, (2 * half + 3 * pad) * sizeof(float)));
    float *odd = even + half, *sums = odd + half, *scale = sums + pad, *bias = scale + pad;
    for (size_t i = 0; i < half; ++i) even[i] = x[2 * i], odd[i] = x[2 * i + 1];
    for (size_t g = 0; g < pad; ++g) sums[g] = bias[g] = 0.f;
    for (size_t g = 0; g < groups; ++g) {
      auto sum = Simd::zero();
      for (size_t i = g * bytes; i < (g + 1) * bytes; i += Simd::width)
        sum = Simd::add(sum, Simd::add(Simd::load(even + i), Simd::load(odd + i)));
      sums[g] = Simd::sum(sum);
    }
    for (size_t r = 0; r < rows; ++r) {
      unpack_scales<Simd>(m, expert, row0 + r, scale, bias);
      const uint8_t* src = m.row(expert, row0 + r);
      auto total = Simd::zero();
      for (size_t g = 0, i = 0; g < groups; ++g) {
        auto low = Simd::zero(), high = Simd::zero();
        __builtin_prefetch(src + i + kReadAhead);
        for (size_t end = i + bytes; i < end; i += Simd::width) {
          auto codes = Simd::nibble_pairs(src + i);
          low = Simd::fma(codes.low, Simd::load(even + i), low);
          high = Simd::fma(codes.high, Simd::load(odd + i), high);
        }
        total = Simd::fma(Simd::add(low, high), Simd::broadcast(scale[g]), total);
      }
      for (size_t g = 0; g < groups; g += Simd::width)
        total = Simd::fma(Simd::load(bias + g), Simd::load(sums + g), total);
      out[r] = Simd::sum(total);
    }
  }

#if defined(MLX_MOE_ACCELERATE) || defined(MLX_MOE_CBLAS)
  // Apple's matrix units are reached through Accelerate only; worth it from a few tokens on.
  static void blas_product(const Matrix& m, size_t expert, size_t row0, size_t rows, const float* x,
                           size_t tokens, float* out) {
    size_t k = padded(m.cols), stride = row_stride(m.cols);
    auto* w = static_cast<float*>(scratch(2, rows * stride * sizeof(float)));
    for (size_t r = 0; r < rows; ++r) {
      float* to = w + r * stride;
      const float* row = unpack_row<Simd>(m, expert, row0 + r, k, to);
      for (size_t i = 0; row != to && i < k; ++i) to[i] = row[i];
    }
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, int(rows), int(tokens), int(k), 1.f, w,
                int(stride), x, int(stride), 0.f, out, int(tokens));
  }
#endif

  // out [rows, tokens], with room for kBlock rows
  static void product(const Matrix& m, size_t expert, size_t row0, size_t rows, const float* x,
                      size_t tokens, float* out) {
    if (tokens == 1 && affine_q4(m)) return vector_q4(m, expert, row0, rows, x, out);
#if defined(MLX_MOE_ACCELERATE) || defined(MLX_MOE_CBLAS)
    if (tokens >= 4) return blas_product(m, expert, row0, rows, x, tokens, out);
#endif
    size_t k = padded(m.cols), stride = row_stride(m.cols);
    auto* unpacked = static_cast<float*>(scratch(2, kRows * stride * sizeof(float)));
    for (size_t i = 0; i < kBlock * tokens; ++i) out[i] = 0.f;
    for (size_t r = 0; r < rows; r += kRows) {
      const float* w[kRows];
      size_t have = rows - r < kRows ? rows - r : kRows;
      for (size_t i = 0; i < kRows; ++i)
        w[i] =
            i < have ? unpack_row<Simd>(m, expert, row0 + r + i, k, unpacked + i * stride) : w[0];
      multiply(w, x, k, stride, tokens, out + r * tokens, tokens);
    }
  }

  // Columns in stretches, so that the rows' part stays in the first-level cache for all tokens.
  static void multiply(const float** w, const float* x, size_t k, size_t stride, size_t tokens,
                       float* out, size_t ld) {
    constexpr size_t step = Simd::tokens;
    for (size_t c = 0; c < k; c += kStretch, x += kStretch) {
      size_t n = k - c < kStretch ? k - c : kStretch, t = 0;
      for (; t + step <= tokens; t += step)
        dots<Simd::tokens>(w, x + t * stride, n, stride, out + t, ld);
      if (t < tokens) rest<Simd::tokens - 1>(tokens - t, w, x + t * stride, n, stride, out + t, ld);
      for (size_t r = 0; r < kRows; ++r) w[r] += n;
    }
  }

  static void gate_up(const Matrix& gate, const Matrix& up, size_t expert, size_t row0, size_t rows,
                      const void* x, size_t tokens, void* h) {
    auto* g = static_cast<float*>(scratch(3, 2 * kBlock * tokens * sizeof(float)));
    float* u = g + kBlock * tokens;
    auto* xs = static_cast<const float*>(x);
    product(gate, expert, row0, rows, xs, tokens, g);
    product(up, expert, row0, rows, xs, tokens, u);
    swiglu<Simd>(g, u, rows * tokens, g);
    columns(gate, row0, rows, g, tokens, tokens, static_cast<float*>(h));
  }

  // g [rows, ld] as columns [row0, row0 + rows) of a panel, zero beyond the last
  static void columns(const Matrix& m, size_t row0, size_t rows, const float* g, size_t ld,
                      size_t tokens, float* panel) {
    size_t stride = row_stride(m.rows), end = row0 + rows == m.rows ? padded(m.rows) : row0 + rows;
    for (size_t t = 0; t < tokens; ++t) {
      float* dst = panel + t * stride;
      for (size_t r = 0; r < rows; ++r) dst[row0 + r] = g[r * ld + t];
      for (size_t r = row0 + rows; r < end; ++r) dst[r] = 0.f;
    }
  }

  static void project(const Matrix& w, size_t expert, size_t row0, size_t rows, const void* x,
                      size_t tokens, const Scatter& out) {
    auto* y = static_cast<float*>(scratch(3, (tokens + 1) * kBlock * sizeof(float)));
    product(w, expert, row0, rows, static_cast<const float*>(x), tokens, y);
    scatter(w, expert, row0, rows, y, tokens, tokens, y + kBlock * tokens, out);
  }

  // y [rows, ld] to the tokens' rows; `line` has room for a token.
  static void scatter(const Matrix& w, size_t expert, size_t row0, size_t rows, const float* y,
                      size_t ld, size_t tokens, float* line, const Scatter& out) {
    for (size_t t = 0; t < tokens; ++t) {
      for (size_t r = 0; r < rows; ++r) line[r] = y[r * ld + t] + w.added_to(expert, row0 + r);
      size_t at = size_t(out.rows ? out.rows[t] : int32_t(t)) * out.stride + row0;
      Simd::from_f32(out.type, line, rows,
                     static_cast<uint8_t*>(out.base) + at * size_of(out.type));
    }
  }

  // A stretch of columns at a time, so that the sums stay in the first-level cache.
  static void combine(const void* y, Scalar y_type, const float* scores, size_t k, size_t cols,
                      void* out, Scalar out_type) {
    constexpr size_t kColumns = 256;
    alignas(64) float row[kColumns], sum[kColumns];
    for (size_t c = 0; c < cols; c += kColumns) {
      size_t n = cols - c < kColumns ? cols - c : kColumns;
      for (size_t i = 0; i < n; ++i) sum[i] = 0.f;
      for (size_t j = 0; j < k; ++j) {
        auto* src = static_cast<const uint8_t*>(y) + (j * cols + c) * size_of(y_type);
        Simd::to_f32(y_type, src, n, row);
        for (size_t i = 0; i < n; ++i) sum[i] += scores[j] * row[i];
      }
      Simd::from_f32(out_type, sum, n, static_cast<uint8_t*>(out) + c * size_of(out_type));
    }
  }

  static void softmax(float* scores, size_t n, size_t seen, float scale, void* out,
                      Scalar out_type) {
    mlx_moe::softmax<Simd>(scores, n, seen, scale);
    Simd::from_f32(out_type, scores, n, out);
  }

  static constexpr Kernel kernel(const char* name) {
    return {name, kBlock, kTokens, panel_bytes, pack, gate_up, project, combine, softmax};
  }
};

}  // namespace mlx_moe
