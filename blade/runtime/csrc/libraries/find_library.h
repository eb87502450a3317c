// SPDX-License-Identifier: Apache-2.0
// Where the libraries of other vendors are.
#pragma once

#include <string>
#include <vector>

namespace blade {

struct LibraryPlaces {
  const char* variable;               // of the environment: the library's file, or the folder of it; nothing else is tried then
  std::vector<std::string> names;     // for the system's loader: "libonnxruntime.so.1"
  std::string package;                // the folder of PyPI's package in site-packages: "onnxruntime/capi"
};

// What dlopen may be tried with, the best first.
std::vector<std::string> library_candidates(const LibraryPlaces& places);

// Why no library of `version` is used; `others`: those that were found.
std::string missing_library(const LibraryPlaces& places, const std::string& version, const std::string& others);

}  // namespace blade
