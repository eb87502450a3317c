// SPDX-License-Identifier: Apache-2.0
#include "device/cpu_features.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <fstream>
#include <sstream>

namespace blade {
namespace {

// The first "flags" (x86) or "Features" (aarch64) line; all cores of a machine that runs one
// Linux process agree on it.
std::set<std::string> read_features() {
  std::set<std::string> features;
  std::ifstream cpuinfo("/proc/cpuinfo");
  std::string line;
  while (std::getline(cpuinfo, line)) {
    const auto colon = line.find(':');
    if (colon == std::string::npos) continue;
    const auto key = line.substr(0, line.find_last_not_of(" \t:", colon) + 1);
    if (key != "flags" && key != "Features") continue;
    std::istringstream words(line.substr(colon + 1));
    for (std::string word; words >> word;) features.insert(word);
    break;
  }
  return features;
}

#ifdef __x86_64__
// Linux gives a process the registers of AMX's tiles only on request, once for all of its threads. It refuses where a
// thread's alternate signal stack is too small for them.
bool may_use_tiles() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#else
bool may_use_tiles() { return false; }
#endif

std::set<std::string> usable_features() {
  auto features = read_features();
  if (features.count("amx_tile") != 0 && !may_use_tiles()) {
    for (const char* name : {"amx_tile", "amx_bf16", "amx_int8", "amx_fp16", "amx_complex"}) features.erase(name);
  }
  return features;
}

}  // namespace

const std::set<std::string>& cpu_features() {
  static const std::set<std::string> features = usable_features();
  return features;
}

}  // namespace blade
