// Ownership that reads the same with ARC, as on a Mac, and without, as in the tests on Linux.
//
// Blocks must not capture Objective-C pointers that outlive the call: without ARC the block
// runtime of the tests does not retain them. They capture C++ objects, which hold a Strong.
#pragma once

#import <Foundation/Foundation.h>

#include <string>
#include <utility>

#include "support/status.h"

namespace mlx_moe {

#if __has_feature(objc_arc)

template <class T>
using Strong = T;

// What alloc and init gave, to be released on its own.
template <class T>
T owned(T object) {
  return object;
}

#else

template <class T>
class Strong {
 public:
  Strong(T object = nil) : object_([object retain]) {}
  Strong(const Strong& other) : Strong(other.object_) {}
  Strong(Strong&& other) : object_(std::exchange(other.object_, nil)) {}
  Strong& operator=(Strong other) {
    std::swap(object_, other.object_);
    return *this;
  }
  ~Strong() { [object_ release]; }
  operator T() const { return object_; }

 private:
  T object_;
};

template <class T>
T owned(T object) {
  return [object autorelease];
}

#endif

inline NSString* string(const std::string& text) {
  return [NSString stringWithUTF8String:text.c_str()];
}

inline std::string text(NSString* string) {
  const char* utf8 = string.UTF8String;
  return utf8 ? utf8 : "";
}

// "what: description (domain code)"; never empty, so never a success.
inline Status failure(const std::string& what, NSError* error) {
  if (error == nil) return {what + ": Core ML gave no reason"};
  return {what + ": " + text(error.localizedDescription) + " (" + text(error.domain) + " " +
          std::to_string(error.code) + ")"};
}

}  // namespace mlx_moe
