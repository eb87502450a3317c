// SPDX-License-Identifier: Apache-2.0
#include "engine/runner.h"

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <map>

#include "engine/interrupt.h"
#include "engine/target.h"

namespace blade {
namespace {

struct Backends {
  std::mutex mutex;
  std::map<std::string, bool> keep_inputs;  // by name
};

Backends& backends() {
  static Backends instance;
  return instance;
}

// The two ops whose implementation blade.runtime.engine registers from Python.
std::vector<c10::IValue> call(const char* op, std::vector<c10::IValue> stack) {
  try {
    c10::Dispatcher::singleton().findSchemaOrThrow(op, "").callBoxed(stack);
  } catch (...) {
    rethrow_if_interrupt();
    throw;
  }
  return stack;
}

// A runner computes what an op would; autograd and autocast have had their say in the guards.
struct Quiet {
  c10::InferenceMode ordinary_tensors{false};
  c10::NoGradGuard no_grad;
  c10::impl::ExcludeDispatchKeyGuard no_autocast{c10::autocast_dispatch_keyset};
};

// Where any of the inputs is; the CPU counts only if all are there.
c10::Device device_of(const std::vector<at::Tensor>& inputs) {
  for (const auto& input : inputs) {
    if (!input.is_cpu()) return input.device();
  }
  return at::kCPU;
}

bool is_updated(const Program& program, size_t input) {
  return std::binary_search(program.updated.begin(), program.updated.end(), static_cast<int64_t>(input));
}

// Whether an output is to have memory of its own, as all have that a program does not declare as views or inputs.
bool is_fresh(const Program& program, size_t output) {
  if (program.outputs.empty()) return true;
  return program.slots[program.outputs[output]].kind == SlotKind::kOutput;
}

// By addresses: what comes through DLPack has a storage of its own.
bool is_in_memory_of(const at::Tensor& tensor, const std::vector<at::Tensor>& others) {
  const auto* at = static_cast<const char*>(tensor.const_data_ptr());
  return std::any_of(others.begin(), others.end(), [&](const at::Tensor& other) {
    if (!other.has_storage() || other.device() != tensor.device()) return false;
    const auto* begin = static_cast<const char*>(other.storage().data());
    return at >= begin && at < begin + other.storage().nbytes();
  });
}

// Not the values: that would take running the original.
void check_outputs(
    const Program& program, const std::vector<int64_t>& registers, c10::Device device,
    const std::vector<at::Tensor>& outputs) {
  for (size_t i = 0; i < outputs.size(); ++i) {
    const auto& got = outputs[i];
    TORCH_CHECK(got.defined(), "output ", i, " of the engine is undefined");
    TORCH_CHECK(
        got.layout() == at::kStrided && got.has_storage(), "output ", i, " of the engine is ", got.layout(), ", not strided");
    TORCH_CHECK(got.device() == device, "output ", i, " of the engine is on ", got.device(), ", not on ", device);
  }
  if (program.outputs.empty()) return;
  TORCH_CHECK(
      outputs.size() == program.outputs.size(), "the engine returned ", outputs.size(), " tensors, not ",
      program.outputs.size());
  for (size_t i = 0; i < outputs.size(); ++i) {
    const auto& slot = program.slots[program.outputs[i]];
    if (slot.kind != SlotKind::kOutput) continue;
    const auto& got = outputs[i];
    TORCH_CHECK(got.scalar_type() == slot.dtype, "output ", i, " of the engine is ", got.scalar_type(), ", not ", slot.dtype);
    bool same = got.dim() == static_cast<int64_t>(slot.sizes.size());
    for (size_t axis = 0; same && axis < slot.sizes.size(); ++axis) {
      same = got.sizes()[axis] == registers[slot.sizes[axis]];
    }
    TORCH_CHECK(same, "output ", i, " of the engine has the wrong shape ", got.sizes());
  }
}

std::string no_runner(const std::string& backend) {
  return "No backend '" + backend + "' is registered in this process. Engines of '" + backend + "' need Python and `import blade`.";
}

}  // namespace

void announce_runner(const std::string& backend, bool keeps_inputs) {
  const std::lock_guard<std::mutex> lock(backends().mutex);
  backends().keep_inputs[backend] = keeps_inputs;
}

bool has_runner(const std::string& backend) {
  const std::lock_guard<std::mutex> lock(backends().mutex);
  return backends().keep_inputs.count(backend) != 0;
}

Runner::Runner(
    std::string backend, std::string name, Program program, const at::Tensor& payload,
    std::vector<at::Tensor> constants, std::string text)
    : backend_(std::move(backend)),
      name_(std::move(name)),
      program_(std::move(program)),
      payload_(payload.detach()),
      constants_(std::move(constants)),
      text_(std::move(text)) {
  check_cpu(program_);  // before Python maps the payload, whose code runs at once
}

std::string Runner::why_unavailable() {
  if (state_ == kReady) return "";
  if (state_ == kBroken) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return why_;
  }
  if (has_runner(backend_)) return load_by_python();
  return has_native_runner(backend_) ? load_native() : no_runner(backend_);
}

std::string Runner::load_by_python() {
  std::string why;
  try {
    const Quiet guards;
    // no lock of ours is held here: the call waits for Python's
    why = call("blade::load_runner", {backend_, name_, payload_, constants_, text_}).at(0).toStringRef();
  } catch (const std::exception& error) {
    why = std::string("The engine could not be loaded: ") + error.what();
  }
  {
    const std::lock_guard<std::mutex> lock(backends().mutex);
    keeps_inputs_ = backends().keep_inputs[backend_];
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    why_ = why;
  }
  state_ = why.empty() ? kReady : kBroken;
  return why;
}

// Once, by one of the threads that call the engine first.
std::string Runner::load_native() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (state_ != kNew) return why_;
  try {
    const Quiet guards;
    native_ = load_native_runner(backend_, payload_, constants_);
    keeps_inputs_ = true;
    why_.clear();
    state_ = kReady;
  } catch (const std::exception& error) {
    why_ = std::string("The engine could not be loaded: ") + printable(error.what());
    state_ = kBroken;
  }
  return why_;
}

std::string Runner::known_obstacle() const {
  if (state_ == kReady) return "";
  if (state_ == kNew) return has_runner(backend_) || has_native_runner(backend_) ? "" : no_runner(backend_);
  const std::lock_guard<std::mutex> lock(mutex_);
  return why_;
}

void Runner::forget() {
  int broken = kBroken;
  state_.compare_exchange_strong(broken, kNew);
}

std::vector<at::Tensor> Runner::run(
    const std::vector<at::Tensor>& inputs, const std::vector<int64_t>& registers) const {
  const Quiet guards;
  auto given = inputs;
  if (!keeps_inputs_) {
    for (size_t i = 0; i < given.size(); ++i) {
      if (!is_updated(program_, i)) given[i] = given[i].clone();
    }
  }
  auto outputs = native_ ? native_->run(given, program_, registers) : call("blade::run_runner", {payload_, given}).at(0).toTensorVector();
  check_outputs(program_, registers, device_of(inputs), outputs);
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (!is_fresh(program_, i) || outputs[i].numel() == 0) continue;
    if (is_in_memory_of(outputs[i], given) || is_in_memory_of(outputs[i], constants_)) outputs[i] = outputs[i].clone();
  }
  return outputs;
}

}  // namespace blade
