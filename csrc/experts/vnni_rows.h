#pragma once

// Two to sixteen tokens against sixteen rows of 4-bit codes, a row a lane. Codes stay in registers;
// memory is asked ahead of need. Sums run as in kernel_vnni.cpp's `dots`, so that a token's results
// have the same bits whichever others share its expert. Included by kernel_vnni.cpp only.

#include "experts/fixed_point.h"
#include "experts/vnni_codes.h"

namespace mlx_moe {

namespace {

constexpr size_t kRowTokens = 16;                     // more are faster by blocks of rows
constexpr size_t kTogether = 6;                       // 2 x 6 whole and 6 float sums beside 8 words
constexpr size_t kFarAhead = 8192, kNearAhead = 128;  // bytes; measured

inline bool takes_rows(const Matrix& m, size_t tokens) {
  return m.bits == 4 && m.group >= 32 && tokens <= kRowTokens;
}

// Asks memory for lines behind the sixteen rows that follow, in its own order and into the second-
// level cache, which holds more questions than the first; and that for these rows' next lines.
[[gnu::always_inline]] inline void ask_ahead(const ByteRows& rows, size_t at) {
  auto* p = reinterpret_cast<const char*>(rows.src);
  const char* far = p + 16 * (rows.row_bytes + at) + kFarAhead;
  for (size_t i = 0; i < 8; ++i) _mm_prefetch(far + 64 * i, _MM_HINT_T1);
  if (at % 64)
    for (size_t i = 0; i < 16; ++i)
      _mm_prefetch(p + i * rows.row_bytes + at + kNearAhead, _MM_HINT_T0);
}

// What sixteen rows are multiplied with: tokens from `first` on.
struct RowTask {
  ByteRows rows;
  const float* scale;  // as unpack_scale_columns leaves them
  const FixedPanel* panel;
  const char* x;
  size_t first;
};

// out[t * kBlockRows + r] = dot(row r, token first + t)
template <int unit, bool floats, int tokens, bool whole>
void dot_rows(const Matrix& m, const RowTask& task, float* out) {
  constexpr int words = unit / 8, units = int(kGroup) / unit;
  constexpr int chains = tokens <= 3 ? 2 : 1;  // a sum waits five cycles for itself
  const ByteRows rows = task.rows;
  const char* x = task.x + task.panel->at(0, task.first);
  const size_t next_block = task.panel->tokens * kBlockBytes - 32;
  const float* scale = task.scale;
  const size_t each = size_t(m.group) > kGroup ? 0 : kScaleStride;  // 128: after both halves
  __m512 total[tokens] = {};
  for (size_t at = 0; at < rows.bytes; at += 32) {
    __m512i r[8];
    load_words<whole>(rows, at, r);
    if (!task.first) ask_ahead(rows, at);
    transpose_halves(r);
#pragma GCC unroll 2
    for (int n = 0; n < units; ++n) {
      if (n && rows.bytes - at <= size_t(n * unit / 2)) break;
      __m512i large[chains][tokens] = {}, small[chains][tokens] = {};
#pragma GCC unroll 8
      for (int i = n * words; i < (n + 1) * words; ++i)
        for (int q = 0; q < 2; ++q) {
          __m512i codes = four_columns<4>(r[i], q);
          if constexpr (floats) codes = float_codes(codes);
          for (int t = 0; t < tokens; ++t) {
            const char* digits = x + size_t(t) * kBlockBytes + q * kOdd + i * 4;
            dot_four(large[(i * 2 + q) % chains][t], codes, digits);
            dot_four(small[(i * 2 + q) % chains][t], codes, digits + kLow);
          }
        }
      __m512 s = _mm512_loadu_ps(scale), b = _mm512_loadu_ps(scale + kBias);
      for (int t = 0; t < tokens; ++t) {
        for (int c = 1; c < chains; ++c) {
          large[0][t] = _mm512_add_epi32(large[0][t], large[c][t]);
          small[0][t] = _mm512_add_epi32(small[0][t], small[c][t]);
        }
        auto* own = reinterpret_cast<const float*>(x + size_t(t) * kBlockBytes + kValues);
        __m512i sum = _mm512_add_epi32(_mm512_slli_epi32(large[0][t], 8), small[0][t]);
        __m512 v = _mm512_mul_ps(_mm512_cvtepi32_ps(sum), _mm512_set1_ps(own[0]));
        v = _mm512_fmadd_ps(v, s, total[t]);
        total[t] = _mm512_fmadd_ps(_mm512_set1_ps(own[sum_at(unit, n * unit)]), b, v);
      }
      scale += at & 32 ? kScaleStride : each;
    }
    x += at & 32 ? next_block : 32;
  }
  for (int t = 0; t < tokens; ++t) _mm512_storeu_ps(out + size_t(t) * kBlockRows, total[t]);
}

using DotRows = void (*)(const Matrix&, const RowTask&, float*);

template <int unit, bool floats, int tokens>
DotRows pick_dot_rows(bool whole) {
  return whole ? dot_rows<unit, floats, tokens, true> : dot_rows<unit, floats, tokens, false>;
}

template <int tokens>
DotRows dot_rows_of(const Matrix& m, bool whole) {
  if (m.mode != Mode::affine) return pick_dot_rows<32, true, tokens>(whole);
  return m.group == 32 ? pick_dot_rows<32, false, tokens>(whole)
                       : pick_dot_rows<64, false, tokens>(whole);
}

template <int tokens = kTogether>
DotRows dot_rows_for(const Matrix& m, size_t n, bool whole) {
  if constexpr (tokens > 2)
    if (n < tokens) return dot_rows_for<tokens - 1>(m, n, whole);
  return dot_rows_of<tokens>(m, whole);
}

// out[t * kBlockRows + r] = dot(row r, token t), in parts of about equally many tokens
inline void multiply_rows(const Matrix& m, RowTask task, float* out) {
  size_t tokens = task.panel->tokens, parts = (tokens + kTogether - 1) / kTogether;
  for (size_t part = 0; part < parts; ++part) {
    size_t end = tokens * (part + 1) / parts;
    task.first = tokens * part / parts;
    dot_rows_for(m, end - task.first, task.rows.whole())(m, task, out + task.first * kBlockRows);
  }
}

}  // namespace

}  // namespace mlx_moe
