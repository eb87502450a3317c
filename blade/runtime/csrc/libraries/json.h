// SPDX-License-Identifier: Apache-2.0
// JSON as Python's json.dumps writes it. Of numbers with a fraction only that they are there is kept.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace blade {

struct Json {
  enum Kind : uint8_t { kNull, kTruth, kInteger, kFraction, kText, kList, kObject };
  Kind kind = kNull;
  int64_t integer = 0;  // kTruth: 0 or 1
  std::string text;
  std::vector<Json> items;                             // of a list
  std::vector<std::pair<std::string, Json>> members;  // of an object

  // The member called `name`, which throws std::runtime_error if there is none.
  const Json& at(std::string_view name) const;
  // The same, or nullptr.
  const Json* find(std::string_view name) const;
  // Throw std::runtime_error for another kind.
  const std::string& as_text() const;
  std::vector<std::string> as_texts() const;
};

// Throws std::runtime_error.
Json parse_json(std::string_view text);

}  // namespace blade
