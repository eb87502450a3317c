// SPDX-License-Identifier: Apache-2.0
#include "engine/target.h"

#include <c10/core/DeviceType.h>

#include <algorithm>
#include <unordered_map>

#include "device/cpu_features.h"
#include "engine/variants.h"

namespace blade {
namespace {


// An accelerator's programs may have inputs on the CPU, which only calls read.
void check_devices(const Program& program, c10::DeviceType type) {
  for (size_t i = 0; i < program.inputs.size(); ++i) {
    const auto device = program.inputs[i].device;
    if (device == type || (device == at::kCPU && !program.launched[i])) continue;
    throw Unavailable(
        Code::kCorruptPayload, "The engine's code is for " + c10::DeviceTypeName(type, true) + ", but input " +
                                   std::to_string(i) + " is on " + c10::DeviceTypeName(device, true) + ".");
  }
}

void check_instructions(const Program& program, bool on_cpu) {
  for (const auto& instr : program.instrs) {
    if (instr.op || instr.loop >= 0 || instr.launch != on_cpu) continue;
    throw Unavailable(
        Code::kCorruptPayload, std::string("The engine's program has a ") + (on_cpu ? "launch" : "kernel of the CPU") +
                                   ", but its isa is " + (on_cpu ? "the CPU's" : program.isa[0]) + ".");
  }
}

[[noreturn]] void no_cuda() {
  throw Unavailable(
      Code::kBackendUnavailable,
      "The engine was made for a CUDA device and blade's CUDA runtime (blade/libblade_cuda.so) is not loaded: `import blade` loads it "
      "where it was built, which needs a torch with CUDA and CUDA's headers (then run `pip install --no-build-isolation -e .`).");
}

}  // namespace

void check_cpu(const Program& program) {
  for (const auto& feature : program.isa) {
    if (cpu_features().count(feature) == 0) {
      throw Unavailable(
          Code::kCpuMismatch, "The engine's native code needs the CPU feature '" + feature + "', which this CPU lacks.");
    }
  }
}

Accelerator* find_target(const Program& program) {
  Accelerator* accelerator = program.isa.empty() ? nullptr : find_accelerator(program.isa[0]);
  if (accelerator == nullptr) {
    if (!program.isa.empty() && program.isa[0] == kCuda) no_cuda();
    check_cpu(program);
    check_devices(program, at::kCPU);
    check_instructions(program, /*on_cpu=*/true);
    return nullptr;
  }
  if (accelerator->count() == 0) {
    throw Unavailable(
        Code::kBackendUnavailable,
        "The engine was made for " + program.isa[0] + ", and this process sees no such device (a driver and a visible GPU are needed).");
  }
  check_devices(program, accelerator->type());
  check_instructions(program, /*on_cpu=*/false);
  return accelerator;
}

DeviceCode::DeviceCode(const Program& program, Accelerator& accelerator, const at::Tensor& object)
    : program_(program), accelerator_(accelerator), object_(object), loaded_(accelerator.count()) {
  if (object_.numel() > 0) {
    binaries_ = read_binaries(static_cast<const uint8_t*>(object_.const_data_ptr()), object_.numel());
  }
  const auto check = [this](const std::string& name) {
    for (size_t k = 1; k < program_.isa.size(); ++k) {
      const auto is_it = [&](const Binary& one) { return one.name == name && one.architecture == program_.isa[k]; };
      if (std::any_of(binaries_.begin(), binaries_.end(), is_it)) continue;
      throw Unavailable(
          Code::kCorruptPayload, "The engine's program needs the kernel '" + name + "', which its device code lacks for " + program_.isa[k] + ".");
    }
  };
  for (const auto& instr : program_.instrs) {
    if (instr.launch) check(instr.kernel);
  }
  for (const auto& pack : program_.packs) check(pack.kernel);
}

// The architecture of the isa whose code `device` runs: its own, or an older one of the same major version.
std::string DeviceCode::architecture_for(c10::DeviceIndex device) const {
  const auto& isa = program_.isa;
  const auto is = accelerator_.architecture(device);
  if (binaries_.empty()) return is;  // calls alone run anywhere
  const auto place = isa[0] + ":" + std::to_string(device) + " is " + is;
  std::string has, too_large;
  for (size_t k = 1; k < isa.size(); ++k) has += (k > 1 ? ", " : "") + isa[k];
  if (const auto own = std::find(isa.begin() + 1, isa.end(), is); own != isa.end()) return is;
  for (size_t k = 1; k < isa.size(); ++k) {
    if (!runs_on(isa[k], is)) continue;
    too_large = why_too_large(binaries_, isa[k], accelerator_, device);
    if (too_large.empty()) return isa[k];
  }
  throw Unavailable(
      Code::kDeviceMismatch, "The engine has device code for " + (has.empty() ? "no architecture" : has) + ", but " + place +
                                 ": optimize the model again on this kind of device." + (too_large.empty() ? "" : " Of its code, " + too_large + "."));
}

const DeviceCode::Kernels& DeviceCode::on(c10::DeviceIndex device) {
  const std::lock_guard<std::mutex> lock(mutex_);
  auto& kernels = loaded_.at(device);
  if (!kernels) kernels = load(device);
  return *kernels;
}

std::unique_ptr<DeviceCode::Kernels> DeviceCode::load(c10::DeviceIndex device) const {
  const auto architecture = architecture_for(device);
  auto kernels = std::make_unique<Kernels>();
  std::unordered_map<std::string, const Kernel*> by_name;
  const auto find = [&](const std::string& name) {
    auto& kernel = by_name[name];
    if (kernel != nullptr) return kernel;
    const auto is_it = [&](const Binary& one) { return one.name == name && one.architecture == architecture; };
    const auto binary = std::find_if(binaries_.begin(), binaries_.end(), is_it);  // there is one: the constructor saw it
    kernels->owned.push_back(accelerator_.load(*binary));
    return kernel = kernels->owned.back().get();
  };
  for (const auto& instr : program_.instrs) kernels->launches.push_back(instr.launch ? find(instr.kernel) : nullptr);
  for (const auto& pack : program_.packs) kernels->packs.push_back(find(pack.kernel));
  return kernels;
}

}  // namespace blade
