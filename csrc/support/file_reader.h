#pragma once

#include <cstddef>
#include <string>

namespace mlx_moe {

// Reads parts of a file. Not mapped: a file that is cut short while it is mapped ends the process.
class FileReader {
 public:
  // Throws Error, which names the file, if it cannot be opened.
  explicit FileReader(const std::string& path);
  ~FileReader();
  FileReader(const FileReader&) = delete;
  FileReader& operator=(const FileReader&) = delete;

  // Throws Error unless all of it is there.
  void read(size_t offset, size_t bytes, void* to) const;

  size_t size() const { return size_; }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  int file_;
  size_t size_ = 0;
};

}  // namespace mlx_moe
