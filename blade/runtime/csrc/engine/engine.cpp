// SPDX-License-Identifier: Apache-2.0
#include "engine/engine.h"

#include <c10/util/Exception.h>

#include <algorithm>

#include "engine/checksum.h"
#include "engine/interrupt.h"
#include "engine/policy.h"
#include "engine/variants.h"

namespace blade {
namespace {

constexpr int64_t kStateVersion = 2, kFirstVersion = 1;
constexpr const char* kChecksum = "checksum";
constexpr const char* kToken = "token";
constexpr const char* kPendingBackend = "pending";

bool is_bytes(const at::Tensor& object) {
  return object.defined() && object.scalar_type() == at::kByte && why_not_whole(object).empty() && object.is_contiguous();
}

void check_object(const at::Tensor& object) {
  TORCH_CHECK(is_bytes(object) && object.is_cpu(), "blade: object must be a contiguous uint8 tensor on the CPU");
}

}  // namespace

Engine::Engine(
    std::string name, std::string backend, std::string program, at::Tensor object,
    std::vector<at::Tensor> constants, const Limits& limits)
    : name_(std::move(name)),
      backend_(std::move(backend)),
      program_(std::move(program)),
      object_(std::move(object)),
      constants_(std::move(constants)),
      limits_(limits.copy()) {
  check_object(object_);
  const bool is_own = limit(kToken, -1) == process_token();
  (void)limits_.erase(kToken);
  if (!is_own && needs_signature() && backend_ != kPendingBackend) {
    set_unavailable(Code::kUntrusted, "It was constructed by code in a file, and BLADE_TRUSTED_KEYS asks for signatures.");
    return;
  }
  load(is_own ? Origin::kProcess : Origin::kFile);
}

int64_t Engine::limit(const char* name, int64_t otherwise) const {
  const auto found = limits_.find(name);
  return found == limits_.end() ? otherwise : found->value();
}

void Engine::set_unavailable(Code code, std::string why) {
  unavailable_ = code;
  why_unavailable_ = std::move(why);
}

void Engine::load(Origin origin) {
  try {
    max_failures_ = limit("max_failures", max_failures_);
    takes_autocast_ = limit("autocast", 0) != 0;
    recheck_.set(limit("recheck_every", 0), limit("recheck_tolerance", 0), max_failures_);
    if (backend_ == kPendingBackend) {
      set_unavailable(Code::kPending, "The engine is still being made.");
      return;
    }
    if (const auto why = why_not_admitted(backend_); !why.empty()) throw Unavailable(Code::kDisabled, why);
    const bool is_disc = backend_ == "disc";
    auto program = parse_program(is_disc ? select_program(program_, object_, constants_) : program_, constants_.size(), origin);
    if (is_disc) {
      ExecutorLimits limits;
      limits.max_shapes = static_cast<size_t>(std::max<int64_t>(1, limit("max_shapes", 64)));
      limits.max_idle_bytes = static_cast<size_t>(limit("max_idle_bytes", int64_t{1} << 29));
      limits.watch_constants = limit("watch_constants", 0) != 0;
      limits.graphs.enabled = limit("cuda_graphs", 1) != 0;
      limits.graphs.always = limit("cuda_graphs", 1) == 2;
      limits.graphs.max_graphs = static_cast<size_t>(std::max<int64_t>(1, limit("max_graphs", 32)));
      limits.graphs.reuse_outputs = limit("reuse_output_buffers", 0) != 0;
      executor_ = std::make_unique<Executor>(std::move(program), object_, constants_, limits);
    } else {
      runner_ = std::make_unique<Runner>(backend_, name_, std::move(program), object_, constants_, program_);
    }
  } catch (const Unavailable& error) {
    set_unavailable(error.code, error.what());
  } catch (const std::exception& error) {
    set_unavailable(Code::kCorruptPayload, std::string("The engine could not be loaded: ") + error.what());
  }
}

// Said once, when a file is loaded: from then on stats() tells.
void Engine::warn_if_unavailable() const {
  const auto why = known_obstacle();
  if (!why.empty()) TORCH_WARN("blade: engine '", name_, "' is not used; the original runs instead. ", why);
}

bool Engine::adopt(const c10::intrusive_ptr<Engine>& successor) {
  const std::lock_guard<std::mutex> lock(adopt_mutex_);
  // one that is pending itself might adopt this one, and no call would come to an end
  if (backend_ != kPendingBackend || adopted_ || successor->backend_ == kPendingBackend) return false;
  if (!enabled_) successor->set_enabled(false);
  adopted_ = successor;
  successor_.store(adopted_.get(), std::memory_order_release);
  return true;
}

void Engine::set_enabled(bool enabled) {
  enabled_ = enabled;
  if (Engine* next = successor()) next->set_enabled(enabled);
}

Engine::State Engine::to_state() const {
  if (const Engine* next = successor()) return next->to_state();
  if (state_) return *state_;
  const std::vector<std::string> words{name_, backend_, program_};
  std::vector<at::Tensor> tensors{object_};
  tensors.insert(tensors.end(), constants_.begin(), constants_.end());
  auto numbers = limits_.copy();
  numbers.insert_or_assign(kChecksum, checksum_of(words, limits_, tensors));
  return {kStateVersion, {name_, backend_, program_, signature_}, std::move(numbers), std::move(tensors)};
}

c10::intrusive_ptr<Engine> Engine::from_state(State state) {
  c10::intrusive_ptr<Engine> engine(std::unique_ptr<Engine>(new Engine()));
  try {
    engine->read(state);
  } catch (const Unavailable& error) {
    engine->set_unavailable(error.code, error.what());
    engine->state_ = std::move(state);
  } catch (const std::exception& error) {
    engine->set_unavailable(Code::kCorruptPayload, printable(std::string("The engine could not be read: ") + error.what()));
    engine->state_ = std::move(state);
  }
  engine->warn_if_unavailable();
  return engine;
}

// Throws where it must not be used, or is not what was written; nothing of it has run then.
void Engine::read(State& state) {
  auto& [version, words, numbers, tensors] = state;
  const auto word = [&words = words](size_t i) { return i < words.size() ? words[i] : std::string(); };
  name_ = word(0);
  backend_ = word(1);
  program_ = word(2);
  signature_ = word(3);
  limits_ = numbers.copy();
  if (version < kFirstVersion || version > kStateVersion) {
    throw Unavailable(
        Code::kVersionMismatch, "The engine was saved in format " + std::to_string(version) + "; this blade reads formats " +
                                    std::to_string(kFirstVersion) + " to " + std::to_string(kStateVersion) + ".");
  }
  const size_t num_words = version == kFirstVersion ? 3 : 4;
  if (words.size() != num_words || tensors.empty() || !numbers.contains(kChecksum) || !is_bytes(tensors[0])) {
    throw Unavailable(Code::kCorruptPayload, "The saved engine lacks some of its parts.");
  }
  (void)limits_.erase(kChecksum);
  if (const auto why = why_not_admitted(backend_); !why.empty() && backend_ != kPendingBackend) throw Unavailable(Code::kDisabled, why);
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (const auto why = why_not_whole(tensors[i]); !why.empty()) {
      throw Unavailable(Code::kCorruptPayload, "Tensor " + std::to_string(i) + " of the engine " + why + ".");
    }
  }
  object_ = tensors[0].cpu();  // map_location moves it, too
  constants_.assign(tensors.begin() + 1, tensors.end());
  const std::vector<std::string> unsigned_words{name_, backend_, program_};
  const int64_t sum =
      version == kFirstVersion ? checksum_of_format_1(program_, object_) : checksum_of(unsigned_words, limits_, tensors);
  if (numbers.at(kChecksum) != sum) {
    throw Unavailable(
        Code::kCorruptPayload, "The engine does not match its checksum: the file is damaged.");
  }
  if (needs_signature() && backend_ != kPendingBackend) {
    object_ = object_.clone();  // what is signed is what runs, whatever code in the file writes to its tensor
    auto signed_tensors = tensors;
    signed_tensors[0] = object_;
    if (const auto why = why_untrusted(unsigned_words, limits_, signed_tensors, signature_); !why.empty()) throw Unavailable(Code::kUntrusted, why);
  }
  load(Origin::kFile);
  if (backend_ == kPendingBackend) why_unavailable_ = "It was saved before its engine was ready.";
}

