// SPDX-License-Identifier: Apache-2.0
#include "driver.h"

#include <c10/util/Exception.h>
#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <cstdlib>

namespace blade::cuda {
namespace {

std::atomic<bool> alive{false};

void end() { alive = false; }

struct Loaded {
  Driver driver;
  std::string why_not;
};

// The headers rename functions to their versions (cuMemsetD8Async to cuMemsetD8Async_ptsz, ...): expand first.
#define BLADE_TEXT(name) #name
#define BLADE_SYMBOL(name) BLADE_TEXT(name)

Loaded load() {
  Loaded loaded;
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);  // never closed
  if (library == nullptr) {
    loaded.why_not = std::string("the CUDA driver is not installed (") + dlerror() + ")";
    return loaded;
  }
#define BLADE_LOOK_UP(name) loaded.driver.name = reinterpret_cast<decltype(&::name)>(dlsym(library, BLADE_SYMBOL(name)));
#define BLADE_FIND(name) \
  BLADE_LOOK_UP(name)    \
  if (loaded.driver.name == nullptr) loaded.why_not = "the CUDA driver is too old: it lacks " BLADE_SYMBOL(name);
  BLADE_CUDA_FUNCTIONS(BLADE_FIND)
  BLADE_NEWER_CUDA_FUNCTIONS(BLADE_LOOK_UP)
#undef BLADE_FIND
#undef BLADE_LOOK_UP
  if (loaded.why_not.empty() && loaded.driver.cuInit(0) != CUDA_SUCCESS) {
    loaded.why_not = "the CUDA driver finds no device";
  }
  if (loaded.why_not.empty()) {
    alive = true;
    std::atexit(end);  // runs before what the driver itself registered, which was earlier
    pthread_atfork(nullptr, nullptr, end);
  }
  return loaded;
}

const Loaded& loaded() {
  static const Loaded once = load();
  return once;
}

}  // namespace

const std::string& why_no_driver() { return loaded().why_not; }

const Driver& driver() { return loaded().driver; }

bool is_alive() { return alive; }

void check(CUresult result, const char* what) {
  if (C10_LIKELY(result == CUDA_SUCCESS)) return;
  const char *name = nullptr, *text = nullptr;
  driver().cuGetErrorName(result, &name);
  driver().cuGetErrorString(result, &text);
  TORCH_CHECK(
      false, "blade: CUDA: ", what, ": ", name == nullptr ? "error" : name, " (", static_cast<int>(result), "): ",
      text == nullptr ? "unknown to the driver" : text);
}

}  // namespace blade::cuda

// For a process that ends in an orderly way (Python's atexit): what engines hold on devices goes with the process.
extern "C" __attribute__((used, visibility("default"))) void blade_cuda_end() { blade::cuda::end(); }
