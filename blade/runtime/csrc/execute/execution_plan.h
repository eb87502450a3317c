// SPDX-License-Identifier: Apache-2.0
// All that a program needs for inputs of certain sizes, made once and used by call after call:
// register values, the memory plan, tensors over the arena, pointer tables, argument lists.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <exception>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "device/accelerator.h"
#include "native/native_library.h"
#include "program/program.h"

namespace blade {

// What stays the same for all execution plans of an engine.
struct Loaded {
  Program program;
  std::vector<KernelFn> kernels;      // per instruction; null for calls
  std::vector<at::Tensor> constants;  // private aliases of the module's tensors
  std::unique_ptr<Library> library;
  Accelerator* accelerator = nullptr;  // null: the CPU
};

// Where an execution plan works: execution plans of an accelerator belong to one of its streams.
struct Place {
  c10::Device device{at::kCPU};
  Stream stream = nullptr;
  const std::vector<const Kernel*>* launches = nullptr;  // per instruction, loaded on this device
};

// Memory for arena slots, with room for the largest execution plan that used it. Tensors over it see a new
// allocation by themselves because they share its storage.
class Arena {
 public:
  // On the current device and stream.
  explicit Arena(c10::DeviceType type);
  void reserve(size_t bytes);  // contents are lost if it grows
  void shrink(size_t bytes);
  char* data() const { return data_; }
  size_t capacity() const { return capacity_; }
  const c10::Storage& storage() const { return storage_; }
  int64_t moves() const { return moves_; }  // how often its address changed

 private:
  void allocate(size_t bytes);
  const c10::DeviceType type_;
  int64_t moves_ = 0;
  c10::Storage storage_;
  char* data_ = nullptr;
  size_t capacity_ = 0;
};

// An arena that gives back, now and then, what no call needed for long.
class ShrinkingArena {
 public:
  explicit ShrinkingArena(c10::DeviceType type) : arena_(type) {}
  void reserve(size_t bytes);  // room for a call; contents are lost if it moves
  const Arena& arena() const { return arena_; }

 private:
  Arena arena_;
  size_t peak_ = 0;
  int calls_ = 0;
};

// The memory of a stream context's calls: an arena for what is known with the inputs' sizes, and one per stage.
class Arenas {
 public:
  explicit Arenas(c10::DeviceType type) : type_(type), first_(type) {}
  ShrinkingArena& first() { return first_; }
  ShrinkingArena& of_stage(size_t stage);
  bool contain(const c10::StorageImpl* storage) const;
  size_t bytes() const;

 private:
  const c10::DeviceType type_;
  ShrinkingArena first_;
  std::vector<std::unique_ptr<ShrinkingArena>> stages_;
};

using Sizes = c10::SmallVector<int64_t, 6>;

// Greedy best fit: where each buffer of an arena starts, so that buffers alive at the same time do
// not overlap. Returns the total size. Live ranges are inclusive; a negative `first` means never used.
struct Buffer {
  int64_t first, last;
  size_t bytes;
  size_t offset = 0;
};
size_t plan_memory(std::vector<Buffer>& buffers);

// Where outputs are; without a storage they are fresh memory.
struct OutputMemory {
  c10::Storage fixed;     // of those that a graph copies
  c10::Storage borrowed;  // of those that are lent
};

// A relation between sizes that became known during the run does not hold: the original has to answer.
class GuardFailed : public std::exception {
 public:
  const char* what() const noexcept override { return "blade: a guard on a size that depends on elements does not hold"; }
};

class ExecutionPlan {
 public:
  // Evaluates registers and guards; prepares the rest only if the guards hold. Values of `apart` bytes and more are in no
  // arena: they have memory of torch's allocator from their first use to their last.
  ExecutionPlan(
      const Loaded& loaded, const std::vector<at::Tensor>& inputs, Arenas& arenas, const Place& place,
      size_t apart = kNoneApart);

  static constexpr size_t kNoneApart = std::numeric_limits<size_t>::max();

