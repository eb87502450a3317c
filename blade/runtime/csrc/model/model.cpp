// SPDX-License-Identifier: Apache-2.0
#include "model/model.h"

#include <caffe2/serialize/read_adapter_interface.h>
#include <torch/csrc/jit/serialization/export.h>
#include <torch/csrc/jit/serialization/import.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>

#include "engine/checksum.h"
#include "engine/engine.h"

namespace blade {
namespace {

constexpr int64_t kModelVersion = 1;
constexpr const char* kForms = "forms";
constexpr const char* kWhole = "forward";
constexpr const char* kSizes = "sizes";
constexpr const char* kClusterEngines[] = {"engine", "engine_1", "engine_2"};  // attributes of a cluster (blade/report)
constexpr const char* kInside = "model.";  // where the wrapper holds the optimized module

class Bytes : public caffe2::serialize::ReadAdapterInterface {
 public:
  explicit Bytes(at::Tensor bytes) : bytes_(std::move(bytes)) {}
  size_t size() const override { return static_cast<size_t>(bytes_.numel()); }
  size_t read(uint64_t pos, void* buf, size_t n, const char* /*what*/) const override {
    if (pos >= size()) return 0;
    const size_t count = std::min<size_t>(n, size() - pos);
    std::memcpy(buf, static_cast<const uint8_t*>(bytes_.const_data_ptr()) + pos, count);
    return count;
  }

 private:
  const at::Tensor bytes_;
};

torch::jit::Module read_module(const at::Tensor& file) {
  const bool is_whole = file.defined() && file.scalar_type() == at::kByte && why_not_whole(file).empty();
  TORCH_CHECK(is_whole, "blade: the file of a Model is a tensor of bytes");
  const c10::InferenceMode ordinary_tensors(false);
  auto module = torch::jit::load(std::make_shared<Bytes>(file.cpu().contiguous()));
  module.eval();
  return module;
}

std::map<std::string, std::string> forms_of(const torch::jit::Module& module) {
  TORCH_CHECK(module.hasattr(kForms), "blade: the module in a Model has no attribute '", kForms, "'");
  std::map<std::string, std::string> forms;
  const auto dict = module.attr(kForms).toGenericDict();
  for (const auto& entry : dict) forms.emplace(entry.key().toStringRef(), entry.value().toStringRef());
  return forms;
}

std::mutex& live_mutex() {
  static std::mutex mutex;
  return mutex;
}

std::map<int64_t, c10::weak_intrusive_ptr<Model>>& live() {
  static auto* models = new std::map<int64_t, c10::weak_intrusive_ptr<Model>>();
  return *models;
}

void announce(const c10::intrusive_ptr<Model>& model) {
  const std::lock_guard<std::mutex> lock(live_mutex());
  auto& models = live();
  for (auto it = models.begin(); it != models.end();) it = it->second.expired() ? models.erase(it) : std::next(it);
  models.emplace(model->number(), c10::weak_intrusive_ptr<Model>(model));
}

int64_t new_number() {
  static std::atomic<int64_t> last{0};
  return ++last;
}

std::string without_prefix(const std::string& name) {
  return name.rfind(kInside, 0) == 0 ? name.substr(std::strlen(kInside)) : name;
}

}  // namespace

Model::Model(const at::Tensor& file) : module_(read_module(file)), number_(new_number()) {
  for (const auto& [name, text] : forms_of(module_)) {
    if (name == kSizes) {
      relations_ = read_relations(text);
      continue;
    }
    auto found = module_.find_method(name);
    TORCH_CHECK(found, "blade: the module in a Model has no method '", name, "'");
    methods_.emplace(name, Method{*found, text, read_forms(text)});
  }
}

c10::intrusive_ptr<Model> Model::from_state(const State& state) {
  const auto& [version, file] = state;
  TORCH_CHECK(
      version == kModelVersion, "blade: the model was saved in format ", version, "; this blade reads format ", kModelVersion,
      ": save it again with this version.");
  auto model = c10::make_intrusive<Model>(file);
  announce(model);
  return model;
}

Model::State Model::to_state() const {
  std::string bytes;
  torch::jit::ExportModule(module_, [&bytes](const void* data, size_t size) {
    bytes.append(static_cast<const char*>(data), size);
    return size;
  });
  auto file = at::empty({static_cast<int64_t>(bytes.size())}, at::kByte);
  std::memcpy(file.mutable_data_ptr(), bytes.data(), bytes.size());
  return {kModelVersion, std::move(file)};
}

const Model::Method& Model::method(const std::string& name) const {
  const auto found = methods_.find(name);
  TORCH_CHECK(found != methods_.end(), "blade: the model has no method '", name, "'");
  return found->second;
}

const std::string& Model::form(const std::string& name) const { return method(name).text; }

void Model::check_sizes(const std::vector<at::Tensor>& inputs) const {
  for (const auto& relation : relations_) {
    TORCH_CHECK_VALUE(
        relation.number.evaluate(inputs) >= 0, "blade: the program was compiled for inputs with ", relation.text,
        ": save it without compile_glue for other sizes.");
  }
}

std::vector<at::Tensor> Model::run(const std::string& name, const std::vector<at::Tensor>& inputs) {
  if (name == kSizes) {
    check_sizes(inputs);
    return {at::empty({0})};
  }
  const auto& method = this->method(name);
  const c10::InferenceMode ordinary_tensors(false);
  const at::NoGradGuard no_grad;
  torch::jit::Method call = method.call;
  auto results = call({inputs}).toTensorVector();
  TORCH_CHECK(results.size() == method.forms.size(), "blade: the model returned ", results.size(), " tensors, not ", method.forms.size());
  for (size_t i = 0; i < results.size(); ++i) {
    auto& result = results[i];
    result = method.forms[i].laid_out(result);
    if (name != kWhole) {
      const auto why = method.forms[i].why_not(result, inputs);
      TORCH_CHECK(why.empty(), "blade: result ", i, " of '", name, "' does not fit the graph around it: ", why);
    }
    // an input, a weight, or shared with another result
    if (result.has_storage() && result.storage().use_count() > 1) result = result.clone();
  }
  return results;
}

Model::Stats Model::stats() const {
  Stats stats;
  for (const auto& [name, module] : module_.named_modules()) {
    for (const char* attribute : kClusterEngines) {
      if (!module.hasattr(attribute)) continue;
      const auto value = module.attr(attribute);
      if (!value.isCustomClass()) continue;
      const auto engine = value.toCustomClass<Engine>();
      const bool is_first = attribute == kClusterEngines[0];
      stats.insert(without_prefix(name) + (is_first ? "" : "/" + engine->backend()), engine->stats());
    }
  }
  return stats;
}

std::vector<c10::intrusive_ptr<Model>> live_models() {
  const std::lock_guard<std::mutex> lock(live_mutex());
  std::vector<c10::intrusive_ptr<Model>> found;
  for (const auto& [number, weak] : live()) {
    if (auto model = weak.lock()) found.push_back(std::move(model));
  }
  return found;
}

std::vector<at::Tensor> run_model(
    const c10::intrusive_ptr<Model>& model, const std::string& method, const std::vector<at::Tensor>& inputs) {
  return model->run(method, inputs);
}

}  // namespace blade
