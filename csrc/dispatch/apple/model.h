#pragma once

#import <CoreML/CoreML.h>

#include "dispatch/apple/memory.h"
#include "dispatch/coreml.h"

namespace mlx_moe {

// Opens one function of a compiled model and checks that its input and output are as the program
// says for `capacity`.
Status open_model(const CoreMLProgram& program, size_t capacity, Strong<MLModel*>& model);

}  // namespace mlx_moe
