#import "dispatch/apple/model.h"

#include <condition_variable>
#include <memory>
#include <mutex>

#import "dispatch/apple/attempt.h"
#import "dispatch/apple/buffer.h"

namespace mlx_moe {

namespace {

// What a completion handler was given, for the thread that waits for it.
template <class T>
class Reply {
 public:
  void give(T given, NSError* error) {
    std::lock_guard lock(mutex_);
    if (there_) return;
    given_ = given;
    error_ = error;
    there_ = true;
    changed_.notify_all();
  }
  void wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return there_; });
  }
  T given() const { return given_; }
  NSError* error() const { return error_; }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool there_ = false;
  Strong<T> given_ = nil;
  Strong<NSError*> error_ = nil;
};

NSURL* directory(const std::string& path) {
  return [NSURL fileURLWithPath:string(path) isDirectory:YES];
}

Status configure(const CoreMLFunction& function, MLModelConfiguration* __strong& configuration) {
  configuration = owned([[MLModelConfiguration alloc] init]);
  configuration.computeUnits = MLComputeUnitsCPUAndNeuralEngine;
  if (function.name.empty()) return {};
  if (@available(macOS 15.0, *)) {
    configuration.functionName = string(function.name);
    return {};
  }
  return {function.compiled + ": its function " + function.name + " takes macOS 15 or newer"};
}

Status check(const std::string& what, MLFeatureDescription* found, size_t width, size_t columns) {
  MLMultiArrayConstraint* constraint = found.multiArrayConstraint;
  if (constraint != nil && constraint.dataType == MLMultiArrayDataTypeFloat16 &&
      [constraint.shape isEqualToArray:coreml_shape(width, columns)])
    return {};
  std::string shape;
  for (NSNumber* n in constraint.shape)
    shape += (shape.empty() ? "" : ", ") + std::to_string(n.unsignedLongValue);
  return {what + " is " + (constraint == nil ? "no array" : "[" + shape + "]") + " of type " +
          std::to_string(long(constraint.dataType)) + ", expected [1, " + std::to_string(width) +
          ", 1, " + std::to_string(columns) + "] of float16"};
}

Placement::Counts& counts_of(id<MLComputeDeviceProtocol> device, Placement& placement) {
  if ([device isKindOfClass:[MLNeuralEngineComputeDevice class]]) return placement.ane;
  if ([device isKindOfClass:[MLGPUComputeDevice class]]) return placement.gpu;
  if ([device isKindOfClass:[MLCPUComputeDevice class]]) return placement.cpu;
  return placement.other;
}

}  // namespace

Status open_model(const CoreMLProgram& program, size_t capacity, Strong<MLModel*>& model) {
  const CoreMLFunction& function = program.functions.at(capacity);
  const size_t columns = program.groups * capacity;
  __block Status status;
  Strong<MLModel*>* out = &model;
  NSString* raised = mlx_moe_attempt(^{
    MLModelConfiguration* configuration = nil;
    status = configure(function, configuration);
    if (!status.ok()) return;
    NSError* error = nil;
    MLModel* opened = [MLModel modelWithContentsOfURL:directory(function.compiled)
                                        configuration:configuration
                                                error:&error];
    if (opened == nil) {
      status = failure(function.compiled + " does not load", error);
      return;
    }
    MLModelDescription* described = opened.modelDescription;
    status = check(function.compiled + ": input " + program.input,
                   [described.inputDescriptionsByName objectForKey:string(program.input)],
                   program.width, columns);
    if (!status.ok()) return;
    status = check(function.compiled + ": output " + program.output,
                   [described.outputDescriptionsByName objectForKey:string(program.output)],
                   program.width, columns);
    if (status.ok()) *out = opened;
  });
  return raised == nil ? status : Status{function.compiled + " does not load: " + text(raised)};
}

Status coreml_compile(const std::string& package, std::string& compiled) {
  @autoreleasepool {
    auto reply = std::make_shared<Reply<NSURL*>>();
    NSString* raised = mlx_moe_attempt(^{
      [MLModel compileModelAtURL:directory(package)
               completionHandler:^(NSURL* url, NSError* error) {
                 reply->give(url, error);
               }];
    });
    if (raised != nil) return {package + " does not compile: " + text(raised)};
    reply->wait();
    if (reply->given() == nil) return failure(package + " does not compile", reply->error());
    compiled = text(reply->given().path);
    return {};
  }
}

Status coreml_placement(const CoreMLFunction& function, Placement& placement) {
  if (@available(macOS 14.4, *)) {
    @autoreleasepool {
      MLModelConfiguration* configuration = nil;
      if (Status status = configure(function, configuration); !status.ok()) return status;
      auto reply = std::make_shared<Reply<MLComputePlan*>>();
      NSString* raised = mlx_moe_attempt(^{
        [MLComputePlan loadContentsOfURL:directory(function.compiled)
                           configuration:configuration
                       completionHandler:^(MLComputePlan* plan, NSError* error) {
                         reply->give(plan, error);
                       }];
      });
      if (raised != nil) return {function.compiled + " has no compute plan: " + text(raised)};
      reply->wait();
      MLComputePlan* plan = reply->given();
      if (plan == nil) return failure(function.compiled + " has no compute plan", reply->error());
      const std::string name = function.name.empty() ? "main" : function.name;
      MLModelStructureProgramFunction* found =
          [plan.modelStructure.program.functions objectForKey:string(name)];
      if (found == nil) return {function.compiled + ": the compute plan has no function " + name};
      placement = {};
      for (MLModelStructureProgramOperation* operation in found.block.operations) {
        MLComputePlanDeviceUsage* usage = [plan computeDeviceUsageForMLProgramOperation:operation];
        if (usage == nil || usage.preferredComputeDevice == nil) continue;
        Placement::Counts& counts = counts_of(usage.preferredComputeDevice, placement);
        counts.operations += 1;
        // A specialised program names its operations by dialect, as ios18.conv.
        counts.products += text(operation.operatorName).ends_with("conv");
      }
      return {};
    }
  }
  return {"a compute plan takes macOS 14.4 or newer"};
}

}  // namespace mlx_moe
