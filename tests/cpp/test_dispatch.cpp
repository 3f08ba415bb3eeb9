#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "blob_program.h"
#include "dispatch/host.h"
#include "dispatch/queue.h"
#include "support/error.h"

using namespace mlx_moe;
using namespace std::chrono_literals;

namespace {

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }
double silu(double x) { return x * sigmoid(x); }
double clip(double x, double limit) { return std::clamp(x, -limit, limit); }
double gelu_erf(double x) { return x * (1 + std::erf(x / std::sqrt(2.0))) / 2; }
double gelu_tanh(double x) {
  return x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x))) / 2;
}

struct Case {
  const char* name;
  std::map<std::string, float> parameters;
  BlobProgram::Function function;
};

// The formulas of mlx-lm's modules; limits small enough to bite.
const std::vector<Case> kActivations = {
    {"swiglu", {}, [](double g, double u) { return silu(g) * u; }},
    {"swiglu_oai",
     {{"alpha", 1.702f}, {"limit", 0.5f}},
     [](double g, double u) {
       g = std::min(g, 0.5);
       return (clip(u, 0.5) + 1) * g * sigmoid(double(1.702f) * g);
     }},
    {"swiglu_clamped_inputs",
     {{"limit", 0.5f}},
     [](double g, double u) { return silu(std::min(g, 0.5)) * clip(u, 0.5); }},
    {"swiglu_clamped",
     {{"limit", 0.25f}},
     [](double g, double u) { return std::min(silu(g), 0.25) * clip(u, 0.25); }},
    {"situ",
     {{"beta", 0.5f}},
     [](double g, double u) { return 0.5 * std::tanh(g / 0.5) * sigmoid(g) * u; }},
    {"situ",
     {{"beta", 0.5f}, {"linear_beta", 2.0f}},
     [](double g, double u) { return std::tanh(g / 0.5) * sigmoid(g) * std::tanh(u / 2); }},
    {"geglu_tanh", {}, [](double g, double u) { return gelu_tanh(g) * u; }},
    {"geglu_erf", {}, [](double g, double u) { return gelu_erf(g) * u; }},
    {"reglu", {}, [](double g, double u) { return std::max(g, 0.0) * u; }},
    {"silu", {}, [](double, double u) { return silu(u); }},
    {"gelu_tanh", {}, [](double, double u) { return gelu_tanh(u); }},
    {"gelu_erf", {}, [](double, double u) { return gelu_erf(u); }},
    {"gelu_sigmoid", {}, [](double, double u) { return u * sigmoid(double(1.702f) * u); }},
    {"relu", {}, [](double, double u) { return std::max(u, 0.0); }},
    {"relu2", {}, [](double, double u) { return std::max(u, 0.0) * std::max(u, 0.0); }},
};

// A queue over a host executor with one program.
struct Host {
  BlobProgram blob;
  std::unique_ptr<Queue> queue;
  size_t program;

  explicit Host(const Case& c = kActivations[0], bool int8 = false, bool biases = false,
                std::chrono::duration<double> dispatch = {}, size_t in_flight = 4)
      : blob(3, 64, 32, c.name, c.parameters, int8, biases, c.function) {
    auto host = std::make_unique<HostExecutor>(dispatch);
    program = host->load(blob.program);
    queue = std::make_unique<Queue>(std::move(host), in_flight);
  }

  Dispatch tile(const std::vector<uint16_t>& x, std::vector<uint16_t>& y, size_t capacity) const {
    return {3, capacity, 64, x.data(), y.data()};
  }
};

