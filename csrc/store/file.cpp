#include "store/file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "store/failure.h"
#include "support/scratch.h"

namespace mlx_moe {

namespace {

constexpr size_t kBlock = 4096;     // what O_DIRECT wants offsets and addresses to be multiples of
constexpr size_t kChunk = 1 << 20;  // read at a time past the page cache
constexpr size_t kScratchSlot = 5;  // of this thread's buffers; reader threads compute nothing

int64_t modified_at(const struct stat& s) {
#if defined(__APPLE__)
  return int64_t(s.st_mtimespec.tv_sec) * 1000000000 + s.st_mtimespec.tv_nsec;
#else
  return int64_t(s.st_mtim.tv_sec) * 1000000000 + s.st_mtim.tv_nsec;
#endif
}

int open_direct(const std::string& path) {
#if defined(__APPLE__)
  int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file >= 0) fcntl(file, F_NOCACHE, 1);
  return file;
#else
  return open(path.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT);
#endif
}

}  // namespace

std::atomic<File::Pread> File::pread_call{&::pread};

File::File(std::string path, bool direct) : path_(std::move(path)) {
  file_ = open(path_.c_str(), O_RDONLY | O_CLOEXEC);
  if (file_ < 0) fail(Failure::read, path_, " cannot be opened: ", std::strerror(errno));
  struct stat facts;
  if (fstat(file_, &facts) != 0 || !S_ISREG(facts.st_mode)) {
    close(file_);
    fail(Failure::read, path_, " is not a regular file");
  }
  size_ = uint64_t(facts.st_size);
  device_ = uint64_t(facts.st_dev);
  inode_ = uint64_t(facts.st_ino);
  modified_ = modified_at(facts);
  if (!direct) return;
  direct_file_ = open_direct(path_);
  struct stat again;
  // A file that was put in its place just now is read through the page cache, the old one.
  direct_ = direct_file_ >= 0 && fstat(direct_file_, &again) == 0 &&
            uint64_t(again.st_dev) == device_ && uint64_t(again.st_ino) == inode_;
}

File::~File() {
  close(file_);
  if (direct_file_ >= 0) close(direct_file_);
}

void File::read(std::span<const Segment> segments) const {
  if (direct_)
    read_direct(segments);
  else
    read_cached(segments);
  check_unchanged();
}

// The kernel is told of all that will be read: on its own it would read a little ahead at a time.
void File::read_cached(std::span<const Segment> segments) const {
#if defined(POSIX_FADV_WILLNEED)
  const uint64_t begin = segments.front().offset;
  const uint64_t end = segments.back().offset + segments.back().size;
  posix_fadvise(file_, off_t(begin), off_t(end - begin), POSIX_FADV_WILLNEED);
#endif
  for (const Segment& s : segments) read_segment(s);
}

void File::read_segment(const Segment& s) const {
  for (size_t done = 0; done < s.size;) {
    const ssize_t got = read_some(file_, s.to + done, s.size - done, s.offset + done);
    if (got <= 0) failed(got, s.offset + done, s.size - done);
    done += size_t(got);
  }
}

// Whole blocks go through a buffer of this thread's, so that slots need no padding and what lies
// together in the file is one read.
void File::read_direct(std::span<const Segment> segments) const {
  const uint64_t end = segments.back().offset + segments.back().size;
  auto* buffer = static_cast<uint8_t*>(scratch(kScratchSlot, kChunk));
  size_t next = 0;
  for (uint64_t at = segments.front().offset / kBlock * kBlock; at < end;) {
    const size_t wanted = size_t(std::min<uint64_t>(kChunk, end - at));
    const size_t whole = (wanted + kBlock - 1) / kBlock * kBlock;
    ssize_t read = read_some(direct_file_, buffer, whole, at);
    if (read < 0 && errno == EINVAL) {
      direct_ = false;  // the filesystem took the flag, but not the reads
      read_cached(segments);
      return;
    }
    // A part of a block is of use at the end only; elsewhere it is read again.
    if (read > 0 && size_t(read) < wanted) read = read / ssize_t(kBlock) * ssize_t(kBlock);
    if (read <= 0) failed(read, at, wanted);
    const size_t got = std::min(size_t(read), wanted);
    for (size_t i = next; i < segments.size() && segments[i].offset < at + got; ++i) {
      const Segment& s = segments[i];
      const uint64_t from = std::max(s.offset, at), to = std::min(s.offset + s.size, at + got);
      if (from < to) std::memcpy(s.to + (from - s.offset), buffer + (from - at), size_t(to - from));
      if (s.offset + s.size <= at + got) next = i + 1;
    }
    at += got;
  }
}

ssize_t File::read_some(int file, void* to, size_t size, uint64_t offset) {
  for (;;) {
    const ssize_t got = pread_call.load()(file, to, size, off_t(offset));
    if (got >= 0 || errno != EINTR) return got;
  }
}

void File::failed(ssize_t got, uint64_t offset, size_t size) const {
  if (got < 0)
    fail(Failure::read, path_, " cannot be read at byte ", offset, ": ", std::strerror(errno));
  check_unchanged();
  fail(Failure::read, path_, " ended at byte ", offset, ", expected ", size, " bytes more");
}

void File::check_unchanged() const {
  struct stat now;
  if (fstat(file_, &now) != 0)
    fail(Failure::read, path_, " cannot be read any more: ", std::strerror(errno));
  if (uint64_t(now.st_size) != size_ || modified_at(now) != modified_)
    fail(Failure::changed, path_, " was written to while it was in use; load the model again");
}

void File::check_path() const {
  struct stat now;
  if (stat(path_.c_str(), &now) != 0)
    fail(Failure::changed, path_, " is gone (", std::strerror(errno), "); load the model again");
  if (uint64_t(now.st_dev) != device_ || uint64_t(now.st_ino) != inode_)
    fail(Failure::changed, path_, " was replaced by another file; load the model again");
  check_unchanged();
}

}  // namespace mlx_moe
