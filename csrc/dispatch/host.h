#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <shared_mutex>
#include <string>
#include <vector>

#include "dispatch/activation.h"
#include "dispatch/executor.h"
#include "experts/matrix.h"

namespace mlx_moe {

// Where a tensor's raw values are in an artifact's blob. Half precision, or int8 with a
// half-precision scale for each row at scale_offset.
struct BlobTensor {
  size_t offset;
  std::optional<size_t> scale_offset;  // int8
};

// The tensors of one expert; biases are optional, and so is the gate of an expert of two matrices.
struct BlobExpert {
  std::optional<BlobTensor> gate, up, down, gate_bias, up_bias, down_bias;
};

// A group's artifact as the host executor reads it: gate and up are [inner, width], down is
// [width, inner].
struct HostProgram {
  std::string blob;  // path of the weight file
  size_t width, inner;
  Activation activation;
  std::vector<size_t> capacities;
  std::vector<BlobExpert> experts;
};

// Runs artifacts on the CPU kernels, from their own weights: the stand-in for an accelerator where
// there is none. Padding is computed like everything else, as an accelerator would.
class HostExecutor : public StaticExecutor {
 public:
  // Every tile waits `dispatch` first, one after the other, as for a device.
  explicit HostExecutor(std::chrono::duration<double> dispatch = {});
  ~HostExecutor() override;

  // Throws Error, which names the blob, on a tensor outside of it or misaligned.
  size_t load(const HostProgram& program);

  const ProgramShape* shape(size_t program) const override;
  void start(size_t program, std::span<const Dispatch> tiles, Done done) override;

  // Of all programs, in half precision, in memory of our own.
  size_t weight_bytes() const;

 private:
  struct Loaded;
  const Loaded* find(size_t program) const;

  const std::chrono::duration<double> dispatch_;
  mutable std::shared_mutex mutex_;
  std::vector<std::unique_ptr<Loaded>> programs_;
};

}  // namespace mlx_moe
