// SPDX-License-Identifier: Apache-2.0
#include "memory/huge_pages.h"

#include <c10/core/CPUAllocator.h>

#ifdef __linux__
#include <sys/mman.h>
#endif

#include <cstdint>
#include <memory>

namespace blade {

#ifdef __linux__
namespace {

constexpr size_t kHuge = size_t{1} << 21;

struct Region {
  void* start;
  size_t bytes;
};

void release(void* context) {
  const std::unique_ptr<Region> region(static_cast<Region*>(context));
  c10::profiledCPUMemoryReporter().Delete(region->start);
  munmap(region->start, region->bytes);
}

// Starts at a huge page's boundary; null where the system gives none.
char* map_aligned(size_t bytes) {
  void* mapped = mmap(nullptr, bytes + kHuge, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return nullptr;
  auto* low = static_cast<char*>(mapped);
  const size_t before = (kHuge - reinterpret_cast<uintptr_t>(low) % kHuge) % kHuge;
  if (before > 0) munmap(low, before);
  munmap(low + before + bytes, kHuge - before);
  return low + before;
}

}  // namespace
#endif

c10::DataPtr allocate_pages(size_t bytes) {
#ifdef __linux__
  constexpr size_t kPage = 1 << 16;  // the largest ordinary page of a supported system
  const size_t size = (bytes + kPage - 1) / kPage * kPage;
  if (char* start = bytes >= kHuge ? map_aligned(size) : nullptr) {
    madvise(start, size, MADV_HUGEPAGE);  // where that is refused, pages are ordinary ones
    c10::profiledCPUMemoryReporter().New(start, bytes);
    return {start, new Region{start, size}, &release, c10::Device(c10::DeviceType::CPU)};
  }
#endif
  return c10::GetCPUAllocator()->allocate(bytes);
}

}  // namespace blade
