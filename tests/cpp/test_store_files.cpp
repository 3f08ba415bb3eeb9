#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>
#include <functional>

#include "checkpoint_file.h"
#include "store/failure.h"
#include "store/json.h"
#include "store/safetensors.h"
#include "support/error.h"

using namespace mlx_moe;

namespace {

std::string failure_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const StoreFailure& e) {
    return std::string(name_of(e.failure)) + ": " + e.what();
  }
  return "";
}

bool has(const std::string& text, const char* part) { return text.find(part) != text.npos; }

}  // namespace

TEST_CASE("JSON values, and texts that are none") {
  const Json value =
      parse_json(R"( {"a": [1, 2.5, -3, true, null], "b\u00e9\n\ud83d\ude00": "x"} )");
  REQUIRE(value.find("a"));
  CHECK(value.find("a")->array()->size() == 5);
  CHECK(*(*value.find("a")->array())[0].number() == 1);
  CHECK(!(*value.find("a")->array())[1].number());
  CHECK(*value.find("b\xc3\xa9\n\xf0\x9f\x98\x80")->text() == "x");
  CHECK(*parse_json("18446744073709551615").number() == UINT64_MAX);
  for (const char* text :
       {"", "{", "[1", "\"a", "{\"a\" 1}", "{\"a\": 1,}", "[1,]", "1 2", "18446744073709551616",
        "{\"a\": 1, \"a\": 2}", "\"\\x\"", "\"\\ud800\"", "\"\n\"", "nul",
        "[[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]]", "\"\\u12\"", "\"\\"}) {
    CAPTURE(text);
    CHECK_THROWS_AS(parse_json(text), Error);
  }
  // A byte of NUL is no end of the text.
  CHECK_THROWS_AS(parse_json(std::string_view("1\0", 2)), Error);
}

TEST_CASE("headers are checked before anything is read by them") {
  TemporaryFile f;
  const auto t = [](const char* shape, const char* range, const char* dtype = "U8") {
    return std::string("{\"dtype\": \"") + dtype + "\", \"shape\": " + shape +
           ", \"data_offsets\": " + range + "}";
  };
  const std::string good = "{\"a\": " + t("[4]", "[0, 4]") + ", \"b\": " + t("[2]", "[4, 6]") + "}";
  const std::vector<uint8_t> data(6);
  f.write(good, data);
  const auto tensors = read_tensors(File(f.path, false));
  REQUIRE(tensors.size() == 2);
  CHECK(tensors[1].name == "b");
  CHECK(tensors[1].offset == 8 + good.size() + 4);

  const struct {
    std::string header;
    int64_t length;
    size_t bytes;
    const char* says;
  } wrong[] = {
      {good, -1, 5, "cut short"},
      {good, int64_t(good.size() + 7), 6, "would have"},
      {good, int64_t(good.size()) - 1, 6, "no JSON"},
      {good, 1, 6, "would have 1 bytes"},
      {good, int64_t(1) << 40, 6, "would have"},
      {"[]", -1, 6, "no JSON object"},
      {"{\"a\": " + t("[4]", "[0, 4]") + ", \"b\": " + t("[3]", "[3, 6]") + "}", -1, 6, "overlap"},
      {"{\"a\": " + t("[4]", "[0, 4]") + ", \"b\": " + t("[1]", "[1, 2]") + "}", -1, 6, "overlap"},
      {"{\"a\": " + t("[4]", "[4, 0]") + "}", -1, 6, "no range"},
      {"{\"a\": " + t("[5]", "[0, 4]") + "}", -1, 6, "shape and dtype"},
      {"{\"a\": " + t("[2]", "[0, 2]", "F32") + "}", -1, 6, "shape and dtype"},
      {"{\"a\": " + t("[4294967296, 4294967296]", "[0, 0]") + "}", -1, 6, "shape and dtype"},
      {"{\"a\": " + t("[-1]", "[0, 1]") + "}", -1, 6, "whole numbers"},
      {"{\"a\": {\"dtype\": \"U8\"}}", -1, 6, "lacks"},
      {"{\"a\": 1}", -1, 6, "lacks"},
  };
  for (const auto& w : wrong) {
    CAPTURE(w.header);
    f.write(w.header, std::vector<uint8_t>(w.bytes), w.length);
    const std::string found = failure_of([&] { read_tensors(File(f.path, false)); });
    CAPTURE(found);
    CHECK(has(found, "CorruptFile: "));
    CHECK(has(found, w.says));
    CHECK(has(found, f.path.c_str()));
  }
  std::ofstream(f.path, std::ios::trunc) << "abc";
  CHECK(has(failure_of([&] { read_tensors(File(f.path, false)); }), "too short"));
  CHECK(has(failure_of([&] { File("/no/such/file", false); }), "ReadFailed"));
  CHECK(has(failure_of([&] { File("/tmp", false); }), "not a regular file"));
}

