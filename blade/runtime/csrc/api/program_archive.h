// SPDX-License-Identifier: Apache-2.0
// Archives of torch.export whose program is one call of blade::run_model: blade.save(optimized, "model.pt2").
#pragma once

#include <ATen/core/ivalue.h>

#include <string>
#include <vector>

#include "blade/blade.h"
#include "model/model.h"

namespace blade {

// The model of the program. Throws c10::Error, with a way out, where the program has other ops, which take Python.
c10::intrusive_ptr<Model> read_whole_model(const std::string& path);

std::vector<at::Tensor> run_whole_model(Model& model, const std::vector<at::Tensor>& inputs);

// Of the engines in a model; nothing if `value` is none.
void add_model_stats(const Model& model, std::vector<EngineStats>& stats);
void add_model_stats(const c10::IValue& value, std::vector<EngineStats>& stats);

}  // namespace blade
