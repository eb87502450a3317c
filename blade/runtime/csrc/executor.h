// SPDX-License-Identifier: Apache-2.0
// Runs a DISC program: any number of threads at once, no lock held while computing.
#pragma once

#include <list>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>

#include "frame.h"

namespace blade {

struct ExecutorLimits {
  size_t max_shapes = 64;                  // frames kept per lane
  size_t max_idle_bytes = size_t{1} << 29;  // arenas kept while nobody calls (one is always kept)
  bool watch_constants = false;             // their versions do not tell of all writes: look at some elements
};

class Executor {
 public:
  // Throws Unavailable.
  Executor(Program program, const at::Tensor& object, const std::vector<at::Tensor>& constants, ExecutorLimits limits);
  ~Executor();

  // Inputs have passed check_inputs. nullopt: a guard over sizes does not hold. Throws what ops throw.
  std::optional<std::vector<at::Tensor>> run(const std::vector<at::Tensor>& inputs);

  // Average seconds per instruction. Throws if the guards do not hold.
  std::vector<double> profile(const std::vector<at::Tensor>& inputs, int64_t repeats);

  // Packs constants again if the user wrote to one of them since (in place, as an optimizer does).
  void refresh_packs(const std::vector<at::Tensor>& constants);

  // Drops the buffers and frames of all sizes seen; what was packed stays.
  void forget_sizes();

  const Program& program() const { return loaded_.program; }

 private:
  class Lane;  // an arena and the frames over it: what one call at a time uses

  // A constant that packs were made from, and how it was then.
  struct PackedFrom {
    int64_t constant, version;
    uint64_t sum;  // of some of its elements, if constants are watched
  };

  std::unique_ptr<Lane> take_lane();
  void give_lane(std::unique_ptr<Lane> lane);
  std::optional<std::vector<at::Tensor>> run_in_lane(
      const std::vector<at::Tensor>& inputs, std::vector<double>* seconds);

  void pack_constants();
  PackedFrom look_at(int64_t constant, const at::Tensor& given) const;

  Loaded loaded_;
  std::vector<KernelFn> pack_kernels_;
  std::vector<PackedFrom> packed_from_;
  size_t num_given_ = 0;  // constants before the packed ones
  const ExecutorLimits limits_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Lane>> idle_;
  size_t idle_bytes_ = 0;
};

}  // namespace blade
