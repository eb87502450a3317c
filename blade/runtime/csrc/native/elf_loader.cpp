// SPDX-License-Identifier: Apache-2.0
// A linker for one object file. Everything goes into a single mapping, in three parts that become
// read-execute (text and call stubs), read-only (constants and the offset table) and read-write, so
// that no page is ever writable and executable at once.
#include "native/elf_loader.h"

#include <elf.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <vector>

#include "engine/reason.h"
#include "native/relocate.h"

namespace blade {

void damaged(const std::string& what) {
  throw Unavailable(Code::kCorruptPayload, "The engine's native code cannot be loaded: " + what + ".");
}

namespace {

enum Part { kText, kRodata, kData, kParts };

// Sizes in bytes of what the linker makes per undefined symbol.
constexpr size_t kStubSize = 16;
constexpr size_t kGotEntrySize = 8;

size_t align_up(size_t value, size_t align) { return (value + align - 1) / align * align; }

}  // namespace

class Linker {
 public:
  Linker(const uint8_t* bytes, size_t size, Object& object) : bytes_(bytes), size_(size), object_(object) {}

  void link() {
    read_sections();
    read_symbols();
    lay_out();
    copy_sections();
    resolve_symbols();
    relocate_sections();
    protect();
    export_functions();
  }

 private:
  template <typename T>
  T read(size_t offset, const char* what) const {
    if (offset > size_ || size_ - offset < sizeof(T)) damaged(std::string(what) + " lies outside the file");
    T value;
    std::memcpy(&value, bytes_ + offset, sizeof(T));
    return value;
  }

  std::string text_at(const Elf64_Shdr& table, size_t offset) const {
    if (table.sh_type == SHT_NOBITS || offset >= table.sh_size) damaged("a name lies outside its table");
    const char* start = reinterpret_cast<const char*>(bytes_ + table.sh_offset + offset);
    return std::string(start, strnlen(start, table.sh_size - offset));
  }

  void read_sections() {
    const auto header = read<Elf64_Ehdr>(0, "the header");
    if (std::memcmp(header.e_ident, ELFMAG, SELFMAG) != 0 || header.e_ident[EI_CLASS] != ELFCLASS64 ||
        header.e_ident[EI_DATA] != ELFDATA2LSB || header.e_type != ET_REL) {
      damaged("it is not a 64-bit relocatable ELF object");
    }
    if (header.e_machine != kMachine) {
      throw Unavailable(
          Code::kCpuMismatch, "The engine's native code is for ELF machine " + std::to_string(header.e_machine) +
                                  "; this process is machine " + std::to_string(kMachine) + ".");
    }
    if (header.e_shentsize != sizeof(Elf64_Shdr)) damaged("its section headers have an unknown size");
    for (size_t i = 0; i < header.e_shnum; ++i) {
      const auto s = read<Elf64_Shdr>(header.e_shoff + i * sizeof(Elf64_Shdr), "a section header");
      if (s.sh_type != SHT_NOBITS && (s.sh_offset > size_ || size_ - s.sh_offset < s.sh_size)) {
        damaged("section " + std::to_string(i) + " lies outside the file");
      }
      if (s.sh_size > (size_t{1} << 32)) damaged("section " + std::to_string(i) + " is too large");
      sections_.push_back(s);
    }
    if (header.e_shstrndx >= sections_.size()) damaged("it has no section names");
    for (const auto& s : sections_) names_.push_back(text_at(sections_[header.e_shstrndx], s.sh_name));
  }

  void read_symbols() {
    for (const auto& s : sections_) {
      if (s.sh_type != SHT_SYMTAB) continue;
      if (s.sh_link >= sections_.size()) damaged("its symbols have no names");
      for (size_t offset = 0; offset + sizeof(Elf64_Sym) <= s.sh_size; offset += sizeof(Elf64_Sym)) {
        symbols_.push_back(read<Elf64_Sym>(s.sh_offset + offset, "a symbol"));
        symbol_names_.push_back(text_at(sections_[s.sh_link], symbols_.back().st_name));
      }
      return;
    }
  }

  // Unwind tables are not needed: nothing throws through a kernel.
  bool is_loaded(size_t i) const {
    return (sections_[i].sh_flags & SHF_ALLOC) != 0 && names_[i] != ".eh_frame";
  }

  void lay_out() {
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    placed_.assign(sections_.size(), 0);
    size_t end = 0;
    for (int part = 0; part < kParts; ++part) {
      part_start_[part] = end = align_up(end, page);
      for (size_t i = 0; i < sections_.size(); ++i) {
        const auto& s = sections_[i];
        const Part wanted = (s.sh_flags & SHF_EXECINSTR) ? kText : (s.sh_flags & SHF_WRITE) ? kData : kRodata;
        if (!is_loaded(i) || wanted != part) continue;
        const size_t align = s.sh_addralign == 0 ? 1 : s.sh_addralign;
        if ((align & (align - 1)) != 0 || align > page) damaged("section " + names_[i] + " has a bad alignment");
        placed_[i] = end = align_up(end, align);
        end += s.sh_size;
      }
      if (part == kText) end = (stubs_ = align_up(end, kStubSize)) + symbols_.size() * kStubSize;
      if (part == kRodata) end = (got_ = align_up(end, kGotEntrySize)) + symbols_.size() * kGotEntrySize;
    }
    part_start_[kParts] = align_up(end, page);
    void* memory = mmap(nullptr, part_start_[kParts], PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
      throw Unavailable(Code::kBackendUnavailable, "The system gave no memory for the engine's native code.");
    }
    object_.memory_ = memory;
    object_.size_ = part_start_[kParts];
    base_ = static_cast<uint8_t*>(memory);
  }

