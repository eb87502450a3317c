// SPDX-License-Identifier: Apache-2.0
#include <elf.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "mutate.h"

namespace fuzz {
namespace {

#if defined(__aarch64__)
constexpr uint8_t kReturn[] = {0xc0, 0x03, 0x5f, 0xd6};
#else
constexpr uint8_t kReturn[] = {0xc3};
#endif

constexpr char kArchive[] = "!<arch>\n";
constexpr size_t kMemberHeader = 60;

template <typename T>
T read(const std::string& bytes, size_t at) {
  T value{};
  if (at <= bytes.size() && bytes.size() - at >= sizeof(T)) std::memcpy(&value, bytes.data() + at, sizeof(T));
  return value;
}

void write(std::string& bytes, size_t at, const void* data, size_t size) {
  if (at <= bytes.size() && bytes.size() - at >= size) std::memcpy(bytes.data() + at, data, size);
}

// Where an undamaged object, or each object of an undamaged archive, starts.
std::vector<size_t> starts(const std::string& object) {
  if (object.rfind(kArchive, 0) != 0) return {0};
  std::vector<size_t> found;
  for (size_t at = sizeof(kArchive) - 1; at + kMemberHeader <= object.size();) {
    const size_t length = std::stoul(object.substr(at + 48, 10));
    at += kMemberHeader;
    if (object.compare(at, SELFMAG, ELFMAG) == 0) found.push_back(at);
    at += length + length % 2;
  }
  return found;
}

struct Section {
  size_t at;  // of its header in the bytes
  Elf64_Shdr header;
};

std::vector<Section> sections(const std::string& object, size_t start) {
  const auto header = read<Elf64_Ehdr>(object, start);
  std::vector<Section> found;
  for (size_t i = 0; i < header.e_shnum; ++i) {
    const size_t at = start + header.e_shoff + i * sizeof(Elf64_Shdr);
    found.push_back({at, read<Elf64_Shdr>(object, at)});
  }
  return found;
}

// A number of 1, 2, 4 or 8 bytes at a multiple of its size.
void edit_field(std::string& bytes, size_t at, size_t size, Random& draw) {
  const size_t width = size_t{1} << draw.below(4);
  const size_t place = at + draw.below(std::max<size_t>(1, size / width)) * width;
  uint64_t value = draw.number();
  if (draw.chance(40)) value = read<uint64_t>(bytes, place) + draw.below(17) - 8;
  write(bytes, place, &value, width);
}

void edit_member(std::string& object, size_t start, Random& draw) {
  const auto all = sections(object, start);
  if (all.empty()) return edit_bytes(object, draw);
  const auto& section = draw.pick(all);
  const auto of_type = [&](uint32_t type, size_t size) {
    std::vector<Section> found;
    std::copy_if(all.begin(), all.end(), std::back_inserter(found), [type](const Section& s) { return s.header.sh_type == type; });
    if (found.empty()) return;
    const auto& table = draw.pick(found).header;
    edit_field(object, start + table.sh_offset + draw.below(std::max<size_t>(1, table.sh_size / size)) * size, size, draw);
  };
  switch (draw.below(6)) {
    case 0: edit_field(object, start, sizeof(Elf64_Ehdr), draw); break;
    case 1: edit_field(object, section.at, sizeof(Elf64_Shdr), draw); break;
    case 2: of_type(SHT_SYMTAB, sizeof(Elf64_Sym)); break;
    case 3: of_type(SHT_RELA, sizeof(Elf64_Rela)); break;
    case 4: of_type(SHT_STRTAB, 1); break;
    default: {
      const auto& other = draw.pick(all);
      write(object, section.at, &other.header, sizeof(Elf64_Shdr));
      write(object, other.at, &section.header, sizeof(Elf64_Shdr));
    }
  }
}

}  // namespace

void edit_bytes(std::string& bytes, Random& draw) {
  for (size_t n = 1 + draw.below(4); n > 0; --n) {
    if (bytes.size() < 16) bytes.resize(16);
    const size_t at = draw.below(bytes.size());
    const size_t length = std::min(bytes.size() - at, 1 + draw.below(draw.chance(80) ? 64 : 4096));
    switch (draw.below(8)) {
      case 0: std::fill_n(bytes.begin() + static_cast<int64_t>(at), length, static_cast<char>(draw.number())); break;
      case 1: bytes.replace(at, length, bytes.substr(draw.below(bytes.size()), length)); break;
      case 2: bytes.erase(at, length); break;
      case 3: bytes.insert(at, bytes.substr(draw.below(bytes.size()), length)); break;
      case 4:
        if (draw.chance(30)) bytes.resize(at);
        break;
      case 5: edit_field(bytes, at / 4 * 4, 8, draw); break;
      default: bytes[at] = static_cast<char>(bytes[at] ^ (1 << draw.below(8)));
    }
  }
}

void edit_object(std::string& object, Random& draw) {
  const auto members = starts(object);
  for (size_t n = 1 + draw.below(3); n > 0; --n) {
    const size_t start = draw.pick(members);
    if (start >= kMemberHeader && draw.chance(15)) {
      const std::string size = std::to_string(draw.number()).substr(0, 10);
      object.replace(start - kMemberHeader + 48, 10, size + std::string(10 - size.size(), ' '));
    } else {
      draw.chance(85) ? edit_member(object, start, draw) : edit_field(object, draw.below(object.size()), 8, draw);
    }
  }
  if (draw.chance(5)) edit_bytes(object, draw);
}

std::string inert(std::string object) {
  if (object.empty()) return object;
  for (const size_t start : starts(object)) {
    const auto all = sections(object, start);
    for (const auto& [_, table] : all) {
      if (table.sh_type != SHT_SYMTAB) continue;
      for (size_t at = start + table.sh_offset; at < start + table.sh_offset + table.sh_size; at += sizeof(Elf64_Sym)) {
        const auto symbol = read<Elf64_Sym>(object, at);
        if (ELF64_ST_TYPE(symbol.st_info) != STT_FUNC || symbol.st_shndx == SHN_UNDEF || symbol.st_shndx >= all.size()) continue;
        write(object, start + all[symbol.st_shndx].header.sh_offset + symbol.st_value, kReturn, sizeof(kReturn));
      }
    }
  }
  return object;
}

}  // namespace fuzz
