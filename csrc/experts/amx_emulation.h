#pragma once

// Tile instructions in AVX512-BF16, so that the AMX kernel's tests run on machines without AMX
// (cmake -DMLX_MOE_EMULATE_AMX=ON). Not for use: it is slow. Included by amx_tiles.h only.

#include <cstring>

namespace mlx_moe {

namespace {

alignas(64) inline thread_local float emulated_tiles[8][16][16];

inline void emulate_load(int tile, const void* from, size_t stride) {
  for (size_t r = 0; r < 16; ++r)
    std::memcpy(emulated_tiles[tile][r], static_cast<const char*>(from) + r * stride, 64);
}

inline void emulate_store(int tile, void* to, size_t stride) {
  for (size_t r = 0; r < 16; ++r)
    std::memcpy(static_cast<char*>(to) + r * stride, emulated_tiles[tile][r], 64);
}

// Each row of c is a sum over pairs of a's columns and of b's rows.
inline void emulate_dot(int c, int a, int b) {
  for (size_t r = 0; r < 16; ++r) {
    __m512 sum = _mm512_load_ps(emulated_tiles[c][r]);
    for (size_t k = 0; k < 16; ++k)
      sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_ps(emulated_tiles[a][r][k]),
                             (__m512bh)_mm512_load_ps(emulated_tiles[b][k]));
    _mm512_store_ps(emulated_tiles[c][r], sum);
  }
}

inline void emulate_zero(int tile) { std::memset(emulated_tiles[tile], 0, 1024); }

}  // namespace

}  // namespace mlx_moe

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig(config) ((void)(config))
#define _tile_release() ((void)0)
#define _tile_zero(tile) emulate_zero(tile)
#define _tile_loadd(tile, from, stride) emulate_load(tile, from, stride)
#define _tile_stored(tile, to, stride) emulate_store(tile, to, stride)
#define _tile_dpbf16ps(c, a, b) emulate_dot(c, a, b)
