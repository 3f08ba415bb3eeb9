#pragma once

// The kernel that multiplies many tokens: a token a lane, weights broadcast, so that neither is
// summed across lanes nor read more often than the second-level cache can. Tokens that would
// leave most lanes empty go DotKernel's way, on the same weight rows. Included by the one-ISA
// files only.

#include "experts/dot_kernel.h"

namespace mlx_moe {

template <class Simd>
struct LaneKernel {
  using V = typename Simd::V;
  using Dots = DotKernel<Simd>;
  static constexpr size_t kBlock = Dots::kBlock, kTokens = Dots::kTokens, kWidth = Simd::width,
                          kRows = Simd::lane_rows,
                          kStretch = 256;  // columns: two vectors of tokens stay in 32 KB

  // A panel: [lanes / width, cols, width], lanes without a token zero, then DotKernel's rows.
  struct Split {
    size_t lanes, tail;
    explicit Split(size_t tokens) : lanes(tokens / kWidth * kWidth), tail(tokens - lanes) {
      // Half-empty vectors cost less than what DotKernel does in several steps (measured).
      if (tail > (lanes ? 1 : 2) * size_t(Simd::tokens)) lanes += kWidth, tail = 0;
    }
    size_t slots() const { return lanes + tail; }
  };

  static size_t panel_bytes(size_t tokens, size_t cols) {
    Split s(tokens);
    return s.lanes * Dots::padded(cols) * sizeof(float) + Dots::panel_bytes(s.tail, cols);
  }

  static void pack(const Gather& x, size_t tokens, size_t cols, void* panel) {
    Split s(tokens);
    size_t n = Dots::padded(cols);
    auto* lines = static_cast<float*>(scratch(2, kWidth * n * sizeof(float)));
    auto* dst = static_cast<float*>(panel);
    for (size_t t = 0; t < s.lanes; t += kWidth, dst += kWidth * n) {
      for (size_t l = 0; l < kWidth; ++l) {
        size_t have = t + l < tokens ? cols : 0;
        float* line = lines + l * n;
        if (have) Simd::to_f32(x.type, row_of(x, t + l), cols, line);
        for (size_t k = have; k < n; ++k) line[k] = 0.f;
      }
      Simd::transpose(lines, n, dst);
    }
    Gather rest = x;
    if (x.rows)
      rest.rows += s.lanes;
    else
      rest.base = row_of(x, s.lanes);
    if (s.tail) Dots::pack(rest, s.tail, cols, dst);
  }

  static const void* row_of(const Gather& x, size_t t) {
    size_t row = x.rows ? size_t(x.rows[t] / x.divide) : t;
    return static_cast<const uint8_t*>(x.base) + row * x.stride * size_of(x.type);
  }

  // out[r * ld + lane] (+)= w[r][k] * x[k][lane] for a few rows and vectors of tokens; columns take
  // turns at `sums` accumulators. Meanwhile the rows that come next are asked for.
  template <size_t vectors, size_t sums>
  static void tile(const float* const* w, const float* const* next, const float* x, size_t apart,
                   size_t k, bool first, float* out, size_t ld) {
    V acc[kRows][vectors * sums];
    for (size_t r = 0; r < kRows; ++r)
      for (size_t v = 0; v < vectors * sums; ++v)
        acc[r][v] = first || v >= vectors ? Simd::zero() : Simd::load(out + r * ld + v * kWidth);
    for (size_t i = 0; i < k; i += sums) {
      if (next && i % 16 == 0)
        for (size_t r = 0; r < kRows; ++r) __builtin_prefetch(next[r] + i, 0, 2);
      for (size_t j = 0; j < sums; ++j) {
        V xs[vectors];
        for (size_t v = 0; v < vectors; ++v) xs[v] = Simd::load(x + v * apart + (i + j) * kWidth);
        for (size_t r = 0; r < kRows; ++r) {
          V wr = Simd::broadcast(w[r][i + j]);
          for (size_t v = 0; v < vectors; ++v)
            acc[r][j * vectors + v] = Simd::fma(wr, xs[v], acc[r][j * vectors + v]);
        }
      }
    }
    for (size_t r = 0; r < kRows; ++r)
      for (size_t v = 0; v < vectors; ++v) {
        for (size_t j = 1; j < sums; ++j) acc[r][v] = Simd::add(acc[r][v], acc[r][j * vectors + v]);
        Simd::store(out + r * ld + v * kWidth, acc[r][v]);
      }
  }

