// SPDX-License-Identifier: Apache-2.0
// Memory that is walked in every call: huge pages where the system has them.
#pragma once

#include <c10/core/Allocator.h>

#include <cstddef>

namespace blade {

// At least 64-byte aligned. From 2 MiB on it is memory of its own, asked for in huge pages: packed
// weights and arenas are larger than what the processor's table of page addresses covers otherwise.
c10::DataPtr allocate_pages(size_t bytes);

}  // namespace blade
