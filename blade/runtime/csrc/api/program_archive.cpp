// SPDX-License-Identifier: Apache-2.0
#include "api/program_archive.h"

#include <c10/util/Exception.h>
#include <caffe2/serialize/inline_container.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <stdexcept>

#include "libraries/json.h"

namespace blade {
namespace {

constexpr const char* kRunModel = "torch.ops.blade.run_model.default";
constexpr const char* kWholeMethod = "forward";
constexpr std::string_view kInside = "model.";  // where a blade.Model holds the optimized module

std::string read_record(caffe2::serialize::PyTorchStreamReader& reader, const std::string& name) {
  const auto [data, size] = reader.getRecord(name);
  return {static_cast<const char*>(data.get()), size};
}

// The one record whose name has this beginning; empty if there are several, or none.
std::string only_record(caffe2::serialize::PyTorchStreamReader& reader, std::string_view prefix) {
  std::string found;
  for (const auto& name : reader.getAllRecords()) {
    if (name.rfind(prefix, 0) != 0) continue;
    if (!found.empty()) return "";
    found = name;
  }
  return found;
}

// Of the values of a graph that are tensors; a value of another kind, but for custom objects, gives a name that none has.
std::vector<std::string> tensor_names(const Json& values) {
  std::vector<std::string> names;
  for (const auto& value : values.items) {
    if (value.find("as_custom_obj") != nullptr) continue;
    const Json* tensor = value.find("as_tensor");
    names.push_back(tensor == nullptr ? "?" : tensor->at("name").as_text());
  }
  return names;
}

std::vector<std::string> names_in(const Json* tensors) {
  std::vector<std::string> names;
  if (tensors == nullptr) return names;
  for (const auto& tensor : tensors->items) names.push_back(tensor.at("name").as_text());
  return names;
}

// Whether the program takes tensors, hands them to the model in that order, and returns the model's results.
bool is_whole_model(const Json& graph) {
  const auto& nodes = graph.at("nodes").items;
  if (nodes.size() != 1 || nodes[0].at("target").as_text() != kRunModel) return false;
  const auto& arguments = nodes[0].at("inputs").items;
  const auto& results = nodes[0].at("outputs").items;
  if (arguments.size() != 3 || results.size() != 1) return false;
  const Json* method = arguments[1].at("arg").find("as_string");
  if (method == nullptr || method->as_text() != kWholeMethod) return false;
  return names_in(arguments[2].at("arg").find("as_tensors")) == tensor_names(graph.at("inputs")) &&
         names_in(results[0].find("as_tensors")) == tensor_names(graph.at("outputs"));
}

bool is_program_of_blade(const std::string& text) {
  try {
    return is_whole_model(parse_json(text).at("graph_module").at("graph"));
  } catch (const std::runtime_error&) {
    return false;
  }
}

// Null for anything else.
c10::intrusive_ptr<Model> model_in(const c10::IValue& value) {
  static const auto type = c10::getCustomClassType<c10::intrusive_ptr<Model>>();
  const bool is_model = value.isObject() && value.type<c10::Type>()->isSubtypeOf(type);
  return is_model ? value.toCustomClass<Model>() : c10::intrusive_ptr<Model>();
}

}  // namespace

c10::intrusive_ptr<Model> read_whole_model(const std::string& path) {
  caffe2::serialize::PyTorchStreamReader reader(path);
  const auto program = only_record(reader, "models/"), object = only_record(reader, "data/constants/custom_obj_");
  TORCH_CHECK(
      !program.empty() && !object.empty() && is_program_of_blade(read_record(reader, program)), "blade: ", path,
      " is a program of torch.export with ops around the model's call, which takes Python to run: "
      "blade.save(model, path, format=\"aoti\") writes a file for C++");
  const auto bytes = read_record(reader, object);
  auto model = model_in(torch::jit::pickle_load_obj(bytes));
  TORCH_CHECK(model, "blade: ", path, " holds no model of blade's");
  return model;
}

std::vector<at::Tensor> run_whole_model(Model& model, const std::vector<at::Tensor>& inputs) { return model.run(kWholeMethod, inputs); }

void add_model_stats(const c10::IValue& value, std::vector<EngineStats>& stats) {
  if (const auto model = model_in(value)) add_model_stats(*model, stats);
}

void add_model_stats(const Model& model, std::vector<EngineStats>& stats) {
  for (auto& one : blade::stats(model.module())) {
    if (one.name.rfind(kInside, 0) == 0) one.name.erase(0, kInside.size());
    stats.push_back(std::move(one));
  }
}

}  // namespace blade
