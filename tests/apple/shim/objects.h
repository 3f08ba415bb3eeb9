// The objects of the shim: every one owns a C++ struct, and is counted while it lives.
#pragma once

#include <Block.h>  // blocks are no objects here: they are copied and released as in C
#import <CoreML/CoreML.h>

#include <memory>
#include <string>
#include <vector>

#include "internal.h"

#define COUNTED(State)                 \
  +(id)allocWithZone : (NSZone*)zone { \
    shim::live += 1;                   \
    return [super allocWithZone:zone]; \
  }                                    \
  -(void)dealloc {                     \
    delete static_cast<State*>(shim_); \
    shim::live -= 1;                   \
    shim::leave_remnant();             \
    [super dealloc];                   \
  }                                    \
  -(State*)state {                     \
    if (!shim_) shim_ = new State;     \
    return static_cast<State*>(shim_); \
  }

namespace shim {

using Shape = std::vector<size_t>;

inline NSArray* numbers(const Shape& shape) {
  NSMutableArray* array = [NSMutableArray array];
  for (size_t n : shape) [array addObject:[NSNumber numberWithUnsignedLong:n]];
  return array;
}

inline Shape sizes(NSArray* array) {
  Shape shape;
  for (NSNumber* n in array) shape.push_back([n unsignedLongValue]);
  return shape;
}

inline size_t product(const Shape& shape) {
  size_t n = 1;
  for (size_t s : shape) n *= s;
  return n;
}

inline NSError* error_of(NSInteger code, const std::string& text) {
  return [NSError
      errorWithDomain:@"com.apple.CoreML"
                 code:code
             userInfo:@{NSLocalizedDescriptionKey : [NSString stringWithUTF8String:text.c_str()]}];
}

// What an object of each class holds.
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

// An object that only an autorelease pool releases, as Apple's may leave when they go: where a
// thread has no pool, it stays and is counted.
void leave_remnant();

}  // namespace shim

@interface MLMultiArray (Shim)
- (shim::Array*)state;
@end
@interface MLModel (Shim)
- (shim::Loaded*)state;
@end
@interface MLModelConfiguration (Shim)
- (shim::Configuration*)state;
@end
@interface MLModelDescription (Shim)
- (shim::Loaded*)state;
@end
@interface MLFeatureDescription (Shim)
- (shim::Pair*)state;
@end
@interface MLMultiArrayConstraint (Shim)
- (shim::Pair*)state;
@end
@interface MLFeatureValue (Shim)
- (shim::Held<MLMultiArray*>*)state;
@end
@interface MLModelStructureProgramOperation (Shim)
- (shim::Operation*)state;
@end
@interface MLModelStructureProgramBlock (Shim)
- (shim::Program*)state;
@end
@interface MLModelStructureProgramFunction (Shim)
- (shim::Program*)state;
@end
@interface MLModelStructureProgram (Shim)
- (shim::Program*)state;
@end
@interface MLModelStructure (Shim)
- (shim::Program*)state;
@end
@interface MLComputePlan (Shim)
- (shim::Program*)state;
@end
@interface MLComputePlanDeviceUsage (Shim)
- (shim::Operation*)state;
@end
