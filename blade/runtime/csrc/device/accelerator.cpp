// SPDX-License-Identifier: Apache-2.0
#include "device/accelerator.h"

#include <c10/util/Exception.h>
#include <dlfcn.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <map>
#include <mutex>
#include <string_view>

#include "engine/reason.h"

namespace blade {
namespace {

constexpr int64_t kBinariesVersion = 1;
constexpr uint32_t kMaxThreads = 1024;
constexpr std::string_view kEarly = "early";

std::mutex registry_mutex;

std::map<std::string, Accelerator*>& registry() {
  static auto* accelerators = new std::map<std::string, Accelerator*>();  // engines may outlive static objects
  return *accelerators;
}

[[noreturn]] void damaged_code(const std::string& what) {
  throw Unavailable(Code::kCorruptPayload, "The engine's device code cannot be read: " + what + ".");
}

// The text at the start of a container, line by line.
class Index {
 public:
  Index(const uint8_t* bytes, size_t size) : text_(reinterpret_cast<const char*>(bytes), size) {}

  std::vector<std::string_view> line() {
    const auto end = text_.find('\n', at_);
    if (end == std::string_view::npos || end - at_ > kLongestLine) damaged_code("its index ends too early");
    std::vector<std::string_view> words;
    for (size_t start = at_; start <= end;) {
      const auto stop = std::min(text_.find(' ', start), end);
      words.push_back(text_.substr(start, stop - start));
      start = stop + 1;
    }
    at_ = end + 1;
    return words;
  }

  size_t at() const { return at_; }

 private:
  static constexpr size_t kLongestLine = 4096;
  const std::string_view text_;
  size_t at_ = 0;
};

uint64_t to_number(std::string_view word, uint64_t most) {
  uint64_t value = 0;
  const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), value);
  if (error != std::errc() || end != word.data() + word.size() || value > most) {
    damaged_code("its index has something else where a number is due, or one out of range");
  }
  return value;
}

// For programs in C++; `import blade` has loaded it, or said why it cannot be. Its constructor registers it.
void load_cuda_once() {
  static std::once_flag tried;
  std::call_once(tried, [] {
    {
      const std::lock_guard<std::mutex> lock(registry_mutex);
      if (registry().count(kCuda) != 0) return;
    }
    Dl_info here;
    if (dladdr(reinterpret_cast<void*>(&load_cuda_once), &here) == 0) return;
    const std::string file = here.dli_fname;
    void* library = dlopen((file.substr(0, file.rfind('/') + 1) + "libblade_cuda.so").c_str(), RTLD_NOW);
    auto* end = library == nullptr ? nullptr : reinterpret_cast<void (*)()>(dlsym(library, "blade_cuda_end"));
    if (end != nullptr) std::atexit(end);  // engines need not unload their kernels one by one
  });
}

}  // namespace

Accelerator* find_accelerator(const std::string& name) {
  if (name == kCuda) load_cuda_once();
  const std::lock_guard<std::mutex> lock(registry_mutex);
  const auto found = registry().find(name);
  return found == registry().end() ? nullptr : found->second;
}

void register_accelerator(const std::string& name, int64_t abi, Accelerator* accelerator) {
  TORCH_CHECK(
      abi == kAcceleratorAbi, "blade: the library for '", name, "' and libblade_runtime.so were not built together (", abi,
      " and ", kAcceleratorAbi, "): build blade again");
  const std::lock_guard<std::mutex> lock(registry_mutex);
  registry()[name] = accelerator;
}

std::vector<std::string> accelerator_names() {
  const std::lock_guard<std::mutex> lock(registry_mutex);
  std::vector<std::string> names;
  for (const auto& [name, accelerator] : registry()) names.push_back(name);
  return names;
}

std::vector<Binary> read_binaries(const uint8_t* bytes, size_t size) {
  Index index(bytes, size);
  const auto head = index.line();
  if (head.size() != 2 || head[0] != "blade.cubins") damaged_code("it does not begin with 'blade.cubins'");
  if (to_number(head[1], UINT32_MAX) != kBinariesVersion) {
    throw Unavailable(
        Code::kVersionMismatch, "The engine's device code has format version " + std::string(head[1]) +
                                    "; this blade reads version " + std::to_string(kBinariesVersion) + ".");
  }
  const auto counted = index.line();
  if (counted.size() != 1) damaged_code("its second line is not a count");
  std::vector<Binary> binaries;
  for (uint64_t n = to_number(counted[0], size); n > 0; --n) {
    const auto words = index.line();
    const bool early = words.size() == 6 && words[5] == kEarly;
    if ((words.size() != 5 && !early) || words[1].empty()) damaged_code("a line of its index has other words than it should");
    Binary binary;
    binary.architecture = words[0];
    binary.name = words[1];
    binary.threads = static_cast<uint32_t>(to_number(words[2], kMaxThreads));
    binary.shared = static_cast<uint32_t>(to_number(words[3], INT32_MAX));
    binary.size = to_number(words[4], size);
    binary.early = early;
    if (binary.threads == 0) damaged_code("a kernel of no threads");
    binaries.push_back(std::move(binary));
  }
  size_t at = index.at();
  for (auto& binary : binaries) {
    if (binary.size > size - at) damaged_code("it ends too early");
    binary.bytes = bytes + at;
    at += binary.size;
  }
  if (at != size) damaged_code("there is more in it than its index says");
  return binaries;
}

}  // namespace blade
