#pragma once

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "experts/matrix.h"
#include "store/safetensors.h"

namespace mlx_moe {

// Open files and the tensors of all of them by name.
class Checkpoint {
 public:
  // Throws StoreFailure as File and read_tensors do, and where two files have a tensor of one name.
  Checkpoint(const std::vector<std::string>& paths, bool direct);

  struct Found {
    uint32_t file;
    Tensor tensor;
  };
  // StoreFailure, which names who asks, if there is no such tensor.
  const Found& find(const std::string& name, const std::string& asks) const;

  const std::vector<std::unique_ptr<File>>& files() const { return files_; }

 private:
  std::vector<std::unique_ptr<File>> files_;
  std::vector<Found> tensors_;  // by name
};

// The arrays of a Matrix, in this order.
enum Part : size_t { kWeight, kScales, kBiases, kAdded, kGlobalScale, kParts };

// Where a projection's arrays are: each the name of one stacked tensor [experts, ...], the names of
// a tensor an expert, or empty.
struct MatrixSource {
  Mode mode = Mode::dense;
  int bits = 0, group = 0;
  std::array<std::vector<std::string>, kParts> names;
};

struct LayerSource {
  std::string name;
  std::vector<MatrixSource> matrices;
};

// Bytes of a file that go to a place in a slot.
struct Piece {
  uint32_t file;
  uint64_t offset;
  size_t size, at;
};

// A projection's format, and the place of each array in a slot.
struct MatrixLayout {
  Matrix format;
  std::array<size_t, kParts> at;  // kNowhere for an array that does not exist
  static constexpr size_t kNowhere = ~size_t(0);

  ExpertArrays arrays(const uint8_t* slot) const;
};

// One expert's arrays lie in its slot one after the other, each at a multiple of 64 bytes.
struct LayerLayout {
  std::string name;
  size_t experts = 0, slot_bytes = 0;  // whole pages
  std::vector<MatrixLayout> matrices;
  std::vector<std::vector<Piece>> pieces;  // of each expert, in the order of the file
};

// Throws StoreFailure, which names the layer and the tensor, on tensors that are not there, of
// shapes or dtypes that the kernels' format does not have, or that do not agree.
LayerLayout lay_out(const LayerSource& source, const Checkpoint& checkpoint);

}  // namespace mlx_moe
