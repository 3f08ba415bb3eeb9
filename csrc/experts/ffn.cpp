#include "experts/ffn.h"

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <vector>

#include "experts/kernel.h"
#include "routing/bucket.h"
#include "support/cpu.h"
#include "support/error.h"
#include "support/scratch.h"
#include "support/thread_pool.h"

namespace mlx_moe {

namespace {

constexpr size_t kWaveBytes = 96 << 20;     // panels that exist at one time
constexpr size_t kChunkTokens = 2048;       // tokens whose y is held for the weighted sum
constexpr size_t kAlone = 64 << 10;         // panel bytes or sums not worth waking a thread for
constexpr size_t kAloneProducts = 1 << 18;  // and products

// The kernels of a call: buckets of a few tokens may have one of their own.
struct Kernels {
  const Kernel *few, *many;
  const Kernel& of(size_t tokens) const { return tokens <= kFewTokens ? *few : *many; }
};

// A bucket, or a part of one: tokens of one expert that share a panel.
struct Unit {
  size_t expert, tokens;
  const int32_t* rows;
  const Kernel* kernel;
  char *x, *h;
};

size_t blocks(size_t rows, const Kernel& kernel) {
  return (rows + kernel.block_rows - 1) / kernel.block_rows;
}

size_t aligned(size_t bytes) { return (bytes + 63) / 64 * 64; }

// Work that is done before another thread would wake up stays on this one.
template <class Fn>
void run(size_t n, bool alone, Fn&& fn) {
  if (!alone) return ThreadPool::shared().run(n, fn);
  for (size_t i = 0; i < n; ++i) fn(i);
}

// Runs fn(unit, first row, rows) over every block of w's rows for every unit.
template <class Fn>
void for_blocks(const Kernels& kernels, const std::vector<Unit>& units, const Matrix& w, Fn&& fn) {
  size_t each = std::max(blocks(w.rows, *kernels.few), blocks(w.rows, *kernels.many)), tokens = 0;
  for (const Unit& u : units) tokens += u.tokens;
  run(units.size() * each, tokens * w.rows * w.cols < kAloneProducts, [&](size_t i) {
    const Unit& u = units[i / each];
    size_t size = u.kernel->block_rows, row = i % each * size;
    if (row < w.rows) fn(u, row, std::min(size, w.rows - row));
  });
}

void pack_panels(const std::vector<Unit>& units, const Input& x, int32_t divide, size_t bytes) {
  run(units.size(), bytes < kAlone, [&](size_t i) {
    const Unit& u = units[i];
    u.kernel->pack({x.data, x.type, u.rows, x.cols, divide}, u.tokens, x.cols, u.x);
  });
}

// Cuts the buckets into units and hands them out in waves whose panels fit the limit.
template <class Fn>
void for_waves(const Kernels& kernels, const std::vector<int32_t>& order,
               const std::vector<int32_t>& offsets, size_t x_cols, size_t h_cols, Fn&& fn) {
  std::vector<Unit> wave;
  std::vector<size_t> sizes;
  size_t bytes = 0;
  auto flush = [&] {
    if (wave.empty()) return;
    char* p = static_cast<char*>(scratch(7, bytes));
    for (size_t i = 0; i < wave.size(); ++i) {
      wave[i].x = p;
      wave[i].h = p + aligned(wave[i].kernel->panel_bytes(wave[i].tokens, x_cols));
      p += sizes[i];
    }
    fn(wave, bytes);
    wave.clear();
    sizes.clear();
    bytes = 0;
  };
  for (size_t e = 0; e + 1 < offsets.size(); ++e)
    for (size_t i = offsets[e], end = offsets[e + 1]; i < end; i += kernels.many->panel_tokens) {
      size_t n = std::min(kernels.many->panel_tokens, end - i);
      const Kernel& kernel = kernels.of(n);
      size_t size = aligned(kernel.panel_bytes(n, x_cols)) +
                    (h_cols ? aligned(kernel.panel_bytes(n, h_cols)) : 0);
      if (bytes + size > kWaveBytes) flush();
      wave.push_back({e, n, order.data() + i, &kernel, nullptr, nullptr});
      sizes.push_back(size);
      bytes += size;
    }
  flush();
}

struct Buckets {
  std::vector<int32_t> order, offsets;
  // An Error if one of the matrices lacks an expert that is routed to.
  Buckets(const Routing& r, std::initializer_list<const Matrix*> matrices)
      : order(r.tokens * r.k), offsets((*matrices.begin())->experts + 1) {
    const size_t experts = offsets.size() - 1;
    bucket(r.ids, order.size(), experts, order.data(), offsets.data());
    for (const Matrix* w : matrices)
      for (size_t e = 0; w->table && e < experts; ++e)
        require(offsets[e] == offsets[e + 1] || w->holds(e), "expert ", e,
                " is routed to, but was not acquired");
  }
};

void check_activations(const Input& x, const Matrix& w, const char* what) {
  require(x.cols == w.cols, what, ": activations have ", x.cols, " columns, the weight ", w.cols);
}

void check_same(const Matrix& a, const Matrix& b, const char* what) {
  require(a.experts == b.experts && a.rows == b.rows && a.cols == b.cols, what);
}

void check_rows(const Output& y, size_t rows, size_t cols) {
  require(y.rows == rows && y.cols == cols, "out has ", y.rows, " rows of ", y.cols, ", expected ",
          rows, " of ", cols);
}

void check_swiglu(const Input& x, const Routing& r, const Matrix& gate, const Matrix& up,
                  const Matrix& down) {
  check_activations(x, gate, "swiglu");
  require(x.rows == r.tokens, "x has ", x.rows, " tokens, ids have ", r.tokens);
  check_same(gate, up, "gate and up differ in shape");
  require(down.experts == gate.experts && down.cols == gate.rows,
          "down does not take what gate and up give");
  require(!gate.added && !up.added, "swiglu takes gate and up without a bias");
}

// Panels go from product to product, so one kernel computes all three: where they would have
// different ones, that of float32.
Kernels swiglu_kernels(Scalar type, const Matrix& gate, const Matrix& up, const Matrix& down) {
  std::string isa = chosen_isa();
  auto common = [&](size_t tokens) {
    const Kernel& kernel = kernel_for(isa, type, gate, tokens);
    bool same = &kernel == &kernel_for(isa, type, up, tokens) &&
                &kernel == &kernel_for(isa, type, down, tokens);
    return same ? &kernel : &kernel_for(isa, Scalar::f32, gate, tokens);
  };
  return {common(kFewTokens), common(kFewTokens + 1)};
}

// Rows of y are numbered from the first token of the routing.
void run_swiglu(const Kernels& kernels, const Input& x, const Routing& r, const Matrix& gate,
                const Matrix& up, const Matrix& down, const Output& y) {
  Buckets b(r, {&gate, &up, &down});
  for_waves(kernels, b.order, b.offsets, gate.cols, gate.rows, [&](auto& units, size_t bytes) {
    pack_panels(units, x, int32_t(r.k), bytes);
    for_blocks(kernels, units, gate, [&](const Unit& u, size_t row, size_t rows) {
      u.kernel->gate_up(gate, up, u.expert, row, rows, u.x, u.tokens, u.h);
    });
    for_blocks(kernels, units, down, [&](const Unit& u, size_t row, size_t rows) {
      Scatter to{y.data, y.type, u.rows, y.cols};
      u.kernel->project(down, u.expert, row, rows, u.h, u.tokens, to);
    });
  });
}

// y = w . x for every assignment in its bucket; assignment numbers / divide are rows of x.
void run_project(const Input& x, const std::vector<int32_t>& order,
                 const std::vector<int32_t>& offsets, int32_t divide, const Matrix& w,
                 const Output& y) {
  std::string isa = chosen_isa();
  Kernels kernels{&kernel_for(isa, x.type, w, kFewTokens), &kernel_for(isa, x.type, w)};
  for_waves(kernels, order, offsets, w.cols, 0, [&](auto& units, size_t bytes) {
    pack_panels(units, x, divide, bytes);
    for_blocks(kernels, units, w, [&](const Unit& u, size_t row, size_t rows) {
      Scatter to{y.data, y.type, u.rows, y.cols};
      u.kernel->project(w, u.expert, row, rows, u.x, u.tokens, to);
    });
  });
}

void sum_assignments(const Kernel& kernel, const Output& y, const Input& scores, size_t token,
                     const Output& out) {
  size_t k = scores.cols;
  auto* weights = static_cast<float*>(scratch(0, k * sizeof(float)));
  for (size_t j = 0; j < k; ++j) weights[j] = load_scalar(scores.type, scores.data, token * k + j);
  kernel.combine(static_cast<const char*>(y.data) + token * k * y.cols * size_of(y.type), y.type,
                 weights, k, y.cols,
                 static_cast<char*>(out.data) + token * out.cols * size_of(out.type), out.type);
}

}  // namespace

void swiglu(const Input& x, const Routing& r, const Matrix& gate, const Matrix& up,
            const Matrix& down, const Output& y) {
  check_swiglu(x, r, gate, up, down);
  check_rows(y, r.tokens * r.k, down.rows);
  run_swiglu(swiglu_kernels(x.type, gate, up, down), x, r, gate, up, down, y);
}

void swiglu_combine(const Input& x, const Routing& r, const Input& scores, const Matrix& gate,
                    const Matrix& up, const Matrix& down, const Output& out) {
  check_swiglu(x, r, gate, up, down);
  check_rows(out, r.tokens, down.rows);
  Kernels kernels = swiglu_kernels(x.type, gate, up, down);
  for (size_t t0 = 0; t0 < r.tokens; t0 += kChunkTokens) {
    size_t n = std::min(kChunkTokens, r.tokens - t0), d = down.rows;
    auto at = [&](const void* p, size_t row_bytes) {
      return static_cast<const char*>(p) + t0 * row_bytes;
    };
    Routing part{r.ids + t0 * r.k, n, r.k};
    Input px{at(x.data, x.cols * size_of(x.type)), x.type, n, x.cols};
    Input ps{at(scores.data, r.k * size_of(scores.type)), scores.type, n, r.k};
    Output po{const_cast<char*>(at(out.data, d * size_of(out.type))), out.type, n, d};
    Output y{scratch(6, n * r.k * d * size_of(x.type)), x.type, n * r.k, d};
    run_swiglu(kernels, px, part, gate, up, down, y);
    run(n, n * r.k * d < kAlone, [&](size_t t) { sum_assignments(*kernels.many, y, ps, t, po); });
  }
}

void weighted_sum(const Input& y, const Input& scores, const Matrix& gate, const Matrix& up,
                  const Matrix& down, const Output& out) {
  size_t tokens = scores.rows, k = scores.cols;
  require(y.rows == tokens * k, "y has ", y.rows, " rows, scores have ", tokens, " x ", k);
  check_rows(out, tokens, y.cols);
  const Kernel& kernel = *swiglu_kernels(y.type, gate, up, down).many;
  Output rows{const_cast<void*>(y.data), y.type, y.rows, y.cols};
  run(tokens, y.rows * y.cols < kAlone,
      [&](size_t t) { sum_assignments(kernel, rows, scores, t, out); });
}

void grouped(const Input& x, const Routing& r, const Matrix& w, const Output& y) {
  check_activations(x, w, "grouped");
  size_t n = r.tokens * r.k;
  require(x.rows == r.tokens || x.rows == n, "x has ", x.rows, " rows, expected one a token (",
          r.tokens, ") or one an assignment (", n, ")");
  check_rows(y, n, w.rows);
  Buckets b(r, {&w});
  run_project(x, b.order, b.offsets, x.rows == n ? 1 : int32_t(r.k), w, y);
}

void linear(const Input& x, const Matrix& w, const Output& y) {
  check_activations(x, w, "linear");
  require(w.experts == 1, "linear takes one matrix, got ", w.experts);
  require(x.rows <= INT32_MAX, "more than 2^31 rows in one call");
  check_rows(y, x.rows, w.rows);
  std::vector<int32_t> order(x.rows), offsets{0, int32_t(x.rows)};
  for (size_t i = 0; i < x.rows; ++i) order[i] = int32_t(i);
  run_project(x, order, offsets, 1, w, y);
}

void softmax(const Output& scores, float scale, size_t period, const Output& out) {
  require(scores.type == Scalar::f32, "softmax takes float32 scores");
  require(scale > 0.f, "softmax takes a positive scale");
  check_rows(out, scores.rows, scores.cols);
  require(period <= scores.cols, "period ", period, " exceeds the ", scores.cols, " columns");
  const Kernel& kernel = kernel_for(chosen_isa(), Scalar::bf16, {});
  size_t n = scores.cols;
  run(scores.rows, scores.rows * n < kAlone, [&](size_t r) {
    size_t seen = period ? n - period + r % period + 1 : n;
    kernel.softmax(static_cast<float*>(scores.data) + r * n, n, seen, scale,
                   static_cast<char*>(out.data) + r * n * size_of(out.type), out.type);
  });
}

}  // namespace mlx_moe
