// bfloat16 tiles for two tokens or more, AVX512-BF16 dot products for one.

#include <algorithm>
#include <cstring>

#include "experts/activation.h"
#include "experts/amx_tiles.h"
#include "experts/bf16_vector.h"
#include "experts/kernel.h"

namespace mlx_moe {

namespace {

constexpr size_t kBlockRows = 32;
constexpr size_t kNearBlocks = 8;  // unpacked columns / 32 that stay in the first-level cache

struct Isa {};

size_t column_blocks(size_t cols) { return (cols + 31) / 32; }
size_t token_tiles(size_t tokens) { return (tokens + 15) / 16; }

// One token is a padded row; more are tiles [token tile][column block][16 pairs][16 tokens][2].
size_t panel_bytes(size_t tokens, size_t cols) {
  return tokens == 1 ? column_blocks(cols) * 64 : token_tiles(tokens) * column_blocks(cols) * 1024;
}

void pack(const Gather& x, size_t tokens, size_t cols, void* panel) {
  auto* to = static_cast<uint16_t*>(panel);
  size_t lanes = tokens == 1 ? 1 : 16;
  for (size_t t0 = 0; t0 < tokens; t0 += 16) {
    const void* rows[16];
    size_t n = std::min<size_t>(16, tokens - t0);
    for (size_t t = 0; t < n; ++t) {
      size_t row = x.rows ? size_t(x.rows[t0 + t] / x.divide) : t0 + t;
      rows[t] = static_cast<const char*>(x.base) + row * x.stride * size_of(x.type);
    }
    for (size_t k = 0; k < cols; k += 32) {
      __m512i r[16];
      for (size_t t = 0; t < lanes; ++t)
        r[t] = t < n ? load_bf16(x.type, rows[t], k, cols - k) : _mm512_setzero_si512();
      if (lanes == 16) transpose(r);
      for (size_t t = 0; t < lanes; ++t, to += 32) _mm512_store_si512(to, r[t]);
    }
  }
}

// 16 rows of one matrix, fewer or none at its end; missing rows are zero.
struct RowTile {
  const Matrix& m;
  size_t row0, rows;
};

struct Scales {
  float *scale, *bias;
  size_t stride;
};

Scales scales_of(const RowTile* tiles, size_t expert) {
  size_t stride = 0;
  for (int i = 0; i < 2; ++i)
    if (tiles[i].m.mode != Mode::dense)
      stride = std::max(stride, (tiles[i].m.groups() + 15) / 16 * 16);
  auto* scale = static_cast<float*>(scratch(3, 64 * stride * sizeof(float) + 64));
  Scales s{scale, scale + 32 * stride, stride};
  for (size_t i = 0; stride && i < 2; ++i)
    for (size_t r = 0; r < tiles[i].rows; ++r)
      unpack_scales(tiles[i].m, expert, tiles[i].row0 + r, scale + (16 * i + r) * stride,
                    s.bias + (16 * i + r) * stride);
  return s;
}

// Columns [k0, k1) of the 16 rows to every second tile from `to` on. What the next 16 rows need is
// asked for meanwhile: they lie right behind, and are most often this thread's next work.
void unpack_tile(const RowTile& t, size_t expert, const Scales& s, size_t first, size_t k0,
                 size_t k1, uint16_t* to) {
  size_t row_bytes = t.m.row_bytes();
  size_t from = k0 * row_bytes / t.m.cols, until = k1 * row_bytes / t.m.cols;
  for (size_t r = 0; r < t.rows; ++r) {
    const uint8_t* src = t.m.row(expert, t.row0 + r);
    for (size_t b = from; b < until; b += 64)
      _mm_prefetch((const char*)src + 16 * row_bytes + b, _MM_HINT_T1);
    size_t at = (first + r) * s.stride;
    unpack_row(t.m, src, s.scale + at, s.bias + at, k0, k1, {to + r * 32, 2 * kTile});
  }
  if (t.rows < 16)
    for (size_t k = k0; k < k1; k += 32, to += 2 * kTile)
      std::memset(to + t.rows * 32, 0, (16 - t.rows) * 64);
}

// Two row tiles against all tokens; done(first token tile, count, sums) for each pair of token
// tiles. Few tokens: columns are unpacked a little at a time, while the sums stay in tiles. Many:
// all columns are unpacked once and used for every pair.
template <class Done>
void multiply_block(const RowTile* rows, size_t expert, const uint16_t* x, size_t tokens,
                    Done&& done) {
  size_t cols = rows[0].m.cols, blocks = column_blocks(cols), tiles = token_tiles(tokens);
  size_t chunk = tiles <= 2 ? std::min(kNearBlocks, blocks) : blocks;
  auto* a = static_cast<uint16_t*>(scratch(2, chunk * 2 * kTile * 2 + 4096));
  auto* sums = reinterpret_cast<float*>(a + chunk * 2 * kTile);
  Scales s = scales_of(rows, expert);
  TileConfig config;
  for (size_t b0 = 0; b0 < blocks; b0 += chunk) {
    size_t b1 = std::min(b0 + chunk, blocks), k1 = std::min(b1 * 32, cols);
    unpack_tile(rows[0], expert, s, 0, b0 * 32, k1, a);
    unpack_tile(rows[1], expert, s, 16, b0 * 32, k1, a + kTile);
    for (size_t t = 0; t < tiles; t += 2) {
      size_t pair = std::min<size_t>(2, tiles - t), stride = blocks * kTile;
      const uint16_t* b = x + t * stride + b0 * kTile;
      if (b0 == 0) zero_sums();
      pair == 2 ? multiply<2>(a, b, stride, b1 - b0) : multiply<1>(a, b, stride, b1 - b0);
      if (b1 < blocks) continue;
      store_sums(sums);
      done(t, pair, sums);
    }
  }
}

// Rows in pairs become the rows of a B tile for the next product.
void store_hidden(const float* h, size_t row0, uint16_t* tile) {
  for (size_t r = 0; r < 16; r += 2) {
    __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(_mm512_load_ps(h + r * 16)));
    __m512i high =
        _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(_mm512_load_ps(h + r * 16 + 16)));
    _mm512_store_si512(tile + (row0 % 32 + r) * 16,
                       _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
  }
}

void gate_up_one(const Matrix& gate, const Matrix& up, size_t expert, size_t row0, size_t rows,
                 const uint16_t* x, uint16_t* h) {
  alignas(64) float g[kBlockRows] = {}, u[kBlockRows] = {};
  vector_rows(gate, expert, row0, rows, x, g);
  vector_rows(up, expert, row0, rows, x, u);
  swiglu<Isa>(g, u, kBlockRows, g);
  _mm512_storeu_si512(h + row0, round_pair(_mm512_load_ps(g), _mm512_load_ps(g + 16)));
}

void gate_up(const Matrix& gate, const Matrix& up, size_t expert, size_t row0, size_t rows,
             const void* x, size_t tokens, void* h) {
  auto* xs = static_cast<const uint16_t*>(x);
  auto* hs = static_cast<uint16_t*>(h);
  if (tokens == 1) return gate_up_one(gate, up, expert, row0, rows, xs, hs);
  size_t stride = column_blocks(gate.rows) * kTile;
  uint16_t* block = hs + row0 / 32 * kTile;
  // Both halves of the 32 columns of h are written, so that padding is zero.
  for (size_t r = 0; r < kBlockRows; r += 16) {
    size_t n = std::min<size_t>(16, rows - std::min(rows, r));
    RowTile tiles[2] = {{gate, row0 + r, n}, {up, row0 + r, n}};
    multiply_block(tiles, expert, xs, tokens, [&](size_t t, size_t pair, float* sums) {
      swiglu<Isa>(sums, sums + 512, pair * 256, sums);
      for (size_t i = 0; i < pair; ++i)
        store_hidden(sums + i * 256, row0 + r, block + (t + i) * stride);
    });
  }
}

// 32 values of one token
void store_row(const Scatter& out, size_t token, size_t row0, size_t n, __m512 low, __m512 high) {
  size_t at = size_t(out.rows ? out.rows[token] : int32_t(token)) * out.stride + row0;
  __mmask32 m = tail_mask(n);
  if (out.type == Scalar::f32) {
    float* to = static_cast<float*>(out.base) + at;
    _mm512_mask_storeu_ps(to, __mmask16(m), low);
    _mm512_mask_storeu_ps(to + 16, __mmask16(m >> 16), high);
    return;
  }
  constexpr int nearest = _MM_FROUND_TO_NEAREST_INT;
  __m512i v = out.type == Scalar::bf16
                  ? round_pair(low, high)
                  : _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtps_ph(low, nearest)),
                                       _mm512_cvtps_ph(high, nearest), 1);
  _mm512_mask_storeu_epi16(static_cast<uint16_t*>(out.base) + at, m, v);
}

