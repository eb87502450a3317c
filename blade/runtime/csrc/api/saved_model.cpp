// SPDX-License-Identifier: Apache-2.0
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>
#include <caffe2/serialize/inline_container.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/serialization/import.h>
#include <torch/version.h>

#include <algorithm>

#include "api/program_archive.h"
#include "api/stats.h"
#include "blade/blade.h"

namespace blade {

class SavedModel::File {
 public:
  virtual ~File() = default;
  virtual std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs) = 0;
  virtual std::vector<EngineStats> stats() const = 0;
};

namespace {

using torch::inductor::AOTIModelPackageLoader;

// In the order in which Python's pytrees have them; what is no tensor is left out.
void add_tensors(const c10::IValue& value, std::vector<at::Tensor>& found) {
  if (value.isTensor()) {
    found.push_back(value.toTensor());
  } else if (value.isTuple()) {
    for (const auto& element : value.toTupleRef().elements()) add_tensors(element, found);
  } else if (value.isList()) {
    for (const auto& element : value.toListRef()) add_tensors(element, found);
  } else if (value.isGenericDict()) {
    for (const auto& entry : value.toGenericDict()) add_tensors(entry.value(), found);
  }
}

class TorchScriptFile : public SavedModel::File {
 public:
  explicit TorchScriptFile(const std::string& path) : module_(torch::jit::load(path)) { module_.eval(); }

  std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs) override {
    std::vector<at::Tensor> outputs;
    add_tensors(module_.forward({inputs.begin(), inputs.end()}), outputs);
    return outputs;
  }

  std::vector<EngineStats> stats() const override { return blade::stats(module_); }

 private:
  torch::jit::Module module_;
};

class AotiPackage : public SavedModel::File {
 public:
  explicit AotiPackage(const std::string& path) : loader_(path) {}

  std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs) override { return loader_.run(inputs); }

  std::vector<EngineStats> stats() const override {
    std::vector<EngineStats> found;
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 13
    for (const auto& [name, value] : loader_.get_custom_objs()) {
      add_stats(name, value, found);
      add_model_stats(value, found);
    }
    std::sort(found.begin(), found.end(), [](const auto& a, const auto& b) { return a.name < b.name; });
#endif
    return found;
  }

 private:
  AOTIModelPackageLoader loader_;
};

class ProgramArchive : public SavedModel::File {
 public:
  explicit ProgramArchive(const std::string& path) : model_(read_whole_model(path)) {}

  std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs) override { return run_whole_model(*model_, inputs); }

  std::vector<EngineStats> stats() const override {
    std::vector<EngineStats> found;
    add_model_stats(*model_, found);
    return found;
  }

 private:
  const c10::intrusive_ptr<Model> model_;
};

bool contains(const std::vector<std::string>& names, const char* part) {
  return std::any_of(names.begin(), names.end(), [&](const auto& name) { return name.find(part) != std::string::npos; });
}

std::shared_ptr<SavedModel::File> open(const std::string& path) {
  const auto names = caffe2::serialize::PyTorchStreamReader(path).getAllRecords();
  if (contains(names, "data/aotinductor/")) return std::make_shared<AotiPackage>(path);
  if (contains(names, "models/")) return std::make_shared<ProgramArchive>(path);
  return std::make_shared<TorchScriptFile>(path);
}

}  // namespace

SavedModel::SavedModel(const std::string& path) : file_(open(path)) {}

std::vector<at::Tensor> SavedModel::run(const std::vector<at::Tensor>& inputs) {
  const c10::InferenceMode guard;
  return file_->run(inputs);
}

std::vector<EngineStats> SavedModel::stats() const { return file_->stats(); }

}  // namespace blade