  // The same plan with other values apart.
  std::unique_ptr<ExecutionPlan> planned_again(const std::vector<at::Tensor>& inputs, size_t apart) const;

  const Guard* failed() const { return failed_; }
  size_t arena_bytes() const { return arena_bytes_; }

  // The first of the constructor's arenas is large enough; nobody else uses them or this execution plan
  // meanwhile; inputs are contiguous. Adds the seconds of every instruction to `seconds` if given. Throws GuardFailed,
  // and what ops throw. After an exception the execution plan must not be used again.
  std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs, std::vector<double>* seconds = nullptr);

  // The same, with the outputs that `lay_out_lent` placed in `lent`.
  std::vector<at::Tensor> run_lending(const std::vector<at::Tensor>& inputs, const c10::Storage& lent);

  // The same on an accelerator, which has nothing else to do.
  struct Timed {
    std::vector<at::Tensor> outputs;
    double work = 0, launching = 0;  // seconds, of the device and of the host
    int64_t steps = 0;               // launches and calls
    bool steady = true;              // the host had all the memory that it needed
  };
  Timed run_timed(const std::vector<at::Tensor>& inputs);

  // Places the outputs among the slots that are `borrowed` one after the other; the bytes of all.
  size_t lay_out_lent(const std::vector<bool>& borrowed);

 private:
  friend class CapturePolicy;
  friend class CapturedGraph;

  struct SlotState {
    at::ScalarType dtype = at::ScalarType::Undefined;
    Sizes sizes, strides;
    int64_t offset = 0;          // elements, from the root's start
    int64_t span = 0;            // roots: elements that may be touched
    size_t arena_offset = 0;     // bytes, from the arena's start; outputs: from the start of `OutputMemory`
    bool borrowed = false;       // outputs: in the memory that is lent
    bool apart = false;          // in no arena
    std::vector<int64_t> views;  // roots: the views on them
  };
  // An entry of the pointer table and the slot it points to.
  struct Patch {
    size_t entry;
    int64_t slot;
  };
  struct Step {
    bool skip = false;  // its `when` does not hold at these sizes
    KernelFn fn = nullptr;
    const Kernel* launch = nullptr;  // accelerators, where the grid is not empty
    Grid grid;
    std::vector<void*> params;       // of a launch: the address of every argument
    int64_t extent = 0, grain = 0;
    size_t scratch = 0;
    size_t table = 0, num_ptrs = 0;  // its part of the pointer table
    std::vector<int64_t> ints;
    std::vector<Patch> patches;         // entries that change per call
    std::vector<c10::IValue> args;      // of a call; those that change per call are filled in then
    std::vector<size_t> changing_args;
  };

  int64_t reg(int64_t id) const { return regs_[id]; }

  // preparation: execution_plan.cpp
  void prepare_slot(size_t id);
  void prepare_view(size_t id);
  void check_view(size_t id) const;
  size_t plan_arena(int64_t known_at);
  void take_apart(std::vector<Buffer>& buffers, const std::vector<std::pair<size_t, size_t>>& homes);
  void make_fixed_tensors();
  void prepare_step(size_t i);
  void prepare_kernel(size_t i);
  void prepare_launch(size_t i);
  void add_pointers(size_t i);
  void prepare_params(Step& step);
  void prepare_call(size_t i);
  void check_results_are_made() const;
  bool is_fixed(int64_t id) const;
  bool is_fixed(const CallArg& arg) const;
  c10::IValue make_arg(const CallArg& arg) const;
  at::Tensor view_of(const at::Tensor& root, const SlotState& slot) const;

  // what becomes known during a run: late_sizes.cpp
  void make_room_for_stages();
  void enter_stage(const Stage& stage);
  bool bind_sizes(const Stage& stage);
  void prepare_stage(const Stage& stage);
  void bind_stage(const Stage& stage);