  // All lanes against rows w [kBlock]. `ahead`: the next block lies behind this one in memory,
  // and is fetched into the second-level cache, evenly over the tokens.
  static void lanes(const float* const* w, size_t rows, const float* x, size_t cols, size_t count,
                    bool ahead, float* out, size_t ld) {
    size_t apart = kWidth * cols, vectors = count / kWidth, steps = vectors / 2 + (vectors == 1);
    for (size_t c = 0; c < cols; c += kStretch) {
      size_t n = cols - c < kStretch ? cols - c : kStretch;
      for (size_t v = 0, step = 0, take; v < vectors; v += take, ++step) {
        take = vectors - v == 3 || vectors == 1 ? vectors - v : 2;
        auto* multiply = take == 3 ? &tile<3, 1> : take == 2 ? &tile<2, 1> : &tile<1, 2>;
        for (size_t r = 0; r < rows; r += kRows) {
          const float *now[kRows], *next[kRows];
          for (size_t i = 0; i < kRows; ++i) now[i] = w[r + i] + c;
          bool soon = ahead && r / kRows % steps == step;
          for (size_t i = 0; soon && i < kRows; ++i) next[i] = now[i] + kBlock * cols;
          const float* from = x + v * apart + c * kWidth;
          multiply(now, soon ? next : nullptr, from, apart, n, c == 0, out + r * ld + v * kWidth,
                   ld);
        }
      }
    }
  }

  // out [kBlock, slots]; what rows beyond those asked for get means nothing
  static void product(const Matrix& m, size_t expert, size_t row0, size_t rows, const float* x,
                      const Split& s, float* out) {
    size_t cols = Dots::padded(m.cols), ld = s.slots();
    auto* unpacked = static_cast<float*>(scratch(2, rows * (cols + kWidth) * sizeof(float)));
    const float* w[kBlock];
    for (size_t r = 0; r < kBlock; ++r)
      w[r] = r < rows ? unpack_row<Simd>(m, expert, row0 + r, cols, unpacked + r * (cols + kWidth))
                      : w[0];
    bool ahead = w[0] != unpacked && row0 + 2 * kBlock <= m.rows;
    lanes(w, rows, x, cols, s.lanes, ahead, out, ld);
    if (!s.tail) return;
    x += s.lanes * cols;
    for (size_t r = 0; r < rows; r += Dots::kRows) {
      for (size_t i = r * ld; i < (r + Dots::kRows) * ld; i += ld)
        for (size_t t = s.lanes; t < ld; ++t) out[i + t] = 0.f;
      const float* four[Dots::kRows];
      for (size_t i = 0; i < Dots::kRows; ++i) four[i] = w[r + i];
      Dots::multiply(four, x, cols, Dots::row_stride(m.cols), s.tail, out + r * ld + s.lanes, ld);
    }
  }

  static void gate_up(const Matrix& gate, const Matrix& up, size_t expert, size_t row0, size_t rows,
                      const void* x, size_t tokens, void* h) {
    Split s(tokens);
    if (!s.lanes) return Dots::gate_up(gate, up, expert, row0, rows, x, tokens, h);
    size_t ld = s.slots();
    auto* g = static_cast<float*>(scratch(3, 2 * kBlock * ld * sizeof(float)));
    float* u = g + kBlock * ld;
    auto* xs = static_cast<const float*>(x);
    product(gate, expert, row0, rows, xs, s, g);
    product(up, expert, row0, rows, xs, s, u);
    swiglu<Simd>(g, u, rows * ld, g);
    auto* panel = static_cast<float*>(h);
    size_t n = Dots::padded(gate.rows), end = row0 + rows == gate.rows ? n : row0 + rows;
    for (size_t t = 0; t < s.lanes; t += kWidth, panel += kWidth * n)
      for (size_t r = row0; r < end; ++r)
        Simd::store(panel + r * kWidth,
                    r < row0 + rows ? Simd::load(g + (r - row0) * ld + t) : Simd::zero());
    Dots::columns(gate, row0, rows, g + s.lanes, ld, s.tail, panel);
  }

  static void project(const Matrix& w, size_t expert, size_t row0, size_t rows, const void* x,
                      size_t tokens, const Scatter& out) {
    Split s(tokens);
    if (!s.lanes) return Dots::project(w, expert, row0, rows, x, tokens, out);
    size_t ld = s.slots();
    auto* y = static_cast<float*>(scratch(3, (ld + 1) * kBlock * sizeof(float)));
    product(w, expert, row0, rows, static_cast<const float*>(x), s, y);
    Dots::scatter(w, expert, row0, rows, y, ld, tokens, y + kBlock * ld, out);
  }

  static constexpr Kernel kernel(const char* name) {
    return {name,    kBlock,  kTokens,       panel_bytes,  pack,
            gate_up, project, Dots::combine, Dots::softmax};
  }
};

}  // namespace mlx_moe
