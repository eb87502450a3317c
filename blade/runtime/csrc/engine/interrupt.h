// SPDX-License-Identifier: Apache-2.0
// Exceptions of Python's that are nobody's failure: KeyboardInterrupt, SystemExit, what a signal's handler raises.
#pragma once

#include <exception>

namespace blade {

// What such an exception travels in from a runner to whoever called the module. It is no std::exception, which
// TorchScript's interpreter would turn into a RuntimeError; blade/_interrupts.so makes Python's own of it again.
struct __attribute__((visibility("default"))) Interrupted {
  std::exception_ptr cause;
};

// Python says so of the exception that is about to leave it, in this thread.
void note_interrupt();

// Inside a catch clause. Throws what was noted on, as Interrupted if that is understood by now, else as it is.
void rethrow_if_interrupt();

// blade/_interrupts.so is loaded.
void expect_interrupts();

}  // namespace blade
