#include <sys/wait.h>

#include "store_fixture.h"
#include "support/error.h"

using namespace mlx_moe;

TEST_CASE("experts that are acquired hold the bytes of the file, at every budget and policy") {
  Fixture f;
  for (const char* policy : {"lru", "lfu", "pinned"})
    for (bool direct : {false, true})
      for (size_t slots : {2, 3, 7, 24}) {
        auto store = f.open(slots, policy, direct);
        std::mt19937 random(7);
        for (int i = 0; i < 200; ++i) {
          const size_t layer = random() % kLayers;
          const std::vector<uint32_t> ids{uint32_t(random() % kExperts),
                                          uint32_t(random() % kExperts)};
          if (i % 3 == 0) store->prefetch((layer + 1) % kLayers, ids, i % 2);
          auto held = store->acquire(layer, ids);
          for (uint32_t e : ids) REQUIRE(f.right(*held, layer, e));
          REQUIRE(store->counts().resident_bytes <= slots * f.page);
        }
        settle(*store);
        const StoreCounts c = store->counts();
        CHECK(c.hits + c.misses + c.prefetch_useful > 300);
        if (slots == 24) CHECK(c.evictions == 0);
        if (slots == 2) CHECK(c.evictions > 50);
      }
}

TEST_CASE("what is held stays; who needs more waits, and fails by name in the end") {
  Fixture f;
  auto store = f.open(3, "lru", false, 0.2);
  auto held = store->acquire(0, std::vector<uint32_t>{0, 1});
  // One slot is left: layer 1 goes through it, expert by expert.
  for (uint32_t e = 0; e < kExperts; ++e) {
    auto one = store->acquire(1, std::vector{e});
    CHECK(f.right(*one, 1, e));
  }
  CHECK(f.right(*held, 0, 0));
  CHECK(f.right(*held, 0, 1));
  CHECK(kind_of([&] { store->acquire(1, std::vector<uint32_t>{0, 1}); }) == Failure::busy);
  CHECK(kind_of([&] { store->acquire(1, std::vector<uint32_t>{0, 1, 2, 3}); }) == Failure::memory);
  CHECK_THROWS_AS(store->acquire(1, std::vector<uint32_t>{8}), Error);
  CHECK_THROWS_AS(store->acquire(3, std::vector<uint32_t>{0}), Error);
  CHECK_THROWS_AS(store->prefetch(0, std::vector<uint32_t>{8}, true), Error);
  held.reset();
  CHECK(store->acquire(1, std::vector<uint32_t>{0, 1}));
  auto nothing = store->acquire(0, std::vector<uint32_t>{});
  CHECK(!nothing->matrices()[0].holds(0));
}

TEST_CASE("a read that fails is an error for all who wait, and is tried again") {
  Fixture f;
  Counted reading;
  auto store = f.open(6);
  failing = 1;
  CHECK(kind_of([&] { store->acquire(0, std::vector<uint32_t>{0}); }) == Failure::read);
  CHECK(store->resident(0).empty());
  CHECK(store->counts().resident_bytes == 0);
  CHECK(f.right(*store->acquire(0, std::vector<uint32_t>{0}), 0, 0));
  failing = 1;
  store->prefetch(1, std::vector<uint32_t>{3}, false);
  settle(*store);
  CHECK(store->resident(1).empty());
  CHECK(f.right(*store->acquire(1, std::vector<uint32_t>{3}), 1, 3));
  // The file is overwritten with something else while it is open.
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  f.file.write(dense_layers(kLayers, kExperts, kRows, kCols));
  CHECK(kind_of([&] { store->acquire(2, std::vector<uint32_t>{1}); }) == Failure::changed);
  CHECK(kind_of([&] { store->check_files(); }) == Failure::changed);
}

TEST_CASE("close wakes who waits, and what is held outlives the store") {
  Fixture f;
  Counted reading;
  auto store = f.open(6);
  auto held = store->acquire(0, std::vector<uint32_t>{5});
  gate = false;
  reads = 0;
  std::optional<Failure> kind;
  std::thread waiting(
      [&] { kind = kind_of([&] { store->acquire(1, std::vector<uint32_t>{0}); }); });
  while (reads == 0) std::this_thread::yield();
  std::thread closing([&] { store->close(); });
  waiting.join();
  CHECK(kind == Failure::closed);
  gate = true;
  closing.join();
  store->close();
  CHECK(kind_of([&] { store->acquire(0, std::vector<uint32_t>{5}); }) == Failure::closed);
  store.reset();
  CHECK(f.right(*held, 0, 5));
}

TEST_CASE("what poll throws ends a wait and leaves the store usable") {
  Fixture f;
  Counted reading;
  auto store = f.open(4, "lru", false, 30);
  struct Interrupted {};
  gate = false;
  CHECK_THROWS_AS(store->acquire(0, std::vector<uint32_t>{1}, [] { throw Interrupted(); }),
                  Interrupted);
  gate = true;
  CHECK(f.right(*store->acquire(0, std::vector<uint32_t>{1}), 0, 1));
  auto held = store->acquire(0, std::vector<uint32_t>{0, 1, 2});
  CHECK_THROWS_AS(store->acquire(1, std::vector<uint32_t>{1, 2}, [] { throw Interrupted(); }),
                  Interrupted);
}

TEST_CASE("many callers at a time get what they asked for") {
  Fixture f;
  for (size_t slots : {6, 12}) {
    auto store = f.open(slots, "lfu", true);
    std::atomic<int> wrong{0};
    std::vector<std::thread> callers;
    for (uint32_t seed = 0; seed < 3; ++seed)
      callers.emplace_back([&, seed] {
        std::mt19937 random(seed);
        for (int i = 0; i < 150; ++i) {
          const size_t layer = random() % kLayers;
          const std::vector<uint32_t> ids{uint32_t(random() % kExperts),
                                          uint32_t(random() % kExperts)};
          auto held = store->acquire(layer, ids);
          store->prefetch((layer + 1) % kLayers, ids, random() % 2);
          for (uint32_t e : ids) wrong += !f.right(*held, layer, e);
          store->counts();
        }
      });
    for (auto& caller : callers) caller.join();
    CHECK(wrong == 0);
    store.reset();  // with reads ahead still under way
  }
}

TEST_CASE("a forked child is told, and ends without harm") {
  Fixture f;
  auto store = f.open(4);
  auto held = store->acquire(0, std::vector<uint32_t>{1});
  const pid_t child = fork();
  if (child == 0) {
    const bool told =
        kind_of([&] { store->acquire(0, std::vector<uint32_t>{1}); }) == Failure::closed;
    const bool readable = f.right(*held, 0, 1);
    held.reset();
    store.reset();
    _exit(told && readable ? 0 : 1);
  }
  int status = 1;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(status == 0);
}
