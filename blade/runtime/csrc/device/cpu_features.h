// SPDX-License-Identifier: Apache-2.0
// What this CPU can do and this process may use, under the names /proc/cpuinfo uses.
#pragma once

#include <set>
#include <string>

namespace blade {

const std::set<std::string>& cpu_features();

}  // namespace blade
