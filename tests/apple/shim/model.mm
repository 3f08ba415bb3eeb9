// Models: configurations, descriptions, loading, compiling, predictions.
#include <thread>

#include "objects.h"

using namespace shim;

// A result that cannot be read.
@interface Unreadable : NSObject <MLFeatureProvider>
@end
@implementation Unreadable
- (MLFeatureValue*)featureValueForName:(NSString*)name {
  [NSException raise:@"NSGenericException" format:@"the result %@ is gone", name];
  return nil;
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
  if (model.raises_on_read) return [[[Unreadable alloc] init] autorelease];
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
