// Arrays and what carries them: features, batches, options.
#include "objects.h"

using namespace shim;

@interface Remnant : NSObject
@end
@implementation Remnant
+ (id)allocWithZone:(NSZone*)zone {
  shim::live += 1;
  return [super allocWithZone:zone];
}
- (void)dealloc {
  shim::live -= 1;
  [super dealloc];
}
@end

void shim::leave_remnant() { [[[Remnant alloc] init] autorelease]; }

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
