// SPDX-License-Identifier: Apache-2.0
#include "api/stats.h"

#include <torch/csrc/jit/api/module.h>

#include <ostream>

namespace blade {
namespace {

// Of a cluster's first engine; others are named by their backends, as in blade.stats.
constexpr const char* kFirst = "engine";

}  // namespace

EngineStats stats_of(const std::string& name, const Engine& engine) {
  EngineStats stats;
  stats.name = name;
  stats.backend = engine.backend();
  const auto counts = engine.stats();
  stats.calls = counts.at("calls");
  stats.engine_runs = counts.at("engine_runs");
  for (const char* reason : kCodeNames) {
    if (const auto found = counts.find(reason); found != counts.end()) stats.fallbacks.emplace(reason, found->value());
  }
  stats.why_unavailable = engine.known_obstacle();
  stats.last_error = engine.last_error();
  return stats;
}

void add_stats(const std::string& name, const c10::IValue& value, std::vector<EngineStats>& stats) {
  static const auto type = c10::getCustomClassType<c10::intrusive_ptr<Engine>>();
  if (value.isObject() && value.type<c10::Type>()->isSubtypeOf(type)) stats.push_back(stats_of(name, *value.toCustomClass<Engine>()));
}

std::vector<EngineStats> stats(const torch::jit::Module& module) {
  std::vector<EngineStats> found;
  for (const auto& [name, child] : module.named_modules()) {
    for (const auto& [attribute, value] : child.named_attributes(/*recurse=*/false)) {
      const size_t before = found.size();
      add_stats(name, value, found);
      if (found.size() != before && attribute != kFirst) found.back().name += "/" + found.back().backend;
    }
  }
  return found;
}

std::ostream& operator<<(std::ostream& stream, const EngineStats& stats) {
  stream << stats.name << ": " << stats.backend << " answered " << stats.engine_runs << " of " << stats.calls << " calls";
  if (stats.calls != stats.engine_runs) stream << ", the original " << stats.calls - stats.engine_runs;
  const char* before = " (";
  for (const auto& [reason, count] : stats.fallbacks) {
    stream << before << reason << " " << count;
    before = ", ";
  }
  if (!stats.fallbacks.empty()) stream << ")";
  if (!stats.why_unavailable.empty()) stream << ". " << stats.why_unavailable;
  if (!stats.last_error.empty()) stream << " Last error: " << stats.last_error;
  return stream;
}

}  // namespace blade
