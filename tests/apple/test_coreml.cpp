#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <thread>

#include "programs.h"
#include "support/error.h"

using namespace mlx_moe;
using namespace std::chrono_literals;

namespace {

bool has(const Status& status, const char* part) {
  return status.message.find(part) != std::string::npos;
}

// Everything is gone once the test is over.
struct NothingLeft {
  ~NothingLeft() { CHECK(shim::live_objects() == 0); }
};

}  // namespace

TEST_CASE("tiles of every capacity come back right, on surfaces and on pages") {
  NothingLeft after;
  for (bool surfaces : {true, false})
    for (size_t capacity : kCapacities) {
      CAPTURE(surfaces);
      CAPTURE(capacity);
      Apple apple([](shim::Model&) {}, 4, surfaces);
      REQUIRE(apple.loaded.message == "");
      for (int i = 0; i < 3; ++i) {
        Tile tile(capacity, i);
        const auto outcome = apple.run(std::vector{tile.request(apple.number)});
        CHECK(outcome[0].status.message == "");
        CHECK(tile.right());
      }
      const auto counts = apple.executor->counts();
      CHECK(counts.surfaces == (surfaces ? 2 : 0));  // one in, one out, used again
      CHECK(counts.pages == (surfaces ? 0 : 2));
      CHECK(counts.copied == 0);
      CHECK(shim::seen().predictions == 3);
      CHECK(shim::seen().locked == 0);
      CHECK(shim::seen().units == 0);
    }
}

TEST_CASE("where there are no surfaces, pages do") {
  NothingLeft after;
  for (bool arrays : {true, false}) {
    Apple apple;
    shim::settings().surfaces = arrays;
    shim::settings().surface_arrays = !arrays;
    Tile tile(32);
    CHECK(apple.run(std::vector{tile.request(apple.number)})[0].status.ok());
    CHECK(tile.right());
    CHECK(apple.executor->counts().pages == 2);
  }
}

TEST_CASE("a result that is not in our buffer is copied, whatever its strides") {
  NothingLeft after;
  Apple apple([](shim::Model& m) { m.takes_backing = false; });
  Tile tile(64);
  CHECK(apple.run(std::vector{tile.request(apple.number)})[0].status.ok());
  CHECK(tile.right());
  CHECK(apple.executor->counts().copied == 1);
}

TEST_CASE("several tiles of a program are one batch") {
  NothingLeft after;
  for (bool backing : {true, false}) {
    Apple apple([&](shim::Model& m) { m.takes_backing = backing; });
    std::vector<Tile> tiles;
    for (int i = 0; i < 4; ++i) tiles.emplace_back(32, i);
    std::vector<Request> requests;
    for (Tile& t : tiles) requests.push_back(t.request(apple.number));
    for (const Outcome& o : apple.run(requests)) CHECK(o.status.message == "");
    for (const Tile& t : tiles) CHECK(t.right());
    CHECK(shim::seen().batches == 1);
    CHECK(shim::seen().predictions == 0);
    CHECK(apple.executor->counts().copied == 4);
  }
}

TEST_CASE("submitting does not wait for predictions or batches") {
  NothingLeft after;
  for (size_t count : {1, 3}) {
    Apple apple([](shim::Model& m) { m.duration = 50ms; });
    std::vector<Tile> tiles(count, Tile(32));
    std::vector<Request> requests;
    for (Tile& t : tiles) requests.push_back(t.request(apple.number));
    const auto start = std::chrono::steady_clock::now();
    const auto pending = apple.queue->submit(requests);
    CHECK(std::chrono::steady_clock::now() - start < 50ms);
    for (const Outcome& o : pending->wait()) CHECK(o.status.ok());
  }
}

TEST_CASE("no more than in_flight tiles are with Core ML at once, for any callers") {
  NothingLeft after;
  Apple apple([](shim::Model& m) { m.duration = 1ms; }, 3);
  std::atomic<int> wrong = 0;
  const auto caller = [&](int seed) {
    for (int i = 0; i < 10; ++i) {
      Tile a(32, seed), b(64, seed + i), c(32, i);
      const std::vector<Request> requests{a.request(apple.number), b.request(apple.number),
                                          c.request(apple.number)};
      for (const Outcome& o : apple.run(requests)) wrong += !o.status.ok();
      wrong += !a.right() + !b.right() + !c.right();
    }
  };
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) threads.emplace_back(caller, i);
  for (auto& t : threads) t.join();
  CHECK(wrong == 0);
  CHECK(shim::seen().most_at_once > 1);
  CHECK(shim::seen().most_at_once <= 3);
  CHECK(apple.queue->counts().most_in_flight <= 3);
  CHECK(apple.executor->counts().surfaces <= 2 * 3 * 2);  // shapes, in flight, in and out
}

