#include "support/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "support/error.h"

namespace mlx_moe {

MappedFile::MappedFile(const std::string& path) : path_(path) {
  int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  require(file >= 0, path, " cannot be opened: ", std::strerror(errno));
  struct stat facts;
  bool known = fstat(file, &facts) == 0 && S_ISREG(facts.st_mode);
  size_ = known ? size_t(facts.st_size) : 0;
  void* data = size_ ? mmap(nullptr, size_, PROT_READ, MAP_SHARED, file, 0) : nullptr;
  close(file);
  require(known, path, " is not a regular file");
  require(data != MAP_FAILED, path, " cannot be mapped: ", std::strerror(errno));
  data_ = static_cast<const uint8_t*>(data);
}

MappedFile::~MappedFile() {
  if (data_) munmap(const_cast<uint8_t*>(data_), size_);
}

}  // namespace mlx_moe
