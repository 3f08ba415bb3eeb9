#include <doctest/doctest.h>

#include <bit>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "routing/rows.h"
#include "support/cpu.h"

using namespace mlx_moe;

namespace {

constexpr Scalar kTypes[] = {Scalar::f32, Scalar::f16, Scalar::bf16};

// Runs fn(code) with every instruction set of this machine.
template <class Fn>
void for_isas(Fn&& fn) {
  for (const auto& isa : usable_isas()) {
    CAPTURE(isa);
    setenv("MLX_MOE_ISA", isa.c_str(), 1);
    fn(row_code());
  }
  unsetenv("MLX_MOE_ISA");
}

bool same(float a, float b) {
  return std::isnan(a) ? std::isnan(b) : std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b);
}

// Values of a type: every half, or float32 bits of all magnitudes and ties of both halves.
std::vector<char> all_values(Scalar type, std::mt19937& random) {
  const size_t n = 1 << 16;
  std::vector<char> values(n * size_of(type));
  for (uint32_t i = 0; i < n; ++i) {
    const uint32_t ends[] = {
        0, 0x8000, 0x1000, 0x7fff, 0x8001, 0x0fff, uint32_t(random() & 0xffff)};
    const uint32_t wide = i << 16 | ends[random() % 7];
    std::memcpy(values.data() + i * size_of(type), type == Scalar::f32 ? &wide : &i, size_of(type));
  }
  return values;
}

}  // namespace

TEST_CASE("rows convert as half.h does, in every pair of types and on every instruction set") {
  std::mt19937 random(1);
  for (Scalar from : kTypes)
    for (Scalar to : kTypes) {
      CAPTURE(int(from));
      CAPTURE(int(to));
      const std::vector<char> x = all_values(from, random);
      const size_t n = x.size() / size_of(from);
      for_isas([&](const RowCode& code) {
        std::vector<char> got(n * size_of(to)), want(size_of(to));
        code.convert(from, x.data(), to, got.data(), n);
        size_t wrong = 0;
        for (size_t i = 0; i < n; ++i) {
          store_scalar(to, want.data(), 0, load_scalar(from, x.data(), i));
          wrong += !same(load_scalar(to, got.data(), i), load_scalar(to, want.data(), 0));
        }
        CHECK(wrong == 0);
      });
    }
}

TEST_CASE("only scalar gets scalar code") {
  const auto& isas = usable_isas();
  size_t i = 0;
  for_isas([&](const RowCode& code) { CHECK((isas[i++] == "scalar") == (&code == &scalar_rows)); });
}

TEST_CASE("conversion stops at the end of odd rows") {
  std::vector<float> x(100, 1.5f);
  for (size_t n = 0; n < 70; ++n)
    for_isas([&](const RowCode& code) {
      std::vector<uint16_t> to(100, 0x7777);
      code.convert(Scalar::f32, x.data() + 1, Scalar::f16, to.data() + 1, n);
      for (size_t i = 0; i < 100; ++i) CHECK(to[i] == (i > 0 && i <= n ? 0x3e00 : 0x7777));
    });
}

TEST_CASE("copies past the caches keep every byte, whatever the alignment") {
  std::vector<char> from(500);
  for (size_t i = 0; i < from.size(); ++i) from[i] = char(i * 7 + 1);
  alignas(64) char to[600];
  for (size_t bytes : {0, 1, 2, 63, 64, 65, 127, 128, 190, 400})
    for (size_t at = 0; at < 66; ++at)
      for_isas([&](const RowCode& code) {
        for (auto copy : {code.copy, code.stream}) {
          std::memset(to, 0, sizeof to);
          copy(from.data() + at % 5, to + at, bytes);
          code.fence();
          size_t others = 0;
          for (size_t i = 0; i < sizeof to; ++i) others += (i < at || i >= at + bytes) && to[i];
          CHECK(std::memcmp(from.data() + at % 5, to + at, bytes) == 0);
          CHECK(others == 0);
        }
      });
}

TEST_CASE("sums are added in order and rounded one by one, the same on every instruction set") {
  std::mt19937 random(2);
  std::normal_distribution<float> normal;
  for (size_t n : {0, 1, 3, 8, 17, 64, 131, 300})
    for (size_t count : {0, 1, 3, 9}) {
      std::vector<std::vector<char>> rows(count);
      std::vector<Term> terms;
      for (auto& row : rows) {
        const Scalar type = kTypes[random() % 3];
        row.resize(n * size_of(type) + 4);
        for (size_t i = 0; i < n; ++i) store_scalar(type, row.data(), i, normal(random));
        terms.push_back({row.data(), normal(random), type});
      }
      for (Scalar type : kTypes)
        for (bool add : {false, true}) {
          std::vector<char> before(n * size_of(type) + 4), want;
          for (size_t i = 0; i < n; ++i) store_scalar(type, before.data(), i, normal(random));
          want = before;
          for (size_t i = 0; i < n; ++i) {
            volatile float sum = add ? load_scalar(type, before.data(), i) : 0.0f;
            for (const Term& t : terms) {
              volatile float product = t.score * load_scalar(t.type, t.row, i);
              sum = sum + product;
            }
            store_scalar(type, want.data(), i, sum);
          }
          for_isas([&](const RowCode& code) {
            std::vector<char> out = before;
            code.sum({terms.data(), count}, {terms.data(), count}, n, add, type, out.data());
            CHECK(out == want);
          });
        }
    }
}