TEST_CASE("segments arrive whole, in the page cache and past it") {
  TemporaryFile f;
  const auto bytes = random_bytes((3 << 20) + 1234, 1);
  std::ofstream(f.path, std::ios::binary)
      .write(reinterpret_cast<const char*>(bytes.data()), std::streamsize(bytes.size()));
  for (bool direct : {false, true}) {
    const File file(f.path, direct);
    std::mt19937 random(2);
    for (int round = 0; round < 50; ++round) {
      // Rising segments with gaps, that may end at the file's end.
      std::vector<Segment> segments;
      std::vector<std::vector<uint8_t>> to;
      uint64_t at = random() % 10000;
      if (round % 5 == 0) at = bytes.size() - 5000;
      while (segments.size() < 6 && at < bytes.size()) {
        size_t size = 1 + random() % (round % 3 ? 3000 : 1500000);
        size = std::min<size_t>(size, bytes.size() - at);
        to.emplace_back(size);
        segments.push_back({at, size, to.back().data()});
        at += size + random() % 5000;
      }
      file.read(segments);
      for (size_t i = 0; i < segments.size(); ++i)
        REQUIRE(!std::memcmp(to[i].data(), bytes.data() + segments[i].offset, to[i].size()));
    }
  }
}

namespace {

std::atomic<int> calls{0};

ssize_t in_small_parts(int file, void* to, size_t size, off_t at) {
  if (++calls % 3 == 0) {
    errno = EINTR;
    return -1;
  }
  return pread(file, to, std::min<size_t>(size, 4096 + 100), at);
}
ssize_t broken(int, void*, size_t, off_t) {
  errno = EIO;
  return -1;
}
ssize_t ended(int, void*, size_t, off_t) { return 0; }
ssize_t no_direct(int file, void* to, size_t size, off_t at) {
#if defined(O_DIRECT)
  if (fcntl(file, F_GETFL) & O_DIRECT) {
    errno = EINVAL;
    return -1;
  }
#endif
  return pread(file, to, size, at);
}

struct ReadBy {
  explicit ReadBy(File::Pread call) { File::pread_call = call; }
  ~ReadBy() { File::pread_call = &::pread; }
};

}  // namespace

TEST_CASE("reads that fail, stop short or are interrupted") {
  TemporaryFile f;
  const auto bytes = random_bytes(300000, 3);
  std::ofstream(f.path, std::ios::binary)
      .write(reinterpret_cast<const char*>(bytes.data()), std::streamsize(bytes.size()));
  for (bool direct : {false, true}) {
    const File file(f.path, direct);
    std::vector<uint8_t> to(200000);
    const Segment s{12345, to.size(), to.data()};
    const auto read = [&] { file.read({&s, 1}); };
    const auto right = [&] { return !std::memcmp(to.data(), bytes.data() + 12345, to.size()); };
    {
      ReadBy small(in_small_parts);
      read();
      CHECK(right());
    }
    {
      ReadBy failing(broken);
      CHECK(has(failure_of(read), "ReadFailed: "));
      CHECK(has(failure_of(read), f.path.c_str()));
    }
    {
      ReadBy failing(ended);
      CHECK(has(failure_of(read), "ended at byte"));
    }
    {
      ReadBy refused(no_direct);
      std::fill(to.begin(), to.end(), uint8_t(0));
      read();
      CHECK(right());
      CHECK(!file.direct());
    }
  }
}

TEST_CASE("a file that changes is not read as what it was") {
  TemporaryFile f, other;
  std::ofstream(f.path) << std::string(10000, 'a');
  std::vector<uint8_t> to(100);
  const Segment s{0, to.size(), to.data()}, last{9900, 100, to.data()};
  for (bool direct : {false, true}) {
    std::ofstream(f.path) << std::string(10000, 'a');
    {  // written in place
      const File file(f.path, direct);
      std::ofstream(f.path, std::ios::in | std::ios::out) << "b";
      struct timespec times[2] = {{0, UTIME_OMIT}, {1, 0}};
      utimensat(AT_FDCWD, f.path.c_str(), times, 0);
      CHECK(has(failure_of([&] { file.read({&s, 1}); }), "FileChanged"));
      CHECK(has(failure_of([&] { file.check_path(); }), "FileChanged"));
    }
    {  // cut
      const File file(f.path, direct);
      REQUIRE(truncate(f.path.c_str(), 5000) == 0);
      CHECK(has(failure_of([&] { file.read({&last, 1}); }), "FileChanged"));
    }
    {  // replaced: what is open stays what it was
      const File file(f.path, direct);
      std::ofstream(other.path) << std::string(5000, 'c');
      REQUIRE(rename(other.path.c_str(), f.path.c_str()) == 0);
      file.read({&s, 1});
      CHECK(to[1] == 'a');
      CHECK(has(failure_of([&] { file.check_path(); }), "replaced"));
      REQUIRE(unlink(f.path.c_str()) == 0);
      CHECK(has(failure_of([&] { file.check_path(); }), "gone"));
    }
  }
}