  // execution: run_plan.cpp
  bool refresh_fixed_pointers();
  void bind(const std::vector<at::Tensor>& inputs, const OutputMemory& homes = OutputMemory());
  at::Tensor output_tensor(int64_t id, const OutputMemory& homes) const;
  void bind_root(int64_t id, at::Tensor tensor, char* data);
  void point_root(int64_t id, char* data);  // its pointers and those of its views
  void point_view(int64_t id);
  void make_apart(size_t i);
  void release_apart(size_t i);
  void release_root(int64_t id);
  void release();  // all that a call holds
  template <typename RunStep>
  void run_range(size_t begin, size_t end, const RunStep& run_one);
  void run_step(size_t i);
  void begin_iteration(const LoopState& loop, int64_t index);
  void swap(const std::pair<int64_t, int64_t>& slots);
  void move_view(int64_t id);
  void run_kernel(const Step& step);
  void run_launch(Step& step);
  void run_profiled(std::vector<double>& seconds);
  std::vector<at::Tensor> run_bound(std::vector<double>* seconds);
  void run_call(const Instr& instr, const Step& step);
  void take_results(const Instr& instr);
  bool is_here(const at::Tensor& tensor) const;
  at::Tensor checked_result(int64_t id, const at::Tensor& result) const;
  std::vector<at::Tensor> collect_outputs();

  const Loaded& loaded_;
  const Program& program_;
  Arenas& arenas_;
  const Arena& arena_;  // the first
  const Place place_;
  Stream stream_ = nullptr;  // where this call enqueues
  Recorder* recorder_ = nullptr;  // who is told of launches instead
  std::vector<int64_t> regs_;
  const Guard* failed_ = nullptr;
  size_t arena_bytes_ = 0;
  std::vector<SlotState> slots_;
  std::vector<at::Tensor> tensors_;
  std::vector<char*> ptrs_;
  std::vector<void*> table_;
  std::vector<Patch> fixed_patches_;  // entries that change only when memory moves
  std::vector<Step> steps_;
  // Memory that one call takes at instruction `first` and lets go of behind `last`, and the slots in it.
  struct Apart {
    int64_t first, last;
    size_t bytes;
    std::vector<int64_t> slots;
  };
  const size_t apart_bytes_;
  std::vector<Apart> apart_;
  std::vector<std::vector<size_t>> apart_from_, apart_until_;  // per instruction
  int64_t known_ = 0;  // what has a larger `known_at` is not known yet
  // Per stage: what its sizes were when it was prepared, and the bytes of its arena. One is prepared again when these
  // differ, or were different for a stage before it.
  struct Prepared {
    std::vector<int64_t> sizes;
    size_t bytes = 0;
  };
  std::vector<Prepared> stages_;
  bool stages_differ_ = false;  // in this call
  std::vector<c10::IValue> stack_;
  std::vector<int64_t> changing_roots_;  // inputs, outputs, results of calls
  std::vector<std::pair<int64_t, int64_t>> swapped_;  // slots that have each other's memory
  // roots with the same memory at every call, and where that memory was when last looked at
  std::vector<std::pair<int64_t, const void*>> fixed_roots_;
};

// Calls `run_one` with each step of [begin, end) that is no loop, in order, as often as the loops around it say.
template <typename RunStep>
void ExecutionPlan::run_range(size_t begin, size_t end, const RunStep& run_one) {
  for (size_t i = begin; i < end; ++i) {
    const Instr& instr = program_.instrs[i];
    if (instr.loop < 0) {
      run_one(i);
      continue;
    }
    const auto length = static_cast<size_t>(instr.length);
    const LoopState& loop = program_.loops[instr.loop];
    for (int64_t index = 0; index < steps_[i].extent; ++index) {
      begin_iteration(loop, index);
      run_range(i + 1, i + 1 + length, run_one);
      for (const auto& pair : instr.swaps) swap(pair);
    }
    for (const int64_t id : instr.last_use) release_root(id);
    i += length;
  }
}

}  // namespace blade
