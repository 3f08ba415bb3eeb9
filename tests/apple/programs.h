// Programs of the shim that give every value of every tile another result.
#pragma once

#include <cmath>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "dispatch/coreml.h"
#include "dispatch/queue.h"
#include "shim.h"
#include "support/half.h"

namespace mlx_moe {

constexpr size_t kGroups = 3, kWidth = 40;
constexpr size_t kCapacities[] = {32, 64};

inline float result(float x, size_t channel, size_t expert) {
  return x * 0.5f + float(channel) - 8 * float(expert);
}

inline shim::Model model(size_t capacity) {
  shim::Model m;
  m.input = m.output = {1, kWidth, 1, kGroups * capacity};
  m.compute = [capacity](const std::vector<uint16_t>& x, std::vector<uint16_t>& y) {
    const size_t columns = kGroups * capacity;
    for (size_t c = 0; c < kWidth; ++c)
      for (size_t t = 0; t < columns; ++t)
        y[c * columns + t] = f32_to_f16(result(f16_to_f32(x[c * columns + t]), c, t / capacity));
  };
  return m;
}

// x and y [G, C, d] of one tile.
struct Tile {
  size_t capacity;
  std::vector<uint16_t> x, y;

  explicit Tile(size_t capacity, int seed = 0)
      : capacity(capacity), x(kGroups * capacity * kWidth), y(x.size(), 0x7e00) {
    for (size_t i = 0; i < x.size(); ++i)
      x[i] = f32_to_f16(float((i * 7919 + size_t(seed) * 31) % 512) / 16 - 16);
  }
  Request request(size_t program) {
    return {program, {kGroups, capacity, kWidth, x.data(), y.data()}};
  }
  bool right() const {
    for (size_t i = 0; i < y.size(); ++i) {
      const size_t c = i % kWidth, expert = i / kWidth / capacity;
      if (y[i] != f32_to_f16(result(f16_to_f32(x[i]), c, expert))) return false;
    }
    return true;
  }
};

// A queue over a Core ML executor with one program, "good.mlmodelc", with functions c32 and c64.
struct Apple {
  CoreMLProgram program{kGroups, kWidth, "x", "y", {}};
  CoreMLExecutor* executor = nullptr;
  std::unique_ptr<Queue> queue;
  size_t number = 99;
  Status loaded;

  template <class Change>
  explicit Apple(Change&& change, size_t in_flight = 4, bool surfaces = true) {
    shim::forget_seen();
    shim::settings() = {};
    for (size_t capacity : kCapacities) {
      const std::string name = "c" + std::to_string(capacity);
      shim::Model m = model(capacity);
      change(m);
      shim::install("/models/good.mlmodelc", name, std::move(m));
      program.functions[capacity] = {"/models/good.mlmodelc", name};
    }
    auto made = std::make_unique<CoreMLExecutor>(surfaces);
    executor = made.get();
    loaded = executor->load(program, number);
    queue = std::make_unique<Queue>(std::move(made), in_flight);
  }
  Apple() : Apple([](shim::Model&) {}) {}

  std::vector<Outcome> run(const std::vector<Request>& requests) {
    const auto pending = queue->submit(requests);
    return pending->wait();
  }
  ~Apple() {
    queue.reset();
    shim::uninstall_all();
    shim::settings() = {};
  }
};

}  // namespace mlx_moe