void Engine::set_signature(std::string signature) {
  if (Engine* next = successor()) return next->set_signature(std::move(signature));
  TORCH_CHECK(!state_, "blade: an engine that could not be read cannot be signed: ", why_unavailable_);
  signature_ = std::move(signature);
}

void Engine::set_limit(const std::string& name, int64_t value) {
  if (Engine* next = successor()) return next->set_limit(name, value);
  const bool is_known = name == "autocast" || name == "recheck_every" || name == "recheck_tolerance";
  TORCH_CHECK(is_known, "blade: '", name, "' is no limit that can be set once the engine is there");
  if (state_) return;
  limits_.insert_or_assign(name, value);
  signature_.clear();  // it was over the limits as they were
  takes_autocast_ = limit("autocast", 0) != 0;
  recheck_.set(limit("recheck_every", 0), limit("recheck_tolerance", 0), max_failures_);
}

bool Engine::is_due() {
  if (Engine* next = successor()) return next->is_due();
  return recheck_.is_due();
}

bool Engine::agrees(const std::vector<at::Tensor>& got, const std::vector<at::Tensor>& want) {
  if (Engine* next = successor()) return next->agrees(got, want);
  const auto why = recheck_.compare(got, want);
  if (why.empty()) return true;
  reasons_[static_cast<size_t>(Code::kDrifted)].fetch_add(1, std::memory_order_relaxed);
  engine_runs_.fetch_sub(1, std::memory_order_relaxed);  // the original answers this call
  const std::lock_guard<std::mutex> lock(error_mutex_);
  last_error_ = why;
  return false;
}

