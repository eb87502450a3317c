// SPDX-License-Identifier: Apache-2.0
#include "execute/execution_plan.h"

#include <ATen/core/List.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <limits>

#include "memory/memory.h"

namespace blade {
namespace {

// Elements of work one thread should get at least; less is not worth waking it.
constexpr int64_t kGrain = 16384;

// What a grid may have along y and z; along x it is any int32.
constexpr int64_t kMaxGrid = 65535;

// Kernels take two more pointers, to scratch memory that ours do without.
void* no_memory = nullptr;

Sizes gather(const std::vector<int64_t>& ids, const std::vector<int64_t>& regs) {
  Sizes values;
  for (const int64_t id : ids) values.push_back(regs[id]);
  return values;
}

int64_t checked_mul(int64_t a, int64_t b) {
  int64_t product = 0;
  TORCH_CHECK(!__builtin_mul_overflow(a, b, &product) && product >= 0, "blade: a size is out of range: ", a, " x ", b);
  return product;
}

int64_t checked_add(int64_t a, int64_t b) {
  int64_t sum = 0;
  TORCH_CHECK(!__builtin_add_overflow(a, b, &sum) && sum >= 0, "blade: an offset is out of range: ", a, " + ", b);
  return sum;
}

int64_t checked_numel(const Sizes& sizes, int64_t itemsize) {
  int64_t numel = 1;
  for (const int64_t size : sizes) {
    TORCH_CHECK(size >= 0, "blade: a size is negative: ", size);
    numel = checked_mul(numel, size);
  }
  checked_mul(numel, itemsize);
  return numel;
}

Sizes contiguous_strides(const Sizes& sizes) {
  Sizes strides(sizes.size());
  int64_t stride = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    strides[i] = stride;
    stride = checked_mul(stride, std::max<int64_t>(sizes[i], 1));
  }
  return strides;
}

// Elements from the first to one past the last that these sizes and strides reach.
int64_t reach(const Sizes& sizes, const Sizes& strides) {
  int64_t last = 0;
  for (size_t i = 0; i < sizes.size(); ++i) {
    TORCH_CHECK(sizes[i] >= 0 && strides[i] >= 0, "blade: a size or stride is negative");
    if (sizes[i] == 0) return 0;
    last = checked_add(last, checked_mul(sizes[i] - 1, strides[i]));
  }
  return checked_add(last, 1);
}

}  // namespace

ExecutionPlan::ExecutionPlan(
    const Loaded& loaded, const std::vector<at::Tensor>& inputs, Arenas& arenas, const Place& place, size_t apart)
    : loaded_(loaded),
      program_(loaded.program),
      arenas_(arenas),
      arena_(arenas.first().arena()),
      place_(place),
      stream_(place.stream),
      apart_bytes_(apart) {
  eval_registers(program_, inputs, regs_);
  failed_ = failed_guard(program_, regs_);
  if (failed_ != nullptr) return;
  slots_.resize(program_.slots.size());
  tensors_.resize(program_.slots.size());
  ptrs_.assign(program_.slots.size(), nullptr);
  for (size_t id = 0; id < slots_.size(); ++id) {
    if (program_.slots[id].kind == SlotKind::kInput || program_.slots[id].kind == SlotKind::kUpdate) {
      const auto& input = inputs[program_.slots[id].index];
      slots_[id].sizes.assign(input.sizes().begin(), input.sizes().end());
    }
    if (program_.slots[id].kind == SlotKind::kView) slots_[program_.slots[id].root].views.push_back(static_cast<int64_t>(id));
    if (program_.slots[id].known_at == 0) prepare_slot(id);
  }
  arena_bytes_ = plan_arena(0);
  make_fixed_tensors();
  steps_.resize(program_.instrs.size());
  for (size_t i = 0; i < steps_.size(); ++i) {
    if (program_.instrs[i].known_at == 0) prepare_step(i);
  }
  make_room_for_stages();
  for (size_t i = 0; i < steps_.size(); ++i) {
    if (program_.instrs[i].launch) prepare_params(steps_[i]);  // the tables no longer grow
  }
  check_results_are_made();
}

std::unique_ptr<ExecutionPlan> ExecutionPlan::planned_again(const std::vector<at::Tensor>& inputs, size_t apart) const {
  return std::make_unique<ExecutionPlan>(loaded_, inputs, arenas_, place_, apart);
}

