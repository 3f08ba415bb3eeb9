#include <doctest/doctest.h>
#include <sys/wait.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <functional>
#include <thread>

#include "checkpoint_file.h"
#include "experts/ffn.h"
#include "random_matrix.h"
#include "store/failure.h"
#include "store/store.h"
#include "support/error.h"

using namespace mlx_moe;

namespace {

constexpr size_t kLayers = 3, kExperts = 8, kRows = 24, kCols = 40;  // a slot is one page

std::vector<LayerSource> sources(size_t layers = kLayers) {
  std::vector<LayerSource> found;
  for (size_t l = 0; l < layers; ++l) {
    MatrixSource m;
    m.names[kWeight] = {"layer" + std::to_string(l) + ".weight"};
    found.push_back({"layer" + std::to_string(l), {m}});
  }
  return found;
}

struct Fixture {
  TemporaryFile file;
  std::vector<TensorEntry> tensors = dense_layers(kLayers, kExperts, kRows, kCols);
  size_t page = Bank::whole_pages(1);

  Fixture() { file.write(tensors); }

  std::shared_ptr<ExpertStore> open(size_t slots, const std::string& policy = "lru",
                                    bool direct = false, double timeout = 30, size_t readers = 3) {
    StoreOptions options;
    options.budget = slots * page;
    options.policy.name = policy;
    options.policy.period = 20;
    options.direct = direct;
    options.timeout = timeout;
    options.readers = readers;
    return std::make_shared<ExpertStore>(std::vector{file.path}, sources(), options);
  }

  bool right(const HeldExperts& held, size_t layer, uint32_t expert) const {
    const Matrix& m = held.matrices()[0];
    return m.holds(expert) &&
           !std::memcmp(m.row(expert, 0),
                        tensors[1 + layer].bytes.data() + expert * kRows * kCols * 2,
                        kRows * kCols * 2);
  }
};

std::optional<Failure> kind_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const StoreFailure& e) {
    return e.failure;
  }
  return std::nullopt;
}

void settle(const ExpertStore& store) {
  for (int i = 0; i < 5000 && !store.idle(); ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  REQUIRE(store.idle());
}

std::atomic<int> failing{0}, reads{0};
std::atomic<bool> gate{true};

ssize_t counted(int file, void* to, size_t size, off_t at) {
  ++reads;
  while (!gate) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  if (failing > 0 && failing-- > 0) {
    errno = EIO;
    return -1;
  }
  return pread(file, to, size, at);
}

struct Counted {
  Counted() {
    failing = 0, reads = 0, gate = true;
    File::pread_call = counted;
  }
  ~Counted() {
    gate = true;
    File::pread_call = &::pread;
  }
};

}  // namespace

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

  gate = false;
  reads = 0;
  store->prefetch(1, std::vector<uint32_t>{0, 1, 2, 3}, false);
  store->prefetch(2, std::vector<uint32_t>{0, 1, 2, 3}, true);
  while (reads == 0) std::this_thread::yield();
  store->cancel_prefetch();
  gate = true;
  settle(*store);
  CHECK(store->resident(1).size() + store->resident(2).size() == 1);
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
          if (i % 20 == 0) store->cancel_prefetch();
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

