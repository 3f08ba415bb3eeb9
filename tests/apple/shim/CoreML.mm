#include <Block.h>  // blocks are no objects here: they are copied and released as in C
#import <CoreML/CoreML.h>

#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <thread>

#include "internal.h"

// Every object owns one C++ struct, and is counted while it lives.
#define COUNTED(State)                 \
  +(id)allocWithZone : (NSZone*)zone { \
    shim::live += 1;                   \
    return [super allocWithZone:zone]; \
  }                                    \
  -(void)dealloc {                     \
    delete static_cast<State*>(shim_); \
    shim::live -= 1;                   \
    [super dealloc];                   \
  }                                    \
  -(State*)state {                     \
    if (!shim_) shim_ = new State;     \
    return static_cast<State*>(shim_); \
  }

namespace {

using Shape = std::vector<size_t>;

NSArray* numbers(const Shape& shape) {
  NSMutableArray* array = [NSMutableArray array];
  for (size_t n : shape) [array addObject:[NSNumber numberWithUnsignedLong:n]];
  return array;
}

Shape sizes(NSArray* array) {
  Shape shape;
  for (NSNumber* n in array) shape.push_back([n unsignedLongValue]);
  return shape;
}

size_t product(const Shape& shape) {
  size_t n = 1;
  for (size_t s : shape) n *= s;
  return n;
}

NSError* error_of(NSInteger code, const std::string& text) {
  return [NSError
      errorWithDomain:@"com.apple.CoreML"
                 code:code
             userInfo:@{NSLocalizedDescriptionKey : [NSString stringWithUTF8String:text.c_str()]}];
}

struct Array {
  Shape shape, strides;
  long type = 0x10010;
  uint8_t* data = nullptr;
  CVPixelBufferRef surface = nullptr;
  void (^deallocator)(void*) = nil;
  std::vector<uint16_t> own;

  ~Array() {
    if (surface) CVPixelBufferRelease(surface);
    if (deallocator) {
      deallocator(data);
      Block_release(deallocator);
    }
  }
  uint16_t& at(size_t i) {
    size_t offset = 0;
    for (size_t d = shape.size(); d-- > 0; i /= shape[d]) offset += i % shape[d] * strides[d];
    return reinterpret_cast<uint16_t*>(data)[offset];
  }
  size_t extent() const {
    size_t last = 0;
    for (size_t d = 0; d < shape.size(); ++d) last += (shape[d] - 1) * strides[d];
    return 2 * (last + 1);
  }
};

struct Pair {
  Shape shape;
  long type;
};

template <class T>
struct Held {
  T object = nil;
  ~Held() { [object release]; }
};

struct Loaded {
  std::shared_ptr<const shim::Model> model;
};

struct Configuration {
  MLComputeUnits units = MLComputeUnitsAll;
  std::string function;
};

struct Operation {
  std::string name, unit;
};

struct Program {
  std::string function;
  std::shared_ptr<const shim::Model> model;
};

}  // namespace

@interface MLMultiArray (Shim)
- (Array*)state;
@end
@interface MLModel (Shim)
- (Loaded*)state;
@end
@interface MLModelConfiguration (Shim)
- (Configuration*)state;
@end
@interface MLModelDescription (Shim)
- (Loaded*)state;
@end
@interface MLFeatureDescription (Shim)
- (Pair*)state;
@end
@interface MLMultiArrayConstraint (Shim)
- (Pair*)state;
@end
@interface MLFeatureValue (Shim)
- (Held<MLMultiArray*>*)state;
@end
@interface MLModelStructureProgramOperation (Shim)
- (Operation*)state;
@end
@interface MLModelStructureProgramBlock (Shim)
- (Program*)state;
@end
@interface MLModelStructureProgramFunction (Shim)
- (Program*)state;
@end
@interface MLModelStructureProgram (Shim)
- (Program*)state;
@end
@interface MLModelStructure (Shim)
- (Program*)state;
@end
@interface MLComputePlan (Shim)
- (Program*)state;
@end
@interface MLComputePlanDeviceUsage (Shim)
- (Operation*)state;
@end

