// SPDX-License-Identifier: Apache-2.0
// A Python module without functions: once imported, pybind11 knows what to make of blade::Interrupted.
#include <torch/csrc/Exceptions.h>

#include "../engine/interrupt.h"

PYBIND11_MODULE(_interrupts, module) {
  module.doc() = "Lets KeyboardInterrupt and the like pass through engines that Python runs.";
  pybind11::register_exception_translator([](std::exception_ptr thrown) {
    try {
      if (thrown) std::rethrow_exception(thrown);
    } catch (const blade::Interrupted& interrupted) {
      try {
        std::rethrow_exception(interrupted.cause);
      } catch (python_error& error) {
        error.restore();
      } catch (pybind11::error_already_set& error) {
        error.restore();
      }
    }
  });
}
