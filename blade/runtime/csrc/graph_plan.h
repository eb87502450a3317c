// SPDX-License-Identifier: Apache-2.0
// What a graph of a frame has to do besides the frame's own work, and whether it pays.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "frame.h"

namespace blade {

// Memory that is elsewhere at every call is either copied to or from where the graph was recorded with, or the
// launches that read or write it are told its address before each replay (it is *direct*): a few of them cost less
// than the copy of some megabytes. What calls read or write is always copied: nobody knows their launches.
class GraphPlan {
 public:
  // `may_move`: launches can be told other addresses. `reuse_outputs`: outputs stay where they are.
  GraphPlan(const Frame& frame, bool may_move, bool reuse_outputs);

  bool is_direct(int64_t root) const;
  bool is_direct_input(size_t i) const { return inputs_[i].direct; }

  // Does step `i` work on direct memory?
  bool moves(size_t i) const { return moves_[i]; }

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
  void look_at(size_t i);

  const Frame& frame_;
  const Program& program_;
  const bool reuse_outputs_;
  std::vector<Memory> inputs_;   // per input
  std::vector<Memory> results_;  // per slot: of those that are outputs or results of calls
  std::vector<bool> moves_;      // per step
  int64_t launches_ = 0, calls_ = 0;
};

}  // namespace blade
