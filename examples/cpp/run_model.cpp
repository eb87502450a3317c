// SPDX-License-Identifier: Apache-2.0
// Runs a model that blade optimized, without Python, and says which engines answered.
//
//   run_model MODEL INPUTS OUTPUTS [CALLS [THREADS]]
//
// MODEL is a file of torch.jit.save or an AOTInductor package. INPUTS is a torch.save of a tuple of tensors, and OUTPUTS
// becomes one, for torch.load. Each thread makes so many calls.
#include <ATen/core/ivalue.h>
#include <blade/blade.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <exception>
#include <fstream>
#include <iostream>
#include <iterator>
#include <stdexcept>
#include <thread>

namespace {

std::vector<at::Tensor> read_tensors(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("cannot read " + path);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  std::vector<at::Tensor> tensors;
  const auto loaded = torch::jit::pickle_load(bytes);
  for (const auto& value : loaded.toTupleRef().elements()) tensors.push_back(value.toTensor());
  return tensors;
}

void write_tensors(const std::string& path, const std::vector<at::Tensor>& tensors) {
  const auto bytes = torch::jit::pickle_save(c10::ivalue::Tuple::create({tensors.begin(), tensors.end()}));
  std::ofstream file(path, std::ios::binary);
  if (!file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()))) throw std::runtime_error("cannot write " + path);
}

void run(const std::string& model_path, const std::string& inputs_path, const std::string& outputs_path, int calls, int threads) {
  blade::SavedModel model(model_path);
  const auto inputs = read_tensors(inputs_path);
  const auto outputs = model.run(inputs);
  std::vector<std::thread> others;
  for (int i = 0; i < threads; ++i) {
    const int left = i == 0 ? calls - 1 : calls;
    others.emplace_back([&, left] {
      for (int k = 0; k < left; ++k) model.run(inputs);
    });
  }
  for (auto& other : others) other.join();
  write_tensors(outputs_path, outputs);
  for (const auto& output : outputs) std::cout << "output " << output.scalar_type() << " " << output.sizes() << "\n";
  for (const auto& engine : model.stats()) std::cout << engine << "\n";
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4 || argc > 6) {
    std::cerr << "usage: run_model MODEL INPUTS OUTPUTS [CALLS [THREADS]]\n";
    return 2;
  }
  try {
    run(argv[1], argv[2], argv[3], argc > 4 ? std::stoi(argv[4]) : 1, argc > 5 ? std::stoi(argv[5]) : 1);
  } catch (const std::exception& error) {
    std::cerr << "error: " << error.what() << "\n";
    return 1;
  }
  return 0;
}
