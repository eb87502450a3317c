// SPDX-License-Identifier: Apache-2.0
#include "execute/executor.h"

#include <ATen/Context.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/jit/codegen/fuser/interface.h>

#include <ATen/Parallel.h>
#include <ATen/ops/scalar_tensor.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <thread>

#include "memory/memory.h"
#include "execute/input_updates.h"

namespace blade {

namespace {

c10::DeviceIndex index_of(c10::Device device) { return std::max<c10::DeviceIndex>(device.index(), 0); }

// Engine code runs as an op would run below autograd, and its results are ordinary tensors even
// when the caller is in inference mode (prebuilt tensors must serve both kinds of callers). Nor do
// modes of Python's see torch's ops in it, as they do not see native kernels: an op that raised there
// would leave Python's error set, which this library cannot clear.
struct BelowAutograd {
  c10::InferenceMode ordinary_tensors{false};
  c10::NoGradGuard no_grad;
  at::AutoDispatchBelowADInplaceOrView below;
  c10::impl::ExcludeDispatchKeyGuard no_autocast{c10::autocast_dispatch_keyset};
  c10::impl::ExcludeDispatchKeyGuard no_modes{
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot})};
};

// `inputs` with every number on `device`: a kernel that gets the number as an argument writes it there, and nobody waits.
std::vector<at::Tensor> with_numbers(const Program& program, std::vector<at::Tensor> inputs, c10::Device device) {
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (program.inputs[i].number) inputs[i] = at::scalar_tensor(inputs[i].item(), inputs[i].options().device(device));
  }
  return inputs;
}

bool has_bfloat16(const Program& program) {
  const auto is_so = [](const auto& one) { return one.dtype == at::kBFloat16; };
  return std::any_of(program.inputs.begin(), program.inputs.end(), is_so) ||
      std::any_of(program.slots.begin(), program.slots.end(), is_so);
}

// A device's random generator, as it was: the original, which runs instead, draws what this run drew.
class Drawn {
 public:
  explicit Drawn(c10::Device device) : generator_(at::globalContext().defaultGenerator(device)) {
    const std::lock_guard<std::mutex> lock(generator_.mutex());
    state_ = generator_.get_state();
  }
  void put_back() const {
    auto generator = generator_;
    const std::lock_guard<std::mutex> lock(generator.mutex());
    generator.set_state(state_);
  }

 private:
  at::Generator generator_;
  at::Tensor state_;
};

// The last time that constants on a device were packed again, by whichever engine: calls on other streams come after.
class Repacked {
 public:
  static Repacked& at(c10::Device device) {
    static std::mutex mutex;
    static auto* all = new std::map<c10::DeviceIndex, std::unique_ptr<Repacked>>();  // engines may outlive static objects
    const std::lock_guard<std::mutex> lock(mutex);
    auto& found = (*all)[device.index()];
    if (!found) found = std::make_unique<Repacked>();
    return *found;
  }

  void record(Accelerator& accelerator, Stream stream) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (event_ && stream_ != stream) event_->block(stream);  // so that who waits for this one waits for that one, too
    event_ = accelerator.make_event();
    event_->record(stream);
    stream_ = stream;
    happened_ = true;
  }

  void wait(Stream stream) const {
    if (!happened_) return;
    const std::lock_guard<std::mutex> lock(mutex_);
    if (stream_ != stream) event_->block(stream);
  }

 private:
  std::atomic<bool> happened_{false};
  mutable std::mutex mutex_;
  std::unique_ptr<Event> event_;
  Stream stream_ = nullptr;
};

}  // namespace

Executor::Executor(
    Program program, const at::Tensor& object, const std::vector<at::Tensor>& constants, ExecutorLimits limits)
    : limits_(limits) {
  loaded_.accelerator = find_target(program);
  const auto type = loaded_.accelerator == nullptr ? at::kCPU : loaded_.accelerator->type();
  loaded_.program = std::move(program);
  loaded_.constants = aliases_of(constants, type);
  num_given_ = constants.size();
  if (loaded_.accelerator != nullptr) find_device();
  // What stays TorchScript, the original above all, must answer: from the third call on TorchScript fuses what is on
  // a GPU, and its code for bfloat16 is none that CUDA 13 compiles. The call raises.
  if (loaded_.accelerator != nullptr && has_bfloat16(loaded_.program)) torch::jit::overrideCanFuseOnGPU(false);
  load_code(object);
  capturable_ = loaded_.accelerator != nullptr && limits_.graphs.enabled && can_be_captured(loaded_.program, type);
  const auto& packs = loaded_.program.packs;
  loaded_.constants.resize(num_given_ + packs.size());
  packed_ = packs.empty();
  if (packed_) return;
  if (loaded_.accelerator != nullptr && !device_) device_ = index_of(c10::impl::VirtualGuardImpl(type).getDevice());
}