  void copy_sections() {
    for (size_t i = 0; i < sections_.size(); ++i) {
      if (!is_loaded(i) || sections_[i].sh_type == SHT_NOBITS) continue;
      std::memcpy(base_ + placed_[i], bytes_ + sections_[i].sh_offset, sections_[i].sh_size);
    }
  }

  void resolve_symbols() {
    addresses_.assign(symbols_.size(), 0);
    for (size_t i = 1; i < symbols_.size(); ++i) {
      const auto& symbol = symbols_[i];
      if (symbol.st_shndx == SHN_UNDEF) {
        resolve_undefined(i);
      } else if (symbol.st_shndx == SHN_ABS) {
        addresses_[i] = symbol.st_value;
      } else if (symbol.st_shndx >= sections_.size()) {
        damaged("symbol '" + symbol_names_[i] + "' lies in no section");
      } else if (is_loaded(symbol.st_shndx)) {
        if (symbol.st_value > sections_[symbol.st_shndx].sh_size) {
          damaged("symbol '" + symbol_names_[i] + "' lies outside its section");
        }
        addresses_[i] = address(placed_[symbol.st_shndx] + symbol.st_value);
      }
      const auto type = ELF64_ST_TYPE(symbol.st_info);
      if (type == STT_TLS || type == STT_GNU_IFUNC) damaged("symbol '" + symbol_names_[i] + "' is of an unknown kind");
      std::memcpy(base_ + got_ + i * kGotEntrySize, &addresses_[i], sizeof(uint64_t));
      write_stub(base_ + stubs_ + i * kStubSize, addresses_[i]);
    }
  }

  void resolve_undefined(size_t i) {
    const auto& name = symbol_names_[i];
    if (name == "_GLOBAL_OFFSET_TABLE_") {
      addresses_[i] = address(got_);
      return;
    }
    addresses_[i] = reinterpret_cast<uint64_t>(find_external(name));
    if (addresses_[i] == 0) damaged("it calls '" + name + "', which the runtime does not provide");
  }

  void relocate_sections() {
    for (const auto& s : sections_) {
      if (s.sh_type == SHT_REL) damaged("it has relocations without addends");
      if (s.sh_type != SHT_RELA) continue;
      if (s.sh_info >= sections_.size()) damaged("relocations of no section");
      if (!is_loaded(s.sh_info)) continue;
      for (size_t offset = 0; offset + sizeof(Elf64_Rela) <= s.sh_size; offset += sizeof(Elf64_Rela)) {
        relocate(s.sh_info, read<Elf64_Rela>(s.sh_offset + offset, "a relocation"));
      }
    }
  }

  void relocate(size_t section, const Elf64_Rela& rela) {
    const size_t id = ELF64_R_SYM(rela.r_info);
    if (id >= symbols_.size()) damaged("a relocation names no symbol");
    if (rela.r_offset > sections_[section].sh_size) damaged("a relocation lies outside its section");
    Relocation r{};
    r.type = static_cast<uint32_t>(ELF64_R_TYPE(rela.r_info));
    r.where = base_ + placed_[section] + rela.r_offset;
    r.room = sections_[section].sh_size - rela.r_offset;
    r.symbol = addresses_[id];
    r.addend = rela.r_addend;
    r.got = address(got_);
    r.got_entry = address(got_ + id * kGotEntrySize);
    r.stub = address(stubs_ + id * kStubSize);
    if (const std::string problem = apply_relocation(r); !problem.empty()) {
      damaged(problem + " for symbol '" + symbol_names_[id] + "' in section " + names_[section]);
    }
  }

  void protect() const {
    const int access[kParts] = {PROT_READ | PROT_EXEC, PROT_READ, PROT_READ | PROT_WRITE};
    for (int part = 0; part < kParts; ++part) {
      const size_t bytes = part_start_[part + 1] - part_start_[part];
      if (bytes > 0 && mprotect(base_ + part_start_[part], bytes, access[part]) != 0) {
        throw Unavailable(
            Code::kBackendUnavailable, "The system does not let this process run the engine's native code (mprotect).");
      }
    }
    auto* start = reinterpret_cast<char*>(base_);
    __builtin___clear_cache(start, start + part_start_[kText + 1]);
  }

  void export_functions() const {
    for (size_t i = 1; i < symbols_.size(); ++i) {
      const auto& symbol = symbols_[i];
      if (ELF64_ST_TYPE(symbol.st_info) != STT_FUNC || ELF64_ST_BIND(symbol.st_info) == STB_LOCAL) continue;
      if (symbol.st_shndx == SHN_UNDEF || addresses_[i] == 0) continue;
      object_.functions_[symbol_names_[i]] = reinterpret_cast<KernelFn>(addresses_[i]);
    }
  }

  uint64_t address(size_t offset) const { return reinterpret_cast<uint64_t>(base_) + offset; }

  const uint8_t* bytes_;
  size_t size_;
  Object& object_;
  uint8_t* base_ = nullptr;
  std::vector<Elf64_Shdr> sections_;
  std::vector<std::string> names_;
  std::vector<size_t> placed_;  // offset in the mapping
  std::vector<Elf64_Sym> symbols_;
  std::vector<std::string> symbol_names_;
  std::vector<uint64_t> addresses_;
  size_t part_start_[kParts + 1] = {};
  size_t stubs_ = 0, got_ = 0;
};

Object::Object(const uint8_t* bytes, size_t size) {
  try {
    Linker(bytes, size, *this).link();
  } catch (...) {
    if (memory_ != nullptr) munmap(memory_, size_);
    throw;
  }
}

Object::~Object() {
  if (memory_ != nullptr) munmap(memory_, size_);
}

KernelFn Object::find(const std::string& name) const {
  const auto found = functions_.find(name);
  return found == functions_.end() ? nullptr : found->second;
}

}  // namespace blade
