// SPDX-License-Identifier: Apache-2.0
// Native code: a relocatable ELF object (x86-64 or aarch64) made callable in this process.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <unordered_map>

namespace blade {

using KernelFn = void (*)(void** ptrs, const int64_t* ints, int64_t begin, int64_t end);

// Throws Unavailable: native code that is not as it was written.
[[noreturn]] void damaged(const std::string& what);

// Owns the memory its functions live in. Throws Unavailable for an object that is damaged, of
// another architecture, or uses what this loader does not know.
class Object {
 public:
  Object(const uint8_t* bytes, size_t size);
  ~Object();
  Object(const Object&) = delete;
  Object& operator=(const Object&) = delete;

  KernelFn find(const std::string& name) const;  // or nullptr

 private:
  friend class Linker;
  void* memory_ = nullptr;
  size_t size_ = 0;
  std::unordered_map<std::string, KernelFn> functions_;
};

// The address of a C library function that kernels may call, or nullptr.
void* find_external(const std::string& name);

}  // namespace blade