TEST_CASE("programs that do not load say which file and why, and leave nothing") {
  NothingLeft after;
  const struct {
    void (*change)(shim::Model&);
    const char* part;
  } cases[] = {
      {[](shim::Model& m) { m.loads = false; }, "execution plan (com.apple.CoreML -14)"},
      {[](shim::Model& m) { m.raises_on_load = true; }, "the model is upside down"},
      {[](shim::Model& m) { m.input[3] += 1; }, "input x is [1, 40, 1, 97]"},
      {[](shim::Model& m) { m.output[1] = 7; }, "output y is [1, 7, 1, 96]"},
      {[](shim::Model& m) { m.input_name = "image"; }, "input x is no array"},
      {[](shim::Model& m) { m.type = 0x10020; }, "of type 65568, expected"},
  };
  for (const auto& [change, part] : cases) {
    Apple apple(change);
    CAPTURE(apple.loaded.message);
    CHECK(has(apple.loaded, part));
    CHECK(has(apple.loaded, "/models/good.mlmodelc"));
    CHECK(apple.executor->shape(0) == nullptr);
  }
  Apple apple;
  size_t number = 99;
  CoreMLProgram gone = apple.program;
  gone.functions[32].compiled = "/models/gone.mlmodelc";
  CHECK(has(apple.executor->load(gone, number), "gone.mlmodelc does not load"));
  gone.functions.clear();
  CHECK_FALSE(apple.executor->load(gone, number).ok());
  CHECK(number == 99);
}

TEST_CASE("a model of its own for each capacity, without functions, as for macOS 14") {
  NothingLeft after;
  Apple apple([](shim::Model& m) { m.operations = {{"ios17.conv", "ANE"}}; });
  CoreMLProgram single = apple.program;
  for (size_t capacity : kCapacities) {
    single.functions[capacity] = {"/models/" + std::to_string(capacity), ""};
    shim::Model own = model(capacity);
    own.operations = {{"ios17.conv", "ANE"}, {"ios17.conv", capacity == 64 ? "CPU" : "ANE"}};
    shim::install(single.functions[capacity].compiled, "", std::move(own));
  }
  size_t number = 99;
  CHECK(apple.executor->load(single, number).message == "");
  CHECK(number == 1);
  for (size_t capacity : kCapacities)
    for (size_t count : {1, 3}) {
      std::vector<Tile> tiles(count, Tile(capacity));
      std::vector<Request> requests;
      for (Tile& t : tiles) requests.push_back(t.request(number));
      for (const Outcome& o : apple.run(requests)) CHECK(o.status.message == "");
      for (const Tile& t : tiles) CHECK(t.right());
    }
  CHECK(shim::seen().batches == 2);
  for (size_t capacity : kCapacities) {
    Placement placement;
    CHECK(coreml_placement(single.functions[capacity], placement).message == "");
    CHECK(placement.ane.products == (capacity == 64 ? 1 : 2));
    CHECK(placement.cpu.products == (capacity == 64 ? 1 : 0));
  }
  shim::install(single.functions[64].compiled, "", model(32));
  CHECK(has(apple.executor->load(single, number), "/models/64: input x is [1, 40, 1, 96]"));
  CHECK(number == 1);
}

TEST_CASE("a tile of another shape than its program's is refused before Core ML sees it") {
  NothingLeft after;
  Apple apple;
  Tile tile(32);
  const struct {
    size_t Dispatch::* changed;
    size_t value;
    const char* part;
  } cases[] = {
      {&Dispatch::groups, 2, "a tile of [2, 32, 40]"},
      {&Dispatch::capacity, 96, "a tile of [3, 96, 40]"},
      {&Dispatch::width, 41, "a tile of [3, 32, 41]"},
  };
  for (const auto& [changed, value, part] : cases) {
    Request request = tile.request(apple.number);
    request.tile.*changed = value;
    CHECK_THROWS_WITH_AS(apple.queue->submit(std::vector{request}),
                         doctest::Contains("its static shape is [3, 32 or 64, 40]"), Error);
    CHECK_THROWS_WITH_AS(apple.queue->submit(std::vector{request}), doctest::Contains(part), Error);
  }
  CHECK_THROWS_WITH_AS(apple.queue->submit(std::vector{tile.request(7)}), "there is no program 7",
                       Error);
  CHECK(shim::seen().predictions == 0);
  CHECK(apple.run(std::vector{tile.request(apple.number)})[0].status.ok());
  CHECK(tile.right());
}

TEST_CASE("what is under way when the queue goes is finished first") {
  NothingLeft after;
  for (size_t count : {1, 3}) {
    std::vector<Tile> tiles(count, Tile(32));
    std::shared_ptr<Pending> pending;
    {
      Apple apple([](shim::Model& m) { m.duration = 20ms; });
      std::vector<Request> requests;
      for (Tile& t : tiles) requests.push_back(t.request(apple.number));
      pending = apple.queue->submit(requests);
    }
    for (const Outcome& o : pending->wait()) CHECK(o.status.ok());
    for (const Tile& t : tiles) CHECK(t.right());
  }
}

