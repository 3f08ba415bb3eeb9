#include <doctest/doctest.h>

#include <bit>
#include <cmath>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "experts/ffn.h"
#include "random_matrix.h"
#include "support/cpu.h"
#include "support/error.h"

using namespace mlx_moe;

namespace {

const Scalar kTypes[] = {Scalar::f32, Scalar::f16, Scalar::bf16};

// Relative Frobenius error; bfloat16 tiles, which also serve float16, round weights and h too.
double tolerance(Scalar type) { return type == Scalar::f32 ? 2e-6 : 5.5e-3; }

// Runs the body once for each instruction set of this machine.
template <class Body>
void for_isas(Body&& body) {
  for (const auto& isa : usable_isas()) {
    CAPTURE(isa);
    setenv("MLX_MOE_ISA", isa.c_str(), 1);
    body();
  }
  unsetenv("MLX_MOE_ISA");
}

struct Values {
  Scalar type;
  size_t rows, cols;
  std::vector<char> bytes;
  Values(Scalar type, size_t rows, size_t cols)
      : type(type), rows(rows), cols(cols), bytes(rows * cols * size_of(type), 0x7f) {}
  Values(Scalar type, size_t rows, size_t cols, std::mt19937& random) : Values(type, rows, cols) {
    for (size_t i = 0; i < rows * cols; ++i)
      store_scalar(type, bytes.data(), i, float(std::normal_distribution<double>()(random)));
  }
  double at(size_t row, size_t col) const {
    return load_scalar(type, bytes.data(), row * cols + col);
  }
  void set(size_t row, size_t col, float v) {
    store_scalar(type, bytes.data(), row * cols + col, v);
  }
  Input in() const { return {bytes.data(), type, rows, cols}; }
  Output out() { return {bytes.data(), type, rows, cols}; }
};

using Ids = std::vector<uint32_t>;
using Doubles = std::vector<double>;

Ids random_ids(size_t n, size_t experts, std::mt19937& random) {
  Ids ids(n);
  for (auto& id : ids) id = uint32_t(random() % experts);
  return ids;
}

// Results in float64, and the size they would have if the terms of each sum had random signs:
// errors are measured against that, as a short sum may cancel to almost nothing.
struct Reference {
  Doubles values;
  double squares = 0;
  void append(const Reference& r) {
    values.insert(values.end(), r.values.begin(), r.values.end());
    squares += r.squares;
  }
};

Reference multiply(const RandomMatrix& w, size_t expert, const Doubles& x) {
  Reference y{Doubles(w.m.rows)};
  for (size_t r = 0; r < w.m.rows; ++r) {
    for (size_t c = 0; c < x.size(); ++c) {
      const double term = w.at(expert, r, c) * x[c];
      y.values[r] += term;
      y.squares += term * term;
    }
    const double added = w.added.empty() ? 0 : w.added[expert * w.m.rows + r];
    y.values[r] += added;
    y.squares += added * added;
  }
  return y;
}

Doubles row_of(const Values& x, size_t row) {
  Doubles values(x.cols);
  for (size_t c = 0; c < x.cols; ++c) values[c] = x.at(row, c);
  return values;
}

double error(const Values& got, const Reference& want) {
  double difference = 0;
  for (size_t i = 0; i < want.values.size(); ++i) {
    const double d = load_scalar(got.type, got.bytes.data(), i) - want.values[i];
    difference += d * d;
  }
  return std::sqrt(difference / want.squares);
}

struct Expert {
  RandomMatrix gate, up, down;
  Expert(const Format& f, size_t experts, size_t cols, size_t hidden, size_t out,
         std::mt19937& random)
      : gate(f, experts, hidden, cols, random),
        up(f, experts, hidden, cols, random),
        down(f, experts, out, hidden, random) {}

  // [tokens * k, out]
  Reference reference(const Values& x, const Ids& ids, size_t k) const {
    Reference y;
    for (size_t a = 0; a < ids.size(); ++a) {
      Doubles h = multiply(gate, ids[a], row_of(x, a / k)).values;
      const Doubles u = multiply(up, ids[a], row_of(x, a / k)).values;
      for (size_t i = 0; i < h.size(); ++i) h[i] = h[i] / (1 + std::exp(-h[i])) * u[i];
      y.append(multiply(down, ids[a], h));
    }
    return y;
  }
};

}  // namespace

