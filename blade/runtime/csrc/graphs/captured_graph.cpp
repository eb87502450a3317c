// SPDX-License-Identifier: Apache-2.0
#include "graphs/captured_graph.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <numeric>

#include "memory/borrowed_outputs.h"
#include "memory/memory.h"

namespace blade {
namespace {

// Bytes of inputs that a graph would keep copies of: with so many it waits for what lends them to have a graph, too.
constexpr size_t kMostCopied = size_t{64} << 20;

constexpr int64_t kMostUses = 64;  // that a shape evicted again and again needs before it is captured once more

std::vector<const void*> addresses_of(const std::vector<at::Tensor>& tensors) {
  std::vector<const void*> addresses;
  addresses.reserve(tensors.size());
  for (const auto& tensor : tensors) addresses.push_back(tensor.const_data_ptr());
  return addresses;
}

}  // namespace

void GraphCounts::failed(const std::string& what) {
  failures.fetch_add(1, std::memory_order_relaxed);
  const std::lock_guard<std::mutex> lock(mutex_);
  last_failure_ = what;
}

std::string GraphCounts::last_failure() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return last_failure_;
}

void GraphCounts::clear() {
  captures = 0;
  replays = 0;
  failures = 0;
  declined = 0;
  bytes_copied = 0;
  const std::lock_guard<std::mutex> lock(mutex_);
  last_failure_.clear();
}

bool can_be_captured(const Program& program, c10::DeviceType type) {
  const auto is_fine = [&](int64_t id, bool written) {
    if (id < 0) return true;
    const Slot& root = program.slots[program.slots[id].root];
    if (root.kind != SlotKind::kInput && root.kind != SlotKind::kUpdate) return true;
    const bool as_it_says = !written || root.kind == SlotKind::kUpdate;
    return as_it_says && program.inputs[root.index].device == type;
  };
  if (!program.stages.empty()) return false;  // the host has to know sizes before it goes on
  for (const auto& instr : program.instrs) {
    for (const auto& arg : instr.args) {
      if (arg.kind == CallArg::kSlot && !is_fine(arg.id, arg.written)) return false;
      if (!std::all_of(arg.slots.begin(), arg.slots.end(), [&](int64_t id) { return is_fine(id, false); })) return false;
    }
  }
  return true;
}

bool CapturedGraph::wants_capture(const std::vector<at::Tensor>& inputs, const GraphLimits& limits, GraphCounts& counts) {
  if (never_ || graph_) return false;
  auto addresses = addresses_of(inputs);
  addresses_.swap(addresses);
  if (++uses_ < needed_) return false;
  if (!policy_) policy_.emplace(plan_, may_move_, limits);
  moved_.resize(inputs.size(), false);
  copied_.assign(inputs.size(), false);
  for (size_t i = 0; i < inputs.size(); ++i) {
    // what a graph lent is there again at the next call, although the call before ran without that graph
    if (addresses[i] != addresses_[i] && !is_borrowed(inputs[i])) moved_[i] = true;
    copied_[i] = moved_[i] && !policy_->is_direct_input(i);
  }
  if (limits.always) return true;
  if (copied_bytes(inputs) >= kMostCopied) {
    put_off();
    return false;
  }
  if (policy_->pays(moved_)) return true;
  counts.declined.fetch_add(1, std::memory_order_relaxed);
  never_ = true;
  return false;
}

size_t CapturedGraph::copied_bytes(const std::vector<at::Tensor>& inputs) const {
  size_t total = 0;
  for (size_t i = 0; i < inputs.size(); ++i) total += copied_[i] ? inputs[i].nbytes() : 0;
  return total;
}

void CapturedGraph::drop() {
  graph_.reset();
  results_.clear();
  loans_ = Loans();
  kept_ = Loans();
  moving_.clear();
}

void CapturedGraph::evict() {
  drop();
  put_off();
}

