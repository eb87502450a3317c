// SPDX-License-Identifier: Apache-2.0
#include "engine/originals.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <map>
#include <mutex>
#include <unordered_map>
#include <utility>

namespace blade {
namespace {

struct Original {
  int64_t calls = 0;
  bool has_changed = false;
};

struct Originals {
  std::mutex mutex;
  std::unordered_map<int64_t, Original> known;
  std::map<std::pair<int64_t, int64_t>, int64_t> paths;
};

Originals& originals() {
  static auto* const made = new Originals();  // never destroyed: a thread may still call when the process ends
  return *made;
}

}  // namespace

void announce_original(int64_t number, bool is_known) {
  const std::lock_guard<std::mutex> lock(originals().mutex);
  if (is_known) {
    originals().known.emplace(number, Original());
  } else {
    originals().known.erase(number);
  }
}

void note_changed_original(int64_t number) {
  const std::lock_guard<std::mutex> lock(originals().mutex);
  const auto found = originals().known.find(number);
  if (found != originals().known.end()) found->second.has_changed = true;
}

bool has_original_changed(int64_t number) {
  const std::lock_guard<std::mutex> lock(originals().mutex);
  const auto found = originals().known.find(number);
  return found != originals().known.end() && found->second.has_changed;
}

int64_t original_calls(int64_t number) {
  const std::lock_guard<std::mutex> lock(originals().mutex);
  const auto found = originals().known.find(number);
  return found == originals().known.end() ? 0 : found->second.calls;
}

void count_path(int64_t number, int64_t path) {
  const std::lock_guard<std::mutex> lock(originals().mutex);
  ++originals().paths[{number, path}];
}

int64_t path_calls(int64_t number, int64_t path) {
  const std::lock_guard<std::mutex> lock(originals().mutex);
  const auto found = originals().paths.find({number, path});
  return found == originals().paths.end() ? 0 : found->second;
}

void reset_path_calls(int64_t number) {
  const std::lock_guard<std::mutex> lock(originals().mutex);
  auto& paths = originals().paths;
  paths.erase(paths.lower_bound({number, 0}), paths.upper_bound({number, INT64_MAX}));
}

std::vector<at::Tensor> answer_by_original(
    c10::IValue inputs, int64_t number, int64_t outputs, const std::string& text) {
  bool is_known = false;
  {
    const std::lock_guard<std::mutex> lock(originals().mutex);
    const auto found = originals().known.find(number);
    is_known = found != originals().known.end();
    if (is_known) ++found->second.calls;
  }
  TORCH_CHECK(is_known, text);
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("blade::call_original", "");
  std::vector<c10::IValue> stack{number, outputs, text, std::move(inputs)};
  op.callBoxed(&stack);
  return stack.at(0).toTensorVector();
}

}  // namespace blade
