// SPDX-License-Identifier: Apache-2.0
// Runs a DISC program: any number of threads at once, no lock held while computing.
#pragma once

#include <c10/core/DeviceGuard.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "execute/packed_constants.h"
#include "execute/stream_context.h"
#include "engine/target.h"

namespace blade {

struct ExecutorLimits {
  size_t max_shapes = 64;                  // execution plans kept per stream context
  size_t max_idle_bytes = size_t{1} << 29;  // arenas kept while nobody calls (one is always kept)
  bool watch_constants = false;             // their versions do not tell of all writes: look at some elements
  GraphLimits graphs;
};

class Executor {
 public:
  // Throws Unavailable.
  Executor(Program program, const at::Tensor& object, const std::vector<at::Tensor>& constants, ExecutorLimits limits);
  ~Executor();

  // Of inputs that have passed check_inputs: whether they are on one device, the constants'.
  std::optional<Code> check_device(const std::vector<at::Tensor>& inputs) const;

  // Inputs have passed check_inputs and check_device, and packs are made (`refresh_packs`). nullopt: a guard over sizes
  // does not hold. Throws what ops throw, and Unavailable for a device the engine has no code for.
  std::optional<std::vector<at::Tensor>> run(const std::vector<at::Tensor>& inputs);

  // Average seconds per instruction. Throws if the guards do not hold.
  std::vector<double> profile(const std::vector<at::Tensor>& inputs, int64_t repeats);

  // Packs constants before the first call, so that loading a file runs nothing of it and starts no threads, which a
  // forked process would wait for; and again if the user wrote to one since (in place, as an optimizer does). What
  // another engine packed of the same constants serves this one, too.
  void refresh_packs(const std::vector<at::Tensor>& constants);

  // Which outputs callers let go of soon, so that they may be lent them (lent.h). Before the first call.
  void lend(const std::vector<int64_t>& outputs);

  // Drops the buffers and execution plans of all sizes seen that no call uses now; what was packed stays.
  void trim();

  // The same, and the counts of graphs.
  void forget_sizes();

  // Of the contexts that no call uses now.
  StreamContext::Bytes idle_memory() const;

  const Program& program() const { return loaded_.program; }

  // nullptr: a program of the CPU.
  const GraphCounts* graph_counts() const { return loaded_.accelerator == nullptr ? nullptr : &graph_counts_; }

 private:
  c10::OptionalDeviceGuard guard_device() const;
  Place place_of(const std::vector<at::Tensor>& inputs);
  std::unique_ptr<StreamContext> take_context(const Place& place);
  void release_context(std::unique_ptr<StreamContext> context);
  std::optional<std::vector<at::Tensor>> run_in_context(
      const std::vector<at::Tensor>& inputs, std::vector<double>* seconds);
  std::optional<std::vector<at::Tensor>> run_at(
      const Place& place, const std::vector<at::Tensor>& inputs, std::vector<double>* seconds);

  void load_code(const at::Tensor& object);
  void find_device();
  bool is_ready(const at::Tensor& input, size_t i) const;
  bool is_packed() const;
  void find_packs(const std::vector<at::Tensor>& constants);
  void pack_on_cpu(size_t i);
  void pack_on_device(size_t i, const Place& place);

  Loaded loaded_;
  std::unique_ptr<DeviceCode> code_;           // accelerators
  std::optional<c10::DeviceIndex> device_;     // of the constants, if they are on one
  std::vector<KernelFn> pack_kernels_;
  std::vector<std::shared_ptr<PackedConstant>> packs_;  // per pack of the program, once `packed_`
  std::atomic<bool> packed_{false};  // once, then for ever
  size_t num_given_ = 0;  // constants before the packed ones
  ExecutorLimits limits_;
  bool capturable_ = false;  // the program, and nobody forbids it
  GraphCounts graph_counts_;
  mutable std::mutex mutex_;
  std::vector<std::unique_ptr<StreamContext>> idle_;
  size_t idle_bytes_ = 0;
};

}  // namespace blade