// Where inputs are is looked at anew: what lends them may have a graph by then.
void CapturedGraph::put_off() {
  uses_ = 0;
  needed_ = std::min(2 * needed_, kMostUses);
  moved_.clear();
}

// Makes room for copied inputs and outputs, and says where they are from the start of their memory.
void CapturedGraph::plan_copies(const std::vector<at::Tensor>& inputs, const GraphMemory& memory, const GraphLimits& limits) {
  size_t bytes = 0;
  offsets_.assign(inputs.size(), 0);
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!copied_[i]) continue;
    offsets_[i] = bytes;
    bytes += of_its_own(inputs[i].nbytes());
  }
  const size_t borrowed = plan_.lay_out_lent(limits.borrowed);
  for (size_t id = 0; id < plan_.slots_.size(); ++id) {
    if (plan_.program_.slots[id].kind != SlotKind::kOutput) continue;
    auto& slot = plan_.slots_[id];
    if (slot.borrowed) continue;
    slot.arena_offset = 0;  // of direct ones anywhere: replays say where they are
    if (policy_->is_direct(static_cast<int64_t>(id))) continue;
    slot.arena_offset = bytes;
    bytes += of_its_own(static_cast<size_t>(slot.span) * c10::elementSize(slot.dtype));
  }
  memory.fixed.reserve(std::max(bytes, kOwnAlign));
  lends_ = borrowed > 0;
  if (lends_) memory.borrowed.reserve(borrowed);
}

std::vector<at::Tensor> CapturedGraph::fixed_inputs(const std::vector<at::Tensor>& inputs, const Arena& fixed) {
  auto bound = inputs;
  in_ = Copies();
  copied_inputs_.clear();
  copied_updates_.clear();
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!copied_[i]) continue;
    const auto& input = inputs[i];
    const auto offset = static_cast<int64_t>(offsets_[i] / input.itemsize());
    bound[i] = tensor_over(fixed.storage(), input.scalar_type(), input.sizes(), input.strides(), offset);
    in_.all.push_back({fixed.data() + offsets_[i], input.const_data_ptr(), input.nbytes()});
    copied_inputs_.push_back(i);
    const auto& updated = plan_.program_.updated;
    if (std::binary_search(updated.begin(), updated.end(), static_cast<int64_t>(i))) copied_updates_.push_back(i);
  }
  return bound;
}

// What the caller gets copies of, and inputs that were updated in a copy.
void CapturedGraph::collect_results(const Arena& fixed, const GraphLimits& limits) {
  out_ = Copies();
  reuse_outputs_ = limits.reuse_outputs;
  for (const int64_t id : plan_.program_.outputs) {
    const int64_t root = plan_.program_.slots[id].root;
    const auto kind = plan_.program_.slots[root].kind;
    if (kind != SlotKind::kOutput && kind != SlotKind::kDyn) continue;
    const auto is_it = [root](const Result& one) { return one.root == root; };
    if (std::any_of(results_.begin(), results_.end(), is_it)) continue;
    if (policy_->is_direct(root)) {
      results_.push_back({root, at::Tensor(), -1, std::nullopt});
      continue;
    }
    const auto& slot = plan_.slots_[root];
    if (limits.is_borrowed(root) && kind == SlotKind::kOutput) {
      results_.push_back({root, at::Tensor(), -1, slot.arena_offset});
      continue;
    }
    results_.push_back({root, plan_.tensors_[root], -1, std::nullopt});
    if (reuse_outputs_ || limits.is_borrowed(root)) continue;
    const size_t bytes = static_cast<size_t>(slot.span) * c10::elementSize(slot.dtype);
    results_.back().copy = static_cast<int64_t>(out_.all.size());
    out_.all.push_back({plan_.ptrs_[root], plan_.ptrs_[root], bytes});
  }
  for (const size_t i : copied_updates_) {
    auto* copy = fixed.data() + offsets_[i];
    out_.all.push_back({copy, copy, in_.all[std::find(copied_inputs_.begin(), copied_inputs_.end(), i) - copied_inputs_.begin()].bytes});
  }
}