void ExecutionPlan::prepare_step(size_t i) {
  const Instr& instr = program_.instrs[i];
  steps_[i].skip = instr.when >= 0 && reg(instr.when) == 0;
  if (steps_[i].skip) return;
  if (instr.loop >= 0) {
    steps_[i].extent = reg(instr.count);
    return;
  }
  instr.op ? prepare_call(i) : instr.launch ? prepare_launch(i) : prepare_kernel(i);
}

void ExecutionPlan::prepare_slot(size_t id) {
  const Slot& slot = program_.slots[id];
  SlotState& state = slots_[id];
  switch (slot.kind) {
    case SlotKind::kView:
      prepare_view(id);
      return;
    case SlotKind::kInput:
    case SlotKind::kUpdate:
      state.dtype = program_.inputs[slot.index].dtype;
      state.strides = contiguous_strides(state.sizes);
      break;
    case SlotKind::kConst: {
      const auto& constant = loaded_.constants[slot.index];
      state.dtype = constant.scalar_type();
      state.sizes.assign(constant.sizes().begin(), constant.sizes().end());
      state.strides.assign(constant.strides().begin(), constant.strides().end());
      state.span = static_cast<int64_t>(constant.storage().nbytes() / constant.itemsize()) - constant.storage_offset();
      return;
    }
    default:
      state.dtype = slot.dtype;
      state.sizes = gather(slot.sizes, regs_);
      checked_numel(state.sizes, static_cast<int64_t>(c10::elementSize(state.dtype)));
      state.strides = slot.kind == SlotKind::kDyn ? gather(slot.strides, regs_) : contiguous_strides(state.sizes);
  }
  state.span = reach(state.sizes, state.strides);
  checked_mul(state.span, static_cast<int64_t>(c10::elementSize(state.dtype)));
}

void ExecutionPlan::prepare_view(size_t id) {
  const Slot& slot = program_.slots[id];
  SlotState& state = slots_[id];
  state.dtype = slots_[slot.index].dtype;
  state.sizes = gather(slot.sizes, regs_);
  state.strides = gather(slot.strides, regs_);
  // of a view that a loop moves, this is where it would be at the index 0, which may not be there
  state.offset = slot.loops == 0 ? checked_add(slots_[slot.index].offset, reg(slot.offset)) : 0;
  state.span = reach(state.sizes, state.strides);
  if (slot.loops == 0) check_view(id);
}

void ExecutionPlan::check_view(size_t id) const {
  const SlotState& state = slots_[id];
  const int64_t elements = state.span, available = slots_[program_.slots[id].root].span;
  TORCH_CHECK(
      elements == 0 || (state.offset >= 0 && state.offset <= available - elements),
      "blade: slot ", id, " is a view outside its base: offset ", state.offset, " + ", elements, " of ", available);
}

// Of the slots of one stage; returns the bytes that they take together.
size_t ExecutionPlan::plan_arena(int64_t known_at) {
  std::vector<Buffer> buffers;
  std::vector<std::pair<size_t, size_t>> homes;  // slot, its buffer
  std::vector<size_t> buffer_of(slots_.size());
  int64_t total = 0;  // what a plan without any reuse would take: no sum of offsets is beyond it
  for (size_t id = 0; id < slots_.size(); ++id) {
    const Slot& slot = program_.slots[id];
    if (slot.kind != SlotKind::kArena || slot.known_at != known_at) continue;
    const auto bytes = static_cast<size_t>(slots_[id].span) * c10::elementSize(slots_[id].dtype);
    total = checked_add(total, static_cast<int64_t>(bytes));
    const bool is_near = slot.reuse >= 0 && program_.slots[slot.reuse].known_at == known_at;
    if (is_near && buffers[buffer_of[slot.reuse]].bytes == bytes) {
      buffer_of[id] = buffer_of[slot.reuse];
      buffers[buffer_of[id]].last = program_.last[id];
    } else {
      buffer_of[id] = buffers.size();
      buffers.push_back({program_.first[id], program_.last[id], bytes});
    }
    homes.emplace_back(id, buffer_of[id]);
  }
  if (known_at == 0 && program_.loops.empty()) take_apart(buffers, homes);
  const size_t taken = plan_memory(buffers);
  for (const auto& [id, buffer] : homes) slots_[id].arena_offset = buffers[buffer].offset;
  return taken;
}

