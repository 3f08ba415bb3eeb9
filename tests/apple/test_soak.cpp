#include <doctest/doctest.h>
#include <unistd.h>

#include <fstream>

#include "programs.h"

using namespace mlx_moe;

namespace {

size_t resident_bytes() {
  size_t all = 0, resident = 0;
  std::ifstream("/proc/self/statm") >> all >> resident;
  return resident * size_t(sysconf(_SC_PAGESIZE));
}

}  // namespace

TEST_CASE("memory stays flat over 20,000 calls, every tenth of which fails") {
  {
    Apple apple;
    CoreMLProgram failing = apple.program;
    for (size_t capacity : kCapacities) {
      shim::Model own = model(capacity);
      own.predicts = false;
      failing.functions[capacity] = {"/models/failing" + std::to_string(capacity), ""};
      shim::install(failing.functions[capacity].compiled, "", std::move(own));
    }
    size_t fails = 0;
    REQUIRE(apple.executor->load(failing, fails).ok());
    std::vector<Tile> tiles(2, Tile(32));
    const auto calls = [&](int count) {
      int wrong = 0;
      for (int i = 0; i < count; ++i) {
        std::vector<Request> requests;
        const bool good = i % 20 < 18;  // of the others one is a batch
        for (int j = 0; j < 1 + i % 2; ++j)
          requests.push_back(tiles[j].request(good ? apple.number : fails));
        for (const Outcome& o : apple.run(requests)) wrong += o.status.ok() != good;
      }
      return wrong;
    };
    CHECK(calls(2000) == 0);
    const size_t before = resident_bytes();
    CHECK(calls(20000) == 0);
    const size_t after = resident_bytes();
    const double grown = (double(after) - double(before)) / (1 << 20);
    MESSAGE("grown by ", grown, " MiB, of ", before >> 20);
    CHECK(grown < 1);
    CHECK(tiles[0].right());
    CHECK(tiles[1].right());
  }
  CHECK(shim::live_objects() == 0);
}
