// SPDX-License-Identifier: Apache-2.0
#include "engine/variants.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <optional>
#include <string_view>
#include <tuple>

#include "engine/reason.h"
#include "program/reader.h"

namespace blade {
namespace {

constexpr std::string_view kProgramStart = "\nblade.disc ", kSm = "sm_";

struct Sm {
  int major = 0, minor = 0;
  bool is_specific = false;  // with instructions that other architectures lack, "sm_90a"
};

// "sm_90", "sm_120a"; nullopt for anything else.
std::optional<Sm> sm_of(const std::string& name) {
  if (name.compare(0, kSm.size(), kSm) != 0) return std::nullopt;
  auto digits = name.substr(kSm.size());
  Sm found;
  if (!digits.empty() && digits.back() == 'a') {
    found.is_specific = true;
    digits.pop_back();
  }
  const auto is_digit = [](char c) { return c >= '0' && c <= '9'; };
  if (digits.size() < 2 || digits.size() > 4 || !std::all_of(digits.begin(), digits.end(), is_digit)) return std::nullopt;
  const int number = std::stoi(digits);
  found.major = number / 10;
  found.minor = number % 10;
  return found;
}

struct Variant {
  std::string text, accelerator;
  std::vector<std::string> architectures;
};

std::vector<Variant> variants_of(const std::string& text) {
  std::vector<Variant> variants;
  for (size_t start = 0; start < text.size();) {
    const auto next = text.find(kProgramStart, start);
    const auto end = next == std::string::npos ? text.size() : next + 1;
    Variant one;
    one.text = text.substr(start, end - start);
    const auto head = one.text.find('\n');
    const auto line = head == std::string::npos ? "" : one.text.substr(head + 1, one.text.find('\n', head + 1) - head - 1);
    auto words = split(line, ' ');
    if (words.size() > 1 && words[0] == "isa") {
      one.accelerator = words[1];
      one.architectures.assign(words.begin() + 2, words.end());
    }
    variants.push_back(std::move(one));
    start = end;
  }
  return variants;
}

c10::DeviceIndex device_for(const Accelerator& accelerator, const std::vector<at::Tensor>& constants) {
  for (const auto& constant : constants) {
    if (constant.defined() && constant.device().type() == accelerator.type()) return std::max<c10::DeviceIndex>(constant.device().index(), 0);
  }
  return std::max<c10::DeviceIndex>(c10::impl::VirtualGuardImpl(accelerator.type()).getDevice().index(), 0);
}

// Of two architectures that suit a device, the one that is nearer to it.
bool is_nearer(const std::string& one, const std::string& other) {
  const auto a = sm_of(one), b = sm_of(other);
  if (!a || !b) return false;
  return std::make_tuple(a->major, a->minor, a->is_specific) > std::make_tuple(b->major, b->minor, b->is_specific);
}

}  // namespace

bool runs_on(const std::string& code, const std::string& device) {
  if (code == device) return true;
  const auto has = sm_of(code), is = sm_of(device);
  if (!has || !is || has->major != is->major) return false;
  return has->is_specific ? has->minor == is->minor : has->minor <= is->minor;
}

std::string why_too_large(
    const std::vector<Binary>& binaries, const std::string& code, const Accelerator& accelerator, c10::DeviceIndex device) {
  const auto most = accelerator.shared_memory(device);
  for (const auto& one : binaries) {
    if (one.architecture != code || one.shared <= most) continue;
    return "the kernel '" + one.name + "' needs " + std::to_string(one.shared) + " bytes of shared memory, and a block has " + std::to_string(most);
  }
  return "";
}

std::string select_program(const std::string& text, const at::Tensor& object, const std::vector<at::Tensor>& constants) {
  if (text.find(kProgramStart) == std::string::npos) return text;
  auto variants = variants_of(text);
  auto* accelerator = variants[0].accelerator.empty() ? nullptr : find_accelerator(variants[0].accelerator);
  if (accelerator == nullptr || accelerator->count() == 0) return std::move(variants[0].text);
  const auto device = device_for(*accelerator, constants);
  const auto is = accelerator->architecture(device);
  std::vector<Binary> binaries;
  if (object.numel() > 0) binaries = read_binaries(static_cast<const uint8_t*>(object.const_data_ptr()), object.numel());
  Variant* best = nullptr;
  std::string has, too_large;
  for (auto& one : variants) {
    if (one.accelerator != variants[0].accelerator || one.architectures.size() != 1) continue;
    const auto& code = one.architectures[0];
    has += (has.empty() ? "" : ", ") + code;
    if (!runs_on(code, is) || (best != nullptr && !is_nearer(code, best->architectures[0]))) continue;
    if (const auto why = why_too_large(binaries, code, *accelerator, device); !why.empty()) {
      too_large = " Of the code for " + code + ", " + why + ".";
    } else {
      best = &one;
    }
  }
  if (best != nullptr) return std::move(best->text);
  throw Unavailable(
      Code::kDeviceMismatch, "The engine has device code for " + has + ", but " + variants[0].accelerator + ":" + std::to_string(device) +
                                 " is " + is + ": optimize the model again on this kind of device, or name it in Config(gpu_targets=...)." + too_large);
}

}  // namespace blade
