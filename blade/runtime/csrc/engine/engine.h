// SPDX-License-Identifier: Apache-2.0
// torch.classes.blade.Engine: one compiled cluster. It answers, or says None and counts why; it
// never throws into the model it is part of.
#pragma once

#include <ATen/core/Dict.h>
#include <ATen/core/Tensor.h>
#include <torch/custom_class.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "execute/executor.h"
#include "engine/reason.h"
#include "engine/recheck.h"
#include "engine/runner.h"

namespace blade {

using Limits = c10::Dict<std::string, int64_t>;

class Engine : public torch::CustomClassHolder {
 public:
  // What travels in a file: format version, [name, backend, program, signature], numbers ("checksum" and the
  // limits), [object, constants...]. The outer types never change, so that any version of blade
  // can read any file far enough to say that it cannot use it. Format 1 had no signature and a weaker checksum.
  using State =
      std::tuple<int64_t, std::vector<std::string>, c10::Dict<std::string, int64_t>, std::vector<at::Tensor>>;

  Engine(
      std::string name, std::string backend, std::string program, at::Tensor object,
      std::vector<at::Tensor> constants, const Limits& limits);

  static c10::intrusive_ptr<Engine> from_state(State state);
  State to_state() const;

  std::optional<std::vector<at::Tensor>> try_execute(const std::vector<at::Tensor>& inputs);
  std::tuple<std::vector<std::string>, std::vector<double>> profile(
      const std::vector<at::Tensor>& inputs, int64_t repeats);

  // An engine of the backend "pending" is still being made: it refuses every call until it adopts the one that
  // was made, which then serves in its place, from any thread. Once: false if there is one, or nothing is pending.
  bool adopt(const c10::intrusive_ptr<Engine>& successor);

  // Counts of a pending engine include those of its successor.
  c10::Dict<std::string, int64_t> stats() const;
  void set_enabled(bool enabled);
  void rearm();
  // As if nothing was run yet: counts, failures and buffers go, what was loaded and packed stays.
  void renew();
  // Buffers of sizes that no call uses now go; counts stay.
  void trim();
  // A limit that is set once the engine is there: "autocast", "recheck_every" or "recheck_tolerance". Before the first call.
  void set_limit(const std::string& name, int64_t value);
  // Whether the answer just given is to be compared with the original's (recheck.h), and what came of it: true if it
  // holds. Where it does not, the original's is the answer, and an engine that goes on so is retired.
  bool is_due();
  bool agrees(const std::vector<at::Tensor>& got, const std::vector<at::Tensor>& want);
  // Over all that the checksum covers (blade/program/trust.py); travels with the engine.
  void set_signature(std::string signature);
  const std::string& signature() const { return serving()->signature_; }
  // Outputs, by number, that the caller lets go of before long: a graph need not give copies of them.
  void lend(const std::vector<int64_t>& outputs);
  std::string last_error() const;
  std::string why_unavailable() const;
  // The same without loading anything: empty if nothing is known to stand in the way.
  std::string known_obstacle() const;
  const std::string& name() const { return name_; }
  const std::string& backend() const { return serving()->backend_; }
  const std::string& program() const { return serving()->program_; }

 private:
  Engine() = default;
  Engine* successor() const { return successor_.load(std::memory_order_acquire); }
  const Engine* serving() const { return successor() != nullptr ? successor() : this; }
  void load(Origin origin);
  void read(State& state);
  void warn_if_unavailable() const;
  void set_unavailable(Code code, std::string why);
  int64_t limit(const char* name, int64_t otherwise) const;
  std::optional<Code> try_run(const std::vector<at::Tensor>& inputs, std::vector<at::Tensor>& outputs);
  std::optional<Code> run_disc(const std::vector<at::Tensor>& inputs, std::vector<at::Tensor>& outputs);
  std::optional<Code> run_runner(const std::vector<at::Tensor>& inputs, std::vector<at::Tensor>& outputs);
  void failed(const std::string& what);

  std::string name_, backend_, program_, signature_;
  at::Tensor object_;
  std::vector<at::Tensor> constants_;
  Limits limits_;
  int64_t max_failures_ = 3;
  bool takes_autocast_ = false;  // it was made under autocast, whose casts are part of it
  Recheck recheck_;

  std::optional<Code> unavailable_;  // set while loading, then never changed
  std::string why_unavailable_;
  std::optional<State> state_;  // as it was read, if this version cannot use it: saved again unchanged
  std::unique_ptr<Executor> executor_;  // disc
  std::unique_ptr<Runner> runner_;      // every other backend

  std::mutex adopt_mutex_;
  c10::intrusive_ptr<Engine> adopted_;       // keeps the successor alive
  std::atomic<Engine*> successor_{nullptr};  // set once

  std::atomic<bool> enabled_{true};
  std::atomic<int64_t> consecutive_failures_{0};
  std::atomic<int64_t> calls_{0}, engine_runs_{0};
  std::array<std::atomic<int64_t>, kCodeNames.size()> reasons_{};
  mutable std::mutex error_mutex_;
  std::string last_error_;
};

}  // namespace blade