std::string refusal(Queue& queue, const Request& request) {
  try {
    queue.submit(std::vector{request})->wait();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

// Runs nothing: keeps what it is handed until it is told that it is done.
class Slow : public StaticExecutor {
 public:
  struct Batch {
    size_t program, tiles;
    Done done;
  };
  const ProgramShape* shape(size_t program) const override {
    return program < 2 ? &shape_ : nullptr;
  }
  void start(size_t program, std::span<const Dispatch> tiles, Done done) override {
    std::lock_guard lock(mutex_);
    batches_.push_back({program, tiles.size(), std::move(done)});
  }
  std::vector<Batch> take() {
    std::lock_guard lock(mutex_);
    return std::exchange(batches_, {});
  }

 private:
  ProgramShape shape_{1, 2, {4}};
  std::mutex mutex_;
  std::vector<Batch> batches_;
};

template <class Fn>
bool soon(Fn&& fn) {
  for (int i = 0; i < 20000; ++i) {
    if (fn()) return true;
    std::this_thread::sleep_for(1ms);
  }
  return false;
}

}  // namespace

TEST_CASE("the host executor computes every activation, with and without biases and int8") {
  for (const Case& c : kActivations)
    for (bool int8 : {false, true})
      for (bool biases : {false, true})
        for (size_t capacity : {4, 8}) {
          CAPTURE(c.name);
          CAPTURE(int8);
          CAPTURE(biases);
          Host host(c, int8, biases);
          const auto x = host.blob.input(capacity);
          std::vector<uint16_t> y(x.size(), 0x7e00);
          const Request request{host.program, host.tile(x, y, capacity)};
          const auto outcome = host.queue->submit(std::vector{request})->wait();
          CHECK(outcome[0].status.ok());
          CHECK(outcome[0].finite);
          CHECK(host.blob.error(x, y, capacity) < 1e-3);
        }
}

TEST_CASE("activations that cannot be are refused by name") {
  const auto refuses = [](const char* name, std::map<std::string, float> parameters,
                          const char* part) {
    try {
      parse_activation(name, parameters);
      FAIL("accepted ", name);
    } catch (const Error& error) {
      CHECK(std::string(error.what()).find(part) != std::string::npos);
    }
  };
  refuses("tanhglu", {}, "unknown activation 'tanhglu'");
  refuses("swiglu_oai", {{"limit", 7.f}}, "needs the parameter alpha");
  refuses("swiglu", {{"limit", 7.f}}, "no parameter limit");
  refuses("swiglu_clamped", {{"limit", 0.f}}, "expected more than 0");
}

TEST_CASE("a tile of any shape but the compiled ones is refused, and nothing runs") {
  Host host;
  const auto x = host.blob.input(16);
  std::vector<uint16_t> y(x.size());
  const auto said = [&](size_t program, size_t groups, size_t capacity, size_t width) {
    return refusal(*host.queue, {program, {groups, capacity, width, x.data(), y.data()}});
  };
  CHECK(said(host.program, 3, 5, 64).find("[3, 5, 64], its static shape is [3, 4 or 8, 64]") !=
        std::string::npos);
  CHECK(said(host.program, 3, 16, 64) != "");
  CHECK(said(host.program, 2, 4, 64) != "");
  CHECK(said(host.program, 3, 4, 32) != "");
  CHECK(said(7, 3, 4, 64).find("no program 7") != std::string::npos);
  CHECK(said(host.program, 3, 4, 64) == "");
  CHECK(host.queue->counts().tiles == 1);
}

TEST_CASE("blobs that do not hold what they should are refused") {
  HostExecutor host;
  Host good;
  const auto refuses = [&](auto&& change, const char* part) {
    HostProgram bad = good.blob.program;
    change(bad);
    try {
      host.load(bad);
      FAIL("accepted");
    } catch (const Error& error) {
      CAPTURE(error.what());
      CHECK(std::string(error.what()).find(part) != std::string::npos);
    }
  };
  refuses([](HostProgram& p) { p.blob += ".gone"; }, "cannot be opened");
  refuses([](HostProgram& p) { p.blob = "/tmp"; }, "");
  refuses([](HostProgram& p) { p.experts[0].up->offset = 1 << 30; }, "at offset");
  refuses([](HostProgram& p) { p.experts[2].down->offset += 64; }, "at offset");
  refuses([](HostProgram& p) { p.experts[0].up->offset += 1; }, "at offset");
  refuses([](HostProgram& p) { p.experts[0].up->offset = SIZE_MAX - 1; }, "at offset");
  refuses([](HostProgram& p) { p.experts[0].gate.reset(); }, "lacks a matrix");
  refuses([](HostProgram& p) { p.activation.gated = false; }, "lacks a matrix");
  refuses([](HostProgram& p) { p.experts.clear(); }, "without experts");
  refuses([](HostProgram& p) { p.capacities = {0}; }, "capacity of 0");
  CHECK(host.load(good.blob.program) == 0);
}

TEST_CASE("a blob that is cut short once it is loaded is no longer needed") {
  Host host;
  std::filesystem::resize_file(host.blob.program.blob, 0);
  const auto x = host.blob.input(4);
  std::vector<uint16_t> y(x.size());
  host.queue->submit(std::vector<Request>{{host.program, host.tile(x, y, 4)}})->wait();
  CHECK(host.blob.error(x, y, 4) < 1e-3);
}

TEST_CASE("an output that is not finite is told") {
  Host host;
  auto x = host.blob.input(4, 20000);
  std::vector<uint16_t> y(x.size()), z(x.size());
  const auto calm = host.blob.input(4);
  const std::vector<Request> requests{{host.program, host.tile(x, y, 4)},
                                      {host.program, host.tile(calm, z, 4)}};
  const auto outcomes = host.queue->submit(requests)->wait();
  CHECK(outcomes[0].status.ok());
  CHECK_FALSE(outcomes[0].finite);
  CHECK(outcomes[1].finite);
}

TEST_CASE("and one that is too small for half precision, unless its input is all zero") {
  Host host;
  const double scales[] = {1, 1e-3, 0};
  for (double scale : scales) {
    auto x = host.blob.input(4, scale);
    std::vector<uint16_t> y(x.size());
    const auto outcomes =
        host.queue->submit(std::vector<Request>{{host.program, host.tile(x, y, 4)}});
    CHECK(outcomes->wait()[0].finite);
    CHECK(outcomes->wait()[0].small == (scale == 1e-3));
  }
}

TEST_CASE("so is an input that is not finite where the activation hides it") {
  const Case bounded{
      "situ", {{"beta", 1.f}, {"linear_beta", 2.f}}, [](double, double) { return 0.; }};
  Host host(bounded);
  auto x = host.blob.input(4);
  std::vector<uint16_t> y(x.size());
  x[5] = f32_to_f16(1e6f);
  const auto outcomes =
      host.queue->submit(std::vector<Request>{{host.program, host.tile(x, y, 4)}});
  CHECK_FALSE(outcomes->wait()[0].finite);
  for (uint16_t h : y) CHECK(std::isfinite(f16_to_f32(h)));
}

TEST_CASE("tiles of one program that wait together are one batch, and in flight is bounded") {
  auto slow = std::make_unique<Slow>();
  Slow& executor = *slow;
  Queue queue(std::move(slow), 3);
  std::vector<uint16_t> x(8), y(8);
  const auto request = [&](size_t program) {
    return Request{program, {1, 4, 2, x.data(), y.data()}};
  };
  const auto pending =
      queue.submit(std::vector{request(0), request(1), request(0), request(0), request(0)});
  std::vector<Slow::Batch> first;
  REQUIRE(soon([&] { return !(first = executor.take()).empty(); }));
  std::this_thread::sleep_for(20ms);
  CHECK(first.size() == 1);
  CHECK(first[0].program == 0);
  CHECK(first[0].tiles == 3);
  CHECK(executor.take().empty());
  first[0].done({});
  std::vector<Slow::Batch> rest;
  REQUIRE(soon([&] {
    for (auto& batch : executor.take()) rest.push_back(std::move(batch));
    return rest.size() == 2;
  }));
  CHECK(rest[0].program == 1);
  CHECK(rest[1].tiles == 1);
  rest[0].done({"out of order"});
  rest[1].done({});
  const auto outcomes = pending->wait();
  CHECK(outcomes[1].status.message == "out of order");
  CHECK_FALSE(outcomes[1].finite);
  for (size_t i : {0, 2, 3, 4}) CHECK(outcomes[i].status.ok());
  CHECK(queue.counts().most_in_flight == 3);
  CHECK(queue.counts().batches == 3);
}

TEST_CASE("submit returns at once, and the simulated cost of a dispatch is paid one by one") {
  Host host(kActivations[0], false, false, 20ms);
  const auto x = host.blob.input(4);
  std::vector<uint16_t> y(x.size());
  const std::vector<Request> requests(4, {host.program, host.tile(x, y, 4)});
  const auto start = std::chrono::steady_clock::now();
  const auto pending = host.queue->submit(requests);
  const auto submitted = std::chrono::steady_clock::now();
  pending->wait();
  CHECK(submitted - start < 80ms);
  CHECK(std::chrono::steady_clock::now() - start >= 80ms);
}

TEST_CASE(
    "callers in several threads get their own results, and no request is nothing to wait for") {
  Host host;
  CHECK(host.queue->submit({})->wait().empty());
  std::atomic<int> wrong = 0;
  const auto x = host.blob.input(8);
  const auto caller = [&] {
    for (int i = 0; i < 20; ++i) {
      std::vector<uint16_t> y(x.size()), z(x.size());
      const std::vector<Request> requests{{host.program, host.tile(x, y, 8)},
                                          {host.program, host.tile(x, z, 8)}};
      const auto pending = host.queue->submit(requests);
      for (const Outcome& o : pending->wait()) wrong += !o.finite;
      wrong += host.blob.error(x, y, 8) > 1e-3 || y != z;
    }
  };
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) threads.emplace_back(caller);
  for (auto& t : threads) t.join();
  CHECK(wrong == 0);
}

TEST_CASE("what was submitted is finished before a queue goes") {
  auto host = std::make_unique<Host>(kActivations[0], false, false, 5ms);
  const auto x = host->blob.input(4);
  std::vector<uint16_t> y(x.size());
  const std::vector<Request> requests(3, {host->program, host->tile(x, y, 4)});
  const auto pending = host->queue->submit(requests);
  host->queue.reset();
  for (const Outcome& o : pending->wait()) CHECK(o.finite);
}

TEST_CASE("a queue works in a forked child") {
  Host host;
  const auto x = host.blob.input(4);
  std::vector<uint16_t> y(x.size());
  const std::vector<Request> requests{{host.program, host.tile(x, y, 4)}};
  CHECK(host.queue->submit(requests)->wait()[0].finite);
  const pid_t child = fork();
  if (child == 0) {
    const bool fine = host.queue->submit(requests)->wait()[0].finite;
    host.queue.reset();
    _exit(fine ? 0 : 1);
  }
  int status = -1;
  waitpid(child, &status, 0);
  CHECK(status == 0);
  CHECK(host.queue->submit(requests)->wait()[0].finite);
}
