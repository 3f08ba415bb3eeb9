#import <CoreML/CoreML.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <shared_mutex>
#include <thread>
#include <utility>

#import "dispatch/apple/attempt.h"
#import "dispatch/apple/buffer.h"
#import "dispatch/apple/memory.h"
#import "dispatch/apple/model.h"
#include "dispatch/coreml.h"

namespace mlx_moe {

namespace {

struct Loaded {
  CoreMLProgram program;
  ProgramShape shape;
  std::map<size_t, Strong<MLModel*>> models;  // by capacity
};

// Runs what it is given, one after the other, each in an autorelease pool, on a thread that is
// started when it is needed.
class Worker {
 public:
  ~Worker() {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
    }
    changed_.notify_all();
    if (thread_.joinable()) thread_.join();
  }

  void run(std::function<void()> job) {
    std::lock_guard lock(mutex_);
    jobs_.push_back(std::move(job));
    if (!thread_.joinable()) thread_ = std::thread([this] { loop(); });
    changed_.notify_all();
  }

 private:
  void loop() {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return stop_ || !jobs_.empty(); });
      if (jobs_.empty()) return;
      @autoreleasepool {
        std::function<void()> job = std::move(jobs_.front());
        jobs_.pop_front();
        lock.unlock();
        job();
      }
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> jobs_;
  bool stop_ = false;
  std::thread thread_;
};

// Buffers that no tile is in, by shape.
class Buffers {
 public:
  explicit Buffers(bool surfaces) : surfaces_(surfaces) {}

  std::unique_ptr<Buffer> take(size_t width, size_t columns) {
    {
      std::lock_guard lock(mutex_);
      auto& free = free_[{width, columns}];
      if (!free.empty()) {
        auto buffer = std::move(free.back());
        free.pop_back();
        return buffer;
      }
    }
    auto buffer = Buffer::make(width, columns, surfaces_);
    if (buffer) (buffer->on_surface() ? surface_count : page_count) += 1;
    return buffer;
  }

  void give(size_t width, size_t columns, std::unique_ptr<Buffer> buffer) {
    if (!buffer) return;
    std::lock_guard lock(mutex_);
    free_[{width, columns}].push_back(std::move(buffer));
  }

  std::atomic<size_t> surface_count = 0, page_count = 0, copied = 0;

 private:
  const bool surfaces_;
  std::mutex mutex_;
  std::map<std::pair<size_t, size_t>, std::vector<std::unique_ptr<Buffer>>> free_;
};

// Tiles of one program on their way through Core ML.
class Call {
 public:
  Call(std::shared_ptr<const Loaded> loaded, std::span<const Dispatch> tiles,
       std::shared_ptr<Buffers> buffers, StaticExecutor::Done done)
      : loaded_(std::move(loaded)),
        tiles_(tiles.begin(), tiles.end()),
        buffers_(std::move(buffers)),
        done_(std::move(done)) {}

  size_t tiles() const { return tiles_.size(); }

  // Fills the inputs.
  Status prepare() {
    const Dispatch& first = tiles_[0];
    width_ = first.width;
    columns_ = first.groups * first.capacity;
    const bool backed = tiles_.size() == 1;  // a batch writes to memory of Core ML's own
    for (const Dispatch& tile : tiles_) {
      inputs_.push_back(buffers_->take(width_, columns_));
      if (backed) output_ = buffers_->take(width_, columns_);
      if (!inputs_.back() || (backed && !output_)) return {"no memory for a tile of Core ML's"};
      if (!inputs_.back()->write(tile.x)) return {"the surface of a tile cannot be locked"};
    }
    return {};
  }

  // Begins the prediction of the one tile, for `call`, which is this. By value: blocks copy values
  // and not what references refer to.
  void predict(std::shared_ptr<Call> call) {
    NSString* raised = mlx_moe_attempt(^{
      MLPredictionOptions* options = owned([[MLPredictionOptions alloc] init]);
      options.outputBackings = @{output_name() : output_->array()};
      [model() predictionFromFeatures:features(0)
                              options:options
                    completionHandler:^(id<MLFeatureProvider> given, NSError* error) {
                      @autoreleasepool {
                        call->finish_with(given, error);
                      }
                    }];
    });
    if (raised != nil) finish({"a prediction failed: " + text(raised)});
  }

  // Predicts all tiles as a batch, in its worker's autorelease pool.
  void predict_batch() {
    __block Status status;
    NSString* raised = mlx_moe_attempt(^{
      NSMutableArray* rows = [NSMutableArray arrayWithCapacity:tiles_.size()];
      for (size_t i = 0; i < tiles_.size(); ++i) [rows addObject:features(i)];
      NSError* error = nil;
      id<MLBatchProvider> given =
          [model() predictionsFromBatch:owned([[MLArrayBatchProvider alloc]
                                            initWithFeatureProviderArray:rows])
                                options:owned([[MLPredictionOptions alloc] init])
                                  error:&error];
      if (given == nil) {
        status = failure("a batch failed", error);
        return;
      }
      if (size_t(given.count) != tiles_.size()) {
        status = {"a batch of " + std::to_string(tiles_.size()) + " gave " +
                  std::to_string(given.count) + " results"};
        return;
      }
      for (size_t i = 0; i < tiles_.size() && status.ok(); ++i)
        status = read([given featuresAtIndex:NSInteger(i)], i);
    });
    finish(raised == nil ? status : Status{"a batch failed: " + text(raised)});
  }