// As the graph is recorded: later than all before it, and whether what calls leave is read between its launches.
void CapturedGraph::take_place(const GraphLimits& limits) {
  order_ = &LaunchOrder::of(plan_.place_.device, plan_.place_.stream);
  number_ = order_->next();
  const auto stays = [&](const Result& one) {
    return one.tensor.defined() && one.copy < 0 && plan_.program_.slots[one.root].kind == SlotKind::kDyn;
  };
  if (std::none_of(results_.begin(), results_.end(), stays)) return;
  if (limits.reuse_outputs) kept_.hold();
  order_->add(number_, limits.reuse_outputs ? kept_ : loans_);
}

void CapturedGraph::record(
    const std::vector<at::Tensor>& bound, const GraphMemory& memory, const GraphLimits& limits, Recorder& recorder) {
  int64_t recorded = 0;
  const auto record_copies = [&](Copies& copies) {
    if (!copies.all.empty() && recorder.copy(copies.all)) copies.index = recorded++;
  };
  record_copies(in_);
  plan_.stream_ = recorder.stream();
  plan_.recorder_ = &recorder;
  plan_.bind(bound, {memory.fixed.storage(), memory.borrowed.arena().storage()});
  plan_.run_range(0, plan_.steps_.size(), [&](size_t i) {
    plan_.run_step(i);
    if (!policy_->moves(i)) return;
    recorder.keep_launch();
    moving_.push_back({i, {}});
    for (const auto& patch : plan_.steps_[i].patches) moving_.back().pointers.push_back(plan_.ptrs_[patch.slot]);
  });
  collect_results(memory.fixed, limits);
  take_place(limits);
  record_copies(out_);
  plan_.release();
}

Work CapturedGraph::kind_of_work() const {
  if (plan_.program_.draws) return Work::kDraws;
  const auto& instrs = plan_.program_.instrs;
  for (size_t i = 0; i < instrs.size(); ++i) {
    if (instrs[i].op && !plan_.steps_[i].skip) return Work::kCalls;
  }
  return Work::kLaunches;
}

bool CapturedGraph::capture(
    const std::vector<at::Tensor>& inputs, const GraphMemory& memory, const GraphLimits& limits, GraphCounts& counts) {
  plan_copies(inputs, memory, limits);
  const auto bound = fixed_inputs(inputs, memory.fixed);
  auto& accelerator = *plan_.loaded_.accelerator;
  try {
    const auto& [device, stream] = std::tie(plan_.place_.device, plan_.place_.stream);
    graph_ = accelerator.record(device.index(), stream, kind_of_work(), [&](Recorder& recorder) {
      record(bound, memory, limits, recorder);
    });
  } catch (const std::exception& error) {
    const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
    counts.failed(std::string("no graph was captured: ") + (torch_error ? torch_error->what_without_backtrace() : error.what()));
    never_ = true;
  }
  plan_.stream_ = plan_.place_.stream;
  plan_.recorder_ = nullptr;
  if (graph_ && can_move_launches(counts)) {
    counts.captures.fetch_add(1, std::memory_order_relaxed);
    arena_moves_ = plan_.arena_.moves();
    fixed_moves_ = memory.fixed.moves();
    borrowed_moves_ = memory.borrowed.arena().moves();
    const auto add = [](int64_t sum, const Copy& copy) { return sum + static_cast<int64_t>(copy.bytes); };
    bytes_copied_ = std::accumulate(in_.all.begin(), in_.all.end(), int64_t{0}, add);
    bytes_copied_ = std::accumulate(out_.all.begin(), out_.all.end(), bytes_copied_, add);
    return true;
  }
  plan_.release();
  drop();
  return false;
}

