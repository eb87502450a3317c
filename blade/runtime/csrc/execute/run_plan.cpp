// SPDX-License-Identifier: Apache-2.0
// One call of an execution plan. In steady state this allocates outputs, results of calls and what is apart, nothing else.
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/alloc_cpu.h>

#include <algorithm>
#include <chrono>

#include "execute/execution_plan.h"
#include "execute/workers.h"
#include "memory/memory.h"

namespace blade {
namespace {

using Clock = std::chrono::steady_clock;

// Scratch memory of one thread, kept between kernels.
class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { c10::free_cpu(data_); }

  void* get(size_t bytes) {
    if (bytes > capacity_) {
      c10::free_cpu(data_);
      data_ = nullptr;
      capacity_ = 0;
      data_ = c10::alloc_cpu(bytes);  // 64-byte aligned
      capacity_ = bytes;
    }
    return data_;
  }

 private:
  void* data_ = nullptr;
  size_t capacity_ = 0;
};

thread_local Scratch scratch;

// How often torch's allocator asked the device for memory. That takes longer than many launches.
int64_t device_allocations(c10::Device device) {
  return device.is_cpu() ? 0 : c10::getDeviceAllocator(device.type())->getDeviceStats(device.index()).num_device_alloc;
}

bool same_strides(const at::Tensor& tensor, const Sizes& strides) {
  for (size_t i = 0; i < strides.size(); ++i) {
    if (tensor.size(static_cast<int64_t>(i)) > 1 && tensor.stride(static_cast<int64_t>(i)) != strides[i]) return false;
  }
  return true;
}

}  // namespace

size_t ExecutionPlan::lay_out_lent(const std::vector<bool>& borrowed) {
  size_t end = 0;
  for (size_t id = 0; id < borrowed.size(); ++id) {
    auto& slot = slots_[id];
    slot.borrowed = borrowed[id] && program_.slots[id].kind == SlotKind::kOutput;
    if (!slot.borrowed) continue;
    slot.arena_offset = end;
    end += of_its_own(static_cast<size_t>(slot.span) * c10::elementSize(slot.dtype));
  }
  return end;
}

std::vector<at::Tensor> ExecutionPlan::run(const std::vector<at::Tensor>& inputs, std::vector<double>* seconds) {
  bind(inputs);
  return run_bound(seconds);
}

std::vector<at::Tensor> ExecutionPlan::run_lending(const std::vector<at::Tensor>& inputs, const c10::Storage& lent) {
  bind(inputs, {c10::Storage(), lent});
  return run_bound(nullptr);
}

ExecutionPlan::Timed ExecutionPlan::run_timed(const std::vector<at::Tensor>& inputs) {
  auto& accelerator = *loaded_.accelerator;
  const auto begin = accelerator.make_event(), end = accelerator.make_event();
  accelerator.synchronize(stream_);  // a full queue would keep the host waiting
  const int64_t allocations = device_allocations(place_.device);
  begin->record(stream_);
  const auto start = Clock::now();
  Timed timed{run(inputs)};
  timed.launching = std::chrono::duration<double>(Clock::now() - start).count();
  end->record(stream_);
  timed.work = end->seconds_since(*begin);
  timed.steps = std::count_if(steps_.begin(), steps_.end(), [](const Step& one) { return !one.skip; });
  timed.steady = device_allocations(place_.device) == allocations;
  return timed;
}

std::vector<at::Tensor> ExecutionPlan::run_bound(std::vector<double>* seconds) {
  const AtWork at_work(program_.has_calls);
  if (seconds != nullptr) {
    run_profiled(*seconds);
  } else {
    run_range(0, steps_.size(), [this](size_t i) { run_step(i); });
  }
  return collect_outputs();
}