TEST_CASE("swiglu and its weighted sum, every format, type and instruction set") {
  std::mt19937 random(4);
  const size_t experts = 4, k = 3;
  for (const Format& f : kFormats) {
    const bool dense = f.mode == Mode::dense;
    const size_t cols = dense ? 131 : 256, hidden = dense ? 71 : 128, out = 37;
    const Expert e(f, experts, cols, hidden, out, random);
    for (Scalar type : kTypes)
      for (size_t tokens : {1, 2, 7, 40}) {
        const std::string format = f.name;
        CAPTURE(format);
        CAPTURE(int(type));
        CAPTURE(tokens);
        const Values x(type, tokens, cols, random);
        Values scores(Scalar::f32, tokens, k);
        for (size_t a = 0; a < tokens * k; ++a)
          scores.set(a / k, a % k, float(random() % 256) / 256);
        const Ids ids = random_ids(tokens * k, experts, random);
        const Reference want = e.reference(x, ids, k);
        Reference total{Doubles(tokens * out), want.squares};
        for (size_t a = 0; a < ids.size(); ++a)
          for (size_t c = 0; c < out; ++c)
            total.values[a / k * out + c] += scores.at(a / k, a % k) * want.values[a * out + c];
        for_isas([&] {
          Values y(type, tokens * k, out), sum(type, tokens, out);
          swiglu(x.in(), {ids.data(), tokens, k}, e.gate.m, e.up.m, e.down.m, y.out());
          CHECK(error(y, want) < tolerance(type));
          swiglu_combine(x.in(), {ids.data(), tokens, k}, scores.in(), e.gate.m, e.up.m, e.down.m,
                         sum.out());
          CHECK(error(sum, total) < tolerance(type));
        });
      }
  }
}

TEST_CASE("grouped and linear products with a bias, ragged shapes") {
  std::mt19937 random(5);
  for (const Format& f : kFormats)
    for (size_t rows : {1, 31, 64, 67})
      for (size_t tokens : {1, 6, 33}) {
        const size_t k = 2, experts = 3, whole = f.mode == Mode::nvfp4 ? 48 : 2 * size_t(f.group);
        const size_t cols = f.mode == Mode::dense ? rows + 2 : whole;
        RandomMatrix w(f, experts, rows, cols, random), one(f, 1, rows, cols, random);
        w.add_bias(f.type);
        const Ids ids = random_ids(tokens * k, experts, random);
        for (Scalar type : kTypes) {
          const std::string format = f.name;
          CAPTURE(format);
          CAPTURE(int(type));
          CAPTURE(rows);
          CAPTURE(tokens);
          const Values x(type, tokens, cols, random), each(type, tokens * k, cols, random);
          Reference per_token, per_assignment, single;
          for (size_t a = 0; a < ids.size(); ++a) {
            per_token.append(multiply(w, ids[a], row_of(x, a / k)));
            per_assignment.append(multiply(w, ids[a], row_of(each, a)));
          }
          for (size_t t = 0; t < tokens; ++t) single.append(multiply(one, 0, row_of(x, t)));
          for_isas([&] {
            Values y(type, tokens * k, rows), z(type, tokens, rows);
            grouped(x.in(), {ids.data(), tokens, k}, w.m, y.out());
            CHECK(error(y, per_token) < tolerance(type));
            grouped(each.in(), {ids.data(), tokens, k}, w.m, y.out());
            CHECK(error(y, per_assignment) < tolerance(type));
            linear(x.in(), one.m, z.out());
            CHECK(error(z, single) < tolerance(type));
          });
        }
      }
}

TEST_CASE("a token of NaN or infinity stays alone") {
  std::mt19937 random(6);
  const size_t tokens = 40, k = 1, cols = 128, out = 33;
  for (const Format& f : {kFormats[0], kFormats[2], kFormats[8]}) {
    const Expert e(f, 2, cols, 64, out, random);
    for (Scalar type : kTypes)
      for (float bad : {NAN, INFINITY}) {
        const std::string format = f.name;
        CAPTURE(format);
        CAPTURE(int(type));
        Values x(type, tokens, cols, random);
        const Ids ids = random_ids(tokens, 2, random);
        for_isas([&] {
          Values clean(type, tokens, out), dirty(type, tokens, out), again(type, tokens, out);
          swiglu(x.in(), {ids.data(), tokens, k}, e.gate.m, e.up.m, e.down.m, clean.out());
          Values poisoned = x;
          poisoned.set(7, 5, bad);
          swiglu(poisoned.in(), {ids.data(), tokens, k}, e.gate.m, e.up.m, e.down.m, dirty.out());
          swiglu(x.in(), {ids.data(), tokens, k}, e.gate.m, e.up.m, e.down.m, again.out());
          size_t changed = 0, finite = 0;
          for (size_t t = 0; t < tokens; ++t)
            for (size_t c = 0; c < out; ++c) {
              changed += t != 7 && dirty.at(t, c) != clean.at(t, c);
              finite += t == 7 && std::isfinite(dirty.at(t, c));
            }
          CHECK(changed == 0);
          CHECK(finite == 0);
          CHECK(again.bytes == clean.bytes);
        });
      }
  }
}

