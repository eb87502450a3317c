// SPDX-License-Identifier: Apache-2.0
// Why a call went to the original: the run and load part of blade.reason.Code.
#pragma once

#include <array>
#include <cstddef>
#include <stdexcept>
#include <string>

namespace blade {

enum class Code : size_t {
  kGuardDtype,
  kGuardDevice,
  kGuardRank,
  kGuardShape,
  kGuardGrad,
  kEngineRaised,
  kCircuitOpen,
  kDisabled,
  kCpuMismatch,
  kVersionMismatch,
  kCorruptPayload,
  kBackendUnavailable,
  kPending,
  kDeviceMismatch,
  kUntrusted,
  kGuardAutocast,
  kDrifted,
};

constexpr std::array<const char*, 17> kCodeNames = {
    "guard_dtype",  "guard_device", "guard_rank",       "guard_shape",     "guard_grad",
    "engine_raised", "circuit_open", "disabled",        "cpu_mismatch",    "version_mismatch",
    "corrupt_payload", "backend_unavailable", "pending",
    "device_mismatch", "untrusted", "guard_autocast", "drifted"};

// Python reads texts as UTF-8, and what is quoted from a damaged file may be anything.
inline std::string printable(std::string text) {
  for (char& c : text) {
    const auto code = static_cast<unsigned char>(c);
    if ((code < ' ' && c != '\n') || code > '~') c = '?';
  }
  return text;
}

// The engine cannot serve any call of this process; the text is a full sentence.
class Unavailable : public std::runtime_error {
 public:
  Unavailable(Code code, const std::string& why) : std::runtime_error(printable(why)), code(code) {}
  const Code code;
};

}  // namespace blade