@implementation MLMultiArray
COUNTED(Array)
- (id)initWithDataPointer:(void*)dataPointer
                    shape:(NSArray*)shape
                 dataType:(MLMultiArrayDataType)dataType
                  strides:(NSArray*)strides
              deallocator:(void (^)(void*))deallocator
                    error:(NSError**)error {
  (void)error;
  Array* state = [self state];
  state->data = static_cast<uint8_t*>(dataPointer);
  state->shape = sizes(shape);
  state->strides = sizes(strides);
  state->type = dataType;
  if (deallocator) state->deallocator = Block_copy(deallocator);
  return self;
}
- (id)initWithPixelBuffer:(CVPixelBufferRef)pixelBuffer shape:(NSArray*)shape {
  Array* state = [self state];
  state->shape = sizes(shape);
  const size_t width = state->shape.back(), height = product(state->shape) / width;
  if (!shim::settings().surface_arrays || pixelBuffer->width != width ||
      pixelBuffer->height != height) {
    [self release];
    return nil;
  }
  const size_t row = pixelBuffer->stride / 2;
  state->strides = {state->shape[1] * row, row, row, 1};
  state->data = pixelBuffer->memory.data();
  state->surface = CVPixelBufferRetain(pixelBuffer);
  return self;
}
- (NSArray*)shape {
  return numbers([self state]->shape);
}
- (NSArray*)strides {
  return numbers([self state]->strides);
}
- (MLMultiArrayDataType)dataType {
  return MLMultiArrayDataType([self state]->type);
}
- (void)getBytesWithHandler:(void (^__attribute__((noescape)))(const void*, NSInteger))handler {
  handler([self state]->data, NSInteger([self state]->extent()));
}
@end

@implementation MLFeatureValue
COUNTED(Held<MLMultiArray*>)
+ (id)featureValueWithMultiArray:(MLMultiArray*)value {
  MLFeatureValue* made = [[self alloc] init];
  [made state]->object = [value retain];
  return [made autorelease];
}
- (MLMultiArray*)multiArrayValue {
  return [self state]->object;
}
@end

@interface MLDictionaryFeatureProvider (Shim)
- (Held<NSDictionary*>*)state;
@end
@implementation MLDictionaryFeatureProvider
COUNTED(Held<NSDictionary*>)
- (id)initWithDictionary:(NSDictionary*)dictionary error:(NSError**)error {
  (void)error;
  [self state]->object = [dictionary copy];
  return self;
}
- (MLFeatureValue*)featureValueForName:(NSString*)name {
  return [[self state]->object objectForKey:name];
}
@end

@interface MLArrayBatchProvider (Shim)
- (Held<NSArray*>*)state;
@end
@implementation MLArrayBatchProvider
COUNTED(Held<NSArray*>)
- (id)initWithFeatureProviderArray:(NSArray*)array {
  [self state]->object = [array copy];
  return self;
}
- (NSInteger)count {
  return NSInteger([[self state]->object count]);
}
- (id<MLFeatureProvider>)featuresAtIndex:(NSInteger)index {
  return [[self state]->object objectAtIndex:NSUInteger(index)];
}
@end

@interface MLPredictionOptions (Shim)
- (Held<NSDictionary*>*)state;
@end
@implementation MLPredictionOptions
COUNTED(Held<NSDictionary*>)
- (NSDictionary*)outputBackings {
  return [self state]->object;
}
- (void)setOutputBackings:(NSDictionary*)backings {
  [[self state]->object release];
  [self state]->object = [backings copy];
}
@end

@implementation MLModelConfiguration
COUNTED(Configuration)
- (MLComputeUnits)computeUnits {
  return [self state]->units;
}
- (void)setComputeUnits:(MLComputeUnits)units {
  [self state]->units = units;
}
- (NSString*)functionName {
  return [NSString stringWithUTF8String:[self state]->function.c_str()];
}
- (void)setFunctionName:(NSString*)name {
  [self state]->function = [name UTF8String];
}
@end

@implementation MLMultiArrayConstraint
COUNTED(Pair)
- (NSArray*)shape {
  return numbers([self state]->shape);
}
- (MLMultiArrayDataType)dataType {
  return MLMultiArrayDataType([self state]->type);
}
@end

@implementation MLFeatureDescription
COUNTED(Pair)
- (MLMultiArrayConstraint*)multiArrayConstraint {
  MLMultiArrayConstraint* made = [[MLMultiArrayConstraint alloc] init];
  *[made state] = *[self state];
  return [made autorelease];
}
@end

@implementation MLModelDescription
COUNTED(Loaded)
- (NSDictionary*)describe:(const std::string&)name shape:(const Shape&)shape {
  MLFeatureDescription* made = [[MLFeatureDescription alloc] init];
  *[made state] = {shape, [self state]->model->type};
  NSDictionary* all = @{[NSString stringWithUTF8String:name.c_str()] : made};
  [made release];
  return all;
}
- (NSDictionary*)inputDescriptionsByName {
  const shim::Model& model = *[self state]->model;
  return [self describe:model.input_name shape:model.input];
}
- (NSDictionary*)outputDescriptionsByName {
  const shim::Model& model = *[self state]->model;
  return [self describe:model.output_name shape:model.output];
}
@end

