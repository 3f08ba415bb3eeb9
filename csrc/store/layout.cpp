#include "store/layout.h"

#include <algorithm>

#include "store/bank.h"
#include "store/failure.h"
#include "support/error.h"

namespace mlx_moe {

namespace {

constexpr size_t kLine = 64;

using Shape = std::vector<uint64_t>;

std::string text_of(const Shape& shape) {
  std::string s;
  for (uint64_t n : shape) s += (s.empty() ? "" : ", ") + std::to_string(n);
  return "[" + s + "]";
}

// One array of a projection for every expert: where it is, and what all of them have in common.
struct Stack {
  std::string name, dtype;
  Shape shape;  // of one expert
  size_t size = 0;
  struct Place {
    uint32_t file;
    uint64_t offset;
  };
  std::vector<Place> experts;
};

class Builder {
 public:
  Builder(const LayerSource& source, const Checkpoint& checkpoint)
      : source_(source), checkpoint_(checkpoint) {
    layout_.name = source.name;
  }

  LayerLayout build() {
    if (source_.matrices.empty()) wrong("has no projections");
    for (const MatrixSource& m : source_.matrices) add(m);
    layout_.slot_bytes = Bank::whole_pages(end_);
    for (auto& pieces : layout_.pieces)
      std::sort(pieces.begin(), pieces.end(), [](const Piece& a, const Piece& b) {
        return a.file != b.file ? a.file < b.file : a.offset < b.offset;
      });
    return std::move(layout_);
  }

 private:
  template <class... Parts>
  [[noreturn]] void wrong(const Parts&... parts) const {
    fail(Failure::corrupt, source_.name, ": ", parts...);
  }

  Stack stack(const std::vector<std::string>& names) const {
    const auto& first = checkpoint_.find(names[0], source_.name);
    Stack s{names[0], first.tensor.dtype, first.tensor.shape, 0, {}};
    if (names.size() > 1) {
      for (const std::string& name : names) {
        const auto& found = checkpoint_.find(name, source_.name);
        if (found.tensor.dtype != s.dtype || found.tensor.shape != s.shape)
          wrong("tensor '", name, "' is ", found.tensor.dtype, " ", text_of(found.tensor.shape),
                ", '", s.name, "' is ", s.dtype, " ", text_of(s.shape));
        s.experts.push_back({found.file, found.tensor.offset});
      }
      s.size = first.tensor.size;
      return s;
    }
    if (s.shape.empty() || s.shape[0] == 0) wrong("tensor '", s.name, "' is no stack of experts");
    const uint64_t experts = s.shape[0];
    s.shape.erase(s.shape.begin());
    s.size = first.tensor.size / experts;
    if (s.size * experts != first.tensor.size)  // a dtype that we do not know
      wrong("tensor '", s.name, "' is ", s.dtype, ", which does not cut into experts");
    for (uint64_t e = 0; e < experts; ++e)
      s.experts.push_back({first.file, first.tensor.offset + e * s.size});
    return s;
  }

  void expect(const Stack& s, std::initializer_list<const char*> dtypes, const Shape& shape) const {
    const bool known = std::any_of(dtypes.begin(), dtypes.end(),
                                   [&](const char* name) { return s.dtype == name; });
    if (!known) wrong("tensor '", s.name, "' is ", s.dtype, "; the kernels do not take that here");
    if (s.shape != shape)
      wrong("tensor '", s.name, "' has shape ", text_of(s.shape), " an expert, expected ",
            text_of(shape));
  }

  static Scalar scalar(const Stack& s) {
    return s.dtype == "F32" ? Scalar::f32 : s.dtype == "F16" ? Scalar::f16 : Scalar::bf16;
  }

  void add(const MatrixSource& source) {
    MatrixLayout m;
    m.at.fill(MatrixLayout::kNowhere);
    const auto& names = source.names;
    if (names[kWeight].empty()) wrong("a projection has no weight");
    const Stack weight = stack(names[kWeight]);
    if (weight.shape.size() != 2)
      wrong("tensor '", weight.name, "' has shape ", text_of(weight.shape),
            " an expert, expected [rows, columns]");
    format(m.format, source, weight);
    place(m, kWeight, weight);
    const Shape groups = {m.format.rows, source.mode == Mode::dense ? 0 : m.format.groups()};
    for (Part part : {kScales, kBiases, kAdded, kGlobalScale}) {
      if (names[part].empty()) continue;
      const Stack s = stack(names[part]);
      if (part == kGlobalScale)
        expect(s, {"F32"}, s.shape.empty() ? Shape{} : Shape{1});
      else if (part == kAdded)
        expect(s, {"F32", "F16", "BF16"}, {m.format.rows});
      else if (m.format.mode != Mode::affine)
        expect(s, {"U8"}, groups);
      else
        expect(s, {"F32", "F16", "BF16"}, groups);
      if (part == kAdded) m.format.added_type = scalar(s);
      if (part == kScales) m.format.type = scalar(s);
      if (part == kBiases && scalar(s) != m.format.type) wrong(s.name, " is not as its scales");
      place(m, part, s);
    }
    layout_.matrices.push_back(m);
  }

