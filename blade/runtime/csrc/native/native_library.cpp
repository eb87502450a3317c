// SPDX-License-Identifier: Apache-2.0
// The archive format of Unix: "!<arch>\n", then per member a header of 60 characters and its bytes, padded to an
// even length. Members whose name starts with "//" or is "/" are tables of the archive itself.
#include "native/native_library.h"

#include <algorithm>
#include <cctype>
#include <cstring>

namespace blade {
namespace {

constexpr char kArchive[] = "!<arch>\n";
constexpr size_t kArchiveSize = sizeof(kArchive) - 1;
constexpr size_t kHeaderSize = 60;
constexpr size_t kSizeAt = 48, kSizeLength = 10;  // where in a header the size is, in decimal
constexpr size_t kEndAt = 58;                     // "`\n"

size_t read_size(const char* text) {
  size_t size = 0;
  for (size_t i = 0; i < kSizeLength && text[i] != ' '; ++i) {
    if (std::isdigit(static_cast<unsigned char>(text[i])) == 0) damaged("a member of the archive has no size");
    size = 10 * size + static_cast<size_t>(text[i] - '0');
  }
  return size;
}

bool is_table(const char* name) { return name[0] == '/' && (name[1] == '/' || name[1] == ' '); }

}  // namespace

Library::Library(const uint8_t* bytes, size_t size) {
  if (size >= kArchiveSize && std::memcmp(bytes, kArchive, kArchiveSize) == 0) {
    add_members(bytes, size);
  } else {
    objects_.push_back(std::make_unique<Object>(bytes, size));
  }
}

void Library::add_members(const uint8_t* bytes, size_t size) {
  for (size_t at = kArchiveSize; at < size;) {
    if (size - at < kHeaderSize) damaged("the archive ends in a header");
    const char* header = reinterpret_cast<const char*>(bytes + at);
    if (std::memcmp(header + kEndAt, "`\n", 2) != 0) damaged("a member of the archive has no header");
    const size_t length = read_size(header + kSizeAt);
    at += kHeaderSize;
    if (size - at < length) damaged("a member of the archive lies outside of it");
    if (!is_table(header)) objects_.push_back(std::make_unique<Object>(bytes + at, length));
    at += std::min(length + length % 2, size - at);
  }
}

KernelFn Library::find(const std::string& name) const {
  for (const auto& object : objects_) {
    if (const KernelFn found = object->find(name); found != nullptr) return found;
  }
  damaged("kernel '" + name + "' is not in it");
}

}  // namespace blade
