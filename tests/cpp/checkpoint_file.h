#pragma once

#include <unistd.h>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <vector>

// Writes safetensors files for tests, right and wrong ones.
struct TensorEntry {
  std::string name, dtype;
  std::vector<size_t> shape;
  std::vector<uint8_t> bytes;
};

class TemporaryFile {
 public:
  TemporaryFile() {
    static int made = 0;
    auto name = "mlx_moe_store_" + std::to_string(getpid()) + "_" + std::to_string(made++);
    path = (std::filesystem::temp_directory_path() / name).string();
  }
  ~TemporaryFile() { std::remove(path.c_str()); }
  TemporaryFile(const TemporaryFile&) = delete;

  void write(const std::string& header, const std::vector<uint8_t>& data, int64_t length = -1) {
    std::ofstream out(path, std::ios::binary | std::ios::trunc);
    const uint64_t n = length < 0 ? header.size() : uint64_t(length);
    for (int i = 0; i < 8; ++i) out.put(char(n >> (8 * i)));
    out << header;
    out.write(reinterpret_cast<const char*>(data.data()), std::streamsize(data.size()));
  }

  void write(const std::vector<TensorEntry>& tensors, size_t shift = 0) {
    std::string header = "{\"__metadata__\": {\"format\": \"mlx\"}";
    std::vector<uint8_t> data(shift);
    for (const TensorEntry& t : tensors) {
      std::string shape;
      for (size_t n : t.shape) shape += (shape.empty() ? "" : ", ") + std::to_string(n);
      header += ", \"" + t.name + "\": {\"dtype\": \"" + t.dtype + "\", \"shape\": [" + shape +
                "], \"data_offsets\": [" + std::to_string(data.size()) + ", " +
                std::to_string(data.size() + t.bytes.size()) + "]}";
      data.insert(data.end(), t.bytes.begin(), t.bytes.end());
    }
    write(header + "}", data);
  }

  std::string path;
};

inline std::vector<uint8_t> random_bytes(size_t n, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<uint8_t> bytes(n);
  for (auto& b : bytes) b = uint8_t(random());
  return bytes;
}

// Layers of dense bfloat16 experts with one projection of [rows, cols], stacked, in a file that has
// an odd tensor first so that nothing is aligned.
inline std::vector<TensorEntry> dense_layers(size_t layers, size_t experts, size_t rows,
                                             size_t cols) {
  std::vector<TensorEntry> tensors{{"odd", "U8", {3}, {1, 2, 3}}};
  for (size_t l = 0; l < layers; ++l)
    tensors.push_back({"layer" + std::to_string(l) + ".weight",
                       "BF16",
                       {experts, rows, cols},
                       random_bytes(experts * rows * cols * 2, uint32_t(l))});
  return tensors;
}