TEST_CASE("tensors that do not make a layer are named") {
  Fixture f;
  StoreOptions options;
  options.budget = 1 << 20;
  const auto failure = [&](std::vector<LayerSource> layers) {
    try {
      ExpertStore(std::vector{f.file.path}, layers, options);
    } catch (const StoreFailure& e) {
      return std::string(e.what());
    }
    return std::string();
  };
  auto s = sources(1);
  s[0].matrices[0].names[kWeight] = {"nowhere"};
  CHECK(failure(s).find("layer0: there is no tensor 'nowhere'") == 0);
  s = sources(1);
  s[0].matrices[0].mode = Mode::affine;
  s[0].matrices[0].bits = 4, s[0].matrices[0].group = 64;
  CHECK(failure(s).find("missing") != std::string::npos);
  s[0].matrices[0].names[kScales] = s[0].matrices[0].names[kBiases] = {"layer1.weight"};
  CHECK(failure(s).find("is BF16") != std::string::npos);
  s = sources(1);
  s[0].matrices[0].names[kAdded] = {"layer1.weight"};
  CHECK(failure(s).find("expected [24]") != std::string::npos);
  s[0].matrices[0].names[kAdded] = {"odd"};
  CHECK(failure(s).find("odd") != std::string::npos);
  CHECK(failure(sources(3)).empty());
  options.policy.name = "best";
  CHECK_THROWS_AS(ExpertStore(std::vector{f.file.path}, sources(), options), Error);
  options.policy = {"lfu", 1, {1, 2}, {}};
  CHECK_THROWS_AS(ExpertStore(std::vector{f.file.path}, sources(), options), Error);
  options.policy = {"lfu", 0, {}, {}};
  CHECK_THROWS_AS(ExpertStore(std::vector{f.file.path}, sources(), options), Error);
  options.policy = {"pinned", 0, {}, {24}};
  CHECK_THROWS_AS(ExpertStore(std::vector{f.file.path}, sources(), options), Error);
}

TEST_CASE("kernels read scattered experts as they read stacked ones") {
  std::mt19937 random(3);
  constexpr size_t experts = 5, rows = 64, cols = 128, tokens = 7, k = 2;
  for (const Format& format : kFormats) {
    CAPTURE(format.name);
    RandomMatrix gate(format, experts, rows, cols, random), up(format, experts, rows, cols, random),
        down(format, experts, cols, rows % size_t(format.group ? format.group : 1) ? cols : rows,
             random);
    if (down.m.cols != rows) continue;
    down.add_bias(Scalar::bf16);
    std::vector<std::vector<ExpertArrays>> tables;
    const auto scattered = [&](Matrix m) {
      auto& table = tables.emplace_back(experts);
      for (size_t e = 0; e < experts; ++e) {
        if (e == 3) continue;
        table[e] = {m.row(e, 0), m.scales ? m.row_scales(e, 0) : nullptr,
                    m.biases ? m.row_biases(e, 0) : nullptr,
                    m.added ? m.added + e * m.rows * size_of(m.added_type) : nullptr,
                    m.global_scale ? m.global_scale + e : nullptr};
      }
      m.table = table.data();
      m.weight = nullptr;
      return m;
    };
    tables.reserve(3);
    const Matrix g = scattered(gate.m), u = scattered(up.m), d = scattered(down.m);
    std::vector<uint16_t> x(tokens * cols);
    for (auto& v : x) v = f32_to_bf16(float(int(random() % 200) - 100) / 100);
    std::vector<uint32_t> ids(tokens * k);
    for (auto& id : ids) id = random() % 3 == 0 ? 4 : uint32_t(random() % 3);
    std::vector<float> scores(tokens * k);
    for (auto& s : scores) s = float(random() % 100) / 100;
    const Input in{x.data(), Scalar::bf16, tokens, cols};
    const Input weights{scores.data(), Scalar::f32, tokens, k};
    const Routing r{ids.data(), tokens, k};
    std::vector<uint16_t> a(tokens * k * cols), b(a.size()), sum(tokens * cols), same(sum.size());
    const Output ya{a.data(), Scalar::bf16, tokens * k, cols};
    const Output yb{b.data(), Scalar::bf16, tokens * k, cols};
    swiglu(in, r, gate.m, up.m, down.m, ya);
    swiglu(in, r, g, u, d, yb);
    CHECK(a == b);
    swiglu_combine(in, r, weights, gate.m, up.m, down.m, {sum.data(), Scalar::bf16, tokens, cols});
    weighted_sum({b.data(), Scalar::bf16, tokens * k, cols}, weights, g, u, d,
                 {same.data(), Scalar::bf16, tokens, cols});
    CHECK(sum == same);
    ids[0] = 3;  // absent
    CHECK_THROWS_AS(swiglu(in, r, g, u, d, yb), Error);
    CHECK_THROWS_AS(grouped(in, r, g, {b.data(), Scalar::bf16, tokens * k, rows}), Error);
  }
}