void ExecutionPlan::run_profiled(std::vector<double>& seconds) {
  if (loaded_.accelerator == nullptr) {
    run_range(0, steps_.size(), [&](size_t i) {
      const auto start = Clock::now();
      run_step(i);
      seconds[i] += std::chrono::duration<double>(Clock::now() - start).count();
    });
    return;
  }
  std::vector<std::unique_ptr<Event>> marks;
  std::vector<size_t> ran;
  const auto mark = [&] {
    marks.push_back(loaded_.accelerator->make_event());
    marks.back()->record(stream_);
  };
  mark();
  run_range(0, steps_.size(), [&](size_t i) {
    run_step(i);
    ran.push_back(i);
    mark();
  });
  for (size_t k = 0; k < ran.size(); ++k) seconds[ran[k]] += marks[k + 1]->seconds_since(*marks[k]);
}

// An iteration of a loop: what depends on it changes, all else is as it was planned.
void ExecutionPlan::begin_iteration(const LoopState& loop, int64_t index) {
  regs_[loop.index] = index;
  for (const int64_t id : loop.regs) regs_[id] = eval_register(program_.regs[id], regs_);
  for (const auto& one : loop.ints) {
    auto& ints = steps_[one.instr].ints;
    if (!ints.empty()) ints[one.position] = regs_[one.reg];  // empty: the step is skipped
  }
  for (const int64_t id : loop.views) move_view(id);
}

// A view whose offset depends on a loop's index. Checked at each iteration: nothing else keeps it inside its base.
void ExecutionPlan::move_view(int64_t id) {
  const Slot& slot = program_.slots[id];
  SlotState& state = slots_[id];
  TORCH_CHECK(
      !__builtin_add_overflow(slots_[slot.index].offset, reg(slot.offset), &state.offset), "blade: an offset is out of range");
  check_view(id);
  const auto& root = tensors_[slot.root];
  if (!root.defined()) return;  // a call of this iteration makes it, and this view with it
  ptrs_[id] = ptrs_[slot.root] == nullptr ? nullptr : ptrs_[slot.root] + state.offset * static_cast<int64_t>(root.itemsize());
  if (slot.as_tensor) tensors_[id] = view_of(root, state);
}

void ExecutionPlan::swap(const std::pair<int64_t, int64_t>& slots) {
  const auto [a, b] = slots;
  std::swap(tensors_[a], tensors_[b]);
  const auto data = ptrs_[a];
  bind_root(a, tensors_[a], ptrs_[b]);
  bind_root(b, tensors_[b], data);
  const auto found = std::find(swapped_.begin(), swapped_.end(), slots);
  found == swapped_.end() ? swapped_.push_back(slots) : void(swapped_.erase(found));
}

// The arena grows; weights move when the user calls share_memory() or the like. True if any did.
bool ExecutionPlan::refresh_fixed_pointers() {
  bool moved = false;
  for (auto& [id, seen] : fixed_roots_) {
    const void* data = tensors_[id].storage().data();
    if (data == seen) continue;
    moved = true;
    seen = data;
    auto* start = static_cast<char*>(const_cast<void*>(tensors_[id].const_data_ptr()));
    bind_root(id, tensors_[id], start);
  }
  if (!moved) return false;
  for (const auto& patch : fixed_patches_) table_[patch.entry] = ptrs_[patch.slot];
  return true;
}

at::Tensor ExecutionPlan::output_tensor(int64_t id, const OutputMemory& homes) const {
  const auto& slot = slots_[id];
  const auto& home = slot.borrowed ? homes.borrowed : homes.fixed;
  if (!home) return empty_tensor(place_.device.type(), slot.sizes, slot.dtype);
  const auto offset = static_cast<int64_t>(slot.arena_offset / c10::elementSize(slot.dtype));
  return tensor_over(home, slot.dtype, slot.sizes, slot.strides, offset);
}