  void format(Matrix& m, const MatrixSource& source, const Stack& weight) const {
    const bool dense = source.mode == Mode::dense, affine = source.mode == Mode::affine;
    const auto& names = source.names;
    m.mode = source.mode;
    m.bits = source.bits;
    m.group = source.group;
    m.experts = weight.experts.size();
    m.rows = weight.shape[0];
    m.cols = weight.shape[1];
    if (dense != names[kScales].empty() || affine == names[kBiases].empty())
      wrong("'", weight.name, "' is ", name_of(m.mode), ", and scales or biases ",
            dense ? "are there" : "are missing");
    if (!names[kGlobalScale].empty() && m.mode != Mode::nvfp4)
      wrong("'", weight.name, "' has a global scale, which goes with nvfp4");
    if (dense) {
      expect(weight, {"F32", "F16", "BF16"}, weight.shape);
      m.type = scalar(weight);
    } else {
      expect(weight, {"U32"}, weight.shape);
      if (source.bits <= 0 || m.cols * 32 % uint64_t(source.bits))
        wrong("'", weight.name, "' does not hold whole values of ", source.bits, " bits");
      m.cols = m.cols * 32 / uint64_t(source.bits);
    }
    try {
      validate(m);
    } catch (const Error& e) {
      wrong("'", weight.name, "': ", e.what());
    }
  }

  void place(MatrixLayout& m, Part part, const Stack& s) {
    if (layout_.pieces.empty()) {
      layout_.experts = s.experts.size();
      layout_.pieces.resize(layout_.experts);
    }
    if (s.experts.size() != layout_.experts)
      wrong("tensor '", s.name, "' is of ", s.experts.size(), " experts, others of ",
            layout_.experts);
    m.at[part] = end_;
    for (size_t e = 0; e < layout_.experts; ++e)
      layout_.pieces[e].push_back({s.experts[e].file, s.experts[e].offset, s.size, end_});
    end_ = (end_ + s.size + kLine - 1) / kLine * kLine;
  }

  const LayerSource& source_;
  const Checkpoint& checkpoint_;
  LayerLayout layout_;
  size_t end_ = 0;
};

}  // namespace

Checkpoint::Checkpoint(const std::vector<std::string>& paths, bool direct) {
  for (const std::string& path : paths) {
    files_.push_back(std::make_unique<File>(path, direct));
    for (Tensor& t : read_tensors(*files_.back()))
      tensors_.push_back({uint32_t(files_.size() - 1), std::move(t)});
    files_.back()->check_path();  // that it was not replaced meanwhile
  }
  std::sort(tensors_.begin(), tensors_.end(),
            [](const Found& a, const Found& b) { return a.tensor.name < b.tensor.name; });
  for (size_t i = 1; i < tensors_.size(); ++i)
    if (tensors_[i - 1].tensor.name == tensors_[i].tensor.name)
      fail(Failure::corrupt, "tensor '", tensors_[i].tensor.name, "' is in ",
           files_[tensors_[i - 1].file]->path(), " and in ", files_[tensors_[i].file]->path());
}

const Checkpoint::Found& Checkpoint::find(const std::string& name, const std::string& asks) const {
  auto it =
      std::lower_bound(tensors_.begin(), tensors_.end(), name,
                       [](const Found& f, const std::string& n) { return f.tensor.name < n; });
  if (it == tensors_.end() || it->tensor.name != name)
    fail(Failure::corrupt, asks, ": there is no tensor '", name, "' in the ", files_.size(),
         " files");
  return *it;
}

ExpertArrays MatrixLayout::arrays(const uint8_t* slot) const {
  const auto part = [&](Part p) { return at[p] == kNowhere ? nullptr : slot + at[p]; };
  return {part(kWeight), part(kScales), part(kBiases), part(kAdded),
          reinterpret_cast<const float*>(part(kGlobalScale))};
}

LayerLayout lay_out(const LayerSource& source, const Checkpoint& checkpoint) {
  return Builder(source, checkpoint).build();
}

}  // namespace mlx_moe