// Whether the driver lets go of the addresses a graph was captured with; if not, the next capture has copies instead.
bool CapturedGraph::can_move_launches(GraphCounts& counts) {
  try {
    for (size_t k = 0; k < moving_.size(); ++k) graph_->set_launch(k, plan_.steps_[moving_[k].step].params.data());
    return true;
  } catch (const c10::Error& error) {
    counts.failed(std::string("launches of a graph cannot be changed: ") + error.what_without_backtrace());
  }
  may_move_ = false;
  policy_.reset();
  return false;
}

// Tells launches where this call's inputs and outputs are.
void CapturedGraph::move_launches(const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& roots) {
  if (moving_.empty()) return;
  for (const int64_t id : plan_.changing_roots_) {
    const Slot& slot = plan_.program_.slots[id];
    if (slot.kind == SlotKind::kOutput || !policy_->is_direct(id)) continue;
    plan_.point_root(id, static_cast<char*>(const_cast<void*>(inputs[slot.index].const_data_ptr())));
  }
  for (size_t k = 0; k < results_.size(); ++k) {
    const int64_t root = results_[k].root;
    if (policy_->is_direct(root)) plan_.point_root(root, static_cast<char*>(roots[k].mutable_data_ptr()));
  }
  for (size_t k = 0; k < moving_.size(); ++k) {
    auto& [i, pointers] = moving_[k];
    auto& step = plan_.steps_[i];
    bool moved = false;
    for (size_t p = 0; p < pointers.size(); ++p) {
      const int64_t id = step.patches[p].slot;
      void* now = policy_->is_direct(plan_.program_.slots[id].root) ? plan_.ptrs_[id] : pointers[p];
      moved = moved || now != pointers[p];
      pointers[p] = now;
    }
    if (!moved) continue;
    for (size_t p = 0; p < pointers.size(); ++p) plan_.table_[step.patches[p].entry] = pointers[p];
    graph_->set_launch(k, step.params.data());
  }
}

bool CapturedGraph::is_elsewhere(const std::vector<at::Tensor>& inputs, size_t i) const {
  return !copied_[i] && !policy_->is_direct_input(i) && inputs[i].const_data_ptr() != addresses_[i];
}

// An input that is not where it was captured: from now on that one is copied.
bool CapturedGraph::is_input_moved(const std::vector<at::Tensor>& inputs) {
  bool moved = false;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!is_elsewhere(inputs, i)) continue;
    if (!is_borrowed(inputs[i])) moved_[i] = true;
    moved = true;
  }
  return moved;
}

bool CapturedGraph::is_elsewhere_borrowed(const std::vector<at::Tensor>& inputs) const {
  bool found = false;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!is_elsewhere(inputs, i)) continue;
    if (!is_borrowed(inputs[i])) return false;
    found = true;
  }
  return found;
}

bool CapturedGraph::is_out(const BufferSet& borrowed) const {
  return (lends_ && borrowed.is_out()) || loans_.is_out();
}

bool CapturedGraph::is_ready(const std::vector<at::Tensor>& inputs, const BufferSet& borrowed) const {
  if (!graph_ || is_out(borrowed)) return false;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (is_elsewhere(inputs, i)) return false;
  }
  return true;
}

std::optional<std::vector<at::Tensor>> CapturedGraph::replay(
    const std::vector<at::Tensor>& inputs, const GraphMemory& memory, GraphCounts& counts) {
  if (is_out(memory.borrowed)) return std::nullopt;
  const bool is_moved = arena_moves_ != plan_.arena_.moves() || fixed_moves_ != memory.fixed.moves() ||
                        (lends_ && borrowed_moves_ != memory.borrowed.arena().moves());
  const bool weights_moved = plan_.refresh_fixed_pointers();
  if (weights_moved || is_moved || is_input_moved(inputs)) {
    drop();  // captured again at the next use
    return std::nullopt;
  }
  const std::lock_guard<std::mutex> turn(order_->turn());
  if (!order_->may_launch(number_)) {
    evict();  // captured again, later, in memory that is nobody's
    return std::nullopt;
  }
  for (size_t k = 0; k < in_.all.size(); ++k) in_.all[k].from = inputs[copied_inputs_[k]].const_data_ptr();
  const auto results = make_results(inputs, memory.borrowed);
  move_launches(inputs, results);
  launch();
  counts.replays.fetch_add(1, std::memory_order_relaxed);
  counts.bytes_copied.fetch_add(bytes_copied_, std::memory_order_relaxed);
  std::vector<at::Tensor> outputs;
  outputs.reserve(plan_.program_.outputs.size());
  for (const int64_t id : plan_.program_.outputs) outputs.push_back(output(id, inputs, results));
  return outputs;
}

