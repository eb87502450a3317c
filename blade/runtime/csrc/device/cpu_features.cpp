// SPDX-License-Identifier: Apache-2.0
#include "device/cpu_features.h"

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

}  // namespace

const std::set<std::string>& cpu_features() {
  static const std::set<std::string> features = read_features();
  return features;
}

}  // namespace blade
