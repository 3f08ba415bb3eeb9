#pragma once

// Included by files compiled for AVX-512 only, each with a copy of its own.

#include <immintrin.h>

namespace mlx_moe {

namespace {

// In each quarter of four vectors at a time: r[i] word j becomes r[j] word i.
template <int n>
inline void transpose_quarters(__m512i (&r)[n]) {
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
}

// r[i] lane j becomes r[j] lane i
inline void transpose(__m512i (&r)[16]) {
  __m512i t[16];
  transpose_quarters(r);
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
    r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
  }
}

// Eight words of each of sixteen rows: from rows 0 to 3 and 8 to 11 in the lower halves, each with
// the row four further on in the upper half, to r[i] lane j, word i of row j.
inline void transpose_halves(__m512i (&r)[8]) {
  __m512i t[8];
  transpose_quarters(r);
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
  }
  for (int i = 0; i < 8; ++i) r[i] = t[i];
}

}  // namespace

}  // namespace mlx_moe
