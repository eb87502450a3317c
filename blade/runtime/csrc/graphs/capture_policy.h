// SPDX-License-Identifier: Apache-2.0
// What a graph of an execution plan has to do besides the execution plan's own work, and whether it pays.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "execute/execution_plan.h"

namespace blade {

struct GraphLimits {
  bool enabled = true;
  bool always = false;          // even where launch after launch is faster
  size_t max_graphs = 32;       // per stream context
  bool reuse_outputs = false;   // outputs are the graph's own buffers, which later calls overwrite
  std::vector<bool> borrowed;       // per slot: outputs that stay where the graph left them until nobody holds them; or none

  bool is_borrowed(int64_t root) const { return !borrowed.empty() && borrowed[root]; }
};

// Memory that is elsewhere at every call is either copied to or from where the graph was recorded with, or the
// launches that read or write it are told its address before each replay (it is *direct*): a few of them cost less
// than the copy of some megabytes. What calls read or write is always copied: nobody knows their launches.
class CapturePolicy {
 public:
  // `may_move`: launches can be told other addresses.
  CapturePolicy(const ExecutionPlan& plan, bool may_move, const GraphLimits& limits);

  bool is_direct(int64_t root) const;
  bool is_direct_input(size_t i) const { return inputs_[i].direct; }

  // Does step `i` work on direct memory?
  bool moves(size_t i) const { return moves_[i]; }

  // Of outputs that are copied from where the graph leaves them.
  size_t bytes_of_results() const;

  // Is a graph faster than launch after launch? `moved`: per input, whether it is elsewhere at every call.
  bool pays(const std::vector<bool>& moved) const;

 private:
  struct Memory {
    size_t bytes = 0;
    int64_t pointers = 0;  // of launches, to it
    bool called = false;   // a call reads or writes it
    bool back = false;     // an input that is written, too
    bool direct = false;
  };

  Memory* memory_of(int64_t root);
  void look_at(size_t begin, size_t end, int64_t times, bool in_loop);
  void look_at(size_t i, int64_t times, bool in_loop);

  const ExecutionPlan& plan_;
  const Program& program_;
  std::vector<bool> stays_;      // per slot: the caller gets it where it is
  std::vector<Memory> inputs_;   // per input
  std::vector<Memory> results_;  // per slot: of those that are outputs or results of calls
  std::vector<bool> moves_;      // per step
  int64_t launches_ = 0, calls_ = 0;
};

}  // namespace blade
