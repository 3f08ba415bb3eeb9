#include <doctest/doctest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "routing/combine.h"
#include "support/error.h"

using namespace mlx_moe;

namespace {

using Ints = std::vector<int32_t>;
using Floats = std::vector<float>;

Floats run(const Floats& rows, size_t width, const Ints& assignments, const Floats& scores,
           size_t top_k, bool accumulate, Floats out) {
  combine({Scalar::f32, rows.data(), assignments.size(), width}, assignments.data(), scores.data(),
          scores.size() / top_k, top_k, accumulate, out.data());
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
        combine({type, rows.data(), assignments.size(), width}, assignments.data(), scores.data(),
                tokens, top_k, accumulate, out.data());
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
    CHECK_THROWS_AS(combine({Scalar::f32, rows.data(), 2, 1}, bad.data(), scores.data(), 2, 1,
                            false, out.data()),
                    Error);
    CHECK(out == Floats{7, 7});
  }
}
