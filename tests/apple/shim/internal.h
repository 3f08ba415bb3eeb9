// What the files of the shim share.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "shim.h"

struct __CVBuffer {
  std::atomic<int> references{1}, locks{0};
  size_t width, height, stride;
  std::vector<uint8_t> memory;
};

namespace shim {

extern std::atomic<long> live;
extern std::atomic<size_t> locked, other_units;

std::shared_ptr<const Model> find(const std::string& compiled, const std::string& function);

// Around a prediction, or a batch of several tiles: counts it, and the tiles that there are at
// once.
class Running {
 public:
  Running(bool batch, size_t tiles);
  ~Running();

 private:
  const size_t tiles_;
};

// Runs a job on one of the shim's threads.
void soon(std::function<void()> job);

}  // namespace shim
