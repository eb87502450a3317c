// SPDX-License-Identifier: Apache-2.0
// References: "System V ABI, AMD64 supplement" (tables 4.9, 4.10); "ELF for the Arm 64-bit
// Architecture" (section 5.7).
#include "native/relocate.h"

#include <elf.h>

#include <cstring>
#include <limits>

namespace blade {
namespace {

template <typename T>
std::string put(const Relocation& r, T value) {
  if (r.room < sizeof(T)) return "a relocation lies outside its section";
  std::memcpy(r.where, &value, sizeof(T));
  return "";
}

std::string out_of_range(const Relocation& r) { return "relocation " + std::to_string(r.type) + " is out of range"; }

std::string unknown(const Relocation& r) { return "unknown relocation " + std::to_string(r.type); }

bool fits_signed(int64_t value, int bits) {
  return value >= -(int64_t{1} << (bits - 1)) && value < (int64_t{1} << (bits - 1));
}

std::string put_signed32(const Relocation& r, uint64_t bits) {
  const auto value = static_cast<int64_t>(bits);
  return fits_signed(value, 32) ? put(r, static_cast<int32_t>(value)) : out_of_range(r);
}

}  // namespace

std::string apply_x86_64(const Relocation& r) {
  const auto place = reinterpret_cast<uint64_t>(r.where);
  // Wrapping arithmetic: addends are whatever the file says, and what overflows is out of range.
  const uint64_t target = r.symbol + static_cast<uint64_t>(r.addend);  // S + A
  const auto addend = static_cast<uint64_t>(r.addend);
  const uint64_t pc = place, got = r.got, entry = r.got_entry;
  switch (r.type) {
    case R_X86_64_NONE: return "";
    case R_X86_64_64: return put(r, target);
    case R_X86_64_PC64: return put(r, target - pc);
    case R_X86_64_PC32: return put_signed32(r, target - pc);
    case R_X86_64_PLT32:
      if (fits_signed(static_cast<int64_t>(target - pc), 32)) return put_signed32(r, target - pc);
      return put_signed32(r, r.stub + addend - pc);
    case R_X86_64_32:
      if (target > std::numeric_limits<uint32_t>::max()) return out_of_range(r);
      return put(r, static_cast<uint32_t>(target));
    case R_X86_64_32S: return put_signed32(r, target);
    case R_X86_64_GOTPC32: return put_signed32(r, got + addend - pc);
    case R_X86_64_GOTPC64: return put(r, got + addend - pc);
    case R_X86_64_GOTOFF64: return put(r, target - got);
    case R_X86_64_GOT32: return put_signed32(r, entry - got + addend);
    case R_X86_64_GOT64: return put(r, entry - got + addend);
    case R_X86_64_GOTPCREL64: return put(r, entry + addend - pc);
    case R_X86_64_GOTPCREL:
    case R_X86_64_GOTPCRELX:
    case R_X86_64_REX_GOTPCRELX: return put_signed32(r, entry + addend - pc);
    case R_X86_64_PLTOFF64: return put(r, r.stub - got + addend);
    default: return unknown(r);
  }
}

namespace {

// Replaces `bits` bits at `shift` of the instruction at r.where.
std::string put_field(const Relocation& r, uint64_t value, int shift, int bits) {
  uint32_t instruction = 0;
  if (r.room < sizeof(instruction)) return "a relocation lies outside its section";
  std::memcpy(&instruction, r.where, sizeof(instruction));
  const uint32_t mask = ((uint32_t{1} << bits) - 1) << shift;
  instruction = (instruction & ~mask) | ((static_cast<uint32_t>(value) << shift) & mask);
  std::memcpy(r.where, &instruction, sizeof(instruction));
  return "";
}

// A branch or load of a word offset: `bits` bits at `shift`.
std::string put_words(const Relocation& r, int64_t distance, int shift, int bits) {
  if ((distance & 3) != 0 || !fits_signed(distance, bits + 2)) return out_of_range(r);
  return put_field(r, static_cast<uint64_t>(distance >> 2), shift, bits);
}

// ADR and ADRP keep 21 bits in two fields.
std::string put_adr(const Relocation& r, int64_t value) {
  if (!fits_signed(value, 21)) return out_of_range(r);
  const auto bits = static_cast<uint64_t>(value);
  const auto problem = put_field(r, bits & 3, 29, 2);
  return problem.empty() ? put_field(r, bits >> 2, 5, 19) : problem;
}

std::string put_adrp(const Relocation& r, uint64_t target) {
  const auto place = reinterpret_cast<uint64_t>(r.where);
  return put_adr(r, static_cast<int64_t>((target >> 12) - (place >> 12)));
}

// The low 12 bits of an address in a load or store that counts in units of 1 << scale bytes.
std::string put_low12(const Relocation& r, uint64_t target, int scale) {
  if ((target & ((uint64_t{1} << scale) - 1)) != 0) return out_of_range(r);
  return put_field(r, (target & 0xfff) >> scale, 10, 12);
}

}  // namespace

std::string apply_aarch64(const Relocation& r) {
  const auto place = reinterpret_cast<uint64_t>(r.where);
  const uint64_t target = r.symbol + r.addend;  // S + A
  const auto distance = static_cast<int64_t>(target - place);
  switch (r.type) {
    case R_AARCH64_NONE: return "";
    case R_AARCH64_ABS64: return put(r, target);
    case R_AARCH64_PREL64: return put(r, distance);
    case R_AARCH64_PREL32: return put_signed32(r, distance);
    case R_AARCH64_CALL26:
    case R_AARCH64_JUMP26:
      if (fits_signed(distance, 28)) return put_words(r, distance, 0, 26);
      return put_words(r, static_cast<int64_t>(r.stub - place), 0, 26);
    case R_AARCH64_CONDBR19:
    case R_AARCH64_LD_PREL_LO19: return put_words(r, distance, 5, 19);
    case R_AARCH64_TSTBR14: return put_words(r, distance, 5, 14);
    case R_AARCH64_ADR_PREL_LO21: return put_adr(r, distance);
    case R_AARCH64_ADR_PREL_PG_HI21: return put_adrp(r, target);
    case R_AARCH64_ADR_GOT_PAGE: return put_adrp(r, r.got_entry);
    case R_AARCH64_LD64_GOT_LO12_NC: return put_low12(r, r.got_entry, 3);
    case R_AARCH64_ADD_ABS_LO12_NC:
    case R_AARCH64_LDST8_ABS_LO12_NC: return put_low12(r, target, 0);
    case R_AARCH64_LDST16_ABS_LO12_NC: return put_low12(r, target, 1);
    case R_AARCH64_LDST32_ABS_LO12_NC: return put_low12(r, target, 2);
    case R_AARCH64_LDST64_ABS_LO12_NC: return put_low12(r, target, 3);
    case R_AARCH64_LDST128_ABS_LO12_NC: return put_low12(r, target, 4);
    case R_AARCH64_MOVW_UABS_G0_NC: return put_field(r, target & 0xffff, 5, 16);
    case R_AARCH64_MOVW_UABS_G1_NC: return put_field(r, (target >> 16) & 0xffff, 5, 16);
    case R_AARCH64_MOVW_UABS_G2_NC: return put_field(r, (target >> 32) & 0xffff, 5, 16);
    case R_AARCH64_MOVW_UABS_G3: return put_field(r, target >> 48, 5, 16);
    default: return unknown(r);
  }
}

#if defined(__x86_64__)

const uint16_t kMachine = EM_X86_64;

std::string apply_relocation(const Relocation& relocation) { return apply_x86_64(relocation); }

void write_stub(uint8_t* where, uint64_t target) {
  const uint8_t jump[6] = {0xff, 0x25, 0, 0, 0, 0};  // jmp *0(%rip), then the address
  std::memcpy(where, jump, sizeof(jump));
  std::memcpy(where + sizeof(jump), &target, sizeof(target));
}

#elif defined(__aarch64__)

const uint16_t kMachine = EM_AARCH64;

std::string apply_relocation(const Relocation& relocation) { return apply_aarch64(relocation); }

void write_stub(uint8_t* where, uint64_t target) {
  const uint32_t jump[2] = {0x58000050, 0xd61f0200};  // ldr x16, #8; br x16; then the address
  std::memcpy(where, jump, sizeof(jump));
  std::memcpy(where + sizeof(jump), &target, sizeof(target));
}

#else

const uint16_t kMachine = 0xffff;

std::string apply_relocation(const Relocation& relocation) { return unknown(relocation); }

void write_stub(uint8_t*, uint64_t) {}

#endif

}  // namespace blade
