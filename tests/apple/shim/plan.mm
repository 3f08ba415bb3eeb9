// Compute plans, and the structure of programs that they speak of.
#include "objects.h"

using namespace shim;

@implementation MLCPUComputeDevice
@end
@implementation MLGPUComputeDevice
@end
@implementation MLNeuralEngineComputeDevice
@end

@implementation MLModelStructureProgramOperation
COUNTED(Operation)
- (NSString*)operatorName {
  return [NSString stringWithUTF8String:[self state]->name.c_str()];
}
@end

@implementation MLModelStructureProgramBlock
COUNTED(Program)
- (NSArray*)operations {
  NSMutableArray* all = [NSMutableArray array];
  for (const auto& [name, unit] : [self state]->model->operations) {
    MLModelStructureProgramOperation* made = [[MLModelStructureProgramOperation alloc] init];
    *[made state] = {name, unit};
    [all addObject:made];
    [made release];
  }
  return all;
}
@end

@implementation MLModelStructureProgramFunction
COUNTED(Program)
- (MLModelStructureProgramBlock*)block {
  MLModelStructureProgramBlock* made = [[MLModelStructureProgramBlock alloc] init];
  *[made state] = *[self state];
  return [made autorelease];
}
@end

@implementation MLModelStructureProgram
COUNTED(Program)
- (NSDictionary*)functions {
  MLModelStructureProgramFunction* made = [[MLModelStructureProgramFunction alloc] init];
  *[made state] = *[self state];
  const std::string& name = [self state]->function;
  NSDictionary* all =
      @{[NSString stringWithUTF8String:name.empty() ? "main" : name.c_str()] : made};
  [made release];
  return all;
}
@end

@implementation MLModelStructure
COUNTED(Program)
- (MLModelStructureProgram*)program {
  MLModelStructureProgram* made = [[MLModelStructureProgram alloc] init];
  *[made state] = *[self state];
  return [made autorelease];
}
@end

@implementation MLComputePlanDeviceUsage
COUNTED(Operation)
- (id<MLComputeDeviceProtocol>)preferredComputeDevice {
  const std::string& unit = [self state]->unit;
  Class of = unit == "ANE"   ? [MLNeuralEngineComputeDevice class]
             : unit == "GPU" ? [MLGPUComputeDevice class]
                             : [MLCPUComputeDevice class];
  return [[[of alloc] init] autorelease];
}
@end

@implementation MLComputePlan
COUNTED(Program)
+ (void)loadContentsOfURL:(NSURL*)url
            configuration:(MLModelConfiguration*)configuration
        completionHandler:(void (^)(MLComputePlan*, NSError*))completionHandler {
  const std::string path = [[url path] UTF8String], function = [configuration state]->function;
  void (^handler)(MLComputePlan*, NSError*) = Block_copy(completionHandler);
  shim::soon([=] {
    @autoreleasepool {
      if (const auto model = shim::find(path, function)) {
        MLComputePlan* made = [[[MLComputePlan alloc] init] autorelease];
        *[made state] = {function, model};
        handler(made, nil);
      } else {
        handler(nil, error_of(1, "no such model"));
      }
      Block_release(handler);
    }
  });
}
- (MLModelStructure*)modelStructure {
  MLModelStructure* made = [[MLModelStructure alloc] init];
  *[made state] = *[self state];
  return [made autorelease];
}
- (MLComputePlanDeviceUsage*)computeDeviceUsageForMLProgramOperation:
    (MLModelStructureProgramOperation*)operation {
  if ([operation state]->unit.empty()) return nil;
  MLComputePlanDeviceUsage* made = [[MLComputePlanDeviceUsage alloc] init];
  *[made state] = *[operation state];
  return [made autorelease];
}
@end
