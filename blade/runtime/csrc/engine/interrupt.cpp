// SPDX-License-Identifier: Apache-2.0
#include "engine/interrupt.h"

#include <atomic>
#include <utility>

namespace blade {
namespace {

thread_local bool noted = false;
std::atomic<bool> expected{false};

}  // namespace

void note_interrupt() { noted = true; }

void expect_interrupts() { expected = true; }

void rethrow_if_interrupt() {
  if (!std::exchange(noted, false)) return;
  if (!expected) throw;
  throw Interrupted{std::current_exception()};
}

}  // namespace blade
