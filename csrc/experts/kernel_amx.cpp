// bfloat16 tiles for many tokens, AVX512-BF16 dot products for a few.

#include <cstring>

#include "experts/activation.h"
#include "experts/amx_tiles.h"
#include "experts/bf16_vector.h"
#include "experts/kernel.h"

namespace mlx_moe {

namespace {

constexpr size_t kBlockRows = 32;
// Blocks of 32 columns to unpack at a time: few, so that tiles multiply while the next are being
// unpacked and all stays in the first-level cache.
constexpr size_t kStepBlocks = 8;

// Not std's: the linker may share those with files for other instruction sets.
size_t min(size_t a, size_t b) { return a < b ? a : b; }
size_t max(size_t a, size_t b) { return a > b ? a : b; }

size_t column_blocks(size_t cols) { return (cols + 31) / 32; }
size_t token_tiles(size_t tokens) { return (tokens + 15) / 16; }

bool use_vectors(size_t tokens) { return tokens <= kVectorTokens; }

// Rows of a few tokens are a cache line longer, so that no power of two separates them.
VectorPanel vector_panel(const void* x, size_t cols) {
  return {static_cast<const uint16_t*>(x), cols, column_blocks(cols) * 32 + 32};
}

// A few tokens are padded rows; more are tiles
// [token tile][column block][16 pairs][16 tokens][2].
size_t panel_bytes(size_t tokens, size_t cols) {
  return use_vectors(tokens) ? tokens * vector_panel(nullptr, cols).stride * 2
                             : token_tiles(tokens) * column_blocks(cols) * 1024;
}

const void* source_row(const Gather& x, size_t token) {
  size_t row = x.rows ? size_t(x.rows[token] / x.divide) : token;
  return static_cast<const char*>(x.base) + row * x.stride * size_of(x.type);
}

void pack(const Gather& x, size_t tokens, size_t cols, void* panel) {
  auto* to = static_cast<uint16_t*>(panel);
  if (use_vectors(tokens)) {
    size_t stride = vector_panel(panel, cols).stride;
    for (size_t t = 0; t < tokens; ++t)
      for (size_t k = 0; k < cols; k += 32)
        _mm512_store_si512(to + t * stride + k, load_bf16(x.type, source_row(x, t), k, cols - k));
    return;
  }
  for (size_t t0 = 0; t0 < tokens; t0 += 16) {
    const void* rows[16];
    size_t n = min(16, tokens - t0);
    for (size_t t = 0; t < n; ++t) rows[t] = source_row(x, t0 + t);
    for (size_t k = 0; k < cols; k += 32) {
      __m512i r[16];
      for (size_t t = 0; t < 16; ++t)
        r[t] = t < n ? load_bf16(x.type, rows[t], k, cols - k) : _mm512_setzero_si512();
      transpose(r);
      for (size_t t = 0; t < 16; ++t, to += 32) _mm512_store_si512(to, r[t]);
    }
  }
}

// 16 rows of one matrix, fewer or none at its end; missing rows are zero.
struct RowTile {
  const Matrix& m;
  size_t row0, rows;
};

bool has_scales(const Matrix& m) { return m.mode != Mode::dense; }

// The rows of two tiles with their scales unpacked; one of them may be dense.
class Source {
 public:
  Source(const RowTile* tiles, size_t expert) : tiles_(tiles), expert_(expert) {
    for (int i = 0; i < 2; ++i)
      if (has_scales(tiles[i].m)) stride_ = max(stride_, (tiles[i].m.groups() + 15) / 16 * 16);
    scale_ = static_cast<float*>(scratch(3, 64 * stride_ * sizeof(float) + 64));
    bias_ = scale_ + 32 * stride_;
    for (size_t i = 0; i < 2; ++i)
      for (size_t r = 0, at = 16 * i * stride_; has_scales(tiles[i].m) && r < tiles[i].rows;
           ++r, at += stride_)
        unpack_scales<Isa>(tiles[i].m, expert, tiles[i].row0 + r, scale_ + at, bias_ + at);
  }

