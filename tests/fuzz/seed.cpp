// SPDX-License-Identifier: Apache-2.0
#include "seed.h"

#include <caffe2/serialize/inline_container.h>
#include <torch/csrc/jit/serialization/import.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <sstream>

namespace fuzz {
namespace {

std::string read_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) broken("there is no file " + path);
  return {std::istreambuf_iterator<char>(in), {}};
}

}  // namespace

[[noreturn]] void broken(const std::string& what) {
  std::fprintf(stderr, "broken invariant: %s\n", what.c_str());
  std::abort();
}

Tensors copies(const Tensors& tensors) {
  Tensors made;
  for (const auto& tensor : tensors) made.push_back(tensor.defined() ? tensor.clone() : tensor);
  return made;
}

State copy(const State& state) {
  const auto& [version, words, numbers, tensors] = state;
  return {version, words, numbers.copy(), copies(tensors)};
}

std::vector<EnginePtr> engines_of(const torch::jit::Module& module) {
  std::vector<EnginePtr> found;
  for (const auto& attribute : module.named_attributes(/*recurse=*/true)) {
    const auto& value = attribute.value;
    if (value.isObject() && value.type()->repr_str().find("blade.Engine") != std::string::npos) {
      found.push_back(value.toCustomClass<blade::Engine>());
    }
  }
  return found;
}

torch::jit::Module load(const std::string& file) {
  std::istringstream in(file);
  return torch::jit::load(in, at::Device(at::kCPU));
}

std::string archive_of(const std::vector<Record>& records) {
  std::string file;
  caffe2::serialize::PyTorchStreamWriter writer([&file](const void* data, size_t size) {
    file.append(static_cast<const char*>(data), size);
    return size;
  });
  for (const auto& record : records) writer.writeRecord(record.name, record.data.data(), record.data.size());
  writer.writeEndOfFile();
  return file;
}

Seed read_seed(const std::string& folder, const std::string& name) {
  Seed seed{name, read_file(folder + "/" + name + ".pt"), {}, {}, {}};
  std::istringstream in(seed.file);
  caffe2::serialize::PyTorchStreamReader reader(&in);
  for (const auto& record : reader.getAllRecords()) {
    if (record == "version" || record == ".data/serialization_id") continue;  // the writer adds them
    const auto [data, size] = reader.getRecord(record);
    seed.records.push_back({record, std::string(static_cast<const char*>(data.get()), size)});
  }
  const auto inputs = read_file(folder + "/" + name + ".inputs");
  const auto list = torch::jit::pickle_load({inputs.begin(), inputs.end()});
  for (const auto& input : list.toListRef()) seed.inputs.push_back(input.toTensor());
  const auto module = load(seed.file);
  for (const auto& engine : engines_of(module)) {
    seed.engines.push_back(copy(engine->to_state()));
    if (name != "calls" && !engine->try_execute(seed.inputs)) broken(name + " does not answer: " + engine->last_error());
  }
  if (seed.engines.empty()) broken(name + " has no engines");
  return seed;
}

}  // namespace fuzz
