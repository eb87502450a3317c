// SPDX-License-Identifier: Apache-2.0
// Which graphs may be launched while callers read what others left in memory of their pool.
//
// Graphs that are launched on one stream run one after the other, so they are recorded in memory of one pool: each
// writes to what it had let go of when it was recorded, and so may the next ones. Results of calls that callers are
// lent lie in that memory, too. No graph that is recorded later gets it, as it is in use; but it may be what an earlier
// one had let go of.
#pragma once

#include <c10/core/Device.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "device/accelerator.h"
#include "memory/borrowed_outputs.h"

namespace blade {

class LaunchOrder {
 public:
  // Of the graphs that are launched on `stream`; it lives as long as the process.
  static LaunchOrder& of(c10::Device device, Stream stream);

  // For a graph that is being recorded: more than that of any graph before.
  int64_t next() { return ++last_; }

  // What graph `number` left is read as long as `loans` are out.
  void add(int64_t number, const Loans& loans);

  // Held from may_launch() until what it allowed is enqueued, or lent.
  std::mutex& turn() { return turn_; }

  // Whether nobody reads what a later graph left.
  bool may_launch(int64_t number);

 private:
  struct Lender {
    int64_t number;
    std::weak_ptr<const std::atomic<int64_t>> out;
  };

  std::atomic<int64_t> last_{0};
  std::mutex turn_;
  std::vector<Lender> lenders_;
};

}  // namespace blade