  // Columns [k0, k1) of both, in turns a tile of the first and a tile of the second.
  void unpack(size_t k0, size_t k1, uint16_t* a) const {
    for (size_t i = 0; i < 2; ++i, a += kTile) {
      const RowTile& t = tiles_[i];
      size_t at = 16 * i * stride_;
      // The next 16 rows lie right behind, and are most often this thread's next work.
      SourceRows from{t.m,     t.m.row(expert_, t.row0), t.rows, scale_ + at, bias_ + at,
                      stride_, 16 * t.m.row_bytes()};
      unpack_rows(from, k0, k1, {a, 2 * kTile});
      if (t.rows < 16)
        for (size_t k = k0, j = 0; k < k1; k += 32, j += 2 * kTile)
          std::memset(a + j + t.rows * 32, 0, (16 - t.rows) * 64);
    }
  }

 private:
  const RowTile* tiles_;
  size_t expert_, stride_ = 0;
  float *scale_, *bias_;
};

// Two row tiles against all tokens; tiles(first block, blocks) gives them, and done(first token
// tile, count, sums) is called for each pair of token tiles. The sums of one pair stay in tiles;
// those of more are put aside between columns.
template <class Tiles, class Done>
void multiply_tiles(size_t cols, const uint16_t* x, size_t tokens, Tiles&& row_tiles, Done&& done) {
  size_t blocks = column_blocks(cols), tiles = token_tiles(tokens);
  bool few = tiles <= 2;
  auto* all_sums = static_cast<float*>(scratch(4, (tiles + 1) / 2 * kSums * sizeof(float)));
  TileConfig config;
  for (size_t b0 = 0; b0 < blocks; b0 += kStepBlocks) {
    size_t n = min(kStepBlocks, blocks - b0);
    RowTiles a = row_tiles(b0, n);
    for (size_t t = 0; t < tiles; t += 2) {
      const uint16_t* b = x + (t * blocks + b0) * kTile;
      float* sums = all_sums + t / 2 * kSums;
      bool pair = t + 1 < tiles;
      if (b0 == 0)
        zero_sums();
      else if (!few)
        load_sums(sums);
      pair ? multiply_pair(a, b, blocks * kTile, n) : multiply_single(a, b, n);
      bool last = b0 + n == blocks;
      if (last || !few) store_sums(sums);
      if (!last) continue;
      if (!pair) join_sums(sums);
      done(t, pair ? 2 : 1, sums);
    }
  }
}

// An expert's copy is [row tile][column block][16 rows][32 columns].
size_t packed_bytes(const Matrix& m) {
  return (m.rows + 15) / 16 * column_blocks(m.cols) * kTile * sizeof(uint16_t);
}

const uint16_t* packed_tile(const RowTile& t, size_t expert) {
  const void* copy = t.rows && t.m.packed ? t.m.packed[expert] : nullptr;
  size_t at = t.row0 / 16 * column_blocks(t.m.cols) * kTile;
  return copy ? static_cast<const uint16_t*>(copy) + at : nullptr;
}

void pack_rows(const Matrix& m, size_t expert, size_t row0, size_t rows, void* copy) {
  size_t blocks = column_blocks(m.cols);
  auto* pair = static_cast<uint16_t*>(scratch(2, 2 * blocks * kTile * sizeof(uint16_t)));
  size_t first = min(16, rows);
  RowTile tiles[2] = {{m, row0, first}, {m, row0 + 16, rows - first}};
  Source(tiles, expert).unpack(0, m.cols, pair);
  auto* to = static_cast<uint16_t*>(copy) + row0 / 16 * blocks * kTile;
  for (size_t i = 0; i < 2 && tiles[i].rows; ++i)
    for (size_t b = 0; b < blocks; ++b, to += kTile)
      std::memcpy(to, pair + (2 * b + i) * kTile, kTile * sizeof(uint16_t));
}

template <class Done>
void multiply_block(const RowTile* rows, size_t expert, const uint16_t* x, size_t tokens,
                    Done&& done) {
  size_t cols = rows[0].m.cols;
  const uint16_t* packed[2] = {packed_tile(rows[0], expert), packed_tile(rows[1], expert)};
  if (packed[0] && packed[1]) {
    auto tiles = [&](size_t b0, size_t) {
      return RowTiles{packed[0] + b0 * kTile, packed[1] + b0 * kTile, kTile};
    };
    return multiply_tiles(cols, x, tokens, tiles, done);
  }
  auto* a = static_cast<uint16_t*>(scratch(2, 2 * kStepBlocks * kTile * sizeof(uint16_t)));
  Source source(rows, expert);
  auto tiles = [&](size_t b0, size_t n) {
    source.unpack(b0 * 32, min((b0 + n) * 32, cols), a);
    return RowTiles{a, a + kTile, 2 * kTile};
  };
  multiply_tiles(cols, x, tokens, tiles, done);
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

void gate_up_vectors(const Matrix& gate, const Matrix& up, size_t expert, size_t row0, size_t rows,
                     const VectorPanel& x, size_t tokens, uint16_t* h) {
  alignas(64) float g[kVectorTokens * kBlockRows] = {}, u[kVectorTokens * kBlockRows] = {};
  vector_rows(gate, expert, row0, rows, x, tokens, g, kBlockRows);
  vector_rows(up, expert, row0, rows, x, tokens, u, kBlockRows);
  swiglu<Isa>(g, u, tokens * kBlockRows, g);
  size_t stride = vector_panel(h, gate.rows).stride;
  for (size_t t = 0; t < tokens; ++t) {
    const float* line = g + t * kBlockRows;
    _mm512_store_si512(h + t * stride + row0,
                       round_pair(_mm512_load_ps(line), _mm512_load_ps(line + 16)));
  }
}

void gate_up(const Matrix& gate, const Matrix& up, size_t expert, size_t row0, size_t rows,
             const void* x, size_t tokens, void* h) {
  auto* xs = static_cast<const uint16_t*>(x);
  auto* hs = static_cast<uint16_t*>(h);
  if (use_vectors(tokens))
    return gate_up_vectors(gate, up, expert, row0, rows, vector_panel(x, gate.cols), tokens, hs);
  size_t stride = column_blocks(gate.rows) * kTile;
  uint16_t* block = hs + row0 / 32 * kTile;
  // Both halves of the 32 columns of h are written, so that padding is zero.
  for (size_t r = 0; r < kBlockRows; r += 16) {
    size_t n = min(16, rows - min(rows, r));
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

void project(const Matrix& w, size_t expert, size_t row0, size_t rows, const void* x, size_t tokens,
             const Scatter& out) {
  auto* xs = static_cast<const uint16_t*>(x);
  alignas(64) float added[kBlockRows] = {};
  for (size_t r = 0; r < rows; ++r) added[r] = w.added_to(expert, row0 + r);
  __m512 low_bias = _mm512_load_ps(added), high_bias = _mm512_load_ps(added + 16);
  auto store = [&](size_t token, __m512 low, __m512 high) {
    store_row(out, token, row0, rows, _mm512_add_ps(low, low_bias), _mm512_add_ps(high, high_bias));
  };
  if (use_vectors(tokens)) {
    alignas(64) float y[kVectorTokens * kBlockRows] = {};
    vector_rows(w, expert, row0, rows, vector_panel(x, w.cols), tokens, y, kBlockRows);
    for (size_t t = 0; t < tokens; ++t)
      store(t, _mm512_load_ps(y + t * kBlockRows), _mm512_load_ps(y + t * kBlockRows + 16));
    return;
  }
  size_t first = min(16, rows);
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

void combine(const void* y, Scalar y_type, const float* scores, size_t k, size_t cols, void* out,
             Scalar out_type) {
  for (size_t c = 0; c < cols; c += 32) {
    __m512 low = _mm512_setzero_ps(), high = low;
    for (size_t j = 0; j < k; ++j) {
      __m512 s = _mm512_set1_ps(scores[j]);
      size_t at = j * cols + c, rest = cols - c;
      low = _mm512_fmadd_ps(s, load_f32(y_type, y, at, rest), low);
      if (rest > 16) high = _mm512_fmadd_ps(s, load_f32(y_type, y, at + 16, rest - 16), high);
    }
    store_row({out, out_type, nullptr, 0}, 0, c, cols - c, low, high);
  }
}

void softmax(float* scores, size_t n, size_t seen, float scale, void* out, Scalar out_type) {
  mlx_moe::softmax<Isa>(scores, n, seen, scale);
  for (size_t i = 0; i < n; i += 32)
    store_row({out, out_type, nullptr, 0}, 0, i, n - i, load_f32(Scalar::f32, scores, i, n - i),
              n - i > 16 ? load_f32(Scalar::f32, scores, i + 16, n - i - 16) : __m512{});
}

}  // namespace

constinit const Kernel amx_kernel = {"amx",   kBlockRows, 512,     panel_bytes,  pack,     gate_up,
                                     project, combine,    softmax, packed_bytes, pack_rows};

}  // namespace mlx_moe
