#pragma once

#include <string>
#include <vector>

#include "store/file.h"

namespace mlx_moe {

struct Tensor {
  std::string name, dtype;  // as the format writes it: "BF16"
  std::vector<uint64_t> shape;
  uint64_t offset, size;  // bytes, from the beginning of the file
};

// The tensors of a safetensors file in the order of their bytes
// (https://huggingface.co/docs/safetensors). Throws StoreFailure, which names file and tensor, on a
// header that is cut short or no JSON, on ranges that overlap or leave the file, and on sizes that
// are not those of the shapes.
std::vector<Tensor> read_tensors(const File& file);

// Bytes of a value, 0 for a dtype that we do not know.
size_t size_of_dtype(const std::string& dtype);

}  // namespace mlx_moe