// A loop would take the memory of a value in each of its iterations, so programs with loops keep all in the arena.
void ExecutionPlan::take_apart(std::vector<Buffer>& buffers, const std::vector<std::pair<size_t, size_t>>& homes) {
  std::vector<int64_t> number(buffers.size(), -1);
  for (size_t k = 0; k < buffers.size(); ++k) {
    Buffer& buffer = buffers[k];
    const bool is_used = buffer.first >= 0 && buffer.first < static_cast<int64_t>(program_.instrs.size());
    if (!is_used || buffer.bytes < apart_bytes_) continue;
    number[k] = static_cast<int64_t>(apart_.size());
    apart_.push_back({buffer.first, buffer.last, buffer.bytes, {}});
    buffer.first = -1;
  }
  for (const auto& [id, buffer] : homes) {
    if (number[buffer] < 0) continue;
    slots_[id].apart = true;
    apart_[number[buffer]].slots.push_back(static_cast<int64_t>(id));
  }
  if (apart_.empty()) return;
  apart_from_.resize(program_.instrs.size());
  apart_until_.resize(program_.instrs.size() + 1);
  for (size_t k = 0; k < apart_.size(); ++k) {
    apart_from_[apart_[k].first].push_back(k);
    apart_until_[apart_[k].last].push_back(k);
  }
}

at::Tensor ExecutionPlan::view_of(const at::Tensor& root, const SlotState& slot) const {
  auto* base = root.unsafeGetTensorImpl();
  auto view = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(root.storage()), root.key_set(), root.dtype());
  auto* impl = view.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(slot.sizes, slot.strides, base->storage_offset() + slot.offset);
  if (!base->is_inference()) impl->set_version_counter(base->version_counter());
  return view;
}

void ExecutionPlan::make_fixed_tensors() {
  for (size_t id = 0; id < slots_.size(); ++id) {
    const Slot& slot = program_.slots[id];
    if (slot.kind == SlotKind::kArena && slot.known_at > 0) continue;
    if (slot.kind == SlotKind::kConst) {
      tensors_[id] = loaded_.constants[slot.index];
    } else if (slot.kind == SlotKind::kArena && !slots_[id].apart) {
      const auto offset = slots_[id].arena_offset / c10::elementSize(slots_[id].dtype);
      tensors_[id] = tensor_over(
          arena_.storage(), slots_[id].dtype, slots_[id].sizes, slots_[id].strides, static_cast<int64_t>(offset));
    } else {
      if (slot.kind != SlotKind::kView) changing_roots_.push_back(static_cast<int64_t>(id));
      continue;
    }
    fixed_roots_.emplace_back(static_cast<int64_t>(id), nullptr);
    for (const int64_t view : slots_[id].views) {
      if (program_.slots[view].as_tensor && is_fixed(view)) tensors_[view] = view_of(tensors_[id], slots_[view]);
    }
  }
}

bool ExecutionPlan::is_fixed(int64_t id) const {
  const auto& root = program_.slots[program_.slots[id].root];
  if (program_.slots[id].known_at > 0 || root.swapped || program_.slots[id].loops != 0) return false;
  if (slots_[program_.slots[id].root].apart) return false;
  return root.kind == SlotKind::kConst || root.kind == SlotKind::kArena;
}

void ExecutionPlan::prepare_kernel(size_t i) {
  const Instr& instr = program_.instrs[i];
  Step& step = steps_[i];
  step.fn = loaded_.kernels[i];
  step.extent = reg(instr.extent);
  step.grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, reg(instr.cost)));
  TORCH_CHECK(reg(instr.scratch) >= 0, "blade: a kernel asks for a negative scratch size");
  step.scratch = static_cast<size_t>(reg(instr.scratch));
  if (instr.known_at == 0) add_pointers(i);
  for (size_t k = 0; k < instr.ints.size(); ++k) step.ints[k] = reg(instr.ints[k]);
}

// The step's part of the pointer table, and room for its ints.
void ExecutionPlan::add_pointers(size_t i) {
  const Instr& instr = program_.instrs[i];
  Step& step = steps_[i];
  step.table = table_.size();
  step.num_ptrs = instr.ptrs.size();
  for (const int64_t id : instr.ptrs) {
    (is_fixed(id) ? fixed_patches_ : step.patches).push_back({table_.size(), id});
    table_.push_back(nullptr);
  }
  if (!instr.launch) table_.push_back(nullptr);  // no scratch
  step.ints.resize(instr.ints.size());
}

