// SPDX-License-Identifier: Apache-2.0
#include "graphs/capture_policy.h"

#include <algorithm>

namespace blade {
namespace {

// Seconds, measured on an H200 (driver of CUDA 13) with benchmarks/bench_gpu.py and traces of models.
constexpr double kLaunch = 2.5e-6;  // of the host, to launch one kernel
constexpr double kCall = 5e-6;      // of the host, for an op through the dispatcher and the launches it makes
constexpr double kMove = 1e-6;      // of the host, to tell a launch of a graph its addresses
constexpr double kCopy = 1.5e-6;    // of the device, for a launch that copies next to nothing
constexpr double kPerByte = 2 / 3.5e12;  // of the device, read and written

// A graph of as many as two launches takes as long to launch as these.
constexpr int64_t kFewestSteps = 3;

// Launches and calls of a graph; loops make many, and each takes memory of the device.
constexpr int64_t kMostSteps = 1 << 15;

}  // namespace

CapturePolicy::CapturePolicy(const ExecutionPlan& plan, bool may_move, const GraphLimits& limits)
    : plan_(plan),
      program_(plan.program_),
      stays_(program_.slots.size(), limits.reuse_outputs),
      inputs_(program_.inputs.size()),
      results_(program_.slots.size()),
      moves_(plan.steps_.size(), false) {
  for (size_t id = 0; id < program_.slots.size(); ++id) {
    if (limits.is_borrowed(static_cast<int64_t>(id))) stays_[id] = true;
    const auto& slot = plan_.slots_[id];
    Memory* memory = memory_of(static_cast<int64_t>(id));
    if (memory == nullptr) continue;
    memory->bytes = static_cast<size_t>(slot.span) * c10::elementSize(slot.dtype);
    memory->called = memory->called || program_.slots[id].kind == SlotKind::kDyn;
    memory->back = memory->back || program_.slots[id].kind == SlotKind::kUpdate;
  }
  look_at(0, plan_.steps_.size(), 1, /*in_loop=*/false);
  const auto decide = [may_move](Memory& memory) {
    const double move = kMove * static_cast<double>(memory.pointers), copy = kPerByte * static_cast<double>(memory.bytes);
    memory.direct = may_move && !memory.called && move <= copy;
  };
  std::for_each(inputs_.begin(), inputs_.end(), decide);
  for (size_t id = 0; id < results_.size(); ++id) {
    if (!stays_[id]) decide(results_[id]);
  }
  for (size_t i = 0; i < plan_.steps_.size(); ++i) {
    const auto& patches = plan_.steps_[i].patches;
    moves_[i] = std::any_of(
        patches.begin(), patches.end(), [&](const auto& patch) { return is_direct(program_.slots[patch.slot].root); });
  }
}

// nullptr: not memory that moves.
CapturePolicy::Memory* CapturePolicy::memory_of(int64_t root) {
  const Slot& slot = program_.slots[root];
  switch (slot.kind) {
    case SlotKind::kInput:
    case SlotKind::kUpdate: return &inputs_[slot.index];
    case SlotKind::kOutput:
    case SlotKind::kDyn: return &results_[root];
    default: return nullptr;
  }
}

// Steps [begin, end), each of which runs so many times.
void CapturePolicy::look_at(size_t begin, size_t end, int64_t times, bool in_loop) {
  for (size_t i = begin; i < end; ++i) {
    const Instr& instr = program_.instrs[i];
    if (instr.loop < 0) {
      look_at(i, times, in_loop);
      continue;
    }
    const int64_t count = std::clamp<int64_t>(plan_.steps_[i].extent, 0, kMostSteps);
    const auto length = static_cast<size_t>(instr.length);
    look_at(i + 1, i + 1 + length, std::min(times * count, kMostSteps), /*in_loop=*/true);
    i += length;
  }
}

// A launch in a loop has an address per iteration: what it touches stays where it was captured, as for a call.
void CapturePolicy::look_at(size_t i, int64_t times, bool in_loop) {
  const Instr& instr = program_.instrs[i];
  const auto& step = plan_.steps_[i];
  if (step.skip) return;
  const auto is_called = [this](int64_t id) {
    Memory* memory = id < 0 ? nullptr : memory_of(program_.slots[id].root);
    if (memory != nullptr) memory->called = true;
  };
  if (instr.op) {
    calls_ += times;
    for (const auto& arg : instr.args) {
      if (arg.kind == CallArg::kSlot) is_called(arg.id);
      std::for_each(arg.slots.begin(), arg.slots.end(), is_called);
    }
  } else if (step.launch != nullptr) {
    launches_ += times;
    for (const auto& patch : step.patches) {
      Memory* memory = memory_of(program_.slots[patch.slot].root);
      if (memory == nullptr) continue;  // the arena's, which a loop exchanges
      in_loop ? void(memory->called = true) : void(++memory->pointers);
    }
  }
}

bool CapturePolicy::is_direct(int64_t root) const {
  const Slot& slot = program_.slots[root];
  switch (slot.kind) {
    case SlotKind::kInput:
    case SlotKind::kUpdate: return inputs_[slot.index].direct;
    case SlotKind::kOutput: return results_[root].direct;
    default: return false;
  }
}

size_t CapturePolicy::bytes_of_results() const {
  size_t total = 0;
  for (size_t id = 0; id < results_.size(); ++id) {
    if (program_.slots[id].kind == SlotKind::kOutput && !stays_[id] && !results_[id].direct) total += results_[id].bytes;
  }
  return total;
}

bool CapturePolicy::pays(const std::vector<bool>& moved) const {
  if (launches_ + calls_ < kFewestSteps || launches_ + calls_ >= kMostSteps) return false;
  size_t in = 0, out = 0;
  int64_t pointers = 0;
  const auto add = [&](const Memory& memory, size_t& bytes) {
    memory.direct ? pointers += memory.pointers : bytes += memory.bytes;
  };
  for (size_t i = 0; i < inputs_.size(); ++i) {
    if (!moved[i]) continue;
    add(inputs_[i], in);
    if (inputs_[i].back && !inputs_[i].direct) out += inputs_[i].bytes;
  }
  std::vector<bool> counted = stays_;
  for (const int64_t id : program_.outputs) {
    const int64_t root = program_.slots[id].root;
    const auto kind = program_.slots[root].kind;
    if (counted[root] || (kind != SlotKind::kOutput && kind != SlotKind::kDyn)) continue;
    counted[root] = true;
    add(results_[root], out);
  }
  const auto copied = static_cast<double>(in + out);
  const double spent = kMove * static_cast<double>(pointers) + kPerByte * copied + kCopy * ((in > 0) + (out > 0));
  const double saved = kLaunch * static_cast<double>(launches_) + kCall * static_cast<double>(calls_) - kLaunch;
  return spent < saved;
}

}  // namespace blade