void ExecutionPlan::bind(const std::vector<at::Tensor>& inputs, const OutputMemory& homes) {
  known_ = 0;
  stages_differ_ = false;
  while (!swapped_.empty()) swap(std::pair(swapped_.back()));  // the last call ran a loop an odd number of times
  refresh_fixed_pointers();
  for (const int64_t id : changing_roots_) {
    const Slot& slot = program_.slots[id];
    if (slot.kind == SlotKind::kInput || slot.kind == SlotKind::kUpdate) {
      const auto& input = inputs[slot.index];
      bind_root(id, input, static_cast<char*>(const_cast<void*>(input.const_data_ptr())));
    } else if (slot.kind == SlotKind::kOutput && slot.known_at == 0) {
      at::Tensor output = output_tensor(id, homes);
      auto* data = static_cast<char*>(output.mutable_data_ptr());
      bind_root(id, std::move(output), data);
    }
  }
}

void ExecutionPlan::bind_root(int64_t id, at::Tensor tensor, char* data) {
  tensors_[id] = std::move(tensor);
  point_root(id, data);
  if (is_fixed(id)) return;
  for (const int64_t view : slots_[id].views) {
    const Slot& slot = program_.slots[view];
    if (slot.as_tensor && slot.known_at <= known_) tensors_[view] = view_of(tensors_[id], slots_[view]);
  }
}

void ExecutionPlan::point_root(int64_t id, char* data) {
  ptrs_[id] = data;
  for (const int64_t view : slots_[id].views) {
    if (program_.slots[view].known_at <= known_) point_view(view);
  }
}

void ExecutionPlan::point_view(int64_t id) {
  const auto itemsize = static_cast<int64_t>(c10::elementSize(slots_[id].dtype));
  ptrs_[id] = ptrs_[program_.slots[id].root] + slots_[id].offset * itemsize;
}

void ExecutionPlan::release_root(int64_t id) {
  tensors_[id].reset();
  for (const int64_t view : slots_[id].views) tensors_[view].reset();
}

void ExecutionPlan::run_step(size_t i) {
  const Instr& instr = program_.instrs[i];
  Step& step = steps_[i];
  if (!apart_.empty()) make_apart(i);
  if (step.skip) {
    // another instruction covers these sizes
  } else if (instr.op) {
    run_call(instr, step);
  } else if (instr.launch) {
    if (step.launch != nullptr) run_launch(step);
  } else {
    run_kernel(step);
  }
  for (const int64_t id : instr.last_use) release_root(id);
  if (!apart_.empty()) release_apart(i);
}

void ExecutionPlan::make_apart(size_t i) {
  const auto type = place_.device.type();
  for (const size_t k : apart_from_[i]) {
    const auto& one = apart_[k];
    const c10::Storage memory(
        c10::Storage::use_byte_size_t(), one.bytes, allocate_memory(type, one.bytes), /*allocator=*/nullptr, /*resizable=*/false);
    auto* data = static_cast<char*>(const_cast<void*>(memory.data()));
    for (const int64_t id : one.slots) bind_root(id, tensor_over(memory, slots_[id].dtype, slots_[id].sizes, slots_[id].strides, 0), data);
  }
}

void ExecutionPlan::release_apart(size_t i) {
  for (const size_t k : apart_until_[i]) {
    for (const int64_t id : apart_[k].slots) release_root(id);
  }
}

void ExecutionPlan::run_kernel(const Step& step) {
  if (step.extent <= 0) return;
  for (const auto& patch : step.patches) table_[patch.entry] = ptrs_[patch.slot];
  void** table = table_.data() + step.table;
  const auto part = [&step, table](int64_t begin, int64_t end) {
    if (step.scratch == 0) {
      step.fn(table, step.ints.data(), begin, end);
      return;
    }
    c10::SmallVector<void*, 32> own(step.num_ptrs + 1, nullptr);
    std::copy(table, table + step.num_ptrs, own.begin());
    own.back() = scratch.get(step.scratch);
    step.fn(own.data(), step.ints.data(), begin, end);
  };
  if (step.extent <= step.grain) {
    part(0, step.extent);
  } else {
    split(step.extent, step.grain, part);
  }
}