void ExecutionPlan::prepare_launch(size_t i) {
  const Instr& instr = program_.instrs[i];
  const auto axis = [&](size_t k) {
    const int64_t blocks = reg(instr.grid[k]), most = k == 0 ? std::numeric_limits<int32_t>::max() : kMaxGrid;
    TORCH_CHECK(blocks >= 0 && blocks <= most, "blade: ", instr.text, ": a grid cannot have ", blocks, " blocks along axis ", k);
    return static_cast<uint32_t>(blocks);
  };
  const Grid grid{axis(0), axis(1), axis(2)};
  Step& step = steps_[i];
  step.launch = nullptr;
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
  step.grid = grid;
  step.launch = (*place_.launches)[i];
  if (instr.known_at == 0) add_pointers(i);
  for (size_t k = 0; k < instr.ints.size(); ++k) step.ints[k] = reg(instr.ints[k]);
}

void ExecutionPlan::prepare_params(Step& step) {
  for (size_t k = 0; k < step.num_ptrs; ++k) step.params.push_back(&table_[step.table + k]);
  for (auto& value : step.ints) step.params.push_back(&value);
  step.params.insert(step.params.end(), 2, &no_memory);
}

// Instructions that are skipped make no results: whatever reads one must be skipped, too.
void ExecutionPlan::check_results_are_made() const {
  const auto is_skipped = [](const Step& step) { return step.skip; };
  if (std::none_of(steps_.begin(), steps_.end(), is_skipped)) return;
  std::vector<bool> made(slots_.size(), false);
  const auto check = [&](int64_t id, const std::string& text) {
    if (id < 0) return;
    const int64_t root = program_.slots[id].root;
    TORCH_CHECK(
        program_.slots[root].kind != SlotKind::kDyn || made[root], "blade: ", text, ": what makes slot ", root,
        " is skipped at these sizes");
  };
  for (size_t i = 0; i < steps_.size(); ++i) {
    const Instr& instr = program_.instrs[i];
    // whether a step is skipped may not be known yet: it counts as run, and what it reads is looked at then
    const bool is_known = instr.known_at <= known_;
    if (is_known && steps_[i].skip) continue;
    for (size_t k = 0; k < instr.ptrs.size() && is_known; ++k) check(instr.ptrs[k], instr.text);
    for (size_t k = 0; k < instr.args.size() && is_known; ++k) {
      const auto& arg = instr.args[k];
      if (arg.kind == CallArg::kSlot) check(arg.id, instr.text);
      for (const int64_t id : arg.slots) check(id, instr.text);
    }
    for (const int64_t id : instr.results) {
      if (id >= 0) made[id] = true;
    }
  }
  for (const int64_t id : program_.outputs) check(id, "outputs");
}

bool ExecutionPlan::is_fixed(const CallArg& arg) const {
  const auto fixed_or_none = [this](int64_t id) { return id < 0 || is_fixed(id); };
  const auto stays = [this](const auto& one) { return !one.first || program_.regs[one.second].loops == 0; };
  switch (arg.kind) {
    case CallArg::kSlot: return is_fixed(arg.id);
    case CallArg::kReg: return program_.regs[arg.id].loops == 0;
    case CallArg::kInts: return std::all_of(arg.ints.begin(), arg.ints.end(), stays);
    default: return std::all_of(arg.slots.begin(), arg.slots.end(), fixed_or_none);
  }
}

void ExecutionPlan::prepare_call(size_t i) {
  const Instr& instr = program_.instrs[i];
  Step& step = steps_[i];
  step.args.clear();
  step.changing_args.clear();
  for (size_t k = 0; k < instr.args.size(); ++k) {
    const bool fixed = is_fixed(instr.args[k]);
    step.args.push_back(fixed ? make_arg(instr.args[k]) : c10::IValue());
    if (!fixed) step.changing_args.push_back(k);
  }
}

c10::IValue ExecutionPlan::make_arg(const CallArg& arg) const {
  switch (arg.kind) {
    case CallArg::kSlot: return tensors_[arg.id];
    case CallArg::kReg: return reg(arg.id);
    case CallArg::kInts: {
      c10::List<int64_t> list;
      list.reserve(arg.ints.size());
      for (const auto& [is_reg, value] : arg.ints) list.push_back(is_reg ? reg(value) : value);
      return list;
    }
    case CallArg::kTensors: {
      c10::List<at::Tensor> list;
      list.reserve(arg.slots.size());
      for (const int64_t id : arg.slots) list.push_back(tensors_[id]);
      return list;
    }
    case CallArg::kOptionalTensors: {
      c10::List<std::optional<at::Tensor>> list;
      list.reserve(arg.slots.size());
      for (const int64_t id : arg.slots) {
        list.push_back(id < 0 ? std::optional<at::Tensor>() : std::optional<at::Tensor>(tensors_[id]));
      }
      return list;
    }
    default: return arg.value;
  }
}

}  // namespace blade