  // With what a prediction gave, which may raise when it is read.
  void finish_with(id<MLFeatureProvider> given, NSError* error) {
    __block Status status;
    NSString* raised = mlx_moe_attempt(^{
      status = given == nil ? failure("a prediction failed", error) : read(given, 0);
    });
    finish(raised == nil ? status : Status{"a prediction failed: " + text(raised)});
  }

  // The first time it is called, which a handler and an exception both might do.
  void finish(const Status& status) {
    if (finished_.exchange(true)) return;
    // A failed prediction may still have its buffers, so they go with it.
    if (status.ok()) {
      for (auto& input : inputs_) buffers_->give(width_, columns_, std::move(input));
      buffers_->give(width_, columns_, std::move(output_));
    }
    done_(status);
  }

 private:
  MLModel* model() const { return loaded_->models.at(tiles_[0].capacity); }
  NSString* output_name() const { return string(loaded_->program.output); }

  id<MLFeatureProvider> features(size_t tile) const {
    MLFeatureValue* value = [MLFeatureValue featureValueWithMultiArray:inputs_[tile]->array()];
    return owned([[MLDictionaryFeatureProvider alloc]
        initWithDictionary:@{string(loaded_->program.input) : value}
                     error:nullptr]);
  }

  Status read(id<MLFeatureProvider> given, size_t tile) {
    MLMultiArray* array = [given featureValueForName:output_name()].multiArrayValue;
    if (array == nil) return {"a prediction has no output " + loaded_->program.output};
    if (output_ && array == output_->array())
      return {output_->read(tiles_[tile].y) ? "" : "the surface of a result cannot be locked"};
    buffers_->copied += 1;
    return {read_array(array, width_, columns_, tiles_[tile].y)
                ? ""
                : "a prediction gave an output of another shape"};
  }

  const std::shared_ptr<const Loaded> loaded_;
  const std::vector<Dispatch> tiles_;
  const std::shared_ptr<Buffers> buffers_;
  const StaticExecutor::Done done_;
  size_t width_ = 0, columns_ = 0;
  std::vector<std::unique_ptr<Buffer>> inputs_;
  std::unique_ptr<Buffer> output_;
  std::atomic<bool> finished_ = false;
};

}  // namespace

struct CoreMLExecutor::Impl {
  explicit Impl(bool surfaces) : buffers(std::make_shared<Buffers>(surfaces)) {}

  std::shared_ptr<const Loaded> find(size_t program) const {
    std::shared_lock lock(mutex);
    return program < programs.size() ? programs[program] : nullptr;
  }

  const pid_t process = getpid();
  const std::shared_ptr<Buffers> buffers;
  mutable std::shared_mutex mutex;
  std::vector<std::shared_ptr<const Loaded>> programs;
  Worker worker;
};

CoreMLExecutor::CoreMLExecutor(bool surfaces) : impl_(std::make_shared<Impl>(surfaces)) {}
CoreMLExecutor::~CoreMLExecutor() {
  // A forked child has no such thread to join, and Core ML's objects do not work there: both stay.
  if (impl_->process != getpid()) {
    (void)new std::shared_ptr<Impl>(std::move(impl_));
    return;
  }
  @autoreleasepool {
    impl_.reset();
  }
}

Status CoreMLExecutor::load(const CoreMLProgram& program, size_t& number) {
  @autoreleasepool {
    auto loaded = std::make_shared<Loaded>();
    loaded->program = program;
    loaded->shape = {program.groups, program.width, {}};
    if (!program.groups || !program.width || program.functions.empty())
      return {"a program without experts, width or functions"};
    for (const auto& [capacity, function] : program.functions) {
      Strong<MLModel*> model = nil;
      if (Status status = open_model(program, capacity, model); !status.ok()) return status;
      loaded->models.emplace(capacity, model);
      loaded->shape.capacities.push_back(capacity);
    }
    std::unique_lock lock(impl_->mutex);
    number = impl_->programs.size();
    impl_->programs.push_back(std::move(loaded));
    return {};
  }
}

const ProgramShape* CoreMLExecutor::shape(size_t program) const {
  const auto loaded = impl_->find(program);
  return loaded ? &loaded->shape : nullptr;
}

void CoreMLExecutor::start(size_t program, std::span<const Dispatch> tiles, Done done) {
  if (impl_->process != getpid())
    return done({"Core ML does not work in a forked child: start the process anew (spawn)"});
  @autoreleasepool {
    auto call = std::make_shared<Call>(impl_->find(program), tiles, impl_->buffers, done);
    const Status status = call->prepare();
    if (!status.ok()) return call->finish(status);
    if (call->tiles() == 1) return call->predict(call);
    impl_->worker.run([call] { call->predict_batch(); });
  }
}

CoreMLExecutor::Counts CoreMLExecutor::counts() const {
  return {impl_->buffers->surface_count, impl_->buffers->page_count, impl_->buffers->copied};
}

Status coreml_available() { return {}; }

}  // namespace mlx_moe