void Executor::load_code(const at::Tensor& object) {
  const auto& program = loaded_.program;
  if (loaded_.accelerator != nullptr) {
    code_ = std::make_unique<DeviceCode>(program, *loaded_.accelerator, object);
    if (!device_) return;  // where it is called
    const auto guard = guard_device();
    place_of({});
    return;
  }
  if (object.numel() > 0) {
    loaded_.library = std::make_unique<Library>(static_cast<const uint8_t*>(object.const_data_ptr()), object.numel());
  }
  for (const auto& instr : program.instrs) {
    if (instr.loop >= 0) {
      loaded_.kernels.push_back(nullptr);
      continue;
    }
    if (!instr.op && !loaded_.library) {
      throw Unavailable(Code::kCorruptPayload, "The engine's program has kernels but no native code.");
    }
    loaded_.kernels.push_back(instr.op ? nullptr : loaded_.library->find(instr.kernel));
  }
  for (const auto& pack : program.packs) {
    if (!loaded_.library) throw Unavailable(Code::kCorruptPayload, "The engine packs constants but has no native code.");
    pack_kernels_.push_back(loaded_.library->find(pack.kernel));
  }
}

// Constants that launches read are on one device, and aligned as kernels expect.
void Executor::find_device() {
  const auto& program = loaded_.program;
  const auto type = loaded_.accelerator->type();
  std::vector<bool> read(num_given_, false);
  for (const auto& instr : program.instrs) {
    for (const int64_t id : instr.ptrs) {
      const auto& root = program.slots[program.slots[id].root];
      if (root.kind == SlotKind::kConst && root.index < static_cast<int64_t>(num_given_)) read[root.index] = true;
    }
  }
  for (const auto& pack : program.packs) {
    for (const auto& fill : pack.fills) read[fill.constant] = true;
  }
  for (size_t k = 0; k < num_given_; ++k) {
    const auto& constant = loaded_.constants[k];
    const auto device = constant.device();
    const bool same = device.type() == type && (!device_ || *device_ == index_of(device));
    if (!same && (read[k] || device.type() == type)) {
      throw Unavailable(
          Code::kDeviceMismatch, "A constant of the engine is on " + device.str() + ", but its kernels need all on one " + program.isa[0] +
                                     " device: move the whole module to one device before it is saved, or optimize it again.");
    }
    if (device.type() == type) device_ = index_of(device);
    if (read[k] && !is_aligned(constant)) {
      throw Unavailable(Code::kDeviceMismatch, "A constant of the engine does not begin at a multiple of 16 bytes, as its kernels need.");
    }
  }
}

void Executor::pack_on_cpu(size_t i) {
  const auto& pack = loaded_.program.packs[i];
  auto& packed = loaded_.constants[num_given_ + i];
  if (packed.nbytes() > 0) std::memset(packed.mutable_data_ptr(), 0, packed.nbytes());
  for (const auto& fill : pack.fills) {
    auto* source = const_cast<void*>(loaded_.constants[fill.constant].const_data_ptr());
    void* ptrs[] = {source, packed.mutable_data_ptr(), nullptr};
    at::parallel_for(0, fill.extent, 1, [&](int64_t begin, int64_t end) {
      pack_kernels_[i](ptrs, fill.ints.data(), begin, end);
    });
  }
}

void Executor::pack_on_device(size_t i, const Place& place) {
  const auto& pack = loaded_.program.packs[i];
  auto& packed = loaded_.constants[num_given_ + i];
  void* target = packed.mutable_data_ptr();
  loaded_.accelerator->zero(target, packed.nbytes(), place.stream);
  for (const auto& fill : pack.fills) {
    if (fill.extent == 0) continue;
    auto* source = const_cast<void*>(loaded_.constants[fill.constant].const_data_ptr());
    auto ints = fill.ints;
    void* none = nullptr;
    std::vector<void*> params{&source, &target};
    for (auto& value : ints) params.push_back(&value);
    params.insert(params.end(), 2, &none);
    const Grid grid{static_cast<uint32_t>(fill.extent), 1, 1};
    code_->on(place.device.index()).packs[i]->launch(grid, params.data(), place.stream);
  }
}

bool Executor::is_packed() const {
  return packed_ && std::all_of(packs_.begin(), packs_.end(), [](const auto& one) { return one->is_fresh(); });
}