void CapturedGraph::launch() {
  auto& accelerator = *plan_.loaded_.accelerator;
  const Stream stream = plan_.place_.stream;
  if (in_.index >= 0) graph_->set_copies(static_cast<size_t>(in_.index), in_.all);
  if (out_.index >= 0) graph_->set_copies(static_cast<size_t>(out_.index), out_.all);
  if (in_.index < 0 && !in_.all.empty()) accelerator.copy(in_.all, stream);
  graph_->launch(stream);
  if (out_.index < 0 && !out_.all.empty()) accelerator.copy(out_.all, stream);
}

// A tensor per result: fresh memory that it is going to be copied to, or the graph's own.
std::vector<at::Tensor> CapturedGraph::make_results(const std::vector<at::Tensor>& inputs, BufferSet& borrowed) {
  const auto lent = lends_ ? borrowed.lend() : c10::Storage();
  std::vector<at::Tensor> roots;
  roots.reserve(results_.size());
  for (size_t k = 0; k < results_.size(); ++k) {
    const auto& slot = plan_.slots_[results_[k].root];
    if (results_[k].borrowed || (results_[k].tensor.defined() && results_[k].copy < 0 && !reuse_outputs_)) {
      roots.push_back(borrowed_result(results_[k], lent));
      continue;
    }
    if (reuse_outputs_) {
      roots.push_back(plan_.view_of(results_[k].tensor, slot));
      continue;
    }
    roots.push_back(empty_strided_tensor(plan_.place_.device.type(), slot.sizes, slot.strides, slot.dtype));
    if (results_[k].copy >= 0) out_.all[results_[k].copy].to = roots.back().mutable_data_ptr();
  }
  const size_t first = out_.all.size() - copied_updates_.size();
  for (size_t k = 0; k < copied_updates_.size(); ++k) out_.all[first + k].to = inputs[copied_updates_[k]].mutable_data_ptr();
  return roots;
}

// A tensor of its own: what is done to it counts for this call alone. `lent`: the memory of the buffer set.
at::Tensor CapturedGraph::borrowed_result(const Result& result, const c10::Storage& lent) {
  const auto& slot = plan_.slots_[result.root];
  if (result.borrowed) {
    const auto offset = static_cast<int64_t>(*result.borrowed / c10::elementSize(slot.dtype));
    return tensor_over(lent, slot.dtype, slot.sizes, slot.strides, offset);
  }
  const auto& own = result.tensor;
  return tensor_over(loans_.lend(own.storage()), slot.dtype, slot.sizes, own.strides(), own.storage_offset());
}

at::Tensor CapturedGraph::output(int64_t id, const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& roots) const {
  const int64_t root = plan_.program_.slots[id].root;
  const Slot& slot = plan_.program_.slots[root];
  const auto whole_or_part = [&](const at::Tensor& whole) {
    return id == root ? whole : plan_.view_of(whole, plan_.slots_[id]);
  };
  switch (slot.kind) {
    case SlotKind::kInput: return whole_or_part(inputs[slot.index]);
    case SlotKind::kArena: return plan_.tensors_[id].clone();
    case SlotKind::kConst: return plan_.tensors_[id];
    default: break;
  }
  const auto is_it = [root](const Result& one) { return one.root == root; };
  const auto found = std::find_if(results_.begin(), results_.end(), is_it);
  return whole_or_part(roots[found - results_.begin()]);
}

}  // namespace blade
