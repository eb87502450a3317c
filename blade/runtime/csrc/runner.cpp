// SPDX-License-Identifier: Apache-2.0
#include "runner.h"

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>

#include <set>

namespace blade {
namespace {

struct Backends {
  std::mutex mutex;
  std::set<std::string> names;
};

Backends& backends() {
  static Backends instance;
  return instance;
}

// The two ops whose implementation blade.runtime.engine registers from Python.
std::vector<c10::IValue> call(const char* op, std::vector<c10::IValue> stack) {
  c10::Dispatcher::singleton().findSchemaOrThrow(op, "").callBoxed(stack);
  return stack;
}

// A runner computes what an op would; autograd and autocast have had their say in the guards.
struct Quiet {
  c10::InferenceMode ordinary_tensors{false};
  c10::NoGradGuard no_grad;
  c10::impl::ExcludeDispatchKeyGuard no_autocast{c10::autocast_dispatch_keyset};
};

// Not the values: that would take running the original.
void check_outputs(
    const Program& program, const std::vector<int64_t>& registers, const std::vector<at::Tensor>& outputs) {
  if (program.outputs.empty()) return;
  TORCH_CHECK(
      outputs.size() == program.outputs.size(), "the engine returned ", outputs.size(), " tensors, not ",
      program.outputs.size());
  for (size_t i = 0; i < outputs.size(); ++i) {
    const auto& slot = program.slots[program.outputs[i]];
    if (slot.kind != SlotKind::kOutput) continue;
    const auto& got = outputs[i];
    TORCH_CHECK(got.defined(), "output ", i, " of the engine is undefined");
    TORCH_CHECK(got.scalar_type() == slot.dtype, "output ", i, " of the engine is ", got.scalar_type(), ", not ", slot.dtype);
    bool same = got.dim() == static_cast<int64_t>(slot.sizes.size());
    for (size_t axis = 0; same && axis < slot.sizes.size(); ++axis) {
      same = got.sizes()[axis] == registers[slot.sizes[axis]];
    }
    TORCH_CHECK(same, "output ", i, " of the engine has the wrong shape ", got.sizes());
  }
}

}  // namespace

void announce_runner(const std::string& backend) {
  const std::lock_guard<std::mutex> lock(backends().mutex);
  backends().names.insert(backend);
}

bool has_runner(const std::string& backend) {
  const std::lock_guard<std::mutex> lock(backends().mutex);
  return backends().names.count(backend) != 0;
}

Runner::Runner(
    std::string backend, std::string name, Program program, const at::Tensor& payload,
    std::vector<at::Tensor> constants, std::string text)
    : backend_(std::move(backend)),
      name_(std::move(name)),
      program_(std::move(program)),
      payload_(payload.detach()),
      constants_(std::move(constants)),
      text_(std::move(text)) {}

std::string Runner::why_unavailable() {
  if (state_ == kReady) return "";
  if (state_ == kBroken) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return why_;
  }
  if (!has_runner(backend_)) return "No backend '" + backend_ + "' is registered in this process.";
  std::string why;
  try {
    const Quiet guards;
    // no lock of ours is held here: the call waits for Python's
    why = call("blade::load_runner", {backend_, name_, payload_, constants_, text_}).at(0).toStringRef();
  } catch (const std::exception& error) {
    why = std::string("The engine could not be loaded: ") + error.what();
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    why_ = why;
  }
  state_ = why.empty() ? kReady : kBroken;
  return why;
}

void Runner::forget() {
  int broken = kBroken;
  state_.compare_exchange_strong(broken, kNew);
}

std::vector<at::Tensor> Runner::run(
    const std::vector<at::Tensor>& inputs, const std::vector<int64_t>& registers) const {
  const Quiet guards;
  auto outputs = call("blade::run_runner", {payload_, inputs}).at(0).toTensorVector();
  check_outputs(program_, registers, outputs);
  return outputs;
}

}  // namespace blade