void Engine::rearm() {
  if (Engine* next = successor()) next->rearm();
  consecutive_failures_ = 0;
  recheck_.forget();
  if (runner_) runner_->forget();
}

void Engine::renew() {
  if (Engine* next = successor()) next->renew();
  rearm();
  enabled_ = true;
  calls_ = 0;
  engine_runs_ = 0;
  for (auto& reason : reasons_) reason = 0;
  if (executor_) executor_->forget_sizes();
  const std::lock_guard<std::mutex> lock(error_mutex_);
  last_error_.clear();
}

void Engine::trim() {
  if (Engine* next = successor()) next->trim();
  if (executor_) executor_->trim();
}

void Engine::lend(const std::vector<int64_t>& outputs) {
  if (Engine* next = successor()) return next->lend(outputs);
  if (!executor_) return;
  const auto count = static_cast<int64_t>(executor_->program().outputs.size());
  for (const int64_t k : outputs) TORCH_CHECK(k >= 0 && k < count, "blade: there is no output ", k, " to lend, but ", count);
  executor_->lend(outputs);
}

std::string Engine::last_error() const {
  if (const Engine* next = successor()) return next->last_error();
  const std::lock_guard<std::mutex> lock(error_mutex_);
  const auto* graphs = executor_ ? executor_->graph_counts() : nullptr;
  return last_error_.empty() && graphs ? graphs->last_failure() : last_error_;
}

std::string Engine::why_unavailable() const {
  if (const Engine* next = successor()) return next->why_unavailable();
  if (unavailable_) return why_unavailable_;
  return runner_ ? runner_->why_unavailable() : "";
}

std::string Engine::known_obstacle() const {
  if (const Engine* next = successor()) return next->known_obstacle();
  if (unavailable_) return why_unavailable_;
  return runner_ ? runner_->known_obstacle() : "";
}

void Engine::failed(const std::string& what) {
  ++consecutive_failures_;
  const std::lock_guard<std::mutex> lock(error_mutex_);
  last_error_ = what;
}

std::optional<Code> Engine::run_disc(const std::vector<at::Tensor>& inputs, std::vector<at::Tensor>& outputs) {
  if (const auto code = check_inputs(executor_->program(), inputs, takes_autocast_)) return code;
  if (const auto code = executor_->check_device(inputs)) return code;
  executor_->refresh_packs(constants_);
  auto results = executor_->run(inputs);
  if (!results) return Code::kGuardShape;
  outputs = std::move(*results);
  return std::nullopt;
}

std::optional<Code> Engine::run_runner(const std::vector<at::Tensor>& inputs, std::vector<at::Tensor>& outputs) {
  const auto& program = runner_->program();
  if (const auto code = check_inputs(program, inputs, takes_autocast_)) return code;
  std::vector<int64_t> registers;
  eval_registers(program, inputs, registers);
  if (failed_guard(program, registers) != nullptr) return Code::kGuardShape;
  if (!runner_->why_unavailable().empty()) return Code::kBackendUnavailable;
  outputs = runner_->run(inputs, registers);
  return std::nullopt;
}

