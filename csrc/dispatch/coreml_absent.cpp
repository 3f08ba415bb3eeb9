// Stands for coreml.mm where there is no Core ML.
#include "dispatch/coreml.h"

namespace mlx_moe {

struct CoreMLExecutor::Impl {};

CoreMLExecutor::CoreMLExecutor(bool) {}
CoreMLExecutor::~CoreMLExecutor() = default;

Status CoreMLExecutor::load(const CoreMLProgram&, size_t&) { return coreml_available(); }
const ProgramShape* CoreMLExecutor::shape(size_t) const { return nullptr; }
void CoreMLExecutor::start(size_t, std::span<const Dispatch>, Done done) {
  done(coreml_available());
}
CoreMLExecutor::Counts CoreMLExecutor::counts() const { return {}; }

Status coreml_available() { return {"there is no Core ML here: it is a part of macOS"}; }
Status coreml_compile(const std::string&, std::string&) { return coreml_available(); }
Status coreml_placement(const CoreMLFunction&, Placement&) { return coreml_available(); }

}  // namespace mlx_moe
