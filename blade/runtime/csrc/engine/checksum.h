// SPDX-License-Identifier: Apache-2.0
// Checksums tell damage by accident. They are no signatures: whoever writes a file can write its checksum.
#pragma once

#include <ATen/core/Dict.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

namespace blade {

// XXH64 (xxHash specification 0.1.1, Yann Collet), as the library of that name computes it.
uint64_t xxh64(const void* data, size_t size, uint64_t seed = 0);

// Of all that a saved engine is but its signature: its words, its limits, and of every tensor its dtype, sizes, strides and bytes.
// Tensors are on any device and have passed `why_not_whole`.
int64_t checksum_of(
    const std::vector<std::string>& words, const c10::Dict<std::string, int64_t>& limits,
    const std::vector<at::Tensor>& tensors);

// What format 1 had: of program and object alone.
int64_t checksum_of_format_1(const std::string& program, const at::Tensor& object);

// Empty if all bytes of a tensor are there: torch's reader of files believes the sizes that it finds in a file, and
// a record may be shorter.
std::string why_not_whole(const at::Tensor& tensor);

}  // namespace blade
