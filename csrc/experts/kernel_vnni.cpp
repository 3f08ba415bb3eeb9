// AVX512-VNNI: 16-bit activations against the codes of quantised weights, exact sums of whole
// numbers within a group. Twice the multiplications of float32 an instruction, and codes need
// little unpacking.

#include "experts/dot_kernel.h"
#include "experts/fixed_point.h"
#include "experts/vnni_codes.h"
#include "experts/vnni_rows.h"
#include "experts/vnni_vector.h"

namespace mlx_moe {

namespace {

constexpr size_t kPairRows = 32;
constexpr size_t kStretch = 512;  // columns whose codes stay in the first-level cache
constexpr int kBothTokens = 4;    // two digits of 2 x 4 sums
constexpr int kTokens = 6;        // 2 x 6 whole and 2 x 6 float sums of 32 registers

size_t panel_bytes(size_t tokens, size_t cols) { return FixedPanel(cols, tokens).bytes(); }

void pack(const Gather& x, size_t tokens, size_t cols, void* panel) {
  FixedPanel shape(cols, tokens);
  for (size_t t = 0; t < tokens; ++t) {
    size_t row = x.rows ? size_t(x.rows[t] / x.divide) : t;
    auto* src = static_cast<const uint8_t*>(x.base) + row * x.stride * size_of(x.type);
    for (size_t g = 0; g < shape.groups; ++g) {
      alignas(64) float values[kGroup] = {};
      size_t k = g * kGroup;
      Simd::to_f32(x.type, src + k * size_of(x.type), min(kGroup, cols - min(cols, k)), values);
      store_group(values, g, t, shape, static_cast<char*>(panel));
    }
  }
}

// The codes and scales of 32 rows, for a stretch of columns.
struct Stretch {
  const uint8_t* codes;  // [units * steps][32 rows][4]
  const float* scale;    // as unpack_scale_columns leaves them
  size_t column, units;  // where it starts; sums of whole numbers in it
  int units_log2;        // in a weight group
  const uint8_t* ahead;  // memory to ask for meanwhile
  size_t ahead_bytes;    // in a unit
};

// Four bytes at step i of a unit, in every lane.
__m512i four_digits(const char* unit, int i) {
  int four;
  __builtin_memcpy(&four, unit + i % 2 * kOdd + i / 2 * 4, 4);
  return _mm512_set1_epi32(four);
}

// sum[row half][token] += codes of `steps` times four columns . one digit of the tokens
template <int steps, int tokens>
[[gnu::always_inline]] inline void dot_digit(const uint8_t* codes, const char* x,
                                             __m512i (&sum)[2][tokens]) {
#pragma GCC unroll 16
  for (int i = 0; i < steps; ++i) {
    __m512i low = _mm512_load_si512(codes + 128 * i);
    __m512i high = _mm512_load_si512(codes + 128 * i + 64);
    for (int t = 0; t < tokens; ++t) {
      __m512i digits = four_digits(x + t * kBlockBytes, i);
      sum[0][t] = _mm512_dpbusd_epi32(sum[0][t], low, digits);
      sum[1][t] = _mm512_dpbusd_epi32(sum[1][t], high, digits);
    }
  }
}

// The same for both digits in turns: for a few tokens, whose sums would wait for themselves.
template <int steps, int tokens>
[[gnu::always_inline]] inline void dot_digits(const uint8_t* codes, const char* x,
                                              __m512i (&sum)[2][tokens],
                                              __m512i (&small)[2][tokens]) {
#pragma GCC unroll 16
  for (int i = 0; i < steps; ++i) {
    __m512i low = _mm512_load_si512(codes + 128 * i);
    __m512i high = _mm512_load_si512(codes + 128 * i + 64);
    for (int t = 0; t < tokens; ++t) {
      const char* own = x + t * kBlockBytes;
      __m512i large = four_digits(own, i), little = four_digits(own + kLow, i);
      sum[0][t] = _mm512_dpbusd_epi32(sum[0][t], low, large);
      sum[1][t] = _mm512_dpbusd_epi32(sum[1][t], high, large);
      small[0][t] = _mm512_dpbusd_epi32(small[0][t], low, little);
      small[1][t] = _mm512_dpbusd_epi32(small[1][t], high, little);
    }
  }
}

// Exact sums of codes times 16-bit activations over one unit.
template <int steps, int tokens>
[[gnu::always_inline]] inline void dot_unit(const uint8_t* codes, const char* x,
                                            __m512i (&sum)[2][tokens]) {
  __m512i small[2][tokens];
  for (int h = 0; h < 2; ++h)
    for (int t = 0; t < tokens; ++t) sum[h][t] = small[h][t] = _mm512_setzero_si512();
  if constexpr (tokens <= kBothTokens)
    dot_digits<steps, tokens>(codes, x, sum, small);
  else
    dot_digit<steps, tokens>(codes, x, sum);
  for (int h = 0; h < 2; ++h)
    for (int t = 0; t < tokens; ++t) {
      sum[h][t] = _mm512_slli_epi32(sum[h][t], 8);
      if constexpr (tokens <= kBothTokens) sum[h][t] = _mm512_add_epi32(sum[h][t], small[h][t]);
    }
  if constexpr (tokens > kBothTokens) dot_digit<steps, tokens>(codes, x + kLow, sum);
}

// out[t * kBlockRows + r] += dot(row r, token first + t) over the stretch
template <int steps, int tokens>
void dots(const Stretch& s, const FixedPanel& panel, const char* x, size_t first, float* out) {
  constexpr size_t columns = 4 * steps;
  __m512 total[2][tokens];
  for (int t = 0; t < tokens; ++t)
    for (int i = 0; i < 2; ++i) total[i][t] = _mm512_loadu_ps(out + t * kBlockRows + 16 * i);
  const uint8_t* codes = s.codes;
  for (size_t u = 0; u < s.units; ++u, codes += 128 * steps) {
    size_t column = s.column + u * columns;
    for (size_t i = 0; i < s.ahead_bytes; i += 64)
      _mm_prefetch(reinterpret_cast<const char*>(s.ahead) + u * s.ahead_bytes + i, _MM_HINT_T1);
    __m512i sum[2][tokens];
    dot_unit<steps, tokens>(codes, x + panel.at(column, first), sum);
    const float* scales = s.scale + (u >> s.units_log2) * kScaleStride;
    const char* own = x + panel.at(column / kGroup * kGroup, first) + kValues;
    for (int t = 0; t < tokens; ++t, own += kBlockBytes) {
      auto* values = reinterpret_cast<const float*>(own);
      __m512 scale = _mm512_set1_ps(*values);
      __m512 total_x = _mm512_set1_ps(values[sum_at(columns, column)]);
      for (int i = 0; i < 2; ++i) {
        __m512 v = _mm512_mul_ps(_mm512_cvtepi32_ps(sum[i][t]), scale);
        v = _mm512_fmadd_ps(v, _mm512_loadu_ps(scales + 16 * i), total[i][t]);
        total[i][t] = _mm512_fmadd_ps(total_x, _mm512_loadu_ps(scales + kBias + 16 * i), v);
      }
    }
  }
  for (int t = 0; t < tokens; ++t)
    for (int i = 0; i < 2; ++i) _mm512_storeu_ps(out + t * kBlockRows + 16 * i, total[i][t]);
}

template <int steps, int tokens>
void rest(size_t n, const Stretch& s, const FixedPanel& panel, const char* x, size_t t,
          float* out) {
  if (n == tokens) return dots<steps, tokens>(s, panel, x, t, out);
  if constexpr (tokens > 1) rest<steps, tokens - 1>(n, s, panel, x, t, out);
}

template <int steps>
void multiply(const Stretch& s, const FixedPanel& panel, const char* x, float* out) {
  size_t t = 0;
  for (; t + kTokens <= panel.tokens; t += kTokens)
    dots<steps, kTokens>(s, panel, x, t, out + t * kBlockRows);
  if (t < panel.tokens)
    rest<steps, kTokens - 1>(panel.tokens - t, s, panel, x, t, out + t * kBlockRows);
}

using Multiply = void (*)(const Stretch&, const FixedPanel&, const char*, float*);

// Whole rows of codes of odd widths, a byte each.
const uint8_t* code_bytes(const Matrix& m, size_t expert, size_t row0, size_t rows) {
  auto* bytes = static_cast<int8_t*>(scratch(1, kPairRows * m.cols));
  for (size_t r = 0; r < rows; ++r)
    unpack_codes<Simd>(m, m.row(expert, row0 + r), bytes + r * m.cols);
  return reinterpret_cast<const uint8_t*>(bytes);
}

using StoreCodes = void (*)(const ByteRows&, uint8_t*);

// The scales of up to 32 rows, as unpack_scale_columns leaves them; those of the next are asked
// for.
float* scales_of(const Matrix& m, size_t expert, size_t row, size_t rows) {
  auto* scale = static_cast<float*>(scratch(4, m.groups() * kScaleStride * sizeof(float)));
  ask_scales(m, expert, row + kPairRows, kPairRows);
  unpack_scale_columns(m, expert, row, rows, scale);
  return scale;
}

// out [tokens][kBlockRows] = w . x for up to 64 rows, sixteen at a time
void few_tokens(const Matrix& m, size_t expert, size_t row0, size_t rows, const FixedPanel& panel,
                const char* x, float* out) {
  const float* scale = nullptr;
  for (size_t r = 0; r < rows; r += 16) {
    size_t half = r % kPairRows;
    if (!half) scale = scales_of(m, expert, row0 + r, min(kPairRows, rows - r));
    ByteRows part{m.row(expert, row0 + r), min(16, rows - r), m.row_bytes(), m.row_bytes()};
    multiply_rows(m, {part, scale + half, &panel, x, 0}, out + r);
  }
}

// The same with the codes of 32 rows in the first-level cache
void many_tokens(const Matrix& m, size_t expert, size_t row0, size_t rows, const FixedPanel& panel,
                 const char* x, float* out) {
  for (size_t i = 0; i < panel.tokens * kBlockRows; ++i) out[i] = 0.f;
  size_t columns = unit_columns(m);
  bool whole = m.bits == 2 || m.bits == 4 || m.bits == 8;
  size_t bits = whole ? size_t(m.bits) : 8;
  Multiply run = columns == 64 ? multiply<16> : columns == 32 ? multiply<8> : multiply<4>;
  StoreCodes store = m.mode != Mode::affine ? store_codes<4, true>
                     : bits == 2            ? store_codes<2, false>
                     : bits == 4            ? store_codes<4, false>
                                            : store_codes<8, false>;
  auto* codes = static_cast<uint8_t*>(scratch(2, kStretch * kPairRows));
  for (size_t r0 = 0; r0 < rows; r0 += kPairRows, row0 += kPairRows) {
    size_t n = min(kPairRows, rows - r0);
    size_t row_bytes = whole ? m.row_bytes() : m.cols;
    const uint8_t* src = whole ? m.row(expert, row0) : code_bytes(m, expert, row0, n);
    const uint8_t* ahead = m.row(expert, row0 + kPairRows);
    const float* scale = scales_of(m, expert, row0, n);
    for (size_t c = 0; c < m.cols; c += kStretch) {
      size_t width = min(kStretch, m.cols - c), bytes = width * bits / 8;
      for (size_t i = 0; i < 2; ++i) {
        size_t have = n - min(n, 16 * i);
        store({src + 16 * i * row_bytes + c * bits / 8, min(have, 16), row_bytes, bytes},
              codes + 64 * i);
      }
      Stretch s{codes,
                scale + c / size_t(m.group) * kScaleStride,
                c,
                width / columns,
                m.group == 128,
                ahead,
                kPairRows * columns * bits / 8};
      ahead += kPairRows * bytes;
      run(s, panel, x, out + r0);
    }
  }
}

// out [tokens][kBlockRows] = w . x for up to 64 rows
void product(const Matrix& m, size_t expert, size_t row0, size_t rows, const void* panel_x,
             size_t tokens, float* out) {
  FixedPanel panel(m.cols, tokens);
  auto* x = static_cast<const char*>(panel_x);
  if (!takes_rows(m, tokens)) return many_tokens(m, expert, row0, rows, panel, x, out);
  if (tokens > 1) return few_tokens(m, expert, row0, rows, panel, x, out);
  vector_rows(m, expert, row0, rows, panel, x, out);
}

void gate_up(const Matrix& gate, const Matrix& up, size_t expert, size_t row0, size_t rows,
             const void* x, size_t tokens, void* h) {
  auto* g = static_cast<float*>(scratch(3, 2 * tokens * kBlockRows * sizeof(float)));
  float* u = g + tokens * kBlockRows;
  product(gate, expert, row0, rows, x, tokens, g);
  product(up, expert, row0, rows, x, tokens, u);
  swiglu<Simd>(g, u, tokens * kBlockRows, g);
  FixedPanel shape(gate.rows, tokens);
  for (size_t t = 0; t < tokens; ++t) {
    float* row = g + t * kBlockRows;
    for (size_t r = rows; r < kBlockRows; ++r) row[r] = 0.f;
    auto* to = static_cast<char*>(h);
    store_group(row, row0 / kGroup, t, shape, to);
    if (row0 / kGroup + 2 == shape.groups && row0 + rows == gate.rows)
      zero_group(shape.groups - 1, t, shape, to);
  }
}

void project(const Matrix& w, size_t expert, size_t row0, size_t rows, const void* x, size_t tokens,
             const Scatter& out) {
  auto* y = static_cast<float*>(scratch(3, tokens * kBlockRows * sizeof(float)));
  product(w, expert, row0, rows, x, tokens, y);
  for (size_t t = 0; t < tokens; ++t) {
    float* line = y + t * kBlockRows;
    for (size_t r = 0; w.added && r < rows; ++r) line[r] += w.added_to(expert, row0 + r);
    size_t at = size_t(out.rows ? out.rows[t] : int32_t(t)) * out.stride + row0;
    Simd::from_f32(out.type, line, rows, static_cast<uint8_t*>(out.base) + at * size_of(out.type));
  }
}

}  // namespace

constinit const Kernel vnni_kernel = {"vnni",
                                      kBlockRows,
                                      128,
                                      panel_bytes,
                                      pack,
                                      gate_up,
                                      project,
                                      DotKernel<Simd>::combine,
                                      DotKernel<Simd>::softmax};

}  // namespace mlx_moe
