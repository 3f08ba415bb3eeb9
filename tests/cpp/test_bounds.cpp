#include <doctest/doctest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "experts/ffn.h"
#include "random_matrix.h"
#include "routing/combine.h"
#include "routing/pack.h"
#include "support/cpu.h"

using namespace mlx_moe;

namespace {

// Memory between two pages that cannot be touched, at the end or at the beginning.
class Guarded {
 public:
  Guarded(size_t bytes, bool at_end) {
    const size_t page = size_t(sysconf(_SC_PAGESIZE)), inner = (bytes + page - 1) / page * page;
    size_ = inner + 2 * page;
    base_ = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    REQUIRE(base_ != MAP_FAILED);
    char* begin = static_cast<char*>(base_) + page;
    REQUIRE(mprotect(base_, page, PROT_NONE) == 0);
    REQUIRE(mprotect(begin + inner, page, PROT_NONE) == 0);
    data = reinterpret_cast<uint8_t*>(at_end ? begin + inner - bytes : begin);
  }
  ~Guarded() { munmap(base_, size_); }
  Guarded(const Guarded&) = delete;

  uint8_t* data;

 private:
  void* base_;
  size_t size_;
};

struct Memory {
  bool at_end;
  std::vector<std::unique_ptr<Guarded>> blocks;

  uint8_t* make(size_t bytes) {
    return blocks.emplace_back(std::make_unique<Guarded>(bytes, at_end))->data;
  }
  const uint8_t* copy(const uint8_t* from, size_t bytes) {
    return from ? static_cast<uint8_t*>(std::memcpy(make(bytes), from, bytes)) : nullptr;
  }
  Matrix copy(const Matrix& m) {
    Matrix c = m;
    const size_t rows = m.experts * m.rows;
    c.weight = copy(m.weight, rows * m.row_bytes());
    const size_t scales = m.mode == Mode::dense ? 0 : rows * m.groups() * m.scale_size();
    c.scales = copy(m.scales, scales);
    c.biases = copy(m.biases, scales);
    c.added = copy(m.added, rows * size_of(m.added_type));
    return c;
  }
};

}  // namespace

TEST_CASE("nothing outside the arrays is read or written") {
  std::mt19937 random(8);
  const size_t experts = 2, k = 2, rows = 37;
  for (const Format& f : kFormats)
    for (bool at_end : {false, true})
      for (size_t groups : {1, 3}) {
        const size_t cols = f.mode == Mode::dense ? 21 * groups : size_t(f.group) * groups;
        RandomMatrix in(f, experts, cols, cols, random), out(f, experts, rows, cols, random);
        out.add_bias(f.type);
        for (Scalar type : {Scalar::f32, Scalar::f16, Scalar::bf16})
          for (size_t tokens : {1, 2, 5, 19}) {
            Memory memory{at_end, {}};
            const Matrix gate = memory.copy(in.m), down = memory.copy(out.m);
            auto* x = memory.make(tokens * cols * size_of(type));
            for (size_t i = 0; i < tokens * cols; ++i) store_scalar(type, x, i, 0.5f);
            auto* ids = reinterpret_cast<uint32_t*>(memory.make(tokens * k * 4));
            for (size_t a = 0; a < tokens * k; ++a) ids[a] = uint32_t(random() % experts);
            auto* scores = memory.make(tokens * k * 2);
            auto* y = memory.make(tokens * k * rows * size_of(type));
            const Input input{x, type, tokens, cols};
            const Routing routing{ids, tokens, k};
            for (const auto& isa : usable_isas()) {
              setenv("MLX_MOE_ISA", isa.c_str(), 1);
              swiglu(input, routing, gate, gate, down, {y, type, tokens * k, rows});
              swiglu_combine(input, routing, {scores, Scalar::f16, tokens, k}, gate, gate, down,
                             {y, type, tokens, rows});
              grouped(input, routing, down, {y, type, tokens * k, rows});
            }
          }
      }
  unsetenv("MLX_MOE_ISA");
}

TEST_CASE("packing and summing rows touches nothing outside them") {
  const size_t tokens = 3, k = 2, capacity = 5;
  const int32_t kept[] = {0, 3, 4, 1, 5}, offsets[] = {0, 3, 5}, experts[] = {1, 0};
  const float scores[tokens * k] = {1, 2, 3, 4, 5, 6};
  for (bool at_end : {false, true})
    for (size_t width : {1, 7, 16, 33, 130})
      for (Scalar from : {Scalar::f32, Scalar::f16, Scalar::bf16})
        for (Scalar to : {Scalar::f32, Scalar::f16, Scalar::bf16})
          for (const auto& isa : usable_isas()) {
            setenv("MLX_MOE_ISA", isa.c_str(), 1);
            Memory memory{at_end, {}};
            auto* x = memory.make(tokens * width * size_of(from));
            for (size_t i = 0; i < tokens * width; ++i) store_scalar(from, x, i, 0.5f);
            auto* rows = memory.make(2 * capacity * width * size_of(to));
            auto* slots = reinterpret_cast<int32_t*>(memory.make(2 * capacity * 4));
            auto* out = memory.make(tokens * width * size_of(from));
            const Tile tile{{kept, 5, offsets, 2}, {experts, 2, capacity, k}, rows, slots};
            pack({from, x, tokens, width}, {&tile, 1}, to);
            const Part part{{to, rows, 2 * capacity, width}, slots};
            combine({&part, 1}, {scores, tokens, k}, false, {from, out, width});
            for (size_t t = 0; t < tokens; ++t) {
              const float sums[] = {1.5f, 2.0f, 5.5f};  // scores of 0 1, 3, 4 5 times 0.5
              CHECK(load_scalar(from, out, t * width + width - 1) == sums[t]);
            }
          }
  unsetenv("MLX_MOE_ISA");
}
