#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace mlx_moe {

// Bytes of a file that belong at `to`.
struct Segment {
  uint64_t offset;
  size_t size;
  uint8_t* to;
};

// A file that must stay what it was when it was opened. Any number of threads may read it.
class File {
 public:
  // direct: past the page cache where the filesystem can. Throws StoreFailure.
  File(std::string path, bool direct);
  ~File();
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  const std::string& path() const { return path_; }
  uint64_t size() const { return size_; }
  bool direct() const { return direct_; }

  // Reads segments that are in rising order and close to each other. Throws StoreFailure on an
  // error, on too few bytes and if the file was written to since it was opened.
  void read(std::span<const Segment> segments) const;

  // StoreFailure unless the path still leads to the file that was opened, unchanged.
  void check_path() const;

  // What reads, for tests of what happens when that fails.
  using Pread = ssize_t (*)(int, void*, size_t, off_t);
  static std::atomic<Pread> pread_call;

 private:
  void read_cached(std::span<const Segment> segments) const;
  void read_segment(const Segment& s) const;
  void read_direct(std::span<const Segment> segments) const;
  static ssize_t read_some(int file, void* to, size_t size, uint64_t offset);
  [[noreturn]] void failed(ssize_t got, uint64_t offset, size_t size) const;
  void check_unchanged() const;

  std::string path_;
  int file_ = -1, direct_file_ = -1;
  uint64_t size_ = 0, device_ = 0, inode_ = 0;
  int64_t modified_ = 0;  // nanoseconds
  mutable std::atomic<bool> direct_{false};
};

}  // namespace mlx_moe
