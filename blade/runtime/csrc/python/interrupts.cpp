// SPDX-License-Identifier: Apache-2.0
// The library that is a Python module. Once imported, pybind11 knows what to make of blade::Interrupted; and it has
// what compares objects of Python (unchanged.cpp).
#include <torch/csrc/Exceptions.h>

#include "../engine/interrupt.h"
#include "unchanged.h"

PYBIND11_MODULE(_interrupts, module) {
  module.doc() = "Lets KeyboardInterrupt and the like pass through engines that Python runs; says whether a model changed.";
  blade::define_unchanged(module);
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
