// SPDX-License-Identifier: Apache-2.0
// OpenMP's threads across a fork.
//
// libgomp keeps the threads of a parallel region for the next one. A forked process has no copy of them, but still
// has libgomp's record of them, and its first region waits for ever. So the thread that forks lets its team go just
// before: parent and child both start threads at their next region. torch's own regions profit as much.
#include <dlfcn.h>
#include <omp.h>
#include <pthread.h>

namespace blade {
namespace {

using Pause = int (*)(omp_pause_resource_t);

// libgomp's, of the library that torch uses. Null where it lacks it (before GCC 9), and for LLVM's and Intel's, which
// handle forks themselves.
Pause find_pause() {
  Dl_info info;
  if (dladdr(reinterpret_cast<void*>(&omp_get_thread_num), &info) == 0) return nullptr;
  void* library = dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);  // never closed
  if (library == nullptr || dlsym(library, "__kmpc_fork_call") != nullptr) return nullptr;
  return reinterpret_cast<Pause>(dlsym(library, "omp_pause_resource_all"));
}

Pause pause_team = nullptr;

// Keeps the number of threads. Does nothing inside a parallel region.
void end_team() { pause_team(omp_pause_soft); }

[[maybe_unused]] const bool prepared = [] {
  pause_team = find_pause();
  return pause_team != nullptr && pthread_atfork(end_team, nullptr, nullptr) == 0;
}();

}  // namespace
}  // namespace blade
