// SPDX-License-Identifier: Apache-2.0
// The native code of an engine: one relocatable object, or an `ar` archive of several.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "native/elf_loader.h"

namespace blade {

// Throws Unavailable as Object does, and for an archive that is damaged.
class Library {
 public:
  Library(const uint8_t* bytes, size_t size);

  KernelFn find(const std::string& name) const;  // throws Unavailable if missing

 private:
  void add_members(const uint8_t* bytes, size_t size);

  std::vector<std::unique_ptr<Object>> objects_;
};

}  // namespace blade
