// SPDX-License-Identifier: Apache-2.0
// open_package RUNTIME PACKAGE CALLS: runs a package of AOTInductor with blade's engines, without Python. CALLS is a
// TorchScript file with the attributes `inputs` and `expected`, lists of lists of tensors. Prints the largest error of
// each call, then the counters of the engines.
#include <ATen/core/dispatch/Dispatcher.h>
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/script.h>

#include <iostream>

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  if (dlopen(argv[1], RTLD_NOW | RTLD_GLOBAL) == nullptr) {
    std::cerr << dlerror() << "\n";
    return 3;
  }
  if (dlsym(RTLD_DEFAULT, "Py_Initialize") != nullptr) return 4;
  const auto calls = torch::jit::load(argv[3]);
  torch::inductor::AOTIModelPackageLoader package(argv[2]);
  const c10::InferenceMode inference;
  const auto inputs = calls.attr("inputs").toListRef(), expected = calls.attr("expected").toListRef();
  for (size_t i = 0; i < inputs.size(); ++i) {
    const auto found = package.run(inputs[i].toTensorVector());
    const auto wanted = expected[i].toTensorVector();
    if (found.size() != wanted.size()) return 5;
    double error = 0;
    for (size_t k = 0; k < found.size(); ++k) {
      if (found[k].sizes() != wanted[k].sizes()) return 6;
      if (found[k].numel() > 0) error = std::max(error, (found[k] - wanted[k]).abs().max().item<double>());
    }
    std::cout << "error " << error << "\n";
  }
  torch::jit::Stack stack;
  c10::Dispatcher::singleton().findSchemaOrThrow("blade::live_models", "").callBoxed(stack);
  for (const auto& model : stack.at(0).toListRef()) {
    torch::jit::Stack given{model};
    model.toObject()->type()->getMethod("stats").run(given);
    for (const auto& engine : given.at(0).toGenericDict()) {
      for (const auto& count : engine.value().toGenericDict()) {
        std::cout << engine.key().toStringRef() << " " << count.key().toStringRef() << " " << count.value().toInt() << "\n";
      }
    }
  }
  return 0;
}
