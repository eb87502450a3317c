// SPDX-License-Identifier: Apache-2.0
// A frame as a graph of its accelerator: at the first use of a shape it runs launch by launch, at the second
// it is captured, from then on one launch does it all.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "frame.h"
#include "graph_plan.h"

namespace blade {

struct GraphLimits {
  bool enabled = true;
  bool always = false;          // even where launch after launch is faster
  size_t max_graphs = 32;       // per lane
  bool reuse_outputs = false;  // outputs are the graph's own buffers, which later calls overwrite
};

// Of all lanes of an engine.
struct GraphCounts {
  std::atomic<int64_t> captures{0}, replays{0}, failures{0}, declined{0};
  void failed(const std::string& what);
  std::string last_failure() const;
  void clear();

 private:
  mutable std::mutex mutex_;
  std::string last_failure_;
};

class Recording {
 public:
  explicit Recording(Frame& frame) : frame_(frame) {}

  bool has_graph() const { return graph_ != nullptr; }

  // Whether this call should capture (after which run() replays what was captured).
  bool wants_capture(const std::vector<at::Tensor>& inputs, const GraphLimits& limits, GraphCounts& counts);

  // `fixed` holds what graphs of a lane read and write at fixed addresses: copied inputs, and outputs. False: not
  // captured, run the frame.
  bool capture(const std::vector<at::Tensor>& inputs, Arena& fixed, const GraphLimits& limits, GraphCounts& counts);

  // The outputs, or nullopt: run the frame.
  std::optional<std::vector<at::Tensor>> replay(
      const std::vector<at::Tensor>& inputs, const Arena& fixed, GraphCounts& counts);

  // Another shape needs the room. The next capture comes later than this one did.
  void evict();

 private:
  // Memory that a call writes and that the caller gets a copy of: an output slot, or a call's result.
  struct Result {
    int64_t root;
    at::Tensor tensor;  // the graph's own, unless launches write into what the caller gets
    int64_t copy = -1;  // of out_
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

  void drop();
  bool can_move_launches(GraphCounts& counts);
  void move_launches(const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& roots);
  void record(const std::vector<at::Tensor>& bound, const Arena& fixed, bool reuse_outputs, Recorder& recorder);
  size_t plan(const std::vector<at::Tensor>& inputs);
  bool is_input_moved(const std::vector<at::Tensor>& inputs);
  std::vector<at::Tensor> fixed_inputs(const std::vector<at::Tensor>& inputs, const Arena& fixed);
  void collect_results(const Arena& fixed, bool reuse_outputs);
  std::vector<at::Tensor> make_results(const std::vector<at::Tensor>& inputs);
  void launch();
  at::Tensor output(int64_t id, const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& roots) const;

  Frame& frame_;
  bool never_ = false;     // capture does not work for this program or shape, or does not pay
  bool may_move_ = true;   // launches of a graph take other addresses
  std::optional<GraphPlan> plan_;
  int64_t uses_ = 0, needed_ = 2;
  std::vector<const void*> addresses_;  // of the inputs, when last looked at
  std::vector<bool> moved_;             // inputs that come from other addresses every time
  std::vector<bool> copied_;            // those of them that are copied
  std::vector<size_t> offsets_;         // per input, in the fixed memory
  std::unique_ptr<Graph> graph_;
  int64_t arena_moves_ = 0, fixed_moves_ = 0;
  bool reuse_outputs_ = false;
  Copies in_, out_;                     // out_: results first, if they are copied, then updates
  std::vector<size_t> copied_inputs_;   // of in_
  std::vector<size_t> copied_updates_;  // those that the program writes
  std::vector<Result> results_;
  std::vector<Moving> moving_;
};

// Programs whose calls read memory of the CPU or write to inputs cannot be captured.
bool can_be_captured(const Program& program, c10::DeviceType type);

}  // namespace blade
