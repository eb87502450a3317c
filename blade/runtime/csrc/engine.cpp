// SPDX-License-Identifier: Apache-2.0
#include "engine.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>

namespace blade {
namespace {

constexpr int64_t kStateVersion = 1;
constexpr const char* kChecksum = "checksum";
constexpr const char* kPendingBackend = "pending";

// FNV-1a over 8-byte words, the rest byte by byte, lengths included.
class Checksum {
 public:
  void add(const void* data, size_t size) {
    mix(size);
    const auto* bytes = static_cast<const uint8_t*>(data);
    size_t i = 0;
    for (; i + sizeof(uint64_t) <= size; i += sizeof(uint64_t)) {
      uint64_t word = 0;
      std::memcpy(&word, bytes + i, sizeof(word));
      mix(word);
    }
    for (; i < size; ++i) mix(bytes[i]);
  }
  int64_t value() const { return static_cast<int64_t>(hash_ ^ (hash_ >> 32)); }

 private:
  void mix(uint64_t word) {
    hash_ = (hash_ ^ word) * 1099511628211ull;
    hash_ ^= hash_ >> 29;  // FNV alone never lets high bits reach low ones
  }
  uint64_t hash_ = 14695981039346656037ull;
};

int64_t checksum_of(const std::string& program, const at::Tensor& object) {
  Checksum sum;
  sum.add(program.data(), program.size());
  sum.add(object.const_data_ptr(), static_cast<size_t>(object.numel()));
  return sum.value();
}

// Bytes in a row, all of them in its memory: torch's reader of files does not compare the two.
bool is_bytes(const at::Tensor& object) {
  if (!object.defined() || object.scalar_type() != at::kByte || object.layout() != at::kStrided || !object.is_contiguous()) return false;
  const int64_t room = static_cast<int64_t>(object.storage().nbytes()) - object.storage_offset();
  return object.storage_offset() >= 0 && object.numel() <= std::max<int64_t>(room, 0);
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
  load();
}

int64_t Engine::limit(const char* name, int64_t otherwise) const {
  const auto found = limits_.find(name);
  return found == limits_.end() ? otherwise : found->value();
}

void Engine::set_unavailable(Code code, std::string why) {
  unavailable_ = code;
  why_unavailable_ = std::move(why);
}

void Engine::load() {
  try {
    max_failures_ = limit("max_failures", max_failures_);
    if (backend_ == kPendingBackend) {
      set_unavailable(Code::kPending, "The engine is still being made.");
      return;
    }
    auto program = parse_program(program_, constants_.size());
    if (backend_ == "disc") {
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
  std::string why = why_unavailable_;
  if (runner_ && !has_runner(backend_)) why = "No backend '" + backend_ + "' is registered in this process.";
  if (!why.empty()) TORCH_WARN("blade: engine '", name_, "' is not used; the original runs instead. ", why);
}

bool Engine::adopt(const c10::intrusive_ptr<Engine>& successor) {
  const std::lock_guard<std::mutex> lock(adopt_mutex_);
  if (backend_ != kPendingBackend || adopted_ || successor.get() == this) return false;
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
  auto numbers = limits_.copy();
  numbers.insert(kChecksum, checksum_of(program_, object_));
  std::vector<at::Tensor> tensors{object_};
  tensors.insert(tensors.end(), constants_.begin(), constants_.end());
  return {kStateVersion, {name_, backend_, program_}, std::move(numbers), std::move(tensors)};
}

c10::intrusive_ptr<Engine> Engine::from_state(State state) {
  auto engine = c10::intrusive_ptr<Engine>::reclaim(new Engine());
  auto& [version, words, numbers, tensors] = state;
  const auto word = [&words = words](size_t i) { return i < words.size() ? words[i] : std::string(); };
  engine->name_ = word(0);
  engine->backend_ = word(1);
  engine->program_ = word(2);
  engine->limits_ = numbers.copy();
  if (version != kStateVersion) {
    engine->set_unavailable(
        Code::kVersionMismatch, "The engine was saved in format " + std::to_string(version) +
                                    "; this blade reads format " + std::to_string(kStateVersion) + ".");
    engine->state_ = std::move(state);
  } else if (words.size() != 3 || tensors.empty() || !numbers.contains(kChecksum) || !is_bytes(tensors[0])) {
    engine->set_unavailable(Code::kCorruptPayload, "The saved engine lacks some of its parts.");
    engine->state_ = std::move(state);
  } else {
    (void)engine->limits_.erase(kChecksum);
    engine->object_ = tensors[0].cpu();  // map_location moves it, too
    engine->constants_.assign(tensors.begin() + 1, tensors.end());
    if (numbers.at(kChecksum) != checksum_of(engine->program_, engine->object_)) {
      engine->set_unavailable(
          Code::kCorruptPayload, "The engine's program and code do not match their checksum: the file is damaged.");
      engine->state_ = std::move(state);
    } else {
      engine->load();
      if (engine->backend_ == kPendingBackend) {
        engine->why_unavailable_ = "It was saved before its engine was ready.";
      }
    }
  }
  engine->warn_if_unavailable();
  return engine;
}

void Engine::rearm() {
  if (Engine* next = successor()) next->rearm();
  consecutive_failures_ = 0;
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

void Engine::failed(const std::string& what) {
  ++consecutive_failures_;
  const std::lock_guard<std::mutex> lock(error_mutex_);
  last_error_ = what;
}

std::optional<Code> Engine::run_disc(const std::vector<at::Tensor>& inputs, std::vector<at::Tensor>& outputs) {
  if (const auto code = check_inputs(executor_->program(), inputs)) return code;
  if (const auto code = executor_->check_device(inputs)) return code;
  executor_->refresh_packs(constants_);
  auto results = executor_->run(inputs);
  if (!results) return Code::kGuardShape;
  outputs = std::move(*results);
  return std::nullopt;
}

std::optional<Code> Engine::run_runner(const std::vector<at::Tensor>& inputs, std::vector<at::Tensor>& outputs) {
  const auto& program = runner_->program();
  if (const auto code = check_inputs(program, inputs)) return code;
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
  try {
    const auto refused = executor_ ? run_disc(inputs, outputs) : run_runner(inputs, outputs);
    if (!refused && consecutive_failures_ != 0) consecutive_failures_ = 0;
    return refused;
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
  auto refused = check_inputs(executor_->program(), inputs);
  if (!refused) refused = executor_->check_device(inputs);
  TORCH_CHECK(!refused, "blade: the engine does not take these inputs: ", kCodeNames[static_cast<size_t>(*refused)]);
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
  for (size_t i = 0; i < reasons_.size(); ++i) {
    if (const int64_t n = reasons_[i].load(std::memory_order_relaxed)) stats.insert(kCodeNames[i], n);
  }
  if (const auto* graphs = executor_ ? executor_->graph_counts() : nullptr) {
    stats.insert("graph_captures", graphs->captures.load(std::memory_order_relaxed));
    stats.insert("graph_replays", graphs->replays.load(std::memory_order_relaxed));
    stats.insert("graph_failures", graphs->failures.load(std::memory_order_relaxed));
    stats.insert("graph_bytes_copied", graphs->bytes_copied.load(std::memory_order_relaxed));
    stats.insert("graph_declined", graphs->declined.load(std::memory_order_relaxed));
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
