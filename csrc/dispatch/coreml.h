#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "dispatch/executor.h"

namespace mlx_moe {

// Core ML, on macOS 14 or newer. Elsewhere everything here says that there is none.
// Nothing here throws: errors are values, since no C++ exception may pass Objective-C frames.

// What runs tiles of one capacity: a function of a compiled model (.mlmodelc) of several, which
// takes macOS 15, or with no name the only function of a model of its own.
struct CoreMLFunction {
  std::string compiled, name;
};

// A group's program: the tensors `input` and `output` are [1, width, 1, groups * capacity] of f16,
// expert g's tokens in the columns from g * capacity.
struct CoreMLProgram {
  size_t groups, width;
  std::string input, output;
  std::map<size_t, CoreMLFunction> functions;  // by capacity
};

// Operations of one function by the unit that Core ML says it prefers for them; those that it
// names no unit for, as constants, are not counted. `products` are the convolutions among them.
struct Placement {
  struct Counts {
    size_t operations = 0, products = 0;
  };
  Counts ane, gpu, cpu, other;
};

// Runs compiled groups through Core ML, asked to use the Neural Engine and the CPU. Buffers for
// tiles are its own, on IOSurfaces where those are to be had; they are kept for the next tiles of
// the same shape, so there are as many of a shape as were in flight at once.
class CoreMLExecutor : public StaticExecutor {
 public:
  struct Counts {
    size_t surfaces = 0, pages = 0;  // buffers made on IOSurfaces, and in plain memory
    size_t copied = 0;               // results that Core ML did not write to our buffers
  };

  // With `surfaces` false, buffers are plain page-aligned memory.
  explicit CoreMLExecutor(bool surfaces = true);
  ~CoreMLExecutor() override;

  // Loads every function and checks its shapes; slow the first time, when Core ML specialises it.
  Status load(const CoreMLProgram& program, size_t& number);

  const ProgramShape* shape(size_t program) const override;
  // One tile is predicted asynchronously, several as a batch on a thread of the executor's own.
  void start(size_t program, std::span<const Dispatch> tiles, Done done) override;

  Counts counts() const;

 private:
  struct Impl;
  std::shared_ptr<Impl> impl_;
};

// Whether this build has Core ML; if not, or on too old a system, the status says why.
Status coreml_available();

// Compiles a package (.mlpackage); `compiled` is a temporary directory that is the caller's.
Status coreml_compile(const std::string& package, std::string& compiled);

// Where Core ML expects to run a function of a compiled model (macOS 14.4 or newer).
Status coreml_placement(const CoreMLFunction& function, Placement& placement);

}  // namespace mlx_moe