void project(const Matrix& w, size_t expert, size_t row0, size_t rows, const void* x,
             size_t tokens, const Scatter& out) {
  auto* xs = static_cast<const uint16_t*>(x);
  alignas(64) float added[kBlockRows] = {}, y[kBlockRows] = {};
  for (size_t r = 0; r < rows; ++r) added[r] = w.added_to(expert, row0 + r);
  __m512 low_bias = _mm512_load_ps(added), high_bias = _mm512_load_ps(added + 16);
  auto store = [&](size_t token, __m512 low, __m512 high) {
    store_row(out, token, row0, rows, _mm512_add_ps(low, low_bias),
              _mm512_add_ps(high, high_bias));
  };
  if (tokens == 1) {
    vector_rows(w, expert, row0, rows, xs, y);
    return store(0, _mm512_load_ps(y), _mm512_load_ps(y + 16));
  }
  size_t first = std::min<size_t>(16, rows);
  RowTile tiles[2] = {{w, row0, first}, {w, row0 + 16, rows - first}};
  multiply_block(tiles, expert, xs, tokens, [&](size_t t, size_t pair, float* sums) {
    for (size_t i = 0; i < pair; ++i) {
      __m512i low[16], high[16];
      for (int r = 0; r < 16; ++r) {
        low[r] = _mm512_load_si512(sums + i * 256 + r * 16);
        high[r] = _mm512_load_si512(sums + 512 + i * 256 + r * 16);
      }
      transpose(low);
      transpose(high);
      size_t token = (t + i) * 16;
      for (size_t j = 0; j < 16 && token + j < tokens; ++j)
        store(token + j, _mm512_castsi512_ps(low[j]), _mm512_castsi512_ps(high[j]));
    }
  });
}

}  // namespace

const Kernel amx_kernel = {"amx", kBlockRows, panel_bytes, pack, gate_up, project};

}  // namespace mlx_moe
