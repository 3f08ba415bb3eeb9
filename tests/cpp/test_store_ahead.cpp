#include "store_fixture.h"

using namespace mlx_moe;

TEST_CASE("reads ahead take free room or stale slots, and never what is held or just read") {
  Fixture f;
  Counted reading;
  auto store = f.open(4);
  {
    auto held = store->acquire(0, std::vector<uint32_t>{0, 1});
  }
  // Both are of the last forward of their layer: two slots are free, and no more may go.
  store->prefetch(1, std::vector<uint32_t>{0, 1, 2, 3}, false);
  settle(*store);
  CHECK(store->resident(0) == std::vector<uint32_t>{0, 1});
  CHECK(store->resident(1) == std::vector<uint32_t>{0, 1});
  CHECK(store->counts().prefetch_issued == 2);
  CHECK(store->counts().prefetch_dropped == 2);
  // A forward of layer 0 that uses only expert 0 leaves 1 stale.
  {
    auto held = store->acquire(0, std::vector<uint32_t>{0});
  }
  store->prefetch(1, std::vector<uint32_t>{2}, true);  // warm: free room only
  settle(*store);
  CHECK(store->resident(1) == std::vector<uint32_t>{0, 1});
  store->prefetch(1, std::vector<uint32_t>{2}, false);
  settle(*store);
  CHECK(store->resident(0).size() == 1);
  CHECK(store->resident(1) == std::vector<uint32_t>{0, 1, 2});
  const int before = reads;
  {
    auto held = store->acquire(1, std::vector<uint32_t>{0, 2});
  }
  CHECK(reads == before);
  const StoreCounts c = store->counts();
  CHECK(c.prefetch_useful == 2);
  CHECK(c.misses == 2);
  CHECK(c.hits == 1);
  // Expert 1 of layer 1 was read for nothing; it goes like any other now.
  {
    auto held = store->acquire(2, std::vector<uint32_t>{0, 1, 2, 3});
  }
  CHECK(store->counts().prefetch_wasted == 1);
}

TEST_CASE("a demand goes before what is read ahead, and takes over what is on its way") {
  Fixture f;
  Counted reading;
  auto store = f.open(24, "lru", false, 30, 2);
  gate = false;
  reads = 0;
  store->prefetch(0, std::vector<uint32_t>{0, 1, 2, 3, 4, 5, 6, 7}, true);
  while (reads == 0) std::this_thread::yield();
  std::shared_ptr<HeldExperts> held;
  std::thread waiting([&] { held = store->acquire(0, std::vector<uint32_t>{0, 7}); });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  gate = true;
  waiting.join();
  CHECK(f.right(*held, 0, 0));
  CHECK(f.right(*held, 0, 7));
  settle(*store);
  CHECK(store->resident(0).size() == kExperts);
  CHECK(reads == int(kExperts));  // each once
  CHECK(store->counts().stall_seconds > 0.01);
}

TEST_CASE("what is warm is left alone while somebody waits for a read; the next layer is not") {
  for (bool warm : {true, false}) {
    CAPTURE(warm);
    Fixture f;
    Counted reading;
    auto store = f.open(24);
    gate = false;
    reads = 0;
    std::thread waiting([&] { store->acquire(0, std::vector<uint32_t>{0}); });
    while (reads == 0) std::this_thread::yield();
    store->prefetch(1, std::vector<uint32_t>{0, 1, 2, 3}, warm);
    for (int i = 0; i < 2000 && !warm && reads == 1; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    CHECK((reads == 1) == warm);
    gate = true;
    waiting.join();
    settle(*store);
    CHECK(store->resident(1).size() == 4);
  }
}