void ExecutionPlan::run_launch(Step& step) {
  for (const auto& patch : step.patches) table_[patch.entry] = ptrs_[patch.slot];
  if (C10_UNLIKELY(recorder_ != nullptr)) return recorder_->launch(*step.launch, step.grid, step.params.data());
  step.launch->launch(step.grid, step.params.data(), stream_);
}

void ExecutionPlan::run_call(const Instr& instr, const Step& step) {
  stack_ = step.args;
  for (const size_t k : step.changing_args) stack_[k] = make_arg(instr.args[k]);
  instr.op->callBoxed(stack_);
  for (const auto& arg : instr.args) {
    if (!arg.written || arg.kind != CallArg::kSlot) continue;
    // an op that does not like the size of its out= resizes it: the plan was wrong
    TORCH_CHECK(
        tensors_[arg.id].sizes() == c10::IntArrayRef(slots_[arg.id].sizes), "blade: ", instr.text, ": wrote sizes ",
        tensors_[arg.id].sizes(), " where ", c10::IntArrayRef(slots_[arg.id].sizes), " were expected");
  }
  take_results(instr);
  stack_.clear();
}

void ExecutionPlan::take_results(const Instr& instr) {
  if (instr.results.empty()) return;
  if (stack_.size() == 1 && stack_[0].isTensorList()) {
    const auto list = stack_[0].toTensorVector();
    stack_.assign(list.begin(), list.end());
  }
  TORCH_CHECK(
      stack_.size() >= instr.results.size(), "blade: ", instr.text, ": returned ", stack_.size(), " values");
  if (instr.stage >= 0) enter_stage(program_.stages[instr.stage]);
  for (size_t i = 0; i < instr.results.size(); ++i) {
    const int64_t id = instr.results[i];
    if (id < 0) continue;
    at::Tensor result = checked_result(id, stack_[i].toTensor());
    auto* data = static_cast<char*>(const_cast<void*>(result.const_data_ptr()));
    bind_root(id, std::move(result), data);
  }
}

bool ExecutionPlan::is_here(const at::Tensor& tensor) const {
  const auto device = tensor.device();
  return device.type() == place_.device.type() && (device.is_cpu() || device.index() == place_.device.index());
}

at::Tensor ExecutionPlan::checked_result(int64_t id, const at::Tensor& result) const {
  const SlotState& want = slots_[id];
  TORCH_CHECK(
      result.defined() && result.scalar_type() == want.dtype && is_here(result) && result.layout() == at::kStrided &&
          result.sizes() == c10::IntArrayRef(want.sizes),
      "blade: slot ", id, ": an op returned ", result.toString(), " ",
      result.defined() ? result.sizes() : c10::IntArrayRef(), " where ", want.dtype, " ",
      c10::IntArrayRef(want.sizes), " was expected");
  const bool in_arena = arenas_.contain(result.storage().unsafeGetStorageImpl());
  const bool as_wanted = is_memory(result) && same_strides(result, want.strides);
  if (!in_arena && as_wanted && (loaded_.accelerator == nullptr || is_aligned(result))) return result;
  at::Tensor copy = empty_strided_tensor(place_.device.type(), want.sizes, want.strides, want.dtype);
  copy.copy_(as_memory(result));
  return copy;
}

std::vector<at::Tensor> ExecutionPlan::collect_outputs() {
  std::vector<at::Tensor> outputs;
  outputs.reserve(program_.outputs.size());
  for (const int64_t id : program_.outputs) {
    const bool in_arena = program_.slots[program_.slots[id].root].kind == SlotKind::kArena;
    outputs.push_back(in_arena ? tensors_[id].clone() : tensors_[id]);
  }
  release();
  return outputs;
}

void ExecutionPlan::release() {
  for (const int64_t id : changing_roots_) release_root(id);
  stack_.clear();
}

}  // namespace blade