void Executor::refresh_packs(const std::vector<at::Tensor>& constants) {
  if (is_packed()) return;
  const std::lock_guard<std::mutex> lock(packing_mutex());
  // one that waited here must not pack again what the other one computes with by now
  if (is_packed()) return;
  const BelowAutograd below;
  const auto guard = guard_device();
  const auto place = loaded_.accelerator == nullptr ? Place() : place_of({});
  if (!packed_) find_packs(constants);
  bool is_new = false;
  std::vector<size_t> stale;
  std::vector<std::vector<Seen>> seen;
  for (size_t i = 0; i < packs_.size(); ++i) {
    if (packs_[i]->is_fresh()) continue;
    is_new = is_new || !packs_[i]->has_contents();
    stale.push_back(i);
    seen.push_back(packs_[i]->look());
  }
  if (loaded_.accelerator != nullptr && loaded_.accelerator->is_capturing(place.stream)) {
    if (is_new) {
      throw Unavailable(
          Code::kPending, "The engine's first call is recorded into a CUDA graph of somebody's: call it once before, "
                          "so that its weights are packed outside of that graph.");
    }
    packed_ = true;
    // what is recorded orders itself, and nothing is packed yet
    for (const size_t i : stale) pack_on_device(i, place);
    return;
  }
  for (const size_t i : stale) loaded_.accelerator == nullptr ? pack_on_cpu(i) : pack_on_device(i, place);
  if (loaded_.accelerator != nullptr && is_new) loaded_.accelerator->synchronize(place.stream);
  if (loaded_.accelerator != nullptr && !is_new && !stale.empty()) Repacked::at(place.device).record(*loaded_.accelerator, place.stream);
  for (size_t k = 0; k < stale.size(); ++k) packs_[stale[k]]->set_packed(seen[k]);
  packed_ = true;
}

// Those of other engines, and memory for the rest: no call has begun that might read it.
void Executor::find_packs(const std::vector<at::Tensor>& constants) {
  const auto device = loaded_.accelerator == nullptr ? c10::Device(at::kCPU) : c10::Device(loaded_.accelerator->type(), *device_);
  packs_ = packed_constants(loaded_.program.packs, constants, loaded_.constants, device, limits_.watch_constants);
  for (size_t i = 0; i < packs_.size(); ++i) loaded_.constants[num_given_ + i] = packs_[i]->tensor();
}

// Nothing to guard on the CPU, or while no device is known.
c10::OptionalDeviceGuard Executor::guard_device() const {
  if (!device_) return c10::OptionalDeviceGuard();
  return c10::OptionalDeviceGuard(c10::Device(loaded_.accelerator->type(), *device_));
}

std::optional<Code> Executor::check_device(const std::vector<at::Tensor>& inputs) const {
  if (loaded_.accelerator == nullptr) return std::nullopt;
  auto device = device_;
  for (const auto& input : inputs) {
    if (input.device().type() != loaded_.accelerator->type()) continue;
    const auto index = index_of(input.device());
    if (device && *device != index) return Code::kGuardDevice;
    device = index;
  }
  return std::nullopt;
}

// Makes nothing current: guard_device or the caller did.
Place Executor::place_of(const std::vector<at::Tensor>& inputs) {
  const auto type = loaded_.accelerator->type();
  auto device = device_;
  for (size_t i = 0; i < inputs.size() && !device; ++i) {
    if (inputs[i].device().type() == type) device = index_of(inputs[i].device());
  }
  if (!device) device = index_of(c10::impl::VirtualGuardImpl(type).getDevice());
  loaded_.accelerator->enter(*device);
  return {{type, *device}, loaded_.accelerator->current_stream(*device), &code_->on(*device).launches};
}

Executor::~Executor() = default;

std::unique_ptr<StreamContext> Executor::take_context(const Place& place) {
  if (loaded_.accelerator != nullptr && !packs_.empty()) Repacked::at(place.device).wait(place.stream);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (size_t i = idle_.size(); i-- > 0;) {
      if (!idle_[i]->is_at(place)) continue;
      auto context = std::move(idle_[i]);
      idle_.erase(idle_.begin() + static_cast<int64_t>(i));
      idle_bytes_ -= context->bytes().all();
      return context;
    }
  }
  return std::make_unique<StreamContext>(place);
}

void Executor::release_context(std::unique_ptr<StreamContext> context) {
  static const size_t max_idle = std::max<size_t>(8, 2 * std::thread::hardware_concurrency());
  const std::lock_guard<std::mutex> lock(mutex_);
  const bool room = idle_.size() < max_idle && idle_bytes_ + context->bytes().all() <= limits_.max_idle_bytes;
  if (!idle_.empty() && !room) return;
  idle_bytes_ += context->bytes().all();
  idle_.push_back(std::move(context));
}

