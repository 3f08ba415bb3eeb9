#pragma once

#include <doctest/doctest.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <functional>
#include <optional>
#include <thread>

#include "checkpoint_file.h"
#include "store/failure.h"
#include "store/store.h"

namespace mlx_moe {

inline constexpr size_t kLayers = 3, kExperts = 8, kRows = 24, kCols = 40;  // a slot is one page

inline std::vector<LayerSource> sources(size_t layers = kLayers) {
  std::vector<LayerSource> found;
  for (size_t l = 0; l < layers; ++l) {
    MatrixSource m;
    m.names[kWeight] = {"layer" + std::to_string(l) + ".weight"};
    found.push_back({"layer" + std::to_string(l), {m}});
  }
  return found;
}

// A checkpoint of dense layers, and stores of it.
struct Fixture {
  TemporaryFile file;
  std::vector<TensorEntry> tensors = dense_layers(kLayers, kExperts, kRows, kCols);
  size_t page = Bank::whole_pages(1);

  Fixture() { file.write(tensors); }

  std::shared_ptr<ExpertStore> open(size_t slots, const std::string& policy = "lru",
                                    bool direct = false, double timeout = 30, size_t readers = 3) {
    StoreOptions options;
    options.budget = slots * page;
    options.policy.name = policy;
    options.policy.period = 20;
    options.direct = direct;
    options.timeout = timeout;
    options.readers = readers;
    return std::make_shared<ExpertStore>(std::vector{file.path}, sources(), options);
  }

  bool right(const HeldExperts& held, size_t layer, uint32_t expert) const {
    const Matrix& m = held.matrices()[0];
    return m.holds(expert) &&
           !std::memcmp(m.row(expert, 0),
                        tensors[1 + layer].bytes.data() + expert * kRows * kCols * 2,
                        kRows * kCols * 2);
  }
};

inline std::optional<Failure> kind_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const StoreFailure& e) {
    return e.failure;
  }
  return std::nullopt;
}

// Waits until nothing is read ahead any more.
inline void settle(const ExpertStore& store) {
  for (int i = 0; i < 5000 && !store.idle(); ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  REQUIRE(store.idle());
}

inline std::atomic<int> failing{0}, reads{0};
inline std::atomic<bool> gate{true};

inline ssize_t counted(int file, void* to, size_t size, off_t at) {
  ++reads;
  while (!gate) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  if (failing > 0 && failing-- > 0) {
    errno = EIO;
    return -1;
  }
  return pread(file, to, size, at);
}

// Reads are counted, fail while `failing` is above 0, and wait while the gate is shut.
struct Counted {
  Counted() {
    failing = 0, reads = 0, gate = true;
    File::pread_call = counted;
  }
  ~Counted() {
    gate = true;
    File::pread_call = &::pread;
  }
};

}  // namespace mlx_moe
