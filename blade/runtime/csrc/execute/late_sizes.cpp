// SPDX-License-Identifier: Apache-2.0
// Sizes that depend on elements: when the call has run whose results have them, what follows from them is prepared, in
// memory of its own, and the run goes on. Nothing is prepared again while they stay the same from call to call.
#include "execute/execution_plan.h"
#include "memory/memory.h"

namespace blade {

// Places in the pointer table, which must not grow once launches know its addresses.
void ExecutionPlan::make_room_for_stages() {
  stages_.resize(program_.stages.size());
  for (const auto& stage : program_.stages) {
    for (const int64_t i : stage.instrs) {
      if (!program_.instrs[i].op) add_pointers(static_cast<size_t>(i));
    }
  }
}

// Behind the call that makes `stage` known, whose results are on the stack.
void ExecutionPlan::enter_stage(const Stage& stage) {
  const bool differs = bind_sizes(stage);
  stages_differ_ = stages_differ_ || differs;
  known_ = stage.instr + 1;
  if (stages_differ_) prepare_stage(stage);
  bind_stage(stage);
}

// Takes the sizes from the results; true if they are not those of the stage as it is prepared.
bool ExecutionPlan::bind_sizes(const Stage& stage) {
  const Instr& instr = program_.instrs[stage.instr];
  std::vector<int64_t> sizes;
  for (const auto& [reg, result, axis] : stage.bound) {
    const auto& value = stack_[result];
    if (axis < 0) {
      TORCH_CHECK(value.isInt() || value.isBool(), "blade: ", instr.text, ": returned no integer");
      sizes.push_back(value.isInt() ? value.toInt() : static_cast<int64_t>(value.toBool()));
    } else {
      TORCH_CHECK(value.isTensor() && value.toTensor().defined(), "blade: ", instr.text, ": returned no tensor");
      const auto& tensor = value.toTensor();
      const auto rank = static_cast<int64_t>(program_.slots[instr.results[result]].sizes.size());
      TORCH_CHECK(
          tensor.layout() == at::kStrided && tensor.dim() == rank, "blade: ", instr.text, ": returned a tensor of ",
          tensor.dim(), " dimensions where ", rank, " were expected");
      sizes.push_back(tensor.size(axis));
    }
    regs_[reg] = sizes.back();
  }
  auto& prepared = stages_[instr.stage];
  if (prepared.sizes == sizes) return false;
  prepared.sizes = std::move(sizes);
  return true;
}

void ExecutionPlan::prepare_stage(const Stage& stage) {
  eval_stage(program_, stage, regs_);
  if (failed_guard(program_, stage, regs_) != nullptr) throw GuardFailed();
  for (const int64_t id : stage.slots) prepare_slot(static_cast<size_t>(id));
  stages_[program_.instrs[stage.instr].stage].bytes = plan_arena(known_);
  for (const int64_t i : stage.instrs) {
    // calls take tensors, which are made when the stage is bound
    if (!program_.instrs[i].op) prepare_step(static_cast<size_t>(i));
  }
}

// Memory for the slots of `stage`, and views of what has memory already.
void ExecutionPlan::bind_stage(const Stage& stage) {
  const int64_t number = program_.instrs[stage.instr].stage;
  auto& memory = arenas_.of_stage(static_cast<size_t>(number));
  memory.reserve(stages_[number].bytes);
  const Arena& arena = memory.arena();
  for (const int64_t id : stage.slots) {
    const Slot& slot = program_.slots[id];
    const SlotState& state = slots_[id];
    if (slot.kind == SlotKind::kArena) {
      const auto offset = static_cast<int64_t>(state.arena_offset / c10::elementSize(state.dtype));
      bind_root(id, tensor_over(arena.storage(), state.dtype, state.sizes, state.strides, offset), arena.data() + state.arena_offset);
    } else if (slot.kind == SlotKind::kOutput) {
      at::Tensor output = output_tensor(id, OutputMemory());
      auto* data = static_cast<char*>(output.mutable_data_ptr());
      bind_root(id, std::move(output), data);
    } else if (slot.kind == SlotKind::kView && tensors_[slot.root].defined()) {
      point_view(id);
      if (slot.as_tensor) tensors_[id] = view_of(tensors_[slot.root], state);
    }
  }
  if (!stages_differ_) return;
  for (const int64_t i : stage.instrs) {
    if (program_.instrs[i].op) prepare_step(static_cast<size_t>(i));
  }
  check_results_are_made();
}

}  // namespace blade
