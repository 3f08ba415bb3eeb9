#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace mlx_moe {

// A file's bytes, read-only; pages come in as they are touched.
class MappedFile {
 public:
  // Throws Error, which names the file, if it cannot be read.
  explicit MappedFile(const std::string& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const uint8_t* data() const { return data_; }
  size_t size() const { return size_; }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  const uint8_t* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace mlx_moe
