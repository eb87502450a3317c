// SPDX-License-Identifier: Apache-2.0
// All that a program needs for inputs of certain sizes, made once and used by call after call:
// register values, the memory plan, tensors over the arena, pointer tables, argument lists.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

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

using Sizes = c10::SmallVector<int64_t, 6>;

// Greedy best fit: where each buffer of an arena starts, so that buffers alive at the same time do
// not overlap. Returns the total size. Live ranges are inclusive; a negative `first` means never used.
struct Buffer {
  int64_t first, last;
  size_t bytes;
  size_t offset = 0;
};
size_t plan_memory(std::vector<Buffer>& buffers);

// Where outputs are for a graph; without one they are fresh memory.
struct OutputMemory {
  const Arena* fixed = nullptr;
  const Arena* borrowed = nullptr;
};

class ExecutionPlan {
 public:
  // Evaluates registers and guards; prepares the rest only if the guards hold.
  ExecutionPlan(const Loaded& loaded, const std::vector<at::Tensor>& inputs, const Arena& arena, const Place& place);

  const Guard* failed() const { return failed_; }
  size_t arena_bytes() const { return arena_bytes_; }

  // The arena is the one of the constructor and large enough; nobody else uses it or this execution plan
  // meanwhile; inputs are contiguous. Adds the seconds of every instruction to `seconds` if given.
  // After an exception the execution plan must not be used again.
  std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs, std::vector<double>* seconds = nullptr);

 private:
  friend class CapturePolicy;
  friend class CapturedGraph;

  struct SlotState {
    at::ScalarType dtype = at::ScalarType::Undefined;
    Sizes sizes, strides;
    int64_t offset = 0;          // elements, from the root's start
    int64_t span = 0;            // roots: elements that may be touched
    size_t arena_offset = 0;     // bytes, from the arena's start; outputs: from the start of a graph's memory
    bool borrowed = false;           // outputs of a graph: in the memory that it lends
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

  // preparation: frame.cpp
  void prepare_slot(size_t id);
  void prepare_view(size_t id);
  void plan_arena();
  void make_fixed_tensors();
  void prepare_kernel(size_t i);
  void prepare_launch(size_t i);
  void add_pointers(const Instr& instr, Step& step);
  void prepare_params();
  void prepare_call(size_t i);
  void check_results_are_made() const;
  bool is_fixed(int64_t id) const;
  bool is_fixed(const CallArg& arg) const;
  c10::IValue make_arg(const CallArg& arg) const;
  at::Tensor view_of(const at::Tensor& root, const SlotState& slot) const;

  // execution: execute.cpp
  bool refresh_fixed_pointers();
  void bind(const std::vector<at::Tensor>& inputs, const OutputMemory& homes = OutputMemory());
  at::Tensor output_tensor(int64_t id, const OutputMemory& homes) const;
  void bind_root(int64_t id, at::Tensor tensor, char* data);
  void point_root(int64_t id, char* data);  // its pointers and those of its views
  void release_root(int64_t id);
  void release();  // all that a call holds
  void run_step(size_t i);
  void run_kernel(const Step& step);
  void run_launch(Step& step);
  void run_timed(std::vector<double>& seconds);
  void run_call(const Instr& instr, const Step& step);
  void take_results(const Instr& instr);
  bool is_here(const at::Tensor& tensor) const;
  at::Tensor checked_result(int64_t id, const at::Tensor& result) const;
  std::vector<at::Tensor> collect_outputs();

  const Loaded& loaded_;
  const Program& program_;
  const Arena& arena_;
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
  std::vector<c10::IValue> stack_;
  std::vector<int64_t> changing_roots_;  // inputs, outputs, results of calls
  // roots with the same memory at every call, and where that memory was when last looked at
  std::vector<std::pair<int64_t, const void*>> fixed_roots_;
};

}  // namespace blade
