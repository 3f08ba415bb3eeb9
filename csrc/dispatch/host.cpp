#include "dispatch/host.h"

#include <mutex>
#include <thread>

#include "experts/ffn.h"
#include "support/error.h"
#include "support/file_reader.h"
#include "support/half.h"
#include "support/scratch.h"
#include "support/thread_pool.h"

namespace mlx_moe {

namespace {

constexpr size_t kBlock = 4096;  // values of an activation that one thread takes at a time
constexpr size_t kLine = 64;     // bytes of a cache line, to which weights are aligned

struct Expert {
  Matrix gate, up, down;  // of one expert each; no gate (experts 0) for two matrices
};

struct Free {
  void operator()(uint8_t* p) const { operator delete[](p, std::align_val_t(kLine)); }
};
using Bytes = std::unique_ptr<uint8_t[], Free>;

Bytes memory(size_t bytes) {
  return Bytes(static_cast<uint8_t*>(operator new[](bytes, std::align_val_t(kLine))));
}

// `count` values of `size` bytes of the blob, in memory of our own.
Bytes values(const FileReader& blob, size_t offset, size_t count, size_t size) {
  require(offset % size == 0 && offset <= blob.size() && count <= (blob.size() - offset) / size,
          blob.path(), " has ", blob.size(), " bytes, expected ", count, " values of ", size,
          " bytes at offset ", offset);
  Bytes read = memory(count * size);
  blob.read(offset, count * size, read.get());
  return read;
}

void compute(const Activation& activation, const Expert& e, size_t tokens, const uint16_t* x,
             uint16_t* y) {
  const size_t width = e.down.rows, inner = e.down.cols;
  const Input in{x, Scalar::f16, tokens, width};
  const Output out{y, Scalar::f16, tokens, width};
  if (activation.is_swiglu() && !e.gate.added && !e.up.added) {
    auto* ids = static_cast<uint32_t*>(scratch(5, tokens * sizeof(uint32_t)));
    std::fill_n(ids, tokens, 0u);
    return swiglu(in, {ids, tokens, 1}, e.gate, e.up, e.down, out);
  }
  const size_t n = tokens * inner;
  auto* u = static_cast<float*>(scratch(5, 2 * n * sizeof(float)));
  auto* h = static_cast<uint16_t*>(scratch(6, n * sizeof(uint16_t)));
  float* g = activation.gated ? u + n : u;
  linear(in, e.up, {u, Scalar::f32, tokens, inner});
  if (activation.gated) linear(in, e.gate, {g, Scalar::f32, tokens, inner});
  ThreadPool::shared().run((n + kBlock - 1) / kBlock, [&](size_t b) {
    const size_t at = b * kBlock;
    apply(activation, g + at, u + at, std::min(kBlock, n - at), h + at);
  });
  linear({h, Scalar::f16, tokens, inner}, e.down, out);
}

}  // namespace

struct HostExecutor::Loaded {
  ProgramShape shape;
  Activation activation;
  std::vector<Expert> experts;
  std::vector<Bytes> weights;
  size_t weight_bytes = 0;

  explicit Loaded(const HostProgram& p)
      : shape{p.experts.size(), p.width, p.capacities}, activation(p.activation) {
    require(!p.experts.empty() && p.width && p.inner && !p.capacities.empty(), p.blob,
            ": a program without experts, width or capacities");
    for (size_t c : p.capacities) require(c > 0, p.blob, ": a capacity of 0");
    const FileReader blob(p.blob);
    for (const BlobExpert& e : p.experts) experts.push_back(expert(blob, p, e));
  }

  Expert expert(const FileReader& blob, const HostProgram& p, const BlobExpert& from) {
    require(from.up && from.down && bool(from.gate) == p.activation.gated &&
                (from.gate || !from.gate_bias),
            blob.path(), ": an expert lacks a matrix that the activation needs, or has one more");
    Expert e;
    if (from.gate) e.gate = matrix(blob, *from.gate, from.gate_bias, p.inner, p.width);
    e.up = matrix(blob, *from.up, from.up_bias, p.inner, p.width);
    e.down = matrix(blob, *from.down, from.down_bias, p.width, p.inner);
    return e;
  }

  Matrix matrix(const FileReader& blob, const BlobTensor& t, const std::optional<BlobTensor>& bias,
                size_t rows, size_t cols) {
    Matrix m;
    m.type = m.added_type = Scalar::f16;
    m.experts = 1;
    m.rows = rows;
    m.cols = cols;
    m.weight = tensor(blob, t, rows, cols);
    if (bias) m.added = tensor(blob, *bias, rows, 1);
    return m;
  }

  // Half-precision values; an accelerator decodes int8 to these, too.
  const uint8_t* tensor(const FileReader& blob, const BlobTensor& t, size_t rows, size_t cols) {
    Bytes found = t.scale_offset ? decoded(blob, t, rows, cols)
                                 : values(blob, t.offset, rows * cols, sizeof(uint16_t));
    weight_bytes += rows * cols * sizeof(uint16_t);
    return weights.emplace_back(std::move(found)).get();
  }

  static Bytes decoded(const FileReader& blob, const BlobTensor& t, size_t rows, size_t cols) {
    const Bytes q = values(blob, t.offset, rows * cols, 1);
    const Bytes scales = values(blob, *t.scale_offset, rows, sizeof(uint16_t));
    Bytes w = memory(rows * cols * sizeof(uint16_t));
    for (size_t r = 0; r < rows; ++r) {
      const float scale = load_scalar(Scalar::f16, scales.get(), r);
      for (size_t i = r * cols; i < (r + 1) * cols; ++i)
        store_scalar(Scalar::f16, w.get(), i, scale * float(int8_t(q[i])));
    }
    return w;
  }
};

HostExecutor::HostExecutor(std::chrono::duration<double> dispatch) : dispatch_(dispatch) {}
HostExecutor::~HostExecutor() = default;

size_t HostExecutor::load(const HostProgram& program) {
  auto loaded = std::make_unique<Loaded>(program);
  std::unique_lock lock(mutex_);
  programs_.push_back(std::move(loaded));
  return programs_.size() - 1;
}

const HostExecutor::Loaded* HostExecutor::find(size_t program) const {
  std::shared_lock lock(mutex_);
  return program < programs_.size() ? programs_[program].get() : nullptr;
}

const ProgramShape* HostExecutor::shape(size_t program) const {
  const Loaded* loaded = find(program);
  return loaded ? &loaded->shape : nullptr;
}

void HostExecutor::start(size_t program, std::span<const Dispatch> tiles, Done done) {
  Status status;
  try {
    const Loaded& p = *find(program);
    for (const Dispatch& t : tiles) {
      if (dispatch_.count() > 0) std::this_thread::sleep_for(dispatch_);
      for (size_t g = 0; g < t.groups; ++g) {
        const size_t at = g * t.capacity * t.width;
        compute(p.activation, p.experts[g], t.capacity, t.x + at, t.y + at);
      }
    }
  } catch (const std::exception& error) {
    status.message = error.what();
  }
  done(status);
}

size_t HostExecutor::weight_bytes() const {
  std::shared_lock lock(mutex_);
  size_t bytes = 0;
  for (const auto& p : programs_) bytes += p->weight_bytes;
  return bytes;
}

}  // namespace mlx_moe
