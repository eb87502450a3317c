// SPDX-License-Identifier: Apache-2.0
// Optimized models in C++ programs, without Python.
//
//   #include <blade/blade.h>
//
//   blade::SavedModel model("model.pt");
//   std::vector<at::Tensor> outputs = model.run({at::ones({8, 64})});
//   for (const blade::EngineStats& engine : model.stats()) std::cout << engine << "\n";
//
// Linking this library is what files of torch.jit.save and packages of AOTInductor need: a program that opens them with
// torch::jit::load or torch::inductor::AOTIModelPackageLoader may go on doing so. docs/deployment.md has the rest.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <iosfwd>
#include <map>
#include <memory>
#include <string>
#include <vector>

#define BLADE_API __attribute__((visibility("default")))

namespace torch::jit {
struct Module;
}

namespace blade {

// What an engine did in this process. Its cluster's original answered the calls in `fallbacks`.
struct EngineStats {
  std::string name;     // of the cluster: "cluster_0"
  std::string backend;  // "disc", "onnxruntime", ...
  int64_t calls = 0;
  int64_t engine_runs = 0;
  std::map<std::string, int64_t> fallbacks;  // docs/reasons.md -> calls
  std::string why_unavailable;               // why it can run no call of this process; empty if it can
  std::string last_error;                    // the text of the last exception in it
};

// "cluster_0: disc answered 2 of 3 calls, the original 1 (guard_dtype 1)"
BLADE_API std::ostream& operator<<(std::ostream& stream, const EngineStats& stats);

// Of all engines in a module that torch::jit::load returned.
BLADE_API std::vector<EngineStats> stats(const torch::jit::Module& module);

// A file of blade.save or torch.jit.save: TorchScript, an AOTInductor package, or an archive of torch.export whose program is
// one call of the model (others take Python). Opening it runs what is in it: a model is a program.
class BLADE_API SavedModel {
 public:
  // Throws c10::Error where the file cannot be opened, or is of another kind.
  explicit SavedModel(const std::string& path);

  // One call in inference mode, from any thread. `inputs` are the model's tensors in order; what comes back are those that
  // it returns, in the order of its tuples, lists and dicts. Throws c10::Error where the model does.
  std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs);

  std::vector<EngineStats> stats() const;

  class File;

 private:
  std::shared_ptr<File> file_;
};

}  // namespace blade
