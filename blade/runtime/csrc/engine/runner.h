// SPDX-License-Identifier: Apache-2.0
// An engine whose computation is a function that Python registered for its backend, or a library's C API in processes
// without Python.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "libraries/native_runner.h"
#include "program/program.h"

namespace blade {

// Python has registered a runner for this backend. `keeps_inputs`: it never writes to what it is given.
void announce_runner(const std::string& backend, bool keeps_inputs);
bool has_runner(const std::string& backend);

class Runner {
 public:
  // `program` holds the guards and, if the backend tells them, the outputs. `payload` is what the backend made of its engine.
  // Throws Unavailable where this CPU lacks a feature of the program's isa: native code in a payload needs it.
  Runner(std::string backend, std::string name, Program program, const at::Tensor& payload,
         std::vector<at::Tensor> constants, std::string text);

  const Program& program() const { return program_; }

  // Empty once loaded, which the first call does; else why it cannot be (kept until forget()). Throws Interrupted.
  std::string why_unavailable();
  void forget();
  // Why it cannot be loaded, as far as that is known without trying.
  std::string known_obstacle() const;

  // `registers` are the program's for these inputs. Throws unless what comes back has the number, dtypes and sizes
  // of the program's outputs, if it declares any, and is strided and on the inputs' device; Interrupted for an
  // exception that is none of the engine's. The runner gets copies of the inputs unless Python said that its backend
  // keeps them as they are; an output in an input's memory is copied.
  std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs, const std::vector<int64_t>& registers) const;

 private:
  std::string load_native();
  std::string load_by_python();

  const std::string backend_, name_;
  const Program program_;
  const at::Tensor payload_;  // of this engine alone: Python keeps the loaded runner on it
  const std::vector<at::Tensor> constants_;
  const std::string text_;
  std::unique_ptr<NativeRunner> native_;   // set once loaded, where Python has no runner
  std::atomic<bool> keeps_inputs_{false};  // known once loaded
  enum State { kNew, kReady, kBroken };
  std::atomic<int> state_{kNew};
  mutable std::mutex mutex_;
  std::string why_;
};

}  // namespace blade
