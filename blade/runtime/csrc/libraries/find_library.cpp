// SPDX-License-Identifier: Apache-2.0
#include "libraries/find_library.h"

#include <ATen/Parallel.h>
#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>

namespace blade {
namespace {

namespace fs = std::filesystem;

// Files in `folder` that are called like the first of `names`, without its version.
void add_files(const fs::path& folder, const std::vector<std::string>& names, std::vector<std::string>& found) {
  const auto stem = names.front().substr(0, names.front().find(".so") + 3);
  std::vector<std::string> here;
  std::error_code ignored;
  for (const auto& file : fs::directory_iterator(folder, ignored)) {
    if (file.path().filename().string().rfind(stem, 0) == 0) here.push_back(file.path().string());
  }
  std::sort(here.begin(), here.end());
  found.insert(found.end(), here.begin(), here.end());
}

// The folder that is `levels` above the library that `address` belongs to.
fs::path above_library_of(const void* address, int levels) {
  Dl_info info;
  if (dladdr(address, &info) == 0 || info.dli_fname == nullptr) return {};
  std::error_code ignored;
  fs::path folder = fs::canonical(info.dli_fname, ignored);
  for (int i = 0; i < levels; ++i) folder = folder.parent_path();
  return folder;
}

}  // namespace

std::vector<std::string> library_candidates(const LibraryPlaces& places) {
  std::vector<std::string> found;
  const char* chosen = std::getenv(places.variable);
  if (chosen != nullptr && *chosen != '\0') {
    std::error_code ignored;
    if (!fs::is_directory(chosen, ignored)) return {chosen};
    add_files(chosen, places.names, found);
    return found;
  }
  found = places.names;
  // site-packages, where blade is (SITE/blade/libblade_runtime.so) or torch is (SITE/torch/lib/libtorch_cpu.so)
  add_files(above_library_of(reinterpret_cast<const void*>(&library_candidates), 2) / places.package, places.names, found);
  add_files(above_library_of(reinterpret_cast<const void*>(&at::get_num_threads), 3) / places.package, places.names, found);
  return found;
}

std::string missing_library(const LibraryPlaces& places, const std::string& version, const std::string& others) {
  const auto& name = places.names.front();
  return "It needs " + name + " of version " + version + ", which is neither on the loader's path nor beside torch; " +
         places.variable + " may name its file or folder." + (others.empty() ? "" : others + ".");
}

}  // namespace blade