std::optional<Code> Engine::try_run(const std::vector<at::Tensor>& inputs, std::vector<at::Tensor>& outputs) {
  if (!enabled_) return Code::kDisabled;
  if (unavailable_) return unavailable_;
  if (consecutive_failures_ >= max_failures_) return Code::kCircuitOpen;
  if (recheck_.is_retired()) return Code::kDrifted;
  try {
    const auto refused = executor_ ? run_disc(inputs, outputs) : run_runner(inputs, outputs);
    if (!refused && consecutive_failures_ != 0) consecutive_failures_ = 0;
    return refused;
  } catch (const Interrupted&) {
    calls_.fetch_sub(1, std::memory_order_relaxed);  // nobody gets an answer
    throw;
  } catch (const Unavailable& error) {  // on the device of this call
    const std::lock_guard<std::mutex> lock(error_mutex_);
    last_error_ = error.what();
    return error.code;
  } catch (const c10::Error& error) {
    failed(error.what_without_backtrace());
  } catch (const std::exception& error) {
    failed(error.what());
  } catch (...) {
    failed("an exception that is not a std::exception");
  }
  return Code::kEngineRaised;
}

std::optional<std::vector<at::Tensor>> Engine::try_execute(const std::vector<at::Tensor>& inputs) {
  if (Engine* next = successor()) return next->try_execute(inputs);
  calls_.fetch_add(1, std::memory_order_relaxed);
  std::vector<at::Tensor> outputs;
  if (const auto code = try_run(inputs, outputs)) {
    reasons_[static_cast<size_t>(*code)].fetch_add(1, std::memory_order_relaxed);
    return std::nullopt;
  }
  engine_runs_.fetch_add(1, std::memory_order_relaxed);
  return outputs;
}

std::tuple<std::vector<std::string>, std::vector<double>> Engine::profile(
    const std::vector<at::Tensor>& inputs, int64_t repeats) {
  if (Engine* next = successor()) return next->profile(inputs, repeats);
  TORCH_CHECK(executor_ != nullptr, "blade: only an available DISC engine can be profiled: ", why_unavailable());
  auto refused = check_inputs(executor_->program(), inputs, takes_autocast_);
  if (!refused) refused = executor_->check_device(inputs);
  TORCH_CHECK(!refused, "blade: the engine does not take these inputs: ", kCodeNames[static_cast<size_t>(*refused)]);
  executor_->refresh_packs(constants_);
  std::vector<std::string> texts;
  for (const auto& instr : executor_->program().instrs) texts.push_back(instr.text);
  return {std::move(texts), executor_->profile(inputs, repeats)};
}

c10::Dict<std::string, int64_t> Engine::stats() const {
  c10::Dict<std::string, int64_t> stats;
  int64_t fallbacks = 0;
  for (const auto& reason : reasons_) fallbacks += reason.load(std::memory_order_relaxed);
  stats.insert("calls", calls_.load(std::memory_order_relaxed));
  stats.insert("engine_runs", engine_runs_.load(std::memory_order_relaxed));
  stats.insert("fallbacks", fallbacks);
  if (recheck_.is_on()) stats.insert("rechecks", recheck_.count());
  for (size_t i = 0; i < reasons_.size(); ++i) {
    if (const int64_t n = reasons_[i].load(std::memory_order_relaxed)) stats.insert(kCodeNames[i], n);
  }
  if (const auto* graphs = executor_ ? executor_->graph_counts() : nullptr) {
    stats.insert("graph_captures", graphs->captures.load(std::memory_order_relaxed));
    stats.insert("graph_replays", graphs->replays.load(std::memory_order_relaxed));
    stats.insert("graph_failures", graphs->failures.load(std::memory_order_relaxed));
    stats.insert("graph_bytes_copied", graphs->bytes_copied.load(std::memory_order_relaxed));
    stats.insert("graph_declined", graphs->declined.load(std::memory_order_relaxed));
    const auto memory = executor_->idle_memory();
    stats.insert("arena_bytes", static_cast<int64_t>(memory.arenas));
    stats.insert("graph_bytes", static_cast<int64_t>(memory.graphs));
    stats.insert("lent_bytes", static_cast<int64_t>(memory.lent));
  }
  if (const Engine* next = successor()) {
    for (const auto& entry : next->stats()) {
      const auto found = stats.find(entry.key());
      stats.insert_or_assign(entry.key(), entry.value() + (found == stats.end() ? 0 : found->value()));
    }
  }
  return stats;
}

}  // namespace blade
