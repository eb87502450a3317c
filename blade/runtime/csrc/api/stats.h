// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/ivalue.h>

#include <string>
#include <vector>

#include "blade/blade.h"
#include "engine/engine.h"

namespace blade {

EngineStats stats_of(const std::string& name, const Engine& engine);

// Nothing if `value` is no engine.
void add_stats(const std::string& name, const c10::IValue& value, std::vector<EngineStats>& stats);

}  // namespace blade
