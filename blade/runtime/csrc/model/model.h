// SPDX-License-Identifier: Apache-2.0
// torch.classes.blade.Model: an optimized module, with its engines, guards, originals and weights, as one value that a
// torch.export archive or an AOTInductor package holds. The op that runs it:
//
//   blade::run_model(Model model, str method, Tensor[] inputs) -> Tensor[]
//
// It is functional: it writes to no input, and every result has memory of its own.
#pragma once

#include <ATen/core/Dict.h>
#include <ATen/core/Tensor.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/custom_class.h>

#include <mutex>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "model/result_form.h"

namespace blade {

class Model : public torch::CustomClassHolder {
 public:
  // What travels in a file: the version of this state, and the bytes of a file of torch.jit.save (uint8).
  using State = std::tuple<int64_t, at::Tensor>;
  using Stats = c10::Dict<std::string, c10::Dict<std::string, int64_t>>;

  // `file`: the bytes of a TorchScript module whose methods take and return List[Tensor], with an attribute
  // `forms: Dict[str, str]`, the results of each method (result_form.h). Where it is taken apart, `forms["sizes"]` has
  // what holds between the sizes of the whole graph's inputs. Throws where they are none.
  explicit Model(const at::Tensor& file);

  static c10::intrusive_ptr<Model> from_state(const State& state);
  State to_state() const;

  // Without gradients. "forward" is the whole model; the results of other methods, which are parts, have to have the
  // sizes of their forms, which the graph around them relies on. "sizes" checks the graph's inputs; its result is empty.
  std::vector<at::Tensor> run(const std::string& method, const std::vector<at::Tensor>& inputs);

  const std::string& form(const std::string& method) const;
  // Counters of each engine, as `blade.stats` gives them: "cluster_0" -> {"calls": 8, "engine_runs": 7, ...}.
  Stats stats() const;
  const torch::jit::Module& module() const { return module_; }
  // Of this process; a later Model has a greater number.
  int64_t number() const { return number_; }

 private:
  struct Method {
    torch::jit::Method call;
    std::string text;
    std::vector<ResultForm> forms;
  };
  const Method& method(const std::string& name) const;
  void check_sizes(const std::vector<at::Tensor>& inputs) const;

  torch::jit::Module module_;
  std::unordered_map<std::string, Method> methods_;
  std::vector<SizeRelation> relations_;
  const int64_t number_;
};

// All that live in this process, the oldest first.
std::vector<c10::intrusive_ptr<Model>> live_models();

std::vector<at::Tensor> run_model(
    const c10::intrusive_ptr<Model>& model, const std::string& method, const std::vector<at::Tensor>& inputs);

}  // namespace blade
