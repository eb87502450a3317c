// SPDX-License-Identifier: Apache-2.0
#include "engine/policy.h"

#include <ATen/core/List.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <mutex>
#include <random>
#include <set>
#include <sstream>
#include <string_view>

namespace blade {
namespace {

constexpr const char* kEngines = "BLADE_ENGINES";
constexpr const char* kTrustedKeys = "BLADE_TRUSTED_KEYS";

// Sorted.
constexpr std::string_view kFunctionalOps[] = {
#include "engine/functional_ops.inc"
};

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

struct Allowed {
  std::mutex mutex;
  std::set<std::string> ops;
};

Allowed& allowed() {
  static Allowed instance;
  return instance;
}

}  // namespace

std::string why_not_admitted(const std::string& backend) {
  const auto names = environment(kEngines);
  if (names.empty()) return "";
  std::istringstream list(names);
  for (std::string name; std::getline(list, name, ',');) {
    name.erase(0, name.find_first_not_of(" \t"));
    name.erase(name.find_last_not_of(" \t") + 1);
    if (name == backend) return "";
  }
  return std::string(kEngines) + "=" + names + " in the environment does not admit engines of the backend '" + backend + "'.";
}

bool needs_signature() { return !environment(kTrustedKeys).empty(); }

std::string why_untrusted(
    const std::vector<std::string>& words, const c10::Dict<std::string, int64_t>& limits,
    const std::vector<at::Tensor>& tensors, const std::string& signature) {
  c10::List<std::string> names;
  c10::List<int64_t> values;
  for (const auto& entry : limits) {
    names.push_back(entry.key());
    values.push_back(entry.value());
  }
  std::vector<c10::IValue> stack{words.at(0), words.at(1), words.at(2), names, values, tensors, signature};
  try {
    c10::Dispatcher::singleton().findSchemaOrThrow("blade::why_untrusted", "").callBoxed(stack);
    return stack.at(0).toStringRef();
  } catch (const std::exception& error) {
    return std::string("Its signature could not be checked, which takes Python and `import blade`: ") + error.what();
  }
}

int64_t process_token() {
  static const int64_t token = [] {
    std::random_device source;
    return static_cast<int64_t>((static_cast<uint64_t>(source()) << 32 | source()) >> 1);
  }();
  return token;
}

bool may_call(const std::string& op) {
  if (std::binary_search(std::begin(kFunctionalOps), std::end(kFunctionalOps), std::string_view(op))) return true;
  const std::lock_guard<std::mutex> lock(allowed().mutex);
  return allowed().ops.count(op) != 0;
}

void allow_call(const std::string& op) {
  const std::lock_guard<std::mutex> lock(allowed().mutex);
  allowed().ops.insert(op);
}

}  // namespace blade
