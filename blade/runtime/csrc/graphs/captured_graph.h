// SPDX-License-Identifier: Apache-2.0
// An execution plan as a graph of its accelerator: at the first use of a shape it runs launch by launch, at the second
// it is captured, from then on one launch does it all.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "execute/execution_plan.h"
#include "graphs/capture_policy.h"
#include "graphs/launch_order.h"
#include "memory/borrowed_outputs.h"

namespace blade {

// Of all stream contexts of an engine.
struct GraphCounts {
  std::atomic<int64_t> captures{0}, replays{0}, failures{0}, declined{0}, bytes_copied{0};
  void failed(const std::string& what);
  std::string last_failure() const;
  void clear();

 private:
  mutable std::mutex mutex_;
  std::string last_failure_;
};

// Memory that graphs of a stream context read and write at addresses that stay the same.
struct GraphMemory {
  Arena& fixed;      // copied inputs, and outputs that callers get copies of
  BufferSet& borrowed;  // outputs that callers get themselves
};

class CapturedGraph {
 public:
  // `buffer_set`: which of the stream context's memories its outputs are lent from.
  CapturedGraph(ExecutionPlan& plan, size_t buffer_set) : plan_(plan), buffer_set_(buffer_set) {}

  size_t buffer_set() const { return buffer_set_; }
  bool has_graph() const { return graph_ != nullptr; }
  int64_t number() const { return number_; }  // in the order in which graphs of its stream were recorded

  // Whether the graph may be launched with these inputs as it is.
  bool is_ready(const std::vector<at::Tensor>& inputs, const BufferSet& borrowed) const;

  // Whether somebody still holds what an earlier call lent.
  bool is_out(const BufferSet& borrowed) const;

  // Whether it differs from what the graph was captured with in nothing but memory that other graphs lent.
  bool is_elsewhere_borrowed(const std::vector<at::Tensor>& inputs) const;

  // Whether this call should capture (after which run() replays what was captured).
  bool wants_capture(const std::vector<at::Tensor>& inputs, const GraphLimits& limits, GraphCounts& counts);

  // False: not captured, run the execution plan. What is lent must not be out.
  bool capture(
      const std::vector<at::Tensor>& inputs, const GraphMemory& memory, const GraphLimits& limits, GraphCounts& counts);

  // The outputs, or nullopt: run the execution plan.
  std::optional<std::vector<at::Tensor>> replay(
      const std::vector<at::Tensor>& inputs, const GraphMemory& memory, GraphCounts& counts);

  // Another shape needs the room. The next capture comes later than this one did.
  void evict();

 private:
  // Memory that a call writes and that the caller gets a copy of: an output slot, or a call's result.
  struct Result {
    int64_t root;
    at::Tensor tensor;  // the graph's own, unless launches write into what the caller gets, or it is lent
    int64_t copy = -1;  // of out_
    std::optional<size_t> borrowed;  // where in the lent memory, in bytes
  };

  // A launch that is told where direct memory is: the pointers it has, by its patches.
  struct Moving {
    size_t step;
    std::vector<void*> pointers;
  };

  // Copies before or after all else: within the graph if the device can, at its `index`, else beside it (-1).
  struct Copies {
    std::vector<Copy> all;
    int64_t index = -1;
  };

  size_t copied_bytes(const std::vector<at::Tensor>& inputs) const;
  void put_off();
  void drop();
  Work kind_of_work() const;
  bool can_move_launches(GraphCounts& counts);
  void move_launches(const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& roots);
  void record(
      const std::vector<at::Tensor>& bound, const GraphMemory& memory, const GraphLimits& limits, Recorder& recorder);
  void plan_copies(const std::vector<at::Tensor>& inputs, const GraphMemory& memory, const GraphLimits& limits);
  bool is_elsewhere(const std::vector<at::Tensor>& inputs, size_t i) const;
  bool is_input_moved(const std::vector<at::Tensor>& inputs);
  std::vector<at::Tensor> fixed_inputs(const std::vector<at::Tensor>& inputs, const Arena& fixed);
  void collect_results(const Arena& fixed, const GraphLimits& limits);
  void take_place(const GraphLimits& limits);
  at::Tensor borrowed_result(const Result& result, const c10::Storage& lent);
  std::vector<at::Tensor> make_results(const std::vector<at::Tensor>& inputs, BufferSet& borrowed);
  void launch();
  at::Tensor output(int64_t id, const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& roots) const;

  ExecutionPlan& plan_;
  const size_t buffer_set_;
  bool never_ = false;     // capture does not work for this program or shape, or does not pay
  bool may_move_ = true;   // launches of a graph take other addresses
  std::optional<CapturePolicy> policy_;
  int64_t uses_ = 0, needed_ = 2;
  std::vector<const void*> addresses_;  // of the inputs, when last looked at
  std::vector<bool> moved_;             // inputs that come from other addresses every time
  std::vector<bool> copied_;            // those of them that are copied
  std::vector<size_t> offsets_;         // per input, in the fixed memory
  std::unique_ptr<Graph> graph_;
  int64_t arena_moves_ = 0, fixed_moves_ = 0, borrowed_moves_ = 0;
  bool reuse_outputs_ = false, lends_ = false;
  int64_t bytes_copied_ = 0;  // by a launch of the graph
  Copies in_, out_;                     // out_: results first, if they are copied, then updates
  std::vector<size_t> copied_inputs_;   // of in_
  std::vector<size_t> copied_updates_;  // those that the program writes
  std::vector<Result> results_;
  Loans loans_, kept_;  // of results of calls; `kept_`: those that the next call overwrites
  LaunchOrder* order_ = nullptr;
  int64_t number_ = 0;
  std::vector<Moving> moving_;
};

// Programs whose calls read memory of the CPU or write to inputs cannot be captured.
bool can_be_captured(const Program& program, c10::DeviceType type);

}  // namespace blade
