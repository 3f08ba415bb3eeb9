#include "support/file_reader.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "support/error.h"

namespace mlx_moe {

namespace {
constexpr size_t kMost = size_t(1) << 30;  // bytes that one read call is asked for
}

FileReader::FileReader(const std::string& path)
    : path_(path), file_(open(path.c_str(), O_RDONLY | O_CLOEXEC)) {
  require(file_ >= 0, path, " cannot be opened: ", std::strerror(errno));
  struct stat facts;
  if (fstat(file_, &facts) == 0 && S_ISREG(facts.st_mode)) {
    size_ = size_t(facts.st_size);
    return;
  }
  close(file_);
  require(false, path, " is not a regular file");
}

FileReader::~FileReader() { close(file_); }

void FileReader::read(size_t offset, size_t bytes, void* to) const {
  auto* next = static_cast<char*>(to);
  while (bytes) {
    const ssize_t got = pread(file_, next, std::min(bytes, kMost), off_t(offset));
    if (got < 0 && errno == EINTR) continue;
    require(got >= 0, path_, " cannot be read: ", std::strerror(errno));
    require(got > 0, path_, " was cut short: it ends before byte ", offset + bytes);
    next += got;
    offset += size_t(got);
    bytes -= size_t(got);
  }
}

}  // namespace mlx_moe