TEST_CASE("silu of values whose exponential leaves float32") {
  for (Scalar type : {Scalar::f32, Scalar::bf16}) {
    std::vector<uint8_t> one(size_of(type));
    store_scalar(type, one.data(), 0, 1);
    Matrix m;
    m.type = type;
    m.experts = m.rows = m.cols = 1;
    m.weight = one.data();
    const Ids ids(20, 0);
    Values x(type, 20, 1);
    for (size_t t = 0; t < 20; ++t) x.set(t, 0, -89);
    x.set(1, 0, -1e30f);
    x.set(2, 0, -INFINITY);
    x.set(3, 0, NAN);
    x.set(4, 0, 1024);
    for (size_t tokens : {1, 20})
      for_isas([&] {
        Values y(type, tokens, 1);
        swiglu({x.bytes.data(), type, tokens, 1}, {ids.data(), tokens, 1}, m, m, m, y.out());
        CHECK(std::abs(y.at(0, 0)) < 1e-30);
        if (tokens == 1) return;
        CHECK(y.at(1, 0) == 0);
        CHECK(std::isnan(y.at(2, 0)));  // as x * sigmoid(x)
        CHECK(std::isnan(y.at(3, 0)));
        CHECK(y.at(4, 0) == 1024 * 1024);
      });
  }
}

TEST_CASE("softmax of masked, infinite and undefined scores") {
  const size_t n = 37;
  for (Scalar type : kTypes)
    for_isas([&] {
      Values scores(Scalar::f32, 4, n), p(type, 4, n);
      for (size_t i = 0; i < 4 * n; ++i) scores.set(i / n, i % n, i % 2 ? -INFINITY : 3);
      scores.set(1, 5, std::bit_cast<float>(0x7fc00001u));
      scores.set(2, 36, INFINITY);
      for (size_t i = 0; i < n; ++i) scores.set(3, i, i == 20 ? -1e30f : -2e30f);
      softmax(scores.out(), 0.5f, 0, p.out());
      size_t wrong = 0;
      for (size_t i = 0; i < n; ++i) {
        wrong += std::abs(p.at(0, i) - (i % 2 ? 0 : 1. / 19)) > (i % 2 ? 0 : 2e-4);
        wrong += !std::isnan(p.at(1, i)) + !std::isnan(p.at(2, i));
        wrong += p.at(3, i) != (i == 20);
      }
      CHECK(wrong == 0);
    });
}

TEST_CASE("no tokens are no work, wrong sizes and ids are errors") {
  std::mt19937 random(7);
  const Expert e(kFormats[0], 3, 16, 8, 4, random);
  const Ids ids{0, 1, 2, 3}, good{0, 1, 2, 0};
  const Values x(Scalar::f32, 2, 16, random), narrow(Scalar::f32, 2, 15, random);
  for_isas([&] {
    Values none(Scalar::f32, 0, 16), empty(Scalar::f32, 0, 4), y(Scalar::f32, 4, 4);
    const auto run = [&](const Values& in, const Ids& which, Values& out) {
      swiglu(in.in(), {which.data(), in.rows, 2}, e.gate.m, e.up.m, e.down.m, out.out());
    };
    CHECK_NOTHROW(run(none, {}, empty));
    CHECK_NOTHROW(run(x, good, y));
    CHECK_THROWS_AS(run(x, ids, y), Error);
    CHECK_THROWS_AS(run(narrow, good, y), Error);
    CHECK_THROWS_AS(run(x, good, empty), Error);
    CHECK_THROWS_AS(linear(x.in(), e.gate.m, y.out()), Error);
  });
}

TEST_CASE("an instruction set that cannot run here is an error") {
  for (const char* name : {"sse", "AMX", "neon2"}) {
    setenv("MLX_MOE_ISA", name, 1);
    CHECK_THROWS_AS(chosen_isa(), Error);
  }
  unsetenv("MLX_MOE_ISA");
  CHECK(chosen_isa() == usable_isas().front());
}
