// SPDX-License-Identifier: Apache-2.0
// The files that mutants are made of, taken apart.
#pragma once

#include <torch/script.h>

#include <string>
#include <vector>

#include "mutate.h"

namespace fuzz {

using EnginePtr = c10::intrusive_ptr<blade::Engine>;
using Tensors = std::vector<at::Tensor>;

struct Record {
  std::string name, data;
};

struct Seed {
  std::string name, file;
  std::vector<Record> records;  // of the archive that the file is
  std::vector<State> engines;
  Tensors inputs;  // that its engines take
};

// What seeds.py wrote as NAME.pt and NAME.inputs. Ends the process if an engine does not answer.
Seed read_seed(const std::string& folder, const std::string& name);

// An archive as torch writes it, with these records.
std::string archive_of(const std::vector<Record>& records);

torch::jit::Module load(const std::string& file);
std::vector<EnginePtr> engines_of(const torch::jit::Module& module);

Tensors copies(const Tensors& tensors);
State copy(const State& state);

[[noreturn]] void broken(const std::string& what);

}  // namespace fuzz