// Outputs that share memory with one that is not lent are copied together with it.
void Executor::lend(const std::vector<int64_t>& outputs) {
  const auto& program = loaded_.program;
  std::vector<bool> borrowed(program.slots.size(), false);
  const auto mark = [&](int64_t k, bool value) { borrowed[program.slots[program.outputs[k]].root] = value; };
  for (const int64_t k : outputs) mark(k, true);
  for (int64_t k = 0; k < static_cast<int64_t>(program.outputs.size()); ++k) {
    if (std::find(outputs.begin(), outputs.end(), k) == outputs.end()) mark(k, false);
  }
  limits_.graphs.borrowed = std::move(borrowed);
}

void Executor::forget_sizes() {
  graph_counts_.clear();
  trim();
}

void Executor::trim() {
  const std::lock_guard<std::mutex> lock(mutex_);
  idle_.clear();
  idle_bytes_ = 0;
}

StreamContext::Bytes Executor::idle_memory() const {
  StreamContext::Bytes sum;
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& context : idle_) {
    const auto one = context->bytes();
    sum.arenas += one.arenas;
    sum.graphs += one.graphs;
    sum.lent += one.lent;
  }
  return sum;
}

bool Executor::is_ready(const at::Tensor& input, size_t i) const {
  if (!input.is_contiguous() || !is_memory(input)) return false;
  return !loaded_.program.launched[i] || is_aligned(input);
}

std::optional<std::vector<at::Tensor>> Executor::run_in_context(
    const std::vector<at::Tensor>& inputs, std::vector<double>* seconds) {
  if (!may_update(loaded_.program, inputs, loaded_.constants)) return std::nullopt;
  const BelowAutograd guards;
  if (loaded_.accelerator == nullptr) return run_at(Place(), inputs, seconds);
  c10::OptionalDeviceGuard guard = guard_device();
  for (size_t i = 0; i < inputs.size() && !device_; ++i) {
    if (inputs[i].device().type() == loaded_.accelerator->type()) guard.reset_device(inputs[i].device());
  }
  const Place place = place_of(inputs);
  return run_at(place, loaded_.program.has_numbers ? with_numbers(loaded_.program, inputs, place.device) : inputs, seconds);
}

std::optional<std::vector<at::Tensor>> Executor::run_at(
    const Place& place, const std::vector<at::Tensor>& inputs, std::vector<double>* seconds) {
  const auto& program = loaded_.program;
  std::vector<at::Tensor> copies;  // filled at the first input that is not as kernels need it
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (is_ready(inputs[i], i)) continue;
    if (program.aliased[i]) return std::nullopt;
    if (copies.empty()) copies = inputs;
    copies[i] = as_memory(inputs[i]).contiguous();
    if (program.launched[i] && !is_aligned(copies[i])) copies[i] = copies[i].clone();
  }
  const auto& ready = copies.empty() ? inputs : copies;
  // What somebody records is replayed whenever they like: its memory is theirs.
  const bool recorded = loaded_.accelerator != nullptr && loaded_.accelerator->is_capturing(place.stream);
  auto context = recorded ? std::make_unique<StreamContext>(place) : take_context(place);
  if (context->shape_for(loaded_, ready, limits_.max_shapes).plan->failed() != nullptr) {
    if (!recorded) release_context(std::move(context));
    return std::nullopt;
  }
  std::vector<at::Tensor> outputs;
  const auto drawn_from = program.draws && !recorded ? std::optional<Drawn>(place.device) : std::nullopt;
  const auto give_up = [&] {
    context->drop_front();
    if (!recorded) release_context(std::move(context));
    if (drawn_from) drawn_from->put_back();
  };
  try {
    const bool graphed = capturable_ && !recorded && seconds == nullptr;
    outputs = graphed ? context->run_graphed(ready, limits_.graphs, graph_counts_) : context->run(ready, seconds);
  } catch (const GuardFailed&) {
    give_up();
    return std::nullopt;
  } catch (...) {
    give_up();
    throw;
  }
  if (!recorded) release_context(std::move(context));
  finish_updates(program, inputs, ready);
  for (size_t k = 0; k < outputs.size(); ++k) {  // an input given back is the caller's own tensor
    const auto& slot = program.slots[program.outputs[k]];
    if (slot.kind == SlotKind::kInput) outputs[k] = inputs[slot.index];
  }
  return outputs;
}

std::optional<std::vector<at::Tensor>> Executor::run(const std::vector<at::Tensor>& inputs) {
  return run_in_context(inputs, nullptr);
}

std::vector<double> Executor::profile(const std::vector<at::Tensor>& inputs, int64_t repeats) {
  std::vector<double> seconds(loaded_.program.instrs.size(), 0.0);
  run(inputs);  // the first call of a shape prepares it
  for (int64_t i = 0; i < repeats; ++i) {
    TORCH_CHECK(run_in_context(inputs, &seconds), "blade: the engine's guards do not hold for these inputs");
  }
  for (double& s : seconds) s /= static_cast<double>(std::max<int64_t>(repeats, 1));
  return seconds;
}

}  // namespace blade
