#include "experts/ffn.h"
#include "random_matrix.h"
#include "store_fixture.h"
#include "support/error.h"

using namespace mlx_moe;

TEST_CASE("tensors that do not make a layer are named") {
  Fixture f;
  StoreOptions options;
  options.budget = 1 << 20;
  const auto failure = [&](std::vector<LayerSource> layers) {
    try {
      ExpertStore(std::vector{f.file.path}, layers, options);
    } catch (const StoreFailure& e) {
      return std::string(e.what());
    }
    return std::string();
  };
  auto s = sources(1);
  s[0].matrices[0].names[kWeight] = {"nowhere"};
  CHECK(failure(s).find("layer0: there is no tensor 'nowhere'") == 0);
  s = sources(1);
  s[0].matrices[0].mode = Mode::affine;
  s[0].matrices[0].bits = 4, s[0].matrices[0].group = 64;
  CHECK(failure(s).find("missing") != std::string::npos);
  s[0].matrices[0].names[kScales] = s[0].matrices[0].names[kBiases] = {"layer1.weight"};
  CHECK(failure(s).find("is BF16") != std::string::npos);
  s = sources(1);
  s[0].matrices[0].names[kAdded] = {"layer1.weight"};
  CHECK(failure(s).find("expected [24]") != std::string::npos);
  s[0].matrices[0].names[kAdded] = {"odd"};
  CHECK(failure(s).find("odd") != std::string::npos);
  CHECK(failure(sources(3)).empty());
  options.policy.name = "best";
  CHECK_THROWS_AS(ExpertStore(std::vector{f.file.path}, sources(), options), Error);
  options.policy = {"lfu", 1, {1, 2}, {}};
  CHECK_THROWS_AS(ExpertStore(std::vector{f.file.path}, sources(), options), Error);
  options.policy = {"lfu", 0, {}, {}};
  CHECK_THROWS_AS(ExpertStore(std::vector{f.file.path}, sources(), options), Error);
  options.policy = {"pinned", 0, {}, {24}};
  CHECK_THROWS_AS(ExpertStore(std::vector{f.file.path}, sources(), options), Error);
}

TEST_CASE("kernels read scattered experts as they read stacked ones") {
  std::mt19937 random(3);
  constexpr size_t experts = 5, rows = 64, cols = 128, tokens = 7, k = 2;
  for (const Format& format : kFormats) {
    CAPTURE(format.name);
    RandomMatrix gate(format, experts, rows, cols, random), up(format, experts, rows, cols, random),
        down(format, experts, cols, rows % size_t(format.group ? format.group : 1) ? cols : rows,
             random);
    if (down.m.cols != rows) continue;
    down.add_bias(Scalar::bf16);
    std::vector<std::vector<ExpertArrays>> tables;
    const auto scattered = [&](Matrix m) {
      auto& table = tables.emplace_back(experts);
      for (size_t e = 0; e < experts; ++e) {
        if (e == 3) continue;
        table[e] = {m.row(e, 0), m.scales ? m.row_scales(e, 0) : nullptr,
                    m.biases ? m.row_biases(e, 0) : nullptr,
                    m.added ? m.added + e * m.rows * size_of(m.added_type) : nullptr,
                    m.global_scale ? m.global_scale + e : nullptr};
      }
      m.table = table.data();
      m.weight = nullptr;
      return m;
    };
    tables.reserve(3);
    const Matrix g = scattered(gate.m), u = scattered(up.m), d = scattered(down.m);
    std::vector<uint16_t> x(tokens * cols);
    for (auto& v : x) v = f32_to_bf16(float(int(random() % 200) - 100) / 100);
    std::vector<uint32_t> ids(tokens * k);
    for (auto& id : ids) id = random() % 3 == 0 ? 4 : uint32_t(random() % 3);
    std::vector<float> scores(tokens * k);
    for (auto& s : scores) s = float(random() % 100) / 100;
    const Input in{x.data(), Scalar::bf16, tokens, cols};
    const Input weights{scores.data(), Scalar::f32, tokens, k};
    const Routing r{ids.data(), tokens, k};
    std::vector<uint16_t> a(tokens * k * cols), b(a.size()), sum(tokens * cols), same(sum.size());
    const Output ya{a.data(), Scalar::bf16, tokens * k, cols};
    const Output yb{b.data(), Scalar::bf16, tokens * k, cols};
    swiglu(in, r, gate.m, up.m, down.m, ya);
    swiglu(in, r, g, u, d, yb);
    CHECK(a == b);
    swiglu_combine(in, r, weights, gate.m, up.m, down.m, {sum.data(), Scalar::bf16, tokens, cols});
    weighted_sum({b.data(), Scalar::bf16, tokens * k, cols}, weights, g, u, d,
                 {same.data(), Scalar::bf16, tokens, cols});
    CHECK(sum == same);
    ids[0] = 3;  // absent
    CHECK_THROWS_AS(swiglu(in, r, g, u, d, yb), Error);
    CHECK_THROWS_AS(grouped(in, r, g, {b.data(), Scalar::bf16, tokens * k, rows}), Error);
  }
}