@implementation MLModel
COUNTED(Loaded)
+ (MLModel*)modelWithContentsOfURL:(NSURL*)url
                     configuration:(MLModelConfiguration*)configuration
                             error:(NSError**)error {
  if ([configuration computeUnits] != MLComputeUnitsCPUAndNeuralEngine) shim::other_units += 1;
  const auto model = shim::find([[url path] UTF8String], [configuration state]->function);
  if (model && model->raises_on_load)
    [NSException raise:@"NSGenericException" format:@"the model is upside down"];
  if (!model || !model->loads) {
    *error = error_of(-14, "Failed to build the model execution plan");
    return nil;
  }
  MLModel* made = [[self alloc] init];
  [made state]->model = model;
  return [made autorelease];
}
+ (void)compileModelAtURL:(NSURL*)url
        completionHandler:(void (^)(NSURL*, NSError*))completionHandler {
  const std::string path = [[url path] UTF8String];
  if (path.find("raises") != std::string::npos)
    [NSException raise:@"NSGenericException" format:@"no such package"];
  void (^handler)(NSURL*, NSError*) = Block_copy(completionHandler);
  shim::soon([=] {
    @autoreleasepool {
      if (path.find("broken") != std::string::npos)
        handler(nil, error_of(0, "the package is broken"));
      else
        handler(
            [NSURL fileURLWithPath:[NSString stringWithUTF8String:(path + ".compiled").c_str()]],
            nil);
      Block_release(handler);
    }
  });
}
- (MLModelDescription*)modelDescription {
  MLModelDescription* made = [[MLModelDescription alloc] init];
  *[made state] = *[self state];
  return [made autorelease];
}
// The result of one prediction, in the backing if it is to be taken.
- (id<MLFeatureProvider>)outputOf:(id<MLFeatureProvider>)input backings:(NSDictionary*)backings {
  const shim::Model& model = *[self state]->model;
  std::this_thread::sleep_for(model.duration);
  NSString* name = [NSString stringWithUTF8String:model.input_name.c_str()];
  Array* from = [[[input featureValueForName:name] multiArrayValue] state];
  if (from->surface && from->surface->locks) shim::locked += 1;
  std::vector<uint16_t> x(product(model.input)), y(product(model.output));
  for (size_t i = 0; i < x.size(); ++i) x[i] = from->at(i);
  model.compute(x, y);

  NSString* output = [NSString stringWithUTF8String:model.output_name.c_str()];
  MLMultiArray* array = [backings objectForKey:output];
  if (array == nil || !model.takes_backing || !model.given.empty()) {
    array = [[[MLMultiArray alloc] init] autorelease];
    Array* own = [array state];
    own->shape = model.given.empty() ? model.output : model.given;
    // Channels beside each other if no backing is taken, else in rows with room between them.
    const size_t row = own->shape.back() + 3;
    if (model.takes_backing)
      own->strides = {own->shape[1] * row, row, row, 1};
    else
      own->strides = {product(own->shape), 1, own->shape[1], own->shape[1]};
    own->own.resize(own->extent() / 2);
    own->data = reinterpret_cast<uint8_t*>(own->own.data());
  }
  Array* to = [array state];
  if (to->surface && to->surface->locks) shim::locked += 1;
  if (model.given.empty())
    for (size_t i = 0; i < y.size(); ++i) to->at(i) = y[i];
  return [[[MLDictionaryFeatureProvider alloc]
      initWithDictionary:@{output : [MLFeatureValue featureValueWithMultiArray:array]}
                   error:NULL] autorelease];
}
- (void)predictionFromFeatures:(id<MLFeatureProvider>)input
                       options:(MLPredictionOptions*)options
             completionHandler:(void (^)(id<MLFeatureProvider>, NSError*))completionHandler {
  if ([self state]->model->raises)
    [NSException raise:@"NSInvalidArgumentException" format:@"an input is missing"];
  void (^handler)(id<MLFeatureProvider>, NSError*) = Block_copy(completionHandler);
  [self retain];
  [input retain];
  [options retain];
  auto running = std::make_shared<shim::Running>(false, 1);
  shim::soon([=]() mutable {
    @autoreleasepool {
      NSError* error = nil;
      id<MLFeatureProvider> output = nil;
      if ([self state]->model->predicts)
        output = [self outputOf:input backings:[options outputBackings]];
      else
        error = error_of(5, "Error computing the outputs");
      running.reset();
      handler(output, error);
      Block_release(handler);
      [options release];
      [input release];
      [self release];
    }
  });
}
- (id<MLBatchProvider>)predictionsFromBatch:(id<MLBatchProvider>)inputBatch
                                    options:(MLPredictionOptions*)options
                                      error:(NSError**)error {
  (void)options;
  const shim::Model& model = *[self state]->model;
  if (model.raises) [NSException raise:@"NSInvalidArgumentException" format:@"an input is missing"];
  if (!model.predicts) {
    *error = error_of(5, "Error computing the outputs");
    return nil;
  }
  shim::Running running(true, size_t([inputBatch count]));
  NSMutableArray* outputs = [NSMutableArray array];
  const NSInteger count = [inputBatch count] - model.last_missing;
  for (NSInteger i = 0; i < count; ++i)
    [outputs addObject:[self outputOf:[inputBatch featuresAtIndex:i] backings:nil]];
  return [[[MLArrayBatchProvider alloc] initWithFeatureProviderArray:outputs] autorelease];
}
@end

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
