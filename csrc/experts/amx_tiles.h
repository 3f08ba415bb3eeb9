#pragma once

// AMX tiles and the layouts around them. Included by kernel_amx.cpp only.
//
// Tiles compute C^T = W X^T: A holds 16 weight rows x 32 columns as they lie in memory, B 32
// columns x 16 tokens with columns in pairs, C 16 weight rows x 16 tokens in float32.

#include <immintrin.h>

#include "experts/bf16_unpack.h"
#include "experts/transpose.h"
#if defined(MLX_MOE_EMULATE_AMX)
#include "experts/amx_emulation.h"
#endif

namespace mlx_moe {

namespace {

constexpr size_t kTile = 512;  // bfloat16 values in a tile of A or B

// Eight full tiles: 0-3 C, 4-5 A, 6-7 B. The state is the thread's: set for a block, then released
// so that the kernel need not save 8 KiB at each context switch.
class TileConfig {
 public:
  TileConfig() {
    alignas(64) struct {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    _tile_loadconfig(&config);
  }
  ~TileConfig() { _tile_release(); }
};

inline void zero_sums() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

// Two row tiles of A for one block of 32 columns, and how far the next block's are.
struct RowTiles {
  const uint16_t *first, *second;
  size_t step;
};

// C += A B over `blocks` blocks of 32 columns: two row tiles against two token tiles, which lie
// `stride` values apart.
inline void multiply_pair(const RowTiles& a, const uint16_t* b, size_t stride, size_t blocks) {
  for (size_t i = 0; i < blocks; ++i, b += kTile) {
    _tile_loadd(4, a.first + i * a.step, 64);
    _tile_loadd(6, b, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, a.second + i * a.step, 64);
    _tile_dpbf16ps(2, 5, 6);
    _tile_loadd(7, b + stride, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(3, 5, 7);
  }
}

// The same against one token tile. Every other block adds to the second pair of sums: a product
// takes three times as long as the next one could start after it.
inline void multiply_single(const RowTiles& a, const uint16_t* b, size_t blocks) {
  for (size_t i = 0; i < blocks; i += 2, b += 2 * kTile) {
    _tile_loadd(4, a.first + i * a.step, 64);
    _tile_loadd(6, b, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, a.second + i * a.step, 64);
    _tile_dpbf16ps(2, 5, 6);
    if (i + 1 == blocks) return;
    _tile_loadd(4, a.first + (i + 1) * a.step, 64);
    _tile_loadd(7, b + kTile, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, a.second + (i + 1) * a.step, 64);
    _tile_dpbf16ps(3, 5, 7);
  }
}

constexpr size_t kSums = 1024;  // floats: [2 row tiles][2 token tiles][16 rows][16 tokens]

inline void load_sums(const float* sums) {
  _tile_loadd(0, sums, 64);
  _tile_loadd(1, sums + 256, 64);
  _tile_loadd(2, sums + 512, 64);
  _tile_loadd(3, sums + 768, 64);
}

inline void store_sums(float* sums) {
  _tile_stored(0, sums, 64);
  _tile_stored(1, sums + 256, 64);
  _tile_stored(2, sums + 512, 64);
  _tile_stored(3, sums + 768, 64);
}

// What multiply_single put into the second pair.
inline void join_sums(float* sums) {
  for (size_t i = 0; i < 256; ++i) {
    sums[i] += sums[i + 256];
    sums[i + 512] += sums[i + 768];
  }
}

}  // namespace

}  // namespace mlx_moe
