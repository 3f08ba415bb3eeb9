#pragma once

// Included by files compiled for AVX-512 only, each with a copy of its own.

#include <immintrin.h>

namespace mlx_moe {

namespace {

// Of each eight vectors, eight words of each of sixteen rows: from rows 0 to 3 and 8 to 11 in the
// lower halves, each with the row four further on in the upper half, to r[i] lane j, word i of
// row j.
template <int n>
inline void transpose_halves(__m512i (&r)[n]) {
  __m512i t[n];
  for (int i = 0; i < n; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < n; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < n; i += 8)
    for (int j = i; j < i + 4; ++j) {
      t[j] = _mm512_shuffle_i32x4(r[j], r[j + 4], 0x88);
      t[j + 4] = _mm512_shuffle_i32x4(r[j], r[j + 4], 0xdd);
    }
  for (int i = 0; i < n; ++i) r[i] = t[i];
}

// r[i] lane j becomes r[j] lane i
inline void transpose(__m512i (&r)[16]) {
  transpose_halves(r);
  for (int i = 0; i < 8; ++i) {
    __m512i low = r[i], high = r[i + 8];
    r[i] = _mm512_shuffle_i32x4(low, high, 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(low, high, 0xdd);
  }
}

}  // namespace

}  // namespace mlx_moe
