// SPDX-License-Identifier: Apache-2.0
// What differs between processors when an object is linked.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace blade {

struct Relocation {
  uint32_t type;
  uint8_t* where;      // the bytes to patch
  size_t room;         // bytes from there to the end of the section
  uint64_t symbol;     // S
  int64_t addend;      // A
  uint64_t got;        // start of the offset table
  uint64_t got_entry;  // the symbol's entry there
  uint64_t stub;       // code near by that jumps to the symbol
};

// ELF e_machine of this process; 0xffff (none) where the loader has not been written.
extern const uint16_t kMachine;

// Empty, or what is wrong.
std::string apply_relocation(const Relocation& relocation);
std::string apply_x86_64(const Relocation& relocation);
std::string apply_aarch64(const Relocation& relocation);

// At most 16 bytes of code that jump to `target` anywhere in memory.
void write_stub(uint8_t* where, uint64_t target);

}  // namespace blade
