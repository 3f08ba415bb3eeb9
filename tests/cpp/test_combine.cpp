#include <doctest/doctest.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "routing/combine.h"
#include "support/error.h"

using namespace mlx_moe;

namespace {

using Ints = std::vector<int32_t>;
using Floats = std::vector<float>;

Floats run(const Floats& rows, size_t width, const Ints& assignments, const Floats& scores,
           size_t top_k, bool accumulate, Floats out) {
  const Part part{{Scalar::f32, rows.data(), assignments.size(), width}, assignments.data()};
  combine({&part, 1}, {scores.data(), scores.size() / top_k, top_k}, accumulate,
          {Scalar::f32, out.data(), width});
  return out;
}

}  // namespace

TEST_CASE("combine sums scaled rows in every type, whatever their order") {
  std::mt19937 random(3);
  for (Scalar type : {Scalar::f32, Scalar::f16, Scalar::bf16})
    for (size_t width : {0, 1, 7, 64, 131}) {
      CAPTURE(int(type));
      CAPTURE(width);
      const size_t tokens = 13, top_k = 3;
      Ints assignments;
      for (int32_t a = 0; a < int32_t(tokens * top_k); ++a)
        if (random() % 4) assignments.push_back(a);
      assignments.insert(assignments.end(), {-1, -1});
      std::shuffle(assignments.begin(), assignments.end(), random);
      std::vector<char> rows(assignments.size() * width * size_of(type));
      for (size_t i = 0; i < assignments.size() * width; ++i)
        store_scalar(type, rows.data(), i, float(int(random() % 64) - 32) / 8);
      Floats scores(tokens * top_k), out(tokens * width, 1.0f);
      for (auto& s : scores) s = float(random() % 16) / 16;

      for (bool accumulate : {false, true}) {
        std::vector<double> want(tokens * width, 0.0);
        if (accumulate) want.assign(out.begin(), out.end());
        for (size_t i = 0; i < assignments.size(); ++i)
          for (size_t c = 0; c < width && assignments[i] >= 0; ++c)
            want[size_t(assignments[i]) / top_k * width + c] +=
                double(scores[assignments[i]]) * load_scalar(type, rows.data(), i * width + c);
        const Part part{{type, rows.data(), assignments.size(), width}, assignments.data()};
        combine({&part, 1}, {scores.data(), tokens, top_k}, accumulate,
                {Scalar::f32, out.data(), width});
        CHECK(std::vector<double>(out.begin(), out.end()) == want);  // exact in these values
      }
    }
}

TEST_CASE("tokens without rows get zeros or keep what they had") {
  CHECK(run({2, 3}, 2, {1}, {0.5f, 2, 1, 1}, 2, false, {9, 9, 9, 9}) == Floats{4, 6, 0, 0});
  CHECK(run({2, 3}, 2, {1}, {0.5f, 2, 1, 1}, 2, true, {9, 9, 9, 9}) == Floats{13, 15, 9, 9});
  CHECK(run({}, 2, {}, {}, 1, false, {}).empty());
}

TEST_CASE("combine refuses a double or unknown assignment and leaves the output alone") {
  Floats out{7, 7};
  const Floats rows{1, 2}, scores{1, 1};
  for (const Ints& bad : {Ints{0, 0}, Ints{0, 2}, Ints{0, -2}}) {
    const Part part{{Scalar::f32, rows.data(), 2, 1}, bad.data()};
    CHECK_THROWS_AS(combine({&part, 1}, {scores.data(), 2, 1}, false, {Scalar::f32, out.data(), 1}),
                    Error);
    CHECK(out == Floats{7, 7});
  }
}

TEST_CASE("parts of any type together are one sum in the order of the assignments") {
  std::mt19937 random(4);
  const size_t tokens = 40, top_k = 4, width = 777, n = tokens * top_k;
  Ints every(n);
  for (size_t a = 0; a < n; ++a) every[a] = int32_t(a);
  std::shuffle(every.begin(), every.end(), random);
  const Scalar types[] = {Scalar::f16, Scalar::f32, Scalar::f16, Scalar::bf16};
  std::vector<std::vector<char>> rows;
  std::vector<Ints> assignments;
  std::vector<Part> parts;
  Floats values(n * width), scores(n);
  for (auto& v : values) v = float(int(random() % 512) - 256) / 64;
  for (auto& s : scores) s = std::normal_distribution<float>()(random);
  for (size_t p = 0; p < 4; ++p) {
    Ints part(every.begin() + p * n / 4, every.begin() + (p + 1) * n / 4);
    part.insert(part.begin() + 3, -1);
    rows.emplace_back(part.size() * width * size_of(types[p]), 0x7f);  // padding may be NaN
    for (size_t i = 0; i < part.size(); ++i)
      for (size_t c = 0; c < width && part[i] >= 0; ++c)
        store_scalar(types[p], rows[p].data(), i * width + c, values[part[i] * width + c]);
    assignments.push_back(part);
  }
  for (size_t p = 0; p < 4; ++p)
    parts.push_back(
        {{types[p], rows[p].data(), assignments[p].size(), width}, assignments[p].data()});

  for (Scalar type : {Scalar::f32, Scalar::f16, Scalar::bf16}) {
    std::vector<char> out(tokens * width * size_of(type));
    combine(parts, {scores.data(), tokens, top_k}, false, {type, out.data(), width});
    size_t wrong = 0;
    for (size_t t = 0; t < tokens; ++t)
      for (size_t c = 0; c < width; ++c) {
        volatile float sum = 0;
        for (size_t a = t * top_k; a < (t + 1) * top_k; ++a) {
          volatile float product = scores[a] * values[a * width + c];
          sum = sum + product;
        }
        char want[4];
        store_scalar(type, want, 0, sum);
        wrong += load_scalar(type, want, 0) != load_scalar(type, out.data(), t * width + c);
      }
    CHECK(wrong == 0);
  }

  Ints again = assignments[1];
  again[0] = assignments[3][1];
  parts[1].assignments = again.data();
  Floats out(tokens * width, 7);
  CHECK_THROWS_WITH_AS(
      combine(parts, {scores.data(), tokens, top_k}, false, {Scalar::f32, out.data(), width}),
      ("assignment " + std::to_string(again[0]) +
       " is in rows 0 of part 1 and 1 of part 3, expected once")
          .c_str(),
      Error);
  CHECK(out == Floats(tokens * width, 7));
  CHECK_THROWS_AS(
      combine(parts, {scores.data(), tokens, top_k}, false, {Scalar::f32, out.data(), width - 1}),
      Error);
}