TEST_CASE("predictions and batches that fail are outcomes, and the next ones go on") {
  NothingLeft after;
  const struct {
    void (*change)(shim::Model&);
    const char* part;
  } cases[] = {
      {[](shim::Model& m) { m.predicts = false; },
       "Error computing the outputs (com.apple.CoreML 5)"},
      {[](shim::Model& m) { m.raises = true; }, "an input is missing"},
      {[](shim::Model& m) { m.raises_on_read = true; }, "failed: the result y is gone"},
      {[](shim::Model& m) { m.given = {1, kWidth, 1, 5}; }, "of another shape"},
  };
  for (const auto& [change, part] : cases)
    for (size_t count : {1, 3}) {
      CAPTURE(part);
      CAPTURE(count);
      Apple apple(change);
      std::vector<Tile> tiles(count, Tile(32));
      std::vector<Request> requests;
      for (Tile& t : tiles) requests.push_back(t.request(apple.number));
      for (int again = 0; again < 2; ++again)
        for (const Outcome& o : apple.run(requests)) {
          CHECK(has(o.status, part));
          CHECK_FALSE(o.finite);
        }
      shim::install("/models/good.mlmodelc", "c32", model(32));
      size_t number = 99;
      REQUIRE(apple.executor->load(apple.program, number).ok());
      Tile good(32);
      CHECK(apple.run(std::vector{good.request(number)})[0].status.ok());
      CHECK(good.right());
    }
}

TEST_CASE("a batch that gives too few results fails") {
  NothingLeft after;
  Apple apple([](shim::Model& m) { m.last_missing = true; });
  std::vector<Tile> tiles(2, Tile(32));
  const std::vector<Request> requests{tiles[0].request(apple.number),
                                      tiles[1].request(apple.number)};
  for (const Outcome& o : apple.run(requests)) CHECK(has(o.status, "a batch of 2 gave 1 results"));
}

TEST_CASE("a forked child is told that Core ML does not work there") {
  NothingLeft after;
  Apple apple;
  Tile tile(32);
  const pid_t child = fork();
  if (child == 0) {
    Status said;
    const Dispatch dispatch = tile.request(apple.number).tile;
    apple.executor->start(apple.number, {&dispatch, 1}, [&](const Status& s) { said = s; });
    _exit(has(said, "forked") ? 0 : 1);
  }
  int status = -1;
  waitpid(child, &status, 0);
  CHECK(status == 0);
}

TEST_CASE("a forked child lets go of an executor whose batch thread is its parent's") {
  NothingLeft after;
  Apple apple;
  std::vector<Tile> tiles(2, Tile(32));
  const std::vector<Request> requests{tiles[0].request(apple.number),
                                      tiles[1].request(apple.number)};
  for (const Outcome& o : apple.run(requests)) CHECK(o.status.ok());
  REQUIRE(shim::seen().batches == 1);
  const pid_t child = fork();
  if (child == 0) {
    alarm(10);  // ends a child that waits for the thread
    apple.queue.reset();
    _exit(0);
  }
  int status = -1;
  waitpid(child, &status, 0);
  CHECK(status == 0);
  for (const Outcome& o : apple.run(requests)) CHECK(o.status.ok());
}

TEST_CASE("packages are compiled, or it is said why not") {
  NothingLeft after;
  std::string compiled;
  CHECK(coreml_available().ok());
  CHECK(coreml_compile("/packages/a.mlpackage", compiled).message == "");
  CHECK(compiled == "/packages/a.mlpackage.compiled");
  CHECK(has(coreml_compile("/packages/broken.mlpackage", compiled), "the package is broken"));
  CHECK(has(coreml_compile("/packages/raises.mlpackage", compiled), "no such package"));
}

TEST_CASE("placement counts what Core ML prefers, by unit") {
  NothingLeft after;
  Apple apple([](shim::Model& m) {
    m.operations = {{"const", ""},         {"ios18.conv", "ANE"}, {"ios18.conv", "ANE"},
                    {"ios18.silu", "ANE"}, {"ios18.conv", "GPU"}, {"ios18.concat", "CPU"}};
  });
  Placement placement;
  CHECK(coreml_placement(apple.program.functions[32], placement).message == "");
  CHECK(placement.ane.operations == 3);
  CHECK(placement.ane.products == 2);
  CHECK(placement.gpu.operations == 1);
  CHECK(placement.gpu.products == 1);
  CHECK(placement.cpu.operations == 1);
  CHECK(placement.cpu.products == 0);
  CHECK(placement.other.operations == 0);
  CHECK(has(coreml_placement({"/models/gone.mlmodelc", ""}, placement), "no compute plan"));
}
